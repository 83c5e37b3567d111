"""Paths that skip stages: SkipPipe's published step times, and every plan of small networks as the oracle."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thinwire.site.skip_paths import SkipNetwork, SkipProblem, run_paths, solve_paths

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "skippipe.json").read_text())
FIRST, COLUMNS = PUBLISHED["stages"][0], [list(column) for column in zip(*PUBLISHED["stages"][1:], strict=True)]
# Activations of float32, and of block-int4 with its scales.
FLOAT32, INT4 = 1.0, 1 / 7.5


def network(size: float) -> SkipNetwork:
    """Return the network of SkipPipe's experiment with messages of a part of their size."""
    rates = {frozenset((one, other)): (ms, rate) for one, other, ms, rate in PUBLISHED["links_ms_gib_per_s"]}
    places = PUBLISHED["places"]

    def delay_s(one: str, other: str) -> float:
        ms, rate = rates.get(frozenset((one, other)), PUBLISHED["same_place_ms_gib_per_s"])
        return float(ms / 1000 + size * PUBLISHED["message_bytes"] / (rate * 2**30) + PUBLISHED["extra_delay_s"])

    return SkipNetwork(
        stages=tuple(map(tuple, PUBLISHED["stages"])), forward_s=(PUBLISHED["forward_s"],) * len(places),
        delay_s=tuple(tuple(0.0 if a == b else delay_s(one, other) for b, other in enumerate(places))
                      for a, one in enumerate(places)),
        memory=PUBLISHED["memory"], after_first_s=PUBLISHED["after_first_s"], after_s=PUBLISHED["after_s"],
    )  # fmt: skip


def full_pipeline(num_first: int, each: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return full paths from some nodes of the first stage, so many from each, in three waves."""
    columns = [(first, *COLUMNS[number % 3]) for number, first in enumerate(FIRST[:num_first])]
    return [one for one in columns for _ in range(each)], [number % 3 * 0.1 for _ in columns for number in range(each)]


def waves(paths: list[list[int]], starts_s: list[float], repeats_s: list[float]) -> tuple[list[Any], list[float]]:
    starts = [start_s + later_s for later_s in repeats_s for start_s in starts_s]
    return [tuple(path) for path in paths] * len(repeats_s), starts


def seconds(size: float, paths: list[Any], starts_s: list[float]) -> float:
    return max(one.end_s for one in run_paths(network(size), paths, starts_s))


STARTS_S = [number % 3 * PUBLISHED["forward_s"] for number in range(15)]
CALLS: dict[str, tuple[list[Any], list[float]]] = {
    "full": full_pipeline(3, 9),
    "full from all five nodes": full_pipeline(5, 6),
    "random": waves(PUBLISHED["random_paths"], STARTS_S, [0.0, 2.5]),
    "chosen": waves(PUBLISHED["paths"], STARTS_S, [0.0, 2.5]),
    "without collisions": waves(PUBLISHED["collision_aware_paths"], [0.0] * 5, [0.0, 1.0, 2.0, 2.5, 3.5, 4.5]),
}


def test_the_published_step_times_are_reproduced() -> None:
    found = {name: seconds(FLOAT32, *call) for name, call in CALLS.items()}
    published = {"full": 79.93971963540922, "random": 48.915682705668054, "chosen": 35.43481420147051,
                 "without collisions": 33.31379002209655}  # fmt: skip
    assert {name: found[name] for name in published} == pytest.approx(published, abs=1e-9)
    # the published full pipeline runs 27 micro-batches from 3 of 5 nodes, the others 30 from all five
    assert round(found["full from all five nodes"], 4) == 89.6416


def test_short_messages_take_most_of_the_gain() -> None:
    found = {name: round(seconds(INT4, *call), 2) for name, call in CALLS.items()}
    assert found == {"full": 45.12, "full from all five nodes": 50.83, "random": 24.22, "chosen": 22.66,
                     "without collisions": 20.39}  # fmt: skip


def test_the_solver_finds_what_was_published_or_better() -> None:
    # three micro-batches share a path, as in the published plan without collisions
    coarse = {"length": 4, "node_visits": 1, "starts": tuple((node, 0.0) for node in FIRST),
              "repeats_s": (0.0, 1.0, 2.0, 2.5, 3.5, 4.5)}  # fmt: skip
    fine = {"length": 4, "starts": tuple((FIRST[number // 3], start_s) for number, start_s in enumerate(STARTS_S)),
            "repeats_s": (0.0, 2.5)}  # fmt: skip
    found = {}
    for size in (FLOAT32, INT4):
        together = solve_paths(SkipProblem(network=network(size), **coarse), most_tries=300)
        apart = solve_paths(SkipProblem(network=network(size), **fine), parts_collisions=False)
        assert apart.is_proven
        found[size] = round(together.makespan_s, 4), round(apart.makespan_s, 4)
    assert found == {FLOAT32: (33.3138, 34.6896), INT4: (20.3932, 22.2534)}


def all_paths(problem: SkipProblem, start: int) -> list[tuple[int, ...]]:
    """Return every path that keeps the rules, which are written out here once more."""
    stage_of = problem.network.stage_of
    found = []
    for more in itertools.permutations([node for node, stage in stage_of.items() if stage], problem.length - 1):
        stages = [stage_of[node] for node in (start, *more)]
        furthest = [max(stages[:place]) for place in range(1, len(stages))]
        steps = [stage - far for stage, far in zip(stages[1:], furthest, strict=True)]
        swaps = [-step for step in steps if step < 0]
        is_once = len(set(stages)) == len(stages)
        if is_once and max(steps, default=0) <= 4 and max(swaps, default=0) <= 1 and sum(swaps) <= 2:
            found.append((start, *more))
    return found


def longest_trip_s(problem: SkipProblem, paths: Any) -> float:
    own, found = problem.network, 0.0
    for path, (_, start_s) in zip(paths, problem.starts, strict=True):
        hops = list(zip(path, (*path[1:], path[0]), strict=True))
        sent_s = sum(own.delay_s[a][b] + own.delay_s[b][a] for a, b in hops)
        work_s = 2.5 * sum(own.forward_s[node] for node in path) + own.forward_s[path[0]] / 4
        found = max(found, start_s + sent_s + work_s)
    return found


def small_problem(seed: int) -> SkipProblem:
    chance = random.Random(seed)
    num_nodes = chance.randint(4, 6)
    cuts = sorted(chance.sample(range(1, num_nodes), 3 if num_nodes > 4 else 2))
    stages = [tuple(range(a, b)) for a, b in zip([0, *cuts], [*cuts, num_nodes], strict=True)]
    delays = [[0.0 if a == b else chance.uniform(0.1, 4) for b in range(num_nodes)] for a in range(num_nodes)]
    return SkipProblem(
        network=SkipNetwork(stages=tuple(stages), forward_s=tuple(chance.uniform(0.2, 2) for _ in range(num_nodes)),
                            delay_s=tuple(map(tuple, delays)), memory=2),
        starts=tuple((chance.choice(stages[0]), chance.uniform(0, 2)) for _ in range(3)),
        length=chance.randint(2, len(stages)), stage_visits=chance.randint(2, 3),
    )  # fmt: skip


def is_within(problem: SkipProblem, paths: Any) -> bool:
    visits = [node for path in paths for node in path[1:]]
    stages = [problem.network.stage_of[node] for node in visits]
    return all(visits.count(node) <= problem.most_node_visits for node in visits) and all(
        stages.count(stage) <= problem.most_stage_visits for stage in stages
    )


def test_small_networks_get_the_best_of_all_plans() -> None:
    num_checked, num_best, worst = 0, 0, 1.0
    for seed in range(60):
        try:
            problem = small_problem(seed)
        except ValueError:
            continue  # fewer places than visits
        choices = [all_paths(problem, start) for start, _ in problem.starts]
        plans = [paths for paths in itertools.product(*choices) if is_within(problem, paths)]
        if not plans:
            with pytest.raises(ValueError, match="no paths keep the limits"):
                solve_paths(problem)
            continue
        longest_s = min(longest_trip_s(problem, paths) for paths in plans)
        found = solve_paths(problem, parts_collisions=False)
        assert found.is_proven and is_within(problem, found.paths)
        assert longest_trip_s(problem, found.paths) == pytest.approx(longest_s)
        parted = solve_paths(problem, most_tries=200)
        best_s = min(problem.makespan_s(paths) for paths in plans)
        assert is_within(problem, parted.paths)
        assert best_s - 1e-9 <= parted.makespan_s <= found.makespan_s + 1e-9
        num_checked += 1
        num_best += parted.makespan_s < best_s + 1e-9
        worst = max(worst, parted.makespan_s / best_s)
    # the search for fewer collisions is no exact one
    assert (num_checked, num_best, round(worst, 2)) == (38, 33, 1.09)


def test_passes_keep_their_order_and_the_memory_of_nodes() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        delays = tuple(tuple(0.0 if a == b else chance.uniform(0.1, 3) for b in range(5)) for a in range(5))
        own = SkipNetwork(stages=((0, 1), (2,), (3,), (4,)), forward_s=(1.0, 2.0, 0.5, 1.5, 1.0), delay_s=delays,
                          memory=2 + seed % 2 * 7, after_s=0.1)  # fmt: skip
        paths = [
            (chance.randrange(2), *sorted(chance.sample((2, 3, 4), chance.randint(0, 3)), reverse=not seed % 4))
            for _ in range(9)
        ]
        passes = run_paths(own, paths, [0.0] * 9)
        assert len(passes) == sum(2 * len(path) + 1 for path in paths)
        for number, path in enumerate(paths):
            trip = [one for one in passes if one.micro_batch == number]
            assert [one.node for one in trip] == [*path, path[0], *reversed(path)]
            for before, after in itertools.pairwise(trip):
                assert after.start_s >= before.end_s + delays[before.node][after.node] - 1e-9
        for node in range(5):
            mine = [one for one in passes if one.node == node]
            assert all(after.start_s >= before.end_s for before, after in itertools.pairwise(mine))
            kinds = [one.place - len(paths[one.micro_batch]) for one in mine]
            held = list(itertools.accumulate((kind < 0) - (kind > 0) for kind in kinds))
            assert max(held, default=0) <= own.memory and (not held or held[-1] == 0)


def test_paths_that_wait_for_each_other_are_refused() -> None:
    own = SkipNetwork(stages=((0, 1), (2,), (3,)), forward_s=(1.0,) * 4, delay_s=((1.0,) * 4,) * 4, memory=1)
    paths = [(0, 2, 3), (1, 3, 2)]
    with pytest.raises(ValueError, match="got memory=1; allowed enough for these paths; try memory=2"):
        run_paths(own, paths, [0.0, 0.0])
    assert len(run_paths(replace(own, memory=2), paths, [0.0, 0.0])) == 14


def test_networks_and_starts_that_cannot_be_are_refused() -> None:
    own = SkipNetwork(stages=((0,), (1,)), forward_s=(1, 1), delay_s=((0, 2), (2, 0)))
    changes: list[dict[str, Any]] = [
        {"stages": ((0,), (0,))}, {"stages": ((0,), (2,))}, {"stages": ((0, 1), ())}, {"stages": ()}, {"memory": 0},
        {"forward_s": (1,)}, {"forward_s": (1, -1)}, {"forward_s": (1, float("nan"))}, {"delay_s": ((0, 2), (2,))},
        {"delay_s": ((0, 2),)}, {"after_s": float("inf")},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(ValueError, match="a network has nodes 0, 1") as refused:
            replace(own, **change)
        assert f"try {own!r}".split("(")[0] in str(refused.value)
    for starts in ((), ((1, 0.0),), ((7, 0.0),), ((0, float("nan")),), ((0, -1.0),)):
        with pytest.raises(ValueError, match=r"got .*; allowed one or more, at \(0,\), .*try starts=\(\(0, 0.0\),\)"):
            SkipProblem(network=own, starts=starts, length=2)
    assert solve_paths(SkipProblem(network=own, starts=((0, 0.0),), length=2)).paths == [(0, 1)]


def test_runs_of_paths_and_starts_that_cannot_be_are_refused() -> None:
    network = SkipNetwork(stages=((0,), (1,)), forward_s=(1, 1), delay_s=((0, 2), (2, 0)))
    for paths, starts_s in (
        ([()], [0.0]), ([(0, 2)], [0.0]), ([(0, 0)], [0.0]), ([(-1,)], [0.0]), ([(0, 1)], []), ([], [0.0]),
        ([(0, 1)], [math.nan]), ([(0, 1)], [math.inf]), ([(0, 1)], [-1.0]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"try run_paths\(network, \[\(0, 1\)\], \[0\.0\]\)"):
            run_paths(network, paths, starts_s)
    assert run_paths(network, [(0, 1)], [0.0])


def test_lengths_and_limits_that_cannot_be_are_refused() -> None:
    own = SkipNetwork(stages=((0,), (1,), (2,)), forward_s=(1.0,) * 3, delay_s=((1.0,) * 3,) * 3, memory=1)
    with pytest.raises(ValueError, match="got 4 stages; allowed 1 to 3; try length=3"):
        SkipProblem(network=own, starts=((0, 0.0),), length=4)
    with pytest.raises(ValueError, match="got 4 visits; allowed at most 2; try stage_visits=2"):
        SkipProblem(network=own, starts=((0, 0.0),) * 2, length=3)
    wider = SkipProblem(network=own, starts=((0, 0.0),) * 2, length=3, stage_visits=2, node_visits=2)
    assert solve_paths(wider).paths == [(0, 1, 2)] * 2
    assert solve_paths(SkipProblem(network=own, starts=((0, 0.0),) * 2, length=1)).paths == [(0,)] * 2
