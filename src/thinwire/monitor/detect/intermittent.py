"""Detector of intermittent links: bad and good messages in turns, too often for noise and without a lasting change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from thinwire.monitor.detect.change_points import ChangePointDetector, at_least, median
from thinwire.monitor.detect.delay_matrix import Cell, DelayMatrix, probe_for
from thinwire.monitor.detect.link_history import LinkTimes
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Evidence, Finding, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class IntermittentConfig:
    """Constants of the detector of links that fail and recover; ratios are natural logarithms."""

    # a bad message; the second level is for jobs in which many messages take twice as long
    bad: tuple[float, float] = (math.log(2.2), math.log(4.0))
    good: float = math.log(1.4)  # a good message
    window: int = 64  # messages of a link; bad ones that are further apart are noise or faults of their own
    min_episodes: int = 3  # bad times
    min_bad: int = 5  # bad messages; equals `often` of the change-point detector, which selects candidates
    dense: int = 10  # messages of which `max_bad` are bad: slow, not intermittent
    max_bad: int = 7  # bad messages among `dense`
    short: int = 4  # rounds of a bad time that is never too long
    longer: int = 3  # median bad times that a bad time may last; longer ones are slow links (LOG 2026-11-24)
    usual_bad: float = 0.01  # share of messages that are bad without a fault
    over_chance: float = 1e-3  # chance of the present calm below which the fault has ended
    latest: int = 32  # messages that the usual share is taken from
    chance: float = 1e-6  # chance of the bad times without a fault; 1e-4 named two sound links (LOG 2026-11-23)
    # share of messages that are bad both ways at once: 7 of 9,000 in the lab on busy cores
    usual_both: tuple[float, float] = (2e-3, 3e-4)
    chance_both: float = 1e-5  # chance of the bad times both ways without a fault
    pairs_share: int = 4  # one pair of so many may be bad in one round; more are no fault of a link
    max_pairs: int = 100  # pairs that tell the usual share
    # of the place: links that failed in the lab showed 3 and more, busy machines 2.4
    min_excess: float = math.log(2.5)


INTERMITTENT = IntermittentConfig()


_Value = tuple[int, float, float]  # round, time, log ratio to the usual duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Flapping:
    """Bad times of an intermittent link."""

    episodes: tuple[tuple[int, int], ...]  # first and last round of each bad time
    since_s: float  # when the first began
    bad: frozenset[int]  # all rounds in bad times
    seen_round: int  # the round that made it sure


def usual_share(watches: Mapping[Cell, ChangePointDetector], least: float) -> float:
    """Return the share of messages above a log ratio that is usual for a link: twice that of the median link.

    Of the latest messages or of all, whichever is less: an earlier fault does not count.
    """
    own = [watch.excess if watch.was_long else () for watch in watches.values() if watch.excess]
    shares = [median([_share(one, least, latest) for one in own] or [0.0]) for latest in (INTERMITTENT.latest, None)]
    return INTERMITTENT.usual_bad + 2 * min(shares)


def _share(values: Sequence[_Value], least: float, latest: int | None) -> float:
    bad = [excess >= least for _, _, excess in islice(reversed(values), latest)]
    return sum(bad) / len(bad) if bad else 0.0


def flapping_of(watch: ChangePointDetector, *, least: float, usual: float) -> Flapping | None:
    """Return the bad times of a link with good ones between, if they are no chance."""
    values = list(watch.excess)[-INTERMITTENT.window :]
    values = _above(_lately(values), values)
    bad = [index for index, (_, _, excess) in enumerate(values) if excess >= least]

    def chance(own: Sequence[int]) -> float:
        return len(values) * at_least(len(own), own[-1] - own[0] + 1, usual)

    return _in_turns(
        values, _without_changes(values, bad, [watch]), chance, least_bad=INTERMITTENT.min_bad, most=INTERMITTENT.chance
    )


def flapping_both_ways(watches: Mapping[Cell, ChangePointDetector]) -> dict[Cell, Flapping]:
    """Return the bad times of links that are bad both ways at once, repeatedly; each under both of its ways."""
    pairs = [(a, b) for a, b in watches if a < b and (b, a) in watches]
    often = [
        pair for pair in pairs
        if all(watches[way].num_long(of=INTERMITTENT.window) >= INTERMITTENT.min_episodes for way in (pair, pair[::-1]))
    ]  # fmt: skip
    # some of the others tell what is usual
    compared = {*often, *pairs[:: 1 + len(pairs) // INTERMITTENT.max_pairs]} if often else set()
    levels: dict[Cell, float] = {}
    values: dict[Cell, list[_Value]] = {}
    for pair in pairs:
        if pair in compared:
            # the lesser excess of both ways, for each round
            back = {number: excess for number, _, excess in watches[pair[::-1]].excess}
            there = watches[pair].excess
            joint = [(number, at_s, min(own, back[number])) for number, at_s, own in there if number in back]
            latest = joint[-INTERMITTENT.window :]
            levels[pair] = _lately(latest)
            values[pair] = _above(levels[pair], latest)
    num_bad = Counter(number for own in values.values() for number, _, excess in own if excess >= INTERMITTENT.bad[0])
    most = max(1, len(pairs) // INTERMITTENT.pairs_share)
    found = {}
    for pair in often:
        both = watches[pair], watches[pair[::-1]]
        bad = [
            index for index, (number, _, excess) in enumerate(values[pair])
            if excess >= INTERMITTENT.bad[0] and num_bad[number] <= most
        ]  # fmt: skip
        others = [excess for other, own in values.items() if other != pair for _, _, excess in own]
        # one slow way and another with a few long messages are not intermittent
        one = _joint_flapping(values[pair], _without_changes(values[pair], bad, both), others)
        if one is not None and not _is_slow(one, values[pair], both, INTERMITTENT.bad[0] + levels[pair]):
            found[pair] = found[pair[::-1]] = one
    return found


def _joint_flapping(values: Sequence[_Value], bad: list[int], others: Sequence[float]) -> Flapping | None:
    # the usual share of bad messages: a constant and the share of all other pairs
    shares = [sum(excess >= least for excess in others) / max(1, len(others)) for least in INTERMITTENT.bad]
    usual = [share + seen for share, seen in zip(INTERMITTENT.usual_both, shares, strict=True)]

    def chance(own: Sequence[int]) -> float:
        likely = math.prod(usual[values[index][2] >= INTERMITTENT.bad[1]] for index in own)
        return len(values) * math.comb(own[-1] - own[0] + 1, len(own)) * likely

    return _in_turns(values, bad, chance, least_bad=INTERMITTENT.min_episodes, most=INTERMITTENT.chance_both)


def _is_slow(found: Flapping, values: Sequence[_Value], ways: Iterable[ChangePointDetector], least: float) -> bool:
    first, last = found.episodes[0][0], found.episodes[-1][1]
    slow = max(sum(excess >= least for excess in one.values_in(first, last)) for one in ways)
    return 2 * slow >= sum(first <= number <= last for number, _, _ in values)


def _lately(values: Sequence[_Value]) -> float:
    """Return the median excess: a link that became slower, as after a reconnect, may be intermittent too."""
    return max(0.0, median([excess for _, _, excess in values] or [0.0]))


def _above(level: float, values: Sequence[_Value]) -> list[_Value]:
    return [(number, at_s, excess - level) for number, at_s, excess in values]


def _without_changes(values: Sequence[_Value], bad: list[int], watches: Iterable[ChangePointDetector]) -> list[int]:
    """Leave out rounds of an ended slowdown, and all rounds before a dense stretch of bad ones."""
    # a very short slowdown may be a bad time of an intermittent link
    past = [one.change for one in watches if one.change is not None and one.change.is_over]
    past = [one for one in past if one.until_round - one.since_round > INTERMITTENT.short]
    bad = [index for index in bad if not any(one.since_round <= values[index][0] < one.until_round for one in past)]
    pairs = zip(bad, bad[INTERMITTENT.max_bad :], strict=False)
    dense = [late for early, late in pairs if late - early < INTERMITTENT.dense]
    return [index for index in bad if not dense or index > dense[-1]]


def _in_turns(
    values: Sequence[_Value], bad: list[int], chance: Callable[[Sequence[int]], float], *, least_bad: int, most: float
) -> Flapping | None:
    """Return bad times with good ones between, if they are no chance."""
    bad = _alike(bad, len(values))
    if len(bad) < least_bad:
        return None
    # the suffix of bad messages with the least chance
    begins = [place for place, index in enumerate(bad) if not place or bad[place - 1] < index - 1]
    enough = [bad[place:] for place in begins[: 1 - INTERMITTENT.min_episodes] if len(bad) - place >= least_bad]
    bad = min(enough, key=chance, default=[])
    stretch = [excess for _, _, excess in values[bad[0] : bad[-1] + 1]] if bad else []
    # a slow link whose excess is near the limit is never good between its bad times
    is_slow = 2 * sum(excess <= INTERMITTENT.good for excess in stretch) < len(stretch)
    if not bad or is_slow or _is_over(bad, len(values)):
        return None
    episodes: list[tuple[int, int]] = []
    seen_round = -1
    for count, index in enumerate(bad, start=1):
        number = values[index][0]
        if count > 1 and bad[count - 2] == index - 1:
            episodes[-1] = (episodes[-1][0], number)
        else:
            episodes.append((number, number))
        is_sure = count >= least_bad and len(episodes) >= INTERMITTENT.min_episodes
        if seen_round < 0 and is_sure and chance(bad[:count]) <= most:
            seen_round = number
    if seen_round < 0:
        return None
    rounds = frozenset(values[index][0] for index in bad)
    return Flapping(episodes=tuple(episodes), since_s=values[bad[0]][1], bad=rounds, seen_round=seen_round)


def _alike(bad: list[int], count: int) -> list[int]:
    """Leave out bad times that are far longer than the others, and one that still lasts."""
    times: list[list[int]] = []
    for place, index in enumerate(bad):
        if not place or bad[place - 1] < index - 1:
            times.append([])
        times[-1].append(index)
    if bad and bad[-1] == count - 1:
        del times[-1]
    most = max(INTERMITTENT.short, INTERMITTENT.longer * median([len(own) for own in times] or [0]))
    return [index for own in times if len(own) <= most for index in own]


def _is_over(bad: list[int], count: int) -> bool:
    """Return whether the calm since the last bad message is longer than any before, and no chance at their rate."""
    share, since = len(bad) / (bad[-1] - bad[0] + 1), count - 1 - bad[-1]
    longest = max(late - early for early, late in pairwise(bad))
    return since > longest and (1 - share) ** since <= INTERMITTENT.over_chance


def find_flapping(job: Job, times: LinkTimes) -> list[Finding]:
    """Return the place whose links are intermittent."""
    flapping: dict[Cell, Flapping] = {}
    often: Mapping[Cell, ChangePointDetector] = times.watches
    for least in sorted(INTERMITTENT.bad):
        often = {
            cell: watch for cell, watch in often.items()
            if watch.is_often_long(of=INTERMITTENT.window + 1)
            and sum(excess >= least for _, _, excess in islice(reversed(watch.excess), INTERMITTENT.window))
            >= INTERMITTENT.min_bad
        }  # fmt: skip
        usual = usual_share(times.watches, least) if often else 0.0
        for cell, watch in often.items():
            found = flapping_of(watch, least=least, usual=usual)
            if found is not None:
                flapping.setdefault(cell, found)
    for cell, found in flapping_both_ways(times.watches).items():
        flapping.setdefault(cell, found)
    if not flapping:
        return []
    # the median excess of each link in the bad rounds of all intermittent ones
    rounds = frozenset.union(*(found.bad for found in flapping.values()))
    matrix = {
        cell: median([excess for number, _, excess in watch.excess if number in rounds])
        for cell, watch in times.watches.items()
    }
    least = INTERMITTENT.bad[0] / 2
    known = {cell: 0.0 if value < least else value for cell, value in matrix.items() if not math.isnan(value)}
    explained = DelayMatrix(known, job.host_of).explain()
    # if few links of a place are intermittent, that is their noise, or the place was slow
    if explained is None or 2 * len(explained.cells & set(flapping)) < len(explained.cells) or (
        explained.excess < INTERMITTENT.min_excess
    ):  # fmt: skip
        return []
    first = min(flapping.values(), key=lambda found: found.seen_round)
    named = joined(explained.places)
    longer = math.exp(explained.excess)
    return [Finding(
        kind="flapping link",
        places=explained.places,
        since_s=first.since_s, since_round=first.episodes[0][0], seen_round=first.seen_round,
        evidence=Evidence(
            "flapping", times_longer=round(longer, 2),
            bad_rounds=[f"{begin} to {end}" for begin, end in first.episodes][:16], explained=round(explained.fit, 3),
        ),
        text=f"Messages over {named} took {longer:.1f} times as long as usual in {len(first.episodes)} bad times, "
        "and as usual between them.",
        confidence=(0.9 if len(explained.places) == 1 else 0.5) * job.trust,
        remedy="look at cable, plug and signal quality; make deadlines longer than a bad time, or leave this link out",
        probe=probe_for(explained.places),
    )]  # fmt: skip
