"""Links that fail and come back, again and again: no lasting change, and too regular for noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.diagnosis.changes import Watch, median
from thinwire.diagnosis.delay_matrix import DelayMatrix, probe_for
from thinwire.diagnosis.findings import Finding
from thinwire.diagnosis.slow import LinkTimes
from thinwire.diagnosis.timeline import Job

_BAD = math.log(2.5)
_LEAST_RUN = 2
_LEAST_EPISODES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Flapping:
    """What a link does that flaps.

    Attributes:
        episodes: First and last round of each bad time.
        since_s: When the first began.
        bad: All rounds in bad times.
    """

    episodes: tuple[tuple[int, int], ...]
    since_s: float
    bad: frozenset[int]


def episodes_of(watch: Watch) -> Flapping | None:
    """Return a link's bad times where there are three or more, each of two rounds or more with good ones between."""
    episodes: list[tuple[int, int]] = []
    bad: set[int] = set()
    run: list[int] = []
    good, since_s = _LEAST_RUN, math.nan
    for number, at_s, excess in watch.excess:
        if excess >= _BAD:
            run.append(number)
            continue
        if len(run) >= _LEAST_RUN and good >= _LEAST_RUN:
            episodes.append((run[0], run[-1]))
            bad |= set(run)
            good = 0
        since_s = at_s if not episodes else since_s
        good = 1 if run else good + 1
        run = []
    if len(episodes) < _LEAST_EPISODES:
        return None
    return Flapping(episodes=tuple(episodes), since_s=since_s, bad=frozenset(bad))


def find_flapping(job: Job, times: LinkTimes) -> list[Finding]:
    """Return the place whose links are bad and good in turns."""
    flapping = {cell: found for cell, watch in times.watches.items() if (found := episodes_of(watch)) is not None}
    if not flapping:
        return []
    bad = frozenset.union(*(found.bad for found in flapping.values()))
    matrix = {cell: _excess_in(watch, bad) for cell, watch in times.watches.items()}
    explained = DelayMatrix(
        {cell: value for cell, value in matrix.items() if not math.isnan(value)}, job.host_of
    ).explain()
    if explained is None:
        return []
    most = max(flapping.values(), key=lambda found: len(found.episodes))
    named = " or ".join(map(str, explained.places))
    return [Finding(
        kind="flapping link",
        places=explained.places,
        since_s=most.since_s, since_round=most.episodes[0][0], seen_round=most.episodes[_LEAST_EPISODES - 1][1] + 1,
        evidence={
            "episodes": [f"{first} to {last}" for first, last in most.episodes][:16],
            "times_longer": round(math.exp(explained.excess), 2), "explained": round(explained.fit, 3),
        },
        text=f"Messages over {named} were {math.exp(explained.excess):.1f} times as long as usual in "
        f"{len(most.episodes)} bad "
        "times, and as usual between them.",
        confidence=(0.9 if len(explained.places) == 1 else 0.5) * job.trust,
        remedy="look at cable, plug and signal quality; make deadlines longer than a bad time, or leave this link out",
        probe=probe_for(explained.places),
    )]  # fmt: skip


def _excess_in(watch: Watch, rounds: frozenset[int]) -> float:
    values = [excess for number, _, excess in watch.excess if number in rounds]
    middle = median(values)
    return middle if not middle < _BAD / 2 else 0.0
