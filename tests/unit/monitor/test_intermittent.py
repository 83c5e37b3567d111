"""Links whose messages are long both ways at once, again and again, and what only looks like it."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping

import pytest

from thinwire.monitor.detect.change_points import ChangePointDetector
from thinwire.monitor.detect.delay_matrix import Cell
from thinwire.monitor.detect.intermittent import find_flapping, flapping_both_ways
from thinwire.monitor.detect.link_history import LinkTimes
from thinwire.monitor.detect.timeline import Job

RANKS = range(4)
CELLS = [(a, b) for a in RANKS for b in RANKS if a != b]
BOTH = [(0, 1), (1, 0)]
# as in a job of the lab: a wire was down in a second of three, and few messages met that
FLAPS = {64: 6.2, 72: 6.7, 80: 6.5}


def _watches(
    longer: Mapping[Cell, Mapping[int, float]], *, rounds: int = 84, sigma: float = 0.3
) -> dict[Cell, ChangePointDetector]:
    """Return what links have shown whose times vary as on busy cores; some rounds of some take longer."""
    draw = random.Random(11)
    watches = {cell: ChangePointDetector() for cell in CELLS}
    for number in range(rounds):
        for cell, watch in watches.items():
            watch.add(number, float(number), math.exp(draw.gauss(0, sigma)) * longer.get(cell, {}).get(number, 1.0))
    return watches


def _both(rounds: Mapping[int, float]) -> dict[Cell, Mapping[int, float]]:
    return dict.fromkeys(BOTH, rounds)


def _flaps(longer: Mapping[Cell, Mapping[int, float]], *, rounds: int = 84) -> Collection[Cell]:
    return flapping_both_ways(_watches(longer, rounds=rounds)).keys()


def test_three_times_both_ways_at_once_are_enough_though_each_way_alone_shows_little() -> None:
    longer = dict.fromkeys(BOTH, FLAPS)
    watches = _watches(longer)
    (found,) = {id(one): one for one in flapping_both_ways(watches).values()}.values()
    assert found.episodes == ((64, 64), (72, 72), (80, 80)) and found.seen_round == 80
    job = Job(host_of=dict(zip(RANKS, "abcd", strict=True)))
    (told,) = find_flapping(job, LinkTimes(watches=watches))
    assert (told.kind, told.where) == ("flapping link", "link 0 <-> 1")
    assert find_flapping(job, LinkTimes(watches=_watches({(0, 1): FLAPS}))) == [], "one way is what noise does too"


@pytest.mark.parametrize(
    ("name", "longer"),
    [
        ("calm", {}),
        ("twice", _both({64: 6.2, 72: 6.7})),
        ("one time of three rounds", _both({70: 6.0, 71: 6.0, 72: 6.0})),
        ("each way at its own times", {(0, 1): FLAPS, (1, 0): {66: 6.2, 74: 6.7, 82: 6.5}}),
        ("all wires at once", dict.fromkeys(CELLS, FLAPS)),
        ("slow for good", _both(dict.fromkeys(range(60, 84), 6.0))),
        ("one way slow for good", {(0, 1): dict.fromkeys(range(60, 84), 20.0), (1, 0): FLAPS}),
        ("slow and well again", _both(dict.fromkeys(range(60, 68), 6.0))),
        ("far apart", _both({24: 2.6, 52: 2.6, 80: 2.6})),
        ("two times and one that goes on", _both({60: 6.2, 66: 6.7, **dict.fromkeys(range(80, 84), 6.0)})),
        ("two times and a fault of its own", _both({60: 6.2, 66: 6.7, **dict.fromkeys(range(72, 77), 20.0)})),
    ],
)
def test_what_is_no_flapping(name: str, longer: Mapping[Cell, Mapping[int, float]]) -> None:
    assert not _flaps(longer), name


def test_what_other_wires_show_as_often_is_the_job_s_noise() -> None:
    others = {66: 6.2, 70: 6.7, 74: 6.5, 78: 6.1}
    assert set(_flaps(_both(FLAPS))) == set(BOTH)
    noise: dict[Cell, Mapping[int, float]] = {(2, 3): others, (3, 2): others}
    assert not _flaps({**_both(FLAPS), **noise})


def test_what_goes_on_is_a_time_of_its_own_once_it_has_ended() -> None:
    longer = _both({60: 6.2, 66: 6.7, **dict.fromkeys(range(80, 83), 6.0)})
    assert not _flaps(longer, rounds=83) and set(_flaps(longer, rounds=84)) == set(BOTH)


def test_a_link_that_has_become_slower_flaps_all_the_same() -> None:
    """After a black hole a connection took 1.8 times as long for good, and flapped then."""
    slower = dict.fromkeys(range(30, 84), 1.8)
    longer = _both({**slower, **dict.fromkeys(range(52, 84, 5), 16.0)})
    assert set(_flaps(longer)) == set(BOTH)
    assert not _flaps(_both(slower)) and not _flaps(_both(dict.fromkeys(range(30, 84), 6.0)))


def test_it_is_over_once_nothing_has_come_for_long() -> None:
    longer = dict.fromkeys(BOTH, FLAPS)
    assert set(_flaps(longer)) == set(BOTH) and not _flaps(longer, rounds=130)


def test_noise_on_busy_cores_makes_no_link_flap() -> None:
    for seed in range(3):
        draw, watches = random.Random(seed), {cell: ChangePointDetector() for cell in CELLS}
        for number in range(400):
            for watch in watches.values():
                # one time of fifty is long by a heavy tail, each way by itself
                tail = draw.paretovariate(1.2) if draw.random() < 0.02 else 1.0
                watch.add(number, float(number), math.exp(draw.gauss(0, 0.3)) * tail)
            if number % 10 == 0:
                assert not flapping_both_ways(watches), (seed, number)
