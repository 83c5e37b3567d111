"""Whatever order things happen in: all apply the same mean, each round is decided once, and nobody waits for ever."""

import pickle
from typing import Any

import pytest
from model import World
from searching import Search, finish, wander

FAULTS = ("lose", "crash", "die", "cut", "hurry")


@pytest.mark.parametrize(("replicas", "faults", "kinds"), [(1, 2, ("lose", "crash")), (2, 0, ())])
def test_in_every_state_of_a_small_run_all_agree_and_the_end_can_be_reached(
    replicas: int, faults: int, kinds: tuple[str, ...]
) -> None:
    """Every state: one round of one replica with two faults (96 states), and of two without any (1463 states)."""
    found = Search(World(replicas=replicas, faults=faults, kinds=kinds), most_states=10_000).run()
    assert found.is_complete and found.states > 90 and found.over > 10
    assert not found.stuck, min(found.stuck, key=len)


def test_in_the_states_next_to_the_beginning_of_three_replicas_all_agree() -> None:
    """The first 800 states, breadth first, of two rounds of three replicas with two faults of any kind."""
    found = Search(World(replicas=3, rounds=2, faults=2, kinds=FAULTS), most_states=800).run()
    assert found.states == 800


@pytest.mark.parametrize("kinds", [*((kind,) for kind in FAULTS), FAULTS], ids=[*FAULTS, "all"])
def test_on_the_ways_of_three_replicas_all_agree_and_those_left_come_to_the_end(
    kinds: tuple[str, ...],
) -> None:
    """60 ways of 80 events each through two rounds, with up to four faults; then all go on in turn."""
    start = pickle.dumps(World(replicas=3, rounds=2, faults=4, kinds=kinds))
    ends = [wander(start, seed=seed, steps=80)[0] for seed in range(60)]
    assert all(end.is_over() for end in ends)
    assert any(end.faults < 4 for end in ends) and any(len(end.decided) == 2 for end in ends)


def test_without_faults_nobody_is_let_go_and_all_parts_count() -> None:
    world = World(replicas=3, rounds=2)
    assert finish(world)
    assert all(one.is_here for one in world.replicas.values())
    assert world.decided == {0: ((0, 1, 2), (0, 1, 2)), 1: ((0, 1, 2), (0, 1, 2))}


class Forgetful(World):
    """Its coordinator does not write decisions down."""

    def record(self, what: str, fields: dict[str, Any]) -> None:
        super().record(what, fields)
        if what == "decision":
            self.journal.pop()


class Hasty(World):
    """Its replicas apply what they happen to hold."""

    def _apply(self, replica: Any, round_id: int, decision: Any) -> None:
        replica.applied[round_id] = replica.machines[round_id].has


@pytest.mark.parametrize(
    ("broken", "kinds", "what"),
    [(Forgetful, ("crash",), "decided twice"), (Hasty, ("hurry", "cut"), "another mean")],
)
def test_the_search_finds_what_is_broken(broken: type[World], kinds: tuple[str, ...], what: str) -> None:
    start = pickle.dumps(broken(replicas=3, rounds=1, faults=3, kinds=kinds))
    with pytest.raises(AssertionError, match=what):
        for seed in range(500):
            wander(start, seed=seed, steps=60)
