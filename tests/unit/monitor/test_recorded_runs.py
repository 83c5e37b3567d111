"""What records of real runs showed to be wrong: each is a small job that looks like the run that did."""

from __future__ import annotations

import random

import pytest

from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.detect.link_history import alone_s
from thinwire.monitor.detect.timeline import Job, Message
from thinwire.monitor.findings import Finding
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Beat, Communicator, Operation, Record, Span, TransferEnd

RANKS = (0, 1, 2)
PLACE = Communicator(communicator="rounds", ranks=RANKS, hosts=("a", "b", "c"), clocks=("one",) * 3)


def _told(records: list[Record]) -> list[str]:
    findings: list[Finding] = diagnose(from_records([PLACE, *records]))
    return [f"{finding.kind}: {finding.where}" for finding in findings]


def _operation(rank: int, number: int, posted_s: float, done_s: float | None) -> Operation:
    return Operation(
        communicator="rounds", rank=rank, sequence=number, kind="round", posted_s=posted_s, done_s=done_s, round=number
    )


def _beats(rank: int, until_s: float, *, bye: bool = False, error: str = "") -> list[Record]:
    found: list[Record] = [Beat(rank=rank, at_s=float(at_s)) for at_s in range(int(until_s) + 1)]
    return [*found, Beat(rank=rank, at_s=until_s, is_last=True, error=error)] if bye else found


def _rounds(count: int, *, every_s: float = 1.0, ranks: tuple[int, ...] = RANKS) -> list[Record]:
    return [
        _operation(rank, number, every_s * number, every_s * number + 0.2) for number in range(count) for rank in ranks
    ]


def test_losses_that_vary_as_those_of_small_batches_do_have_not_parted() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        spans = [
            Span(rank=rank, kind="compute", step=step, started_s=float(step), done_s=step + 0.5,
                 loss=0.7 + 5 * 0.9**step + draw.gauss(0, 0.2) * (step > 15) + draw.gauss(0, 0.03))
            for step in range(200) for rank in RANKS
        ]  # fmt: skip
        assert _told([*spans]) == [], seed


def test_a_loss_that_parts_from_noisy_ones_is_told() -> None:
    draw = random.Random(1)
    spans = [
        Span(rank=rank, kind="compute", step=step, started_s=float(step), done_s=step + 0.5,
             loss=1.0 + draw.gauss(0, 0.2) + 3.0 * (rank == 2 and step > 100))
        for step in range(120) for rank in RANKS
    ]  # fmt: skip
    assert _told([*spans]) == ["loss divergence: rank 2"]


def _sharing(rounds: int, *, apart_until: int, slow: float = 1.0) -> list[Record]:
    """Rank 0 sends to both others, one after the other at first, and then at once: each message takes twice as long."""
    found: list[Record] = []
    for number in range(rounds):
        begin_s, is_apart = float(number), number < apart_until
        for rank in (1, 2):
            posted_s = begin_s + 0.1 * (rank - 1) * is_apart
            took_s = (0.1 if is_apart else 0.2) * (1.0 if is_apart else slow) * (1 + 0.01 * (number % 3))
            for end, peer, direction in ((0, rank, "sent"), (rank, 0, "received")):
                found.append(TransferEnd(
                    communicator="rounds", rank=end, peer=peer, direction=direction, operation=number,  # type: ignore[arg-type]
                    num_bytes=1 << 20, posted_s=posted_s, done_s=posted_s + took_s,
                ))  # fmt: skip
    return found


def test_messages_that_begin_to_share_an_access_are_no_slow_link() -> None:
    assert _told(_sharing(60, apart_until=30)) == []


def test_messages_that_share_an_access_and_are_slower_than_that_are() -> None:
    (told,) = _told(_sharing(60, apart_until=30, slow=3.0))
    assert told.startswith("communication slow: ")


@pytest.mark.parametrize("seed", range(5))
def test_all_messages_that_share_one_access_had_it_for_as_long_as_it_was_in_use(seed: int) -> None:
    draw = random.Random(seed)
    job = Job(host_of={rank: str(rank) for rank in range(9)})
    messages = []
    for rank in range(1, 9):
        begin_s = draw.uniform(0, 5)
        messages.append(
            Message(0, rank, "w", 0, 0, 9, sent_posted_s=begin_s, received_posted_s=begin_s - 1,
                    received_done_s=begin_s + draw.uniform(0, 3))
        )  # fmt: skip
    found = alone_s(job, messages)
    used_s, end_s = 0.0, 0.0
    for message in sorted(messages, key=lambda one: one.sent_posted_s or 0.0):
        begin_s = max(end_s, message.sent_posted_s or 0.0)
        end_s = max(end_s, message.received_done_s or 0.0)
        used_s += max(0.0, end_s - begin_s)
    assert sum(found.values()) == pytest.approx(used_s)
    assert all(found[id(message)] <= (message.transfer_s or 0.0) + 1e-9 for message in messages)


def test_a_rank_that_was_killed_is_named_when_the_others_have_said_goodbye() -> None:
    records = [*_rounds(10), *(_operation(rank, 10, 10.0, None) for rank in RANKS)]
    records += [*_beats(0, 10.3, bye=True), *_beats(1, 10.1), *_beats(2, 10.4, bye=True)]
    assert _told(records) == ["non-communication hang: rank 1"]


def test_a_rank_that_ended_by_its_own_error_is_named_with_it() -> None:
    records = [*_rounds(10), *(_operation(rank, 10, 10.0, None) for rank in (0, 2))]
    records += [*_beats(0, 10.3, bye=True), *_beats(2, 10.4, bye=True)]
    records += _beats(1, 10.2, bye=True, error="DataError: no more data")
    (finding,) = diagnose(from_records([PLACE, *records]))
    assert finding.where == "rank 1" and "DataError: no more data" in finding.text


def test_ranks_that_ended_one_after_the_other_have_not_hung() -> None:
    records = [*_rounds(10)]
    for rank, until_s in ((0, 40.0), (1, 11.0), (2, 12.0)):
        records += _beats(rank, until_s, bye=True)
    assert _told(records) == []


def test_a_silent_rank_is_told_long_before_three_rare_rounds_have_gone_by() -> None:
    records = [*_rounds(4, every_s=10.0), *(_operation(rank, 4, 40.0, None) for rank in (0, 2))]
    records += [*_beats(0, 44.0), *_beats(1, 40.0), *_beats(2, 44.0)]
    assert _told(records) == ["non-communication hang: rank 1"]


def test_a_replica_that_has_left_is_not_waited_for() -> None:
    records = [*_rounds(10), *_rounds(20, ranks=(0, 2)), *(_operation(rank, 20, 20.0, None) for rank in (0, 2))]
    records += [*_beats(0, 30.0), *_beats(1, 11.0, bye=True), *_beats(2, 30.0)]
    (finding,) = diagnose(from_records([PLACE, *records]))
    assert finding.kind == "communication hang" and "rank 1" not in finding.where


def test_a_hang_after_a_rank_was_left_behind_is_told_beside_it() -> None:
    records = [*_rounds(10), _operation(1, 10, 10.0, None), *_rounds(30, ranks=(0, 2))[20:]]
    records += [*(_operation(rank, 30, 30.0, None) for rank in (0, 2))]
    records += [*_beats(0, 45.0), *_beats(1, 10.0), *_beats(2, 30.0)]
    assert _told(records) == ["non-communication hang: rank 1", "non-communication hang: rank 2"]


def test_who_waits_for_a_rank_that_stopped_in_the_operation_before_does_not_stand_still_as_well() -> None:
    """A torch job whose rank 1 is stopped in the middle of a barrier: the others end it, and wait in the next call."""
    records = [*_rounds(16), _operation(1, 16, 16.0, None), *(_operation(rank, 16, 16.0, 16.1) for rank in (0, 2))]
    records += [*(_operation(rank, 17, 17.0, None) for rank in (0, 2))]
    records += [*_beats(0, 30.0), *_beats(1, 16.0), *_beats(2, 30.0)]
    assert _told(records) == ["non-communication hang: rank 1"]


@pytest.mark.parametrize(("period", "said"), [(6, []), (7, ["periodic stall: rank 0"])])
def test_steps_that_decode_rounds_are_no_stalls(period: int, said: list[str]) -> None:
    draw, records, now_s = random.Random(3), [], dict.fromkeys(RANKS, 0.0)
    for step in range(1, 150):
        for rank in RANKS:
            took_s = 0.1 * draw.uniform(0.95, 1.05) * (2.5 if rank == 0 and step % period == 0 else 1.0)
            records.append(
                Span(rank=rank, kind="compute", step=step, started_s=now_s[rank], done_s=now_s[rank] + took_s)
            )
            now_s[rank] += took_s
        arrived_s = max(now_s.values())
        if step % 2 == 0:
            for rank in RANKS:
                records.append(Operation(
                    communicator="rounds", rank=rank, sequence=step // 2, kind="round", round=step // 2,
                    count=100 + step // 2 % 3, posted_s=now_s[rank], done_s=arrived_s + 0.02,
                ))  # fmt: skip
                now_s[rank] = arrived_s + 0.02
    assert _told(records) == said


def test_a_rank_that_was_just_paused_is_no_broken_wire_for_a_second() -> None:
    for until_s in (11.5, 12.0, 12.5, 13.0, 14.0):
        records = [*_rounds(10, every_s=0.3), *(_operation(rank, 10, 10.0, None) for rank in RANKS)]
        records += [*_beats(0, until_s), *_beats(1, 10.0), *_beats(2, until_s)]
        assert set(_told(records)) <= {"non-communication hang: rank 1"}
    assert _told(records) == ["non-communication hang: rank 1"]


def test_times_of_small_messages_that_scatter_are_no_slow_link() -> None:
    draw, hosts = random.Random(5), (0, 1, 2, 3)
    records: list[Record] = [Communicator(communicator="rounds", ranks=hosts, hosts=tuple("abcd"), clocks=("one",) * 4)]
    for number in range(13):
        for source in hosts:
            for destination in hosts:
                if source != destination:
                    middle = 1.5 if (source, destination) == (1, 2) else 0.0
                    done_s = number + 0.001 * 10 ** draw.gauss(middle / 2.3, 1.0)
                    for rank, peer, direction in ((source, destination, "sent"), (destination, source, "received")):
                        records.append(TransferEnd(
                            communicator="rounds", rank=rank, peer=peer, direction=direction, operation=number,  # type: ignore[arg-type]
                            num_bytes=25_000, posted_s=float(number), done_s=done_s,
                        ))  # fmt: skip
    assert diagnose(from_records(records)) == []


def test_who_waits_for_a_rank_that_was_left_behind_does_not_stand_still_by_itself() -> None:
    records = [*_rounds(10), _operation(1, 10, 10.0, None)]
    for rank in (0, 2):
        records += [_operation(rank, 10, 10.0, 10.1), _operation(rank, 11, 11.0, None), *_beats(rank, 20.0)]
        records.append(TransferEnd(
            communicator="rounds", rank=rank, peer=1, direction="received", operation=11, num_bytes=9, posted_s=11.0
        ))  # fmt: skip
    assert _told([*records, *_beats(1, 10.0)]) == ["non-communication hang: rank 1"]


def test_a_killed_rank_is_told_at_once_by_those_whose_calls_have_failed() -> None:
    records = [*_rounds(10), *(_operation(rank, 10, 10.0, None) for rank in (0, 2)), *_beats(1, 9.0)]
    records = [one for one in records if one != _operation(1, 9, 9.0, 9.2)] + [_operation(1, 9, 9.0, None)]
    for rank in (0, 2):
        records += [*_beats(rank, 10.0), Beat(rank=rank, at_s=10.1, error="a call failed: connection reset")]
    (finding,) = diagnose(from_records([PLACE, *records]))
    assert (finding.kind, finding.where) == ("non-communication hang", "rank 1")
    assert "recorder has ended or is cut off" in finding.text or "recorder is paused, killed" in finding.text


def test_a_long_fault_that_is_over_makes_the_next_one_be_told_no_later() -> None:
    paused_s = 30.0
    records = [*_rounds(10), *(_operation(rank, 10, 10.0, 10.0 + paused_s) for rank in RANKS)]
    later = [_operation(rank, number, 30.0 + number, 30.2 + number) for number in range(11, 31) for rank in RANKS]
    records += [*later, *(_operation(rank, 31, 61.0, None) for rank in (0, 1))]
    for rank in RANKS:
        records += _beats(rank, 66.0)
    assert _told(records) == ["non-communication hang: rank 2"]


def test_an_operation_that_takes_long_again_and_again_with_the_same_rank_last_is_usual() -> None:
    records: list[Record] = []
    now_s = 0.0
    for number in range(41):
        late_s = 8.0 if number % 20 == 19 else 0.0  # rank 2 writes a checkpoint
        for rank in RANKS:
            posted_s = now_s + (late_s if rank == 2 else 0.0)
            records.append(_operation(rank, number, posted_s, now_s + late_s + 0.1))
        now_s += late_s + 0.2
    records += [*(_operation(rank, 41, now_s, None) for rank in (0, 1))]
    for rank in RANKS:
        records += _beats(rank, now_s + 7.0)
    assert _told(records) == []


@pytest.mark.parametrize(
    ("other_way_s", "said"), [(None, "link 1 <-> 2"), (40.3, "link 1 <-> 2"), (43.0, "link 1 -> 2")]
)
def test_a_connection_that_is_stuck_one_way_is_named_whole_unless_the_other_way_still_works(
    other_way_s: float | None, said: str
) -> None:
    """What came the other way at about the same time may have come before the wire was cut."""

    def message(source: int, to: int, number: int, posted_s: float, done_s: float | None) -> list[Record]:
        return [
            TransferEnd(communicator="rounds", rank=rank, peer=peer, direction=direction, operation=number,  # type: ignore[arg-type]
                        num_bytes=1 << 20, posted_s=posted_s, done_s=done_s)
            for rank, peer, direction in ((source, to, "sent"), (to, source, "received"))
        ]  # fmt: skip

    pairs = [(source, to) for source in RANKS for to in RANKS if source != to]
    early = [one for number in range(40) for pair in pairs for one in message(*pair, number, number, number + 0.2)]
    last = [one for pair in pairs if set(pair) != {1, 2} for one in message(*pair, 40, 40.0, 40.2)]
    last += message(1, 2, 40, 40.0, None)
    last += message(2, 1, 40, 40.0, other_way_s) if other_way_s is not None else []
    inside = [_operation(rank, 40, 40.0, None) for rank in RANKS]
    beats = [beat for rank in RANKS for beat in _beats(rank, 45.0)]
    assert _told([*_rounds(40), *early, *last, *inside, *beats]) == [f"communication hang: {said}"]


@pytest.mark.parametrize(("small", "is_named"), [(600, True), (1 << 20, False)])
def test_large_messages_that_are_stuck_where_small_ones_arrive_point_to_the_size_of_packets(
    small: int, is_named: bool
) -> None:
    def message(source: int, to: int, number: int, num_bytes: int, done_s: float | None, part: int) -> list[Record]:
        return [
            TransferEnd(communicator="rounds", rank=rank, peer=peer, direction=direction, operation=number, part=part,  # type: ignore[arg-type]
                        num_bytes=num_bytes, posted_s=number + 0.01 * part, done_s=done_s)
            for rank, peer, direction in ((source, to, "sent"), (to, source, "received"))
        ]  # fmt: skip

    pairs = [(source, to) for source in RANKS for to in RANKS if source != to]
    early = [one for number in range(40) for pair in pairs for one in message(*pair, number, 1 << 20, number + 0.2, 0)]
    last = [one for pair in pairs if pair != (1, 2) for one in message(*pair, 40, 1 << 20, 40.2, 0)]
    last += [*message(1, 2, 40, 1 << 20, None, 0), *message(1, 2, 40, small, 40.6, 1)]
    inside = [_operation(rank, 40, 40.0, None) for rank in RANKS]
    beats = [beat for rank in RANKS for beat in _beats(rank, 45.0)]
    (finding,) = diagnose(from_records([PLACE, *_rounds(40), *early, *last, *inside, *beats]))
    assert ("a part of the path may lose full packets" in finding.text) == is_named
    assert finding.kind == "communication hang" and "thinwire doctor HOST:PORT" in finding.remedy
