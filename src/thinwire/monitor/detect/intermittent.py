"""Links that fail and come back, again and again: no lasting change, and too often for noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice

from thinwire.monitor.detect.change_points import Watch, median
from thinwire.monitor.detect.delay_matrix import Cell, DelayMatrix, probe_for
from thinwire.monitor.detect.intermittent_turns import (
    BAD,
    LEAST_BAD,
    WINDOW,
    BothWays,
    Flapping,
    flapping_of,
    usual_share,
)
from thinwire.monitor.detect.link_history import LinkTimes
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Finding

# Wires that failed in the lab took three times as long and more when they did, and busy machines made others of 2.4.
_LEAST = math.log(2.5)


def find_flapping(job: Job, times: LinkTimes) -> list[Finding]:
    """Return the place whose links are bad and good in turns."""
    flapping: dict[Cell, Flapping] = {}
    often: Mapping[Cell, Watch] = times.watches
    for least in sorted(BAD):
        often = {cell: watch for cell, watch in often.items() if _is_often_bad(watch, least)}
        usual = usual_share(times.watches, least) if often else 0.0
        for cell, watch in often.items():
            found = flapping_of(watch, least=least, usual=usual)
            if found is not None:
                flapping.setdefault(cell, found)
    for cell, found in BothWays(times.watches).flapping().items():
        flapping.setdefault(cell, found)
    if not flapping:
        return []
    matrix = {cell: _excess_in(watch, flapping) for cell, watch in times.watches.items()}
    known = {cell: value for cell, value in matrix.items() if not math.isnan(value)}
    explained = DelayMatrix(known, job.host_of).explain()
    # what flaps in few wires of a place is noise of these, or a place that was slow
    if explained is None or 2 * len(explained.cells & set(flapping)) < len(explained.cells):
        return []
    if explained.excess < _LEAST:
        return []
    first = min(flapping.values(), key=lambda found: found.seen_round)
    named = " or ".join(map(str, explained.places))
    longer = math.exp(explained.excess)
    return [Finding(
        kind="flapping link",
        places=explained.places,
        since_s=first.since_s, since_round=first.episodes[0][0], seen_round=first.seen_round,
        evidence={
            "bad_rounds": [f"{begin} to {end}" for begin, end in first.episodes][:16],
            "times_longer": round(longer, 2), "explained": round(explained.fit, 3),
        },
        text=f"Messages over {named} took {longer:.1f} times as long as usual in {len(first.episodes)} bad times, "
        "and as "
        "usual between them.",
        confidence=(0.9 if len(explained.places) == 1 else 0.5) * job.trust,
        remedy="look at cable, plug and signal quality; make deadlines longer than a bad time, or leave this link out",
        probe=probe_for(explained.places),
    )]  # fmt: skip


def _excess_in(watch: Watch, flapping: Mapping[Cell, Flapping]) -> float:
    """Return how much longer a link takes while any that flaps is down, from its first bad round to its last."""
    rounds = frozenset.union(*(found.bad for found in flapping.values()))
    middle = median([excess for number, _, excess in watch.excess if number in rounds])
    return 0.0 if middle < BAD[0] / 2 else middle


def _is_often_bad(watch: Watch, least: float) -> bool:
    if not watch.is_often_long(of=WINDOW + 1):
        return False  # not even by less
    latest = islice(reversed(watch.excess), WINDOW)
    return sum(excess >= least for _, _, excess in latest) >= LEAST_BAD
