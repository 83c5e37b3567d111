"""Whatever order things happen in: who comes has the others' state, no data is lost, and the run comes to its end."""

import pickle
from typing import Any

import pytest
from model_joining import Town
from searching import Search, finish, wander

from thinwire.elastic.coordinator_session import CoordinatorView, StateOffer
from thinwire.elastic.data_leases import DataLeases
from thinwire.training.elastic.states import held_offer

FAULTS = ("lose", "twice", "spoil", "swap", "die", "crash", "hurry", "pause", "leave")


@pytest.mark.parametrize("kinds", [*((kind,) for kind in FAULTS), FAULTS], ids=[*FAULTS, "all"])
def test_on_the_ways_of_a_run_all_that_stay_or_come_get_to_its_end(kinds: tuple[str, ...]) -> None:
    """40 ways of 60 events, with up to six faults, through a run of two that a third one joins; then all go on."""
    start = pickle.dumps(Town(faults=6, lives=3, kinds=kinds))
    ends = [wander(start, seed=seed, steps=60)[0] for seed in range(40)]
    assert all(end.is_over() for end in ends)
    assert any(end.faults < 6 for end in ends) and any(end.coordinator.state.has_finished for end in ends)


def test_in_the_states_next_to_a_joining_all_holds() -> None:
    """The first 400 states, breadth first, with two faults of any kind."""
    found = Search(Town(faults=2, kinds=FAULTS), most_states=400).run()  # type: ignore[arg-type]
    assert found.states == 400


def test_without_faults_who_comes_has_part_in_the_last_word() -> None:
    town = Town()
    assert finish(town)  # type: ignore[arg-type]
    assert all(life.why == "finish" for life in town.lives.values()) and len(town.lives) == 3
    assert [one for one, _ in town.truth[max(town.truth)]] == [0, 1, 2]


def test_who_comes_back_with_a_state_of_its_own_goes_on_from_it_on_some_way() -> None:
    start = pickle.dumps(Town(faults=1, lives=2, comers=0, last_step=8, kinds=("die",), part_share=0.0))
    ends = [wander(start, seed=seed, steps=60)[0] for seed in range(60)]
    assert any(life.is_from_held for end in ends for life in end.lives.values())


class Forgetful(Town):
    """Its coordinator does not write decisions down."""

    def record(self, what: str, fields: dict[str, Any]) -> None:
        super().record(what, fields)
        if what == "decision":
            self.journal.pop()


class Generous(Town):
    """Its coordinator does not write down what it lends."""

    def record(self, what: str, fields: dict[str, Any]) -> None:
        super().record(what, fields)
        if what == "leases":
            self.journal.pop()


class Renumbering(Town):
    """Its coordinator does not write down who came."""

    def record(self, what: str, fields: dict[str, Any]) -> None:
        super().record(what, fields)
        if what == "member":
            self.journal.pop()


@pytest.mark.parametrize(
    ("broken", "what"), [(Forgetful, "decided twice"), (Generous, "windows"), (Renumbering, "number was given twice")]
)
def test_the_search_finds_a_coordinator_that_forgets(broken: type[Town], what: str) -> None:
    start = pickle.dumps(broken(faults=3, kinds=("crash",)))
    with pytest.raises(AssertionError, match=what):
        for seed in range(300):
            wander(start, seed=seed, steps=60)


def test_the_search_finds_a_ledger_that_keeps_what_those_had_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    start = pickle.dumps(Town(faults=6, kinds=("leave", "crash", "pause")))
    monkeypatch.setattr(DataLeases, "borrowers", lambda ledger: ())
    with pytest.raises(AssertionError, match="data is lost"):
        for seed in range(600):
            wander(start, seed=seed, steps=60)


def test_who_fetches_what_nobody_holds_any_more_learns_that_the_run_goes_on_from_a_disk() -> None:
    view = CoordinatorView()
    lost = StateOffer(step=4, root="a" * 64, num_bytes=1, holders=(0,), note={})
    view.offers[4] = lost
    assert held_offer(view) is None
    view.offers[0] = StateOffer(step=0, root="disk", num_bytes=0, holders=(), note={})
    assert held_offer(view) is view.offers[0]
