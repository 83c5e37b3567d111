"""Waits over several communicators: the rank at the end of a chain, circles, and groups named by their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Beat, Communicator, Operation, Record

GROUPS: Mapping[str, tuple[int, ...]] = {"world": (0, 1, 2, 3), "tp0": (0, 1), "tp1": (2, 3), "dp0": (0, 2),
                                         "dp1": (1, 3)}  # fmt: skip
STEPS = 8


def found_in(
    last: Sequence[tuple[str, int]], *, every: Mapping[str, int] | None = None, is_async: Sequence[str] = (),
    end_s: float = 30.0, silent: Sequence[int] = (), goodbye: Sequence[int] = (),
) -> list[Finding]:  # fmt: skip
    """Return the findings of a job on two axes that steps once a second, then stops inside of some operations.

    Args:
        last: Groups and ranks of the operations that do not end, in order.
        every: Steps between two operations of a group; 1 for others.
        is_async: Groups whose operations do not block.
        end_s: Time of the diagnosis.
        silent: Ranks whose heartbeats end as well.
        goodbye: Ranks that end without an error.
    """
    records: list[Record] = [
        Communicator(communicator=name, ranks=ranks, hosts=("a",) * len(ranks)) for name, ranks in GROUPS.items()
    ]
    numbers = dict.fromkeys(GROUPS, 0)
    for step in range(STEPS):
        for name, ranks in GROUPS.items():
            if step % (every or {}).get(name, 1) == 0:
                records += [_operation(name, rank, numbers[name], step, step + 0.1) for rank in ranks]
                numbers[name] += 1
    records += [_operation(name, rank, numbers[name], STEPS, None, is_async=name in is_async) for name, rank in last]
    for rank in range(4):
        until_s = STEPS + 0.5 if rank in (*silent, *goodbye) else end_s
        records += [Beat(rank=rank, at_s=half / 2) for half in range(int(2 * until_s) + 1)]
    records += [Beat(rank=rank, at_s=STEPS + 0.6, is_last=True) for rank in goodbye]
    return diagnose(from_records(records))


def _operation(
    name: str, rank: int, number: int, at_s: float, done_s: float | None, *, is_async: bool = False
) -> Operation:  # fmt: skip
    return Operation(communicator=name, rank=rank, sequence=number, kind="all_reduce", dtype="float32", count=8,
                     posted_s=at_s, done_s=done_s, is_async=is_async)  # fmt: skip


def test_a_chain_over_two_groups_ends_at_the_rank_that_waits_for_none() -> None:
    (finding,) = found_in([("tp0", 0), ("dp1", 1), ("tp1", 2)])
    assert (finding.kind, finding.where) == ("non-communication hang", "rank 3")
    assert finding.evidence["waiting"] == [0, 1, 2], "rank 0 waits for it by rank 1"
    assert "of ranks 1, 3 (dp1)" in finding.text


def test_a_wait_that_is_not_long_yet_for_its_own_group_still_leads_to_the_cause() -> None:
    (finding,) = found_in([("tp0", 0), ("dp1", 1)], every={"dp1": 4}, end_s=STEPS + 6.0)
    assert finding.where == "rank 3", "dp1 has an operation each 4 s only, tp0 each second"


def test_ranks_that_wait_in_a_circle_are_told_with_it() -> None:
    (finding,) = found_in([("tp0", 0), ("dp1", 1), ("tp1", 3), ("dp0", 2)])
    assert (finding.kind, finding.where) == ("desync", "ranks 0, 1, 2, 3")
    assert "rank 0 waits for 1 in all_reduce 8 of ranks 0, 1 (tp0); 1 waits for 3" in finding.text
    assert "one order on all ranks" in finding.remedy
    (finding,) = found_in([("world", 0), ("world", 2), ("world", 3), ("tp0", 1)])
    assert finding.where == "ranks 0, 1" and finding.evidence["waiting"] == [0, 1, 2, 3]


def test_a_call_that_does_not_block_closes_no_circle() -> None:
    (finding,) = found_in([("world", 0), ("world", 2), ("world", 3), ("tp0", 1)], is_async=["tp0"])
    assert (finding.kind, finding.where) == ("non-communication hang", "rank 1")


def test_a_silent_rank_and_one_that_ended_are_ends_of_a_chain() -> None:
    (finding,) = found_in([("tp0", 0), ("dp1", 1), ("tp1", 2), ("world", 3)], silent=[3])
    assert finding.where == "rank 3" and "paused, killed or cut off" in finding.text
    (finding,) = found_in([("tp0", 0), ("dp1", 1), ("tp1", 2)], goodbye=[3])
    assert finding.where == "rank 3" and "said goodbye" in finding.text


def test_two_ranks_that_both_receive_first_wait_in_a_circle_of_messages() -> None:
    records: list[Record] = [Communicator(communicator=f"0 pg {source}->{to}", ranks=(source, to), hosts=("a", "a"))
                             for source, to in ((0, 1), (1, 0))]  # fmt: skip
    for name, rank in (("0 pg 1->0", 0), ("0 pg 0->1", 1)):
        records += [_operation(name, one, step, step, step + 0.1) for step in range(STEPS) for one in (0, 1)]
        records += [_operation(name, rank, STEPS, STEPS, None)]
        records += [Beat(rank=rank, at_s=half / 2) for half in range(60)]
    (finding,) = diagnose(from_records(records))
    assert (finding.kind, finding.where) == ("desync", "ranks 0, 1")
    assert "rank 0 waits for 1 in all_reduce 8 of the messages from rank 1 to rank 0" in finding.text
    assert "batch_isend_irecv" in finding.remedy


def test_most_ranks_may_have_ended_early() -> None:
    (finding,) = found_in([("world", 3)], goodbye=[0, 1, 2])
    assert finding.where == "ranks 0, 1, 2" and "rank 3 waits for them" in finding.text
