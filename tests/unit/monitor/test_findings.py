"""Small jobs written by hand: what is said of each."""

from __future__ import annotations

import json
import math

import pytest

from thinwire.monitor.detect.delay_matrix import Cell, DelayMatrix
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding, report
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Beat, Communicator, Operation, Record, Span, TransferEnd

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}


def _matrix(slow: set[Cell], *, hosts: dict[int, str] = HOSTS, noise: float = 0.0) -> DelayMatrix:
    cells = {(i, j): noise * ((i * 7 + j * 3) % 5) / 5 for i in hosts for j in hosts if i != j}
    return DelayMatrix({cell: 1.5 if cell in slow else value for cell, value in cells.items()}, hosts)


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ({(0, 3)}, "link 0 -> 3"),
        ({(0, 3), (3, 0)}, "link 0 <-> 3"),
        ({(2, j) for j in (0, 1, 3, 4, 5)}, "sender rank 2"),
        ({(2, j) for j in (0, 1, 4, 5)}, "sender rank 2"),
        ({(i, 5) for i in range(5)}, "receiver rank 5"),
        ({(i, j) for i in (0, 1) for j in (4, 5)}, "host link a -> c"),
        ({(i, j) for i in (0, 1) for j in (2, 3, 4, 5)}, "host sender a"),
        ({(i, j) for i in (2, 3, 4, 5) for j in (0, 1)}, "host receiver a"),
        ({c for i in (2, 3) for j in (0, 1, 4, 5) for c in ((i, j), (j, i))}, "host b"),
        ({c for j in (0, 1, 2, 3, 5) for c in ((4, j), (j, 4))}, "endpoint rank 4"),
    ],
)
def test_a_pattern_names_its_place(slow: set[Cell], said: str) -> None:
    for noise in (0.0, 0.3):
        explained = _matrix(slow, noise=noise).explain()
        assert explained is not None and list(map(str, explained.places)) == [said]


def test_an_empty_or_quiet_matrix_blames_nobody() -> None:
    assert DelayMatrix({}, {}).explain() is None and _matrix(set()).explain() is None


WORLD = Communicator(communicator="world", ranks=(0, 1, 2, 3), hosts=("a", "b", "c", "d"))


def _operations(rounds: int, ranks: tuple[int, ...] = (0, 1, 2, 3), **changed: object) -> list[Record]:
    return [
        Operation(communicator="world", rank=rank, sequence=number, kind="all_reduce", dtype="float32", count=8,
                  posted_s=float(number), done_s=number + 0.5)
        for number in range(rounds) for rank in ranks
    ]  # fmt: skip


def _last(rank: int, number: int, kind: str = "all_reduce", count: int = 8, dtype: str = "float32") -> Operation:
    return Operation(
        communicator="world", rank=rank, sequence=number, kind=kind, dtype=dtype, count=count, posted_s=float(number)
    )


def _beats(until_s: dict[int, float]) -> list[Record]:
    return [Beat(rank=rank, at_s=at_s / 2) for rank, end_s in until_s.items() for at_s in range(int(2 * end_s) + 1)]


def _diagnose(records: list[Record]) -> list[Finding]:
    return diagnose(from_records([WORLD, *records]))


def test_a_host_is_named_as_it_names_itself() -> None:
    where = Communicator(communicator="world", ranks=(0, 1, 2, 3), hosts=("a", "b", "Node-A", "Node-A"))
    beats = _beats(dict.fromkeys(range(4), 12.0))
    (found,) = diagnose(from_records([where, *_operations(5), *(_last(rank, 5) for rank in (0, 1)), *beats]))
    assert found.where == "host Node-A" and found.text.startswith("Host Node-A has not come to operation 5")


def test_who_did_not_come_while_its_recorder_lives_hangs_in_its_own_code() -> None:
    records = [*_operations(5), *(_last(rank, 5) for rank in (0, 1, 3)), *_beats(dict.fromkeys(range(4), 12.0))]
    (finding,) = _diagnose(records)
    assert (finding.kind, finding.where) == ("non-communication hang", "rank 2")
    assert "py-spy" in finding.remedy and finding.evidence["wait_chain"] == "0, 1, 3 wait for 2"


def test_who_did_not_come_and_does_not_live_is_gone() -> None:
    beats = _beats({0: 12.0, 1: 12.0, 2: 4.5, 3: 12.0})
    (finding,) = _diagnose([*_operations(5), *(_last(rank, 5) for rank in (0, 1, 3)), *beats])
    assert (finding.kind, finding.where) == ("non-communication hang", "rank 2")
    assert "paused, killed or cut off" in finding.text and finding.since_s < 5.0


def test_nobody_waits_for_who_stops_in_what_the_others_have_ended() -> None:
    beats = _beats({0: 12.0, 1: 12.0, 2: 4.5, 3: 12.0})
    (finding,) = _diagnose([*_operations(5), _last(2, 5), *_operations(6, ranks=(0, 1, 3))[15:], *beats])
    assert finding.text.startswith("Rank 2 has stopped inside of operation 5")
    assert finding.evidence["wait_chain"] == "nobody waits for 2"


def test_a_rank_that_ended_early_is_named_by_who_waits_for_it_before_and_after_their_calls_fail() -> None:
    inside = [_last(rank, 5) for rank in (0, 2, 3)]
    goodbye = Beat(rank=1, at_s=5.6, is_last=True)
    beats = _beats({0: 12.0, 1: 5.5, 2: 12.0, 3: 12.0})
    failed = [Beat(rank=rank, at_s=6.0, error="a call failed: connection closed by peer") for rank in (0, 2, 3)]
    soon = _beats(dict.fromkeys(range(4), 5.5))
    for records in ([*inside, goodbye, *beats], [*inside, goodbye, *soon, *failed]):
        (finding,) = _diagnose([*_operations(5), *records])
        assert (finding.kind, finding.where) == ("non-communication hang", "rank 1")
        assert "said goodbye without an error after operation 4" in finding.text and "uneven batches" in finding.text
        assert finding.evidence["waiting"] == [0, 2, 3] and "drop_last" in finding.remedy
    assert _diagnose([*_operations(5), *inside, goodbye, *soon]) == [], "the others may end soon"
    live = _beats({0: 12.0, 2: 12.0, 3: 12.0})
    (finding,) = _diagnose([*_operations(5), *inside[:2], goodbye, *live, *_beats({1: 5.5})])
    assert finding.where == "rank 3", "a live rank that does not come is the cause"


def test_a_job_that_has_just_begun_to_wait_does_not_hang() -> None:
    records = [*_operations(5), *(_last(rank, 5) for rank in (0, 1, 3)), *_beats(dict.fromkeys(range(4), 6.0))]
    assert _diagnose(records) == []


def test_a_wait_chain_ends_at_the_one_that_nobody_hears_of() -> None:
    ends = [
        TransferEnd(communicator="world", rank=rank, peer=(rank - 1) % 4, direction="received", operation=5,
                    num_bytes=9, posted_s=5.0)
        for rank in (0, 1, 3)
    ]  # fmt: skip
    records = [*_operations(5), *(_last(rank, 5) for rank in (0, 1, 3)), *ends, *_beats(dict.fromkeys(range(4), 12.0))]
    (finding,) = _diagnose(records)
    assert finding.evidence["wait_chain"] == "0 waits for 3 waits for 2"


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (_last(1, 5, count=9), "brings 9 elements where the others bring 8"),
        (_last(1, 5, dtype="bfloat16"), "bfloat16"),
        (_last(1, 5, kind="all_gather"), "calls all_gather where the others call all_reduce"),
    ],
)
def test_a_rank_out_of_step_is_named_and_the_wait_that_follows_is_not(odd: Operation, said: str) -> None:
    records = [*_operations(5), odd, *(_last(rank, 5) for rank in (0, 2, 3)), *_beats(dict.fromkeys(range(4), 20.0))]
    (finding,) = _diagnose(records)
    assert (finding.kind, finding.where, finding.since_round) == ("desync", "rank 1", 5)
    assert said in finding.text


def test_two_against_two_is_ambiguous() -> None:
    (finding,) = _diagnose([*_operations(5), *(_last(rank, 5, count=8 + rank // 2) for rank in range(4))])
    assert finding.is_ambiguous and finding.confidence <= 0.6 and finding.probe


def _losses(rank_loss: dict[int, float], step: int) -> list[Record]:
    return [
        Span(rank=rank, kind="step", step=step, started_s=step - 0.5, done_s=float(step), loss=loss)
        for rank, loss in rank_loss.items()
    ]


def test_a_loss_that_is_no_number_is_told_with_its_rank_and_step() -> None:
    records = [one for step in range(20) for one in _losses(dict.fromkeys(range(4), 3.0), step)]
    (finding,) = _diagnose([*records, *_losses({0: 3.0, 1: 3.0, 2: math.nan, 3: 3.0}, 20)])
    assert (finding.kind, finding.where, finding.since_round) == ("non-finite loss", "rank 2", 20)
    assert json.loads(json.dumps(finding.to_json(), allow_nan=False))["evidence"] == {"losses": ["nan"]}


def test_a_loss_that_parts_from_the_others_is_told_and_one_that_varies_is_not() -> None:
    usual = [
        _losses({rank: 4.0 - 0.01 * step + 0.02 * ((rank * 3 + step) % 4) for rank in range(4)}, step)
        for step in range(60)
    ]
    assert _diagnose([one for step in usual for one in step]) == []
    parted = [_losses({0: 3.5, 1: 3.52, 2: 3.49, 3: 3.5 + 0.2 * step}, 60 + step) for step in range(12)]
    (finding,) = _diagnose([one for step in usual + parted for one in step])
    assert (finding.kind, finding.where) == ("loss divergence", "rank 3")


def test_a_report_says_what_where_since_when_how_sure_and_what_to_do() -> None:
    records = [*_operations(5), *(_last(rank, 5) for rank in (0, 1, 3))]
    text = report(_diagnose([*records, *_beats(dict.fromkeys(range(4), 12.0))]))
    assert "confidence 0.70" in text and "it may also be very slow" in text, "it lives, and is not 25 times late"
    text = report(_diagnose([*records, *_beats(dict.fromkeys(range(4), 31.0))]))
    for part in ("non-communication hang: rank 2", "round 5", "confidence 0.9", "waiting: 0, 1, 3", "remedy: "):
        assert part in text
    assert report([]) == "No fault found."
