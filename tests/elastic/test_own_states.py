"""Who comes back with a state of its own goes on from it, where what it lacks can be had; else it fetches one."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_coordinator import Desk
from test_elastic_faults import SOON_S, STEPS, Street, Worker, are_alike, street

from thinwire.elastic.protocol import VERSION
from thinwire.elastic.replica_state import global_tensors, load_global_tensors
from thinwire.version import __version__

__all__ = ["street"]


def comes_back(desk: Desk, *, held: int, era: int = 0) -> list[tuple[str, int]]:
    """Return what a third replica that says what it holds is offered."""
    desk.hear(b"c", "join", version=VERSION, thinwire=__version__, host="c")
    desk.hear(b"c", "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=held, era=era, disk=0)
    return [(state["root"], state["step"]) for state in desk.words(b"c", "state")]


def beats(desk: Desk, *, step: int) -> None:
    desk.now_s += 1.1
    for token in (b"a", b"b"):
        desk.hear(token, "beat", step=step, step_s=0.1, roster=0)
    desk.coordinator.tick(desk.now_s)


def test_a_state_of_its_own_is_gone_on_from_and_rounds_after_it_are_kept() -> None:
    desk = Desk().begun()
    beats(desk, step=30)
    assert comes_back(desk, held=22) == [("own", 22)]
    beats(desk, step=900)
    assert desk.words(b"a", "progress")[-1]["floor"] == 21
    beats(desk, step=900)
    assert desk.words(b"a", "progress")[-1]["kept"] <= 22, "it needs them as long as it is on its way"
    desk.hear(
        b"c", "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=22, era=0, disk=0
    )  # the word was lost
    assert [state["step"] for state in desk.words(b"c", "state")] == [22]
    again = desk.again()  # another process of the coordinator
    again.hear(b"c", "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=22, era=0, disk=0)
    assert [(state["root"], state["step"]) for state in again.words(b"c", "state")] == [("own", 22)]
    desk.hear(b"c", "active", step=22)
    assert not desk.words(b"a", "capture") and not desk.coordinator.state.snapshots.waiting


@pytest.mark.parametrize(("step", "held", "era"), [(30, 0, 0), (30, 31, 0), (30, 22, 1), (200, 100, 0)])
def test_a_state_of_no_use_is_not_gone_on_from(step: int, held: int, era: int) -> None:
    desk = Desk().begun()
    beats(desk, step=step)
    assert comes_back(desk, held=held, era=era) == []
    assert desk.coordinator.state.snapshots.of(2) is not None, "it is to fetch one"


def test_rounds_that_only_the_dead_held_are_not_to_be_had() -> None:
    desk = Desk(planned=1)
    desk.come(b"a")
    desk.hear(b"a", "active", step=0)
    desk.hear(b"a", "launch", round=3, step=40, used={})
    desk.hear(b"a", "vote", round=3, step=40, has=[0], hash=0)
    desk.come(b"b")  # begins from a later state, and never fetches that part
    desk.hear(b"b", "active", step=45)
    desk.hear(b"a", "leave", why="")
    desk.hear(b"b", "beat", step=60, step_s=0.1, roster=0)
    desk.coordinator.tick(1.0)
    assert comes_back(desk, held=38) == [] and desk.coordinator.state.snapshots.of(2) is not None
    again = desk.again()
    again.hear(b"b", "beat", step=60, step_s=0.1, roster=0)
    again.hear(b"d", "join", version=VERSION, thinwire=__version__, host="d")
    again.hear(b"d", "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=38, era=0, disk=0)
    assert not again.words(b"d", "state"), "the journal holds when each began"
    desk.hear(b"e", "join", version=VERSION, thinwire=__version__, host="e")
    desk.hear(b"e", "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=55, era=0, disk=0)
    assert [state["root"] for state in desk.words(b"e", "state")] == ["own"], "nothing was decided since"


def test_parts_are_kept_for_as_long_as_they_are_less_than_half_of_a_state() -> None:
    desk = Desk().begun()
    state = desk.coordinator.state
    beats(desk, step=300)
    assert desk.words(b"a", "progress")[-1]["kept"] == 300 - 8 * 10
    state.config = replace(state.config, part_share=1 / 16)  # two replicas: an eighth of the state in each interval
    beats(desk, step=300)
    assert desk.words(b"a", "progress")[-1]["kept"] == 300 - 4 * 10
    state.config = replace(state.config, part_share=0.5)  # what was let go of is not there again
    beats(desk, step=300)
    assert desk.words(b"a", "progress")[-1]["kept"] == 300 - 5
    assert comes_back(desk, held=294) == []


def test_after_a_run_went_on_from_a_disk_states_from_before_are_of_another_past() -> None:
    desk = Desk().begun()
    desk.decide(used={})
    beats(desk, step=30)
    for token in (b"a", b"b"):
        desk.hear(token, "leave", why="")
    assert comes_back(desk, held=22) == [("disk", 0)]
    desk.hear(b"c", "active", step=20)
    desk.hear(b"d", "join", version=VERSION, thinwire=__version__, host="d")
    desk.hear(b"d", "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=20, era=0, disk=0)
    assert desk.words(b"d", "state") == [] and desk.coordinator.state.snapshots.of(3) is not None
    desk.hear(b"e", "join", version=VERSION, thinwire=__version__, host="e")
    desk.hear(b"e", "here", address="127.0.0.1", port=1, corpus="c", windows=100, held=20, era=1, disk=0)
    assert [state["era"] for state in desk.words(b"e", "state")] == [1]
    again = desk.again()
    assert again.coordinator.state.era == 1


class Returning:
    """Three replicas, one of which dies and comes back with what it held after step 11."""

    def __init__(self, run: Street) -> None:
        self.run = run
        self.kept: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None
        self.has_died, self.is_back = threading.Event(), threading.Event()
        *self.others, self.lost = run.workers
        self.lost.driver.observers[:] = [self]
        self.lost.pause = self._die
        for worker in self.others:
            worker.pause = self._wait

    def on_exchanged(self, step: int) -> None:
        self.lost.session.reach(step)
        if step == 11:
            self.kept = global_tensors(self.lost.optimizer.engine, self.lost.model)

    def _die(self, step: int) -> None:
        if step == 18:
            self.lost.resident.die()
            self.lost.session.view.expelled_why = "died"
            self.has_died.set()

    def _wait(self, step: int) -> None:
        if step == 40:
            self.is_back.wait(SOON_S)

    def come_back(self) -> Worker:
        again = Worker(self.run.town, name="again", steps=STEPS * 2, held=11, patience_steps=2.0)
        self.run.workers.append(again)
        until(lambda: again.session.view.offer is not None)
        assert again.session.view.offer.root == "own" and again.session.view.offer.step == 11
        assert self.kept is not None
        load_global_tensors(again.optimizer.engine, again.model, *self.kept)
        again.session.reach(11)
        again.resident.begin(11)
        again.driver.begin_at(again.optimizer, 11)
        again.begin()
        until(lambda: bool(again.steps))
        self.is_back.set()
        return again


def until(what: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_who_dies_and_goes_on_from_its_own_state_ends_with_the_bits_of_the_others(
    street: Callable[..., Street],
) -> None:
    run = street(3, steps=STEPS * 2)
    play = Returning(run)
    run.begin()
    assert play.has_died.wait(SOON_S)
    with run.town.lock:
        run.town.coordinator.expel(play.lost.replica, "died")
    # both: a round that one of them has not reached is not decided, and who comes back begins before it
    until(lambda: all(worker.optimizer.steps_done >= 39 for worker in play.others))
    again = play.come_back()
    values = [worker.end() for worker in (*play.others, again)]
    assert are_alike(values[0], values[1]) and are_alike(values[0], values[2])
    assert again.steps[0] > 36, "it passes over what it lacks"
    assert any(again.replica in members for members in run.members().values())
