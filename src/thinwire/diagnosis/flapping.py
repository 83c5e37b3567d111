"""Links that fail and come back, again and again: no lasting change, and too often for noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, pairwise

from thinwire.diagnosis.changes import OFTEN, Watch, at_least, median
from thinwire.diagnosis.delay_matrix import Cell, DelayMatrix, probe_for
from thinwire.diagnosis.findings import Finding
from thinwire.diagnosis.link_history import LinkTimes
from thinwire.diagnosis.timeline import Job

# A job in which many messages take twice as long by nature still shows links that take four times as long.
_BAD = (math.log(2.2), math.log(4.0))
_GOOD = math.log(1.4)
# Of so many messages: bad ones that lie further apart are what a busy machine does, or faults of their own.
_WINDOW = 64
_LEAST_EPISODES = 3
_LEAST_BAD = OFTEN
_DENSE = 10  # of so many messages in a row most are bad: slow, not flapping
_MOST_BAD = 7
_USUAL_BAD = 0.01
_OVER = 1e-3
_LATEST = 32
_CHANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Flapping:
    """What a link does that flaps.

    Attributes:
        episodes: First and last round of each bad time.
        since_s: When the first began.
        bad: All rounds in bad times.
        seen_round: The round that made it sure.
    """

    episodes: tuple[tuple[int, int], ...]
    since_s: float
    bad: frozenset[int]
    seen_round: int


def usual_share(watches: Mapping[Cell, Watch], least: float) -> float:
    """Return which share of a link's messages may be longer by the logarithm `least`: twice that of the middle link.

    Of the latest messages, or of all, whichever is less: what was broken before says nothing of now.
    """
    shares = []
    for latest in (_LATEST, None):
        shares.append(median([_share(watch, least, latest) for watch in watches.values() if watch.excess] or [0.0]))
    return _USUAL_BAD + 2 * min(shares)


def _share(watch: Watch, least: float, latest: int | None) -> float:
    if not watch.was_long:
        return 0.0
    values = [excess >= least for _, _, excess in islice(reversed(watch.excess), latest)]
    return sum(values) / len(values)


def flapping_of(watch: Watch, *, least: float, usual: float) -> Flapping | None:
    """Return what a link does that is bad in several times with good ones between, more often than by chance.

    Args:
        watch: Its times.
        least: The logarithm of the ratio from which a message is bad.
        usual: Which share of its messages may be.
    """
    values = list(watch.excess)[-_WINDOW:]
    bad = [index for index, (_, _, excess) in enumerate(values) if excess >= least]
    # what was told as slow, and is over, was no flapping
    past = watch.change if watch.change is not None and watch.change.is_over else None
    bad = [index for index in bad if past is None or not past.since_round <= values[index][0] < past.until_round]
    # where it was slow for good for a while, only what came after that may be flapping
    dense = [late for early, late in zip(bad, bad[_MOST_BAD:], strict=False) if late - early < _DENSE]
    bad = [index for index in bad if not dense or index > dense[-1]]
    if len(bad) < _LEAST_BAD:
        return None
    bad = _least_likely(bad, len(values), usual)
    stretch = [excess for _, _, excess in values[bad[0] : bad[-1] + 1]] if bad else []
    # a link that is slow by about as much as counts as bad is never good
    if not bad or 2 * sum(excess <= _GOOD for excess in stretch) < len(stretch) or _is_over(bad, len(values)):
        return None
    episodes: list[tuple[int, int]] = []
    seen_round = -1
    for count, index in enumerate(bad, start=1):
        number = values[index][0]
        if count > 1 and bad[count - 2] == index - 1:
            episodes[-1] = (episodes[-1][0], number)
        else:
            episodes.append((number, number))
        is_sure = count >= _LEAST_BAD and len(episodes) >= _LEAST_EPISODES
        if seen_round < 0 and is_sure and _chance(bad[:count], len(values), usual) <= _CHANCE:
            seen_round = number
    if seen_round < 0:
        return None
    rounds = frozenset(values[index][0] for index in bad)
    return Flapping(episodes=tuple(episodes), since_s=values[bad[0]][1], bad=rounds, seen_round=seen_round)


def _is_often_bad(watch: Watch, least: float) -> bool:
    if not watch.is_often_long(of=_WINDOW + 1):
        return False  # not even by less
    latest = islice(reversed(watch.excess), _WINDOW)
    return sum(excess >= least for _, _, excess in latest) >= _LEAST_BAD


def _chance(bad: list[int], count: int, usual: float) -> float:
    """Return how likely so many bad messages are from the first of them to the last, wherever that may begin."""
    return count * at_least(len(bad), bad[-1] - bad[0] + 1, usual)


def _least_likely(bad: list[int], count: int, usual: float) -> list[int]:
    """Return the latest bad messages, from that one on which makes them least likely; none where they are too few."""
    begins = [place for place, index in enumerate(bad) if not place or bad[place - 1] < index - 1]
    enough = [bad[place:] for place in begins[: 1 - _LEAST_EPISODES] if len(bad) - place >= _LEAST_BAD]
    return min(enough, key=lambda own: _chance(own, count, usual), default=[])


def _is_over(bad: list[int], count: int) -> bool:
    """Return whether so long a time without bad messages was not there before, and is no chance at their rate."""
    share, since = len(bad) / (bad[-1] - bad[0] + 1), count - 1 - bad[-1]
    return since > max(late - early for early, late in pairwise(bad)) and (1 - share) ** since <= _OVER


def find_flapping(job: Job, times: LinkTimes) -> list[Finding]:
    """Return the place whose links are bad and good in turns."""
    flapping: dict[Cell, Flapping] = {}
    often: Mapping[Cell, Watch] = times.watches
    for least in sorted(_BAD):
        often = {cell: watch for cell, watch in often.items() if _is_often_bad(watch, least)}
        usual = usual_share(times.watches, least) if often else 0.0
        for cell, watch in often.items():
            found = flapping_of(watch, least=least, usual=usual)
            if found is not None:
                flapping.setdefault(cell, found)
    if not flapping:
        return []
    matrix = {cell: _excess_in(watch, flapping) for cell, watch in times.watches.items()}
    known = {cell: value for cell, value in matrix.items() if not math.isnan(value)}
    explained = DelayMatrix(known, job.host_of).explain()
    # what flaps in few wires of a place is noise of these, or a place that was slow
    if explained is None or 2 * len(explained.cells & set(flapping)) < len(explained.cells):
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
    return 0.0 if middle < _BAD[0] / 2 else middle
