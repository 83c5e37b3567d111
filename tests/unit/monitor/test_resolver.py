"""Each row of the resolver's table explains what it says, only under its condition, and in any order of findings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import pytest

from thinwire.monitor.detect.resolver import RULES, _ranks, resolve
from thinwire.monitor.detect.timeline import Job, Message
from thinwire.monitor.findings import Evidence, EvidenceKind, Finding, Kind, Place, PlaceKind

JOB = Job(host_of={0: "a", 1: "b", 2: "c"})
RECORDED = replace(JOB, messages=[Message(0, 1, "w", 0, 0, 9)])


def place(*ranks: int, kind: PlaceKind = "rank") -> Place:
    return Place(kind=kind, ranks=ranks)


def finding(
    evidence: Evidence, *places: Place, kind: Kind = "communication slow", since_s: float = 10.0,
    until_s: float | None = None, since_round: int = 5,
) -> Finding:  # fmt: skip
    return Finding(
        kind=kind, places=places or (place(1),), since_s=since_s, until_s=until_s, since_round=since_round, text="",
        confidence=1.0, remedy="", evidence=evidence,
    )  # fmt: skip


def slow_link(times: float = 4.0, *places: Place, **fields: object) -> Finding:
    evidence = Evidence("slow_link", times_longer=times, usual_s=0.1, now_s=0.4, links=[], explained=1.0, retries=0,
                                clock_error_s=0.0)  # fmt: skip
    return finding(evidence, *(places or (place(1, kind="sender"),)), **fields)  # type: ignore[arg-type]


def slow_compute(times: float = 4.0, *places: Place, usual_s: float = 0.2, **fields: object) -> Finding:
    evidence = Evidence("slow_compute", times_longer=times, usual_s=usual_s, now_s=usual_s * times, waited_least="")
    return finding(evidence, *places, kind="non-communication slow", **fields)  # type: ignore[arg-type]


def operation(times: float, *, usual_s: float = 0.1, is_placed: bool = False, **fields: object) -> Finding:
    if is_placed:
        evidence: Evidence = Evidence("placed_operation", communicator="w", times_longer=times, usual_s=usual_s,
                                                     byte_times_longer=times, links=[])  # fmt: skip
        return finding(evidence, **fields)  # type: ignore[arg-type]
    evidence = Evidence("slow_operation", communicator="w", times_longer=times, usual_s=usual_s)
    return finding(evidence, Place(kind="communicator"), **fields)  # type: ignore[arg-type]


def slow_bytes(times: float = 4.0, **fields: object) -> Finding:
    evidence = Evidence("slow_bytes", times_longer=times, usual_mbit_a_second=8.0, now_mbit_a_second=2.0, links=[])
    return finding(evidence, place(0, 1, kind="link"), **fields)  # type: ignore[arg-type]


def missing(*ranks: int, communicator: str = "w") -> Finding:
    evidence = Evidence("missing_rank", communicator=communicator, waiting=[0], last_sign_s=1.0, wait_chain="")
    return finding(evidence, place(*(ranks or (1,))), kind="non-communication hang")


def stuck(*, kind: Kind = "communication hang", places: Sequence[Place] = ()) -> Finding:
    return finding(Evidence("stuck_message", communicator="w", stuck=[], arrived=0), *places, kind=kind)


def one_sided() -> Finding:
    return finding(Evidence("one_sided", communicator="w", not_heard=[1], num_peers=1), kind="communication hang")


def desync(communicator: str = "w") -> Finding:
    return finding(
        Evidence("desync", communicator=communicator, operation=3, differs_in="kind", by_rank=[]), kind="desync"
    )


def flapping(*places: Place, **fields: object) -> Finding:
    evidence = Evidence("flapping", times_longer=5.0, bad_rounds=[], explained=1.0)
    return finding(evidence, *(places or (place(0, 1, kind="link"),)), kind="flapping link", **fields)  # type: ignore[arg-type]


def stall(*ranks: int, **fields: object) -> Finding:
    evidence = Evidence("stall", times_longer=5.0, every_rounds=7.0)
    return finding(evidence, place(*(ranks or (1,))), kind="periodic stall", **fields)  # type: ignore[arg-type]


def transfer(*places: Place) -> Finding:
    return finding(Evidence("slow_transfer", times_longer=9.0, bytes_a_second=9, links=[], waited_s=2.0), *places)


def step(*places: Place) -> Finding:
    evidence = Evidence("slow_step", times_longer=9.0, usual_s=0.1, now_s=0.9, steps=2, waited_s=2.0)
    return finding(evidence, *places, kind="non-communication slow")


def slow_path(*ranks: int) -> Finding:
    evidence = Evidence("slow_path", times_longer=5.0, source_port=9, usual_mbit_a_second=8.0, now_mbit_a_second=1.0)
    return finding(evidence, Place(kind="path", ranks=ranks, path=1))


def silent(rank: int = 1) -> Finding:
    evidence = Evidence("silent_rank", last_sign_s=1.0, silent_s=20.0, longer_than_s=3.0, usual_between_s=0.5)
    return finding(evidence, place(rank), kind="non-communication hang")


def ras(*ranks: int) -> Finding:
    evidence = Evidence("ras_lost", state="dead", host="b", processes=[], ranks=ranks)
    return finding(evidence, place(*ranks), kind="non-communication hang")


def ended(*ranks: int) -> Finding:
    evidence = Evidence("ended_file", communicator="w", last_operation=3, ranks=ranks, others_last=9,
    others_went_on_s=20.0,
                                 locations=[])  # fmt: skip
    return finding(evidence, place(*ranks), kind="no records")


LINK_PEERS = finding(Evidence("link_peers", times_longer_than_peers=4.0, peers_s=0.1, clock_error_s=0.0))
COMPUTE_PEERS = finding(
    Evidence("compute_peers", times_longer_than_peers=4.0, usual_s=0.1), kind="non-communication slow"
)
NO_FILE = finding(
    Evidence("missing_file", communicator="w", ranks=[1, 2], num_ranks=4, with_files=2), kind="no records"
)
OWN_ERROR = finding(Evidence("own_error", error="E", others_ended=[]), kind="non-communication hang")
LINK = place(0, 1, kind="link")


@dataclass(frozen=True)
class Case:
    row: int
    explained: Finding
    by: tuple[Finding, ...]
    job: Job = field(default_factory=lambda: JOB)


EXPLAINED = [
    Case(0, missing(), (desync(),)), Case(0, stuck(), (desync(),)), Case(0, one_sided(), (desync(),)),
    Case(1, slow_link(), (flapping(),)), Case(1, LINK_PEERS, (flapping(),)),
    Case(2, slow_compute(), (stall(),)), Case(2, COMPUTE_PEERS, (stall(0, 1),)),
    Case(3, slow_link(4.0), (slow_compute(3.5),)),
    Case(4, transfer(LINK), (flapping(),)), Case(4, step(), (flapping(),)),
    Case(4, stuck(kind="communication slow"), (flapping(),)),
    Case(5, transfer(LINK), (slow_link(4.0, LINK),)), Case(5, step(), (slow_compute(),)),
    Case(5, step(), (COMPUTE_PEERS,)),
    Case(6, operation(1.5), (slow_compute(4.0),)), Case(6, operation(1.5, is_placed=True), (slow_compute(4.0),)),
    Case(7, slow_bytes(), (slow_link(),), RECORDED), Case(7, slow_bytes(), (stall(),), RECORDED),
    Case(8, slow_bytes(), (OWN_ERROR,)), Case(8, slow_bytes(), (missing(2),)), Case(8, slow_bytes(), (transfer(LINK),)),
    Case(9, slow_bytes(), (operation(4.0, is_placed=True),)),
    Case(10, operation(4.0), (slow_bytes(3.9),)),
    Case(11, silent(), (missing(),)), Case(11, silent(), (ras(1),)),
    Case(12, ended(1, 2), (ras(1), ras(2))), Case(12, NO_FILE, (ras(1, 2),)),
    Case(13, slow_link(4.0, LINK), (slow_path(0, 1),)), Case(13, transfer(LINK), (slow_path(0, 1),)),
    Case(13, slow_bytes(), (slow_path(0, 1),)),
]  # fmt: skip

REPORTED = [
    Case(0, missing(), (desync("other"),)),
    Case(1, slow_link(4.0, place(2, kind="sender")), (flapping(),)),
    Case(2, slow_compute(4.0, place(2)), (stall(),)),
    Case(3, slow_link(4.0), (slow_compute(3.0),)),  # slower than the compute: a fault of its own
    Case(3, slow_link(4.0, LINK), (slow_compute(4.0),)),  # a single link
    Case(3, slow_link(4.0), (slow_compute(4.0, place(2)),)),  # another rank
    Case(3, slow_link(4.0), (slow_compute(4.0, Place(kind="job")),)),
    Case(3, slow_link(4.0), (slow_compute(4.0, until_s=9.0, since_s=1.0),)),  # had ended before
    Case(3, slow_link(4.0), (slow_compute(4.0, since_round=0),)),
    Case(3, slow_link(4.0), (COMPUTE_PEERS,)),
    Case(4, stuck(), (flapping(),)),  # a hang is worse
    Case(4, transfer(place(1, 2, kind="link")), (flapping(place(0, kind="sender")),)),
    Case(5, transfer(LINK), (slow_link(4.0, LINK, until_s=20.0),)),
    Case(5, transfer(LINK), (slow_link(4.0, place(0, kind="sender")),)),
    Case(5, missing(), (slow_compute(),)),
    Case(6, operation(3.0), (slow_compute(4.0),)),
    Case(6, operation(1.5), (slow_compute(4.0, since_s=1.0, until_s=9.0),)),
    Case(7, slow_bytes(), (slow_link(),)),  # nothing is recorded by message
    Case(7, slow_bytes(), (slow_link(since_s=1.0, until_s=9.0),), RECORDED),
    Case(8, slow_bytes(until_s=20.0), (missing(2),)),
    Case(9, slow_bytes(), (operation(4.0, is_placed=True, since_s=1.0, until_s=9.0),)),
    Case(10, operation(9.0), (slow_bytes(1.3),)),
    Case(10, operation(4.0), (slow_bytes(4.0, since_s=1.0, until_s=9.0),)),
    Case(11, silent(2), (missing(1),)),
    Case(11, silent(), (step(),)),  # slow is not gone
    Case(12, ended(1, 2), (ras(1),)),
    Case(13, slow_link(4.0, LINK), (slow_path(0, 2),)),
]  # fmt: skip


@pytest.mark.parametrize("case", EXPLAINED, ids=lambda case: str(case.row))
def test_a_row_explains_its_evidence_and_no_other_row_is_needed_for_it(case: Case) -> None:
    found = [case.explained, *case.by]
    assert resolve(found, case.job, RULES[case.row : case.row + 1]) == [*case.by]
    assert resolve(found, case.job) == [*case.by]


@pytest.mark.parametrize("case", REPORTED, ids=lambda case: str(case.row))
def test_without_its_condition_a_row_explains_nothing(case: Case) -> None:
    found = [case.explained, *case.by]
    assert resolve(found, case.job, RULES[case.row : case.row + 1]) == found


def test_every_row_has_a_reason_and_a_case_of_both_sorts() -> None:
    assert all(rule.reason.endswith(".") for rule in RULES)
    for cases in (EXPLAINED, REPORTED):
        assert {case.row for case in cases} == set(range(len(RULES)))


def test_the_order_of_findings_changes_their_order_only() -> None:
    found = [flapping(), slow_link(), slow_compute(4.0), stall(), transfer(LINK), slow_bytes(), operation(4.0)]
    kept = {id(one) for one in resolve(found, RECORDED)}
    for order in itertools.permutations(found):
        assert [id(one) for one in resolve(order, RECORDED)] == [id(one) for one in order if id(one) in kept]


def test_what_is_explained_explains_nothing() -> None:
    # the stall explains the slow compute, so that the slow sender is a fault of its own
    found = [slow_link(4.0), slow_compute(4.0), stall(), finding(Evidence("desync", communicator="v", operation=0,
             differs_in="kind", by_rank=[]), kind="desync")]  # fmt: skip
    assert [one.kind for one in resolve(found, JOB)] == ["communication slow", "periodic stall", "desync"]


def test_no_evidence_explains_itself_over_other_rows() -> None:
    # slow operations are explained by slow bytes, and explain these only where a connection is known: two kinds
    edges = {(cause, one) for rule in RULES for one in rule.explained for cause in rule.by}
    left: set[EvidenceKind] = set(get_args(EvidenceKind))
    assert {kind for edge in edges for kind in edge} <= left
    while left:
        free = {one for one in left if not any(cause in left for cause, other in edges if other == one)}
        assert free, f"a cycle among {sorted(left)}"
        left -= free


def test_ranks_of_hosts_and_of_the_job_are_known() -> None:
    everyone = finding(
        Evidence("desync", communicator="w", operation=0, differs_in="kind", by_rank=[]), Place(kind="job")
    )
    assert _ranks(everyone, JOB) == {0, 1, 2}
    assert _ranks(replace(everyone, places=(Place(kind="host", hosts=("c",)), place(0))), JOB) == {0, 2}
