"""Parts that a broken replica sends: they are left out, named, and cost no other replica its run."""

import time
from collections.abc import Callable, Collection
from typing import cast

import pytest
import torch
from test_elastic_faults import STEPS, Street, are_alike, street
from town import TownShelf

from thinwire.elastic.coordinator import MOST_BAD_PARTS
from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.part_disputes import PartDisputes, PartReport
from thinwire.elastic.round_driver import (
    HEAD_BYTES,
    CastVote,
    RequestPart,
    RoundDriver,
    RoundInputs,
    RoundStateMachine,
    part_of_name,
)
from thinwire.elastic.rounds import Decision

__all__ = ["street"]

# A blob's head of 16 bytes: hash, zeros, round. Then the part's header of 24 bytes: kind, tokens, steps.
Damage = Callable[[torch.Tensor], torch.Tensor]


def with_byte(blob: torch.Tensor, place: int, value: int) -> torch.Tensor:
    found = blob.clone()
    found[place] = value
    return found


MALFORMED: dict[str, Damage] = {
    "8 bytes too short": lambda blob: blob[:-8].clone(),
    "another kind": lambda blob: with_byte(blob, HEAD_BYTES, 7),
    "far too large": lambda blob: blob.repeat(9),
    "no head": lambda blob: blob[:5].clone(),
    "nothing": lambda blob: blob[:0].clone(),
}
FOREIGN: dict[str, Damage] = {
    "another reference hash": lambda blob: with_byte(blob, 0, int(blob[0]) ^ 1),
    "an old round": lambda blob: with_byte(blob, 8, int(blob[8]) ^ 1),
}


def break_parts(run: Street, number: int, damage: Damage, *, since: int) -> None:
    """Let a replica publish damaged parts of its own from a round on."""
    shelf: TownShelf = run.workers[number].resident.shelf
    publish = shelf.publish

    def publish_damaged(name: bytes, payload: torch.Tensor) -> None:
        round_id, member = cast(tuple[int, int], part_of_name(name))
        publish(name, damage(payload) if member == number and round_id >= since else payload)

    shelf.publish = publish_damaged


@pytest.mark.parametrize("fault", [*MALFORMED, *FOREIGN])
def test_a_replica_that_sends_bad_parts_is_named_and_dropped_and_ends_no_other(
    street: Callable[..., Street], fault: str
) -> None:
    run = street(3)
    break_parts(run, 2, (MALFORMED | FOREIGN)[fault], since=4)
    run.begin()
    values = [worker.end() for worker in run.workers[:2]]
    assert are_alike(*values) and all(bool(value.isfinite().all()) for value in values[0])
    assert all(worker.steps == list(range(1, STEPS + 1)) for worker in run.workers[:2])
    run.workers[2].ended()
    assert run.workers[2].expelled and run.workers[2].session.view.has_bad_parts
    what = "are malformed" if fault in MALFORMED else "refer to other global parameters or to another round"
    named, dropped = [text for text in run.town.coordinator.state.findings if what in text]
    assert "without the part of replica 2 on host2" in named
    assert f"replica 2 on host2 was dropped: {MOST_BAD_PARTS} of its parts in a row {what} (" in dropped


@pytest.mark.parametrize("factor", [100.0, 1e4, 1e20])
def test_a_replica_whose_parameters_are_huge_is_dropped_and_pulls_no_other(
    street: Callable[..., Street], factor: float
) -> None:
    calm, run = street(3), street(3)
    calm.begin()
    usual = torch.cat([value.flatten() for value in calm.workers[0].end()])
    run.workers[2].spoil = lambda step: factor if step == 9 else None
    run.begin()
    values = [worker.end() for worker in run.workers[:2]]
    assert are_alike(*values)
    found = torch.cat([value.flatten() for value in values[0]])
    assert float((found - usual).norm()) < 0.1 * float(usual.norm())
    run.workers[2].ended()
    assert run.workers[2].expelled and run.workers[2].session.view.has_bad_parts
    told = [text for text in run.town.coordinator.state.findings if "in a row are far longer than those" in text]
    assert len(told) == 1 and "replica 2 on host2 was dropped" in told[0]
    assert not any(worker.findings for worker in run.workers), "the coordinator makes the finding"


@pytest.mark.parametrize("factor", [1e3, 1e20])
def test_a_huge_part_of_one_of_two_pulls_none_and_neither_is_dropped(
    street: Callable[..., Street], factor: float
) -> None:
    calm, run = street(2), street(2)
    calm.begin()
    usual = torch.cat([value.flatten() for value in calm.workers[0].end()])
    run.workers[1].spoil = lambda step: factor if step == 9 else None
    run.begin()
    values = [worker.end() for worker in run.workers]
    assert are_alike(*values)
    found = torch.cat([value.flatten() for value in values[0]])
    assert float((found - usual).norm()) < 0.5 * float(usual.norm())
    (named,) = [text for text in run.town.coordinator.state.findings if "far longer" in text]
    assert "the part of replica 1" in named and "it is not known which one is wrong, so neither is dropped" in named


def test_who_calls_a_sound_part_bad_is_dropped_and_not_its_sender(street: Callable[..., Street]) -> None:
    run = street(3)
    liar = run.workers[2].resident.seat
    confirm = liar.confirm

    def confirm_and_lie(round_id: int, sound: Collection[int]) -> None:
        for since in (round_id - 1, round_id) if round_id >= 4 else ():
            liar.reject(0, round_id=round_id, bad_parts=round_id - since + 1, since=since, fault="non_finite")
        confirm(round_id, sound)

    liar.confirm = confirm_and_lie  # type: ignore[method-assign]
    run.begin()
    values = [worker.end() for worker in run.workers[:2]]
    assert are_alike(*values) and [worker.steps for worker in run.workers[:2]] == [list(range(1, STEPS + 1))] * 2
    run.workers[2].ended()
    assert run.workers[2].expelled
    (dropped,) = [text for text in run.town.coordinator.state.findings if "was dropped" in text]
    assert "replica 2 on host2 was dropped: it reported that parts of replica 0 hold NaN or infinity" in dropped
    assert "most others hold the same bytes of round" in dropped and "find them sound" in dropped


def dispute(answers: dict[int, PartReport], *, active: set[int], is_counted: bool = True) -> tuple[bool, list[int]]:
    """Let those accuse who find the part of 0 bad, and the others answer; return whether 0 goes, and who else does."""
    disputes = PartDisputes(lambda some, of: 2 * len(some) > len(of))
    for replica, report in answers.items():
        if report.verdict == "bad" and replica:
            disputes.accuse(replica, report, round_id=7, member=0, is_counted=is_counted, now_s=0.0)
    for replica, report in answers.items():
        disputes.answer(replica, report, round_id=7, member=0)
    (settled,) = disputes.settle(active, now_s=100.0)
    return settled.is_bad, list(settled.liars)


BAD, SOUND = PartReport(verdict="bad", sha256="aa"), PartReport(verdict="sound", sha256="aa")
OTHER, NONE = PartReport(verdict="sound", sha256="bb"), PartReport(verdict="unknown")


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ({1: BAD, 2: BAD, 3: NONE}, (True, [])),
        ({1: BAD, 2: NONE, 3: NONE}, (False, [])),
        ({1: BAD, 2: BAD, 3: BAD, 4: SOUND}, (False, [])),  # one honest copy against any number of liars
        ({0: SOUND, 1: BAD, 2: SOUND, 3: SOUND}, (False, [1])),
        ({0: SOUND, 1: BAD, 2: OTHER, 3: OTHER}, (False, [])),  # its sender may have sent each other bytes
        ({0: SOUND, 1: PartReport(verdict="bad"), 2: OTHER, 3: OTHER}, (False, [1])),  # counted, and not looked at
        ({0: SOUND, 1: BAD}, (False, [])),
    ],
    ids=["most", "one alone", "a sound copy", "a lie", "other bytes", "no hash", "of two"],
)
def test_a_report_counts_by_what_the_others_find_in_the_same_bytes(
    answers: dict[int, PartReport], outcome: tuple[bool, list[int]]
) -> None:
    assert dispute(answers, active={0, *answers}) == outcome


@pytest.mark.parametrize("seed", range(4))
def test_whatever_bytes_a_replica_sends_the_others_finish_alike(street: Callable[..., Street], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def damaged(blob: torch.Tensor) -> torch.Tensor:
        """Replace bytes of the head, the header or the code, or change the size; every other part stays whole."""
        kind, place, byte = (int(torch.randint(most, (), generator=generator)) for most in (6, blob.numel(), 256))
        if kind == 0:
            return blob[:place].clone()
        if kind == 1:
            return torch.cat([blob, blob[:place]])
        return with_byte(blob, place if kind == 2 else place % (HEAD_BYTES + 24), byte) if kind < 5 else blob

    run = street(3)
    break_parts(run, 2, damaged, since=1)
    run.begin()
    values = [worker.end() for worker in run.workers[:2]]
    assert are_alike(*values) and all(bool(value.isfinite().all()) for value in values[0])
    assert float(torch.cat([value.flatten() for value in values[0]]).abs().max()) < 10.0
    run.workers[2].ended()


def test_a_part_that_is_refused_is_not_awaited_and_is_taken_from_who_holds_a_good_copy() -> None:
    machine = RoundStateMachine(replica=0, has_part=True)
    words = {"called": (0, 1, 2), "decision": None, "active": (0, 1, 2), "neighbours": (0, 1, 2), "limit_s": 60.0}
    assert [one.member for one in machine.advance(RoundInputs(**words), now_s=0.0)] == [1, 2]
    machine.on_part(1)
    assert machine.advance(RoundInputs(**words), now_s=0.1) == [], "the part of 2 is awaited"
    machine.on_refusal(2)
    assert machine.advance(RoundInputs(**words), now_s=0.2) == [CastVote(has=(0, 1))]
    decision = Decision(round_id=9, launch_step=12, members=(0, 1, 2), holders=(1, 2), step=12)
    actions = machine.advance(RoundInputs(**words | {"decision": decision}), now_s=0.3)
    assert actions == [RequestPart(source=1, member=2)], "the others may hold a good copy"


class FullStore:
    """Delivers a blob at once, whoever is asked for whichever."""

    def __init__(self, blob: torch.Tensor) -> None:
        self.blob = blob
        self.num_asked = 0

    def publish(self, name: bytes, payload: torch.Tensor) -> None: ...

    def get(self, source: int, name: bytes, *, most_bytes: int) -> "FullStore":
        self.num_asked += 1
        return self

    def forget_past(self) -> None: ...

    def done(self) -> bool:
        return True

    def wait(self, *, deadline_s: float) -> torch.Tensor:
        return self.blob

    def cancel(self) -> None: ...


@pytest.mark.parametrize(("place", "num_asked"), [(0, 1), (8, 1), (None, 2)], ids=["hash", "round", "size"])
def test_a_round_votes_without_a_refused_part_as_soon_as_it_is_refused(place: int | None, num_asked: int) -> None:
    good = torch.zeros(HEAD_BYTES + 9, dtype=torch.uint8)
    good[0], good[8] = 5, 9  # the hash of the global value, and the round
    said: list[tuple[str, dict[str, object]]] = []
    session = CoordinatorSession(replica=0, interval_steps=4, send=lambda kind, **fields: said.append((kind, fields)))
    about = {"host": "h", "address": "10.0.0.1", "port": 7, "state": "active"}
    session.receive({
        "kind": "roster", "members": [{"replica": n, **about} for n in range(2)], "started": True, "number": 1,
    })  # fmt: skip
    session.receive({"kind": "call", "round": 9, "members": [0, 1]})
    store = FullStore(good.repeat(3) if place is None else with_byte(good, place, 77))
    driver = RoundDriver(
        session=session, store=store, round_id=9, launch_step=40, part=good[HEAD_BYTES:], reference_hash=5, most_bytes=9
    )
    end_s = time.monotonic() + 60.0
    while not any(kind == "vote" for kind, _ in said) and time.monotonic() < end_s:
        driver._advance()
    assert [fields["has"] for kind, fields in said if kind == "vote"] == [[0]]
    assert store.num_asked == num_asked, "only what may have been damaged on its way is requested again"
