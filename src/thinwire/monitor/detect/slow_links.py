"""Slow-link detector: links whose messages take longer than before, or than those of their peers, and the place.

A message's duration begins when both of its ends are ready, so that a late rank is not taken for a slow link.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from thinwire.monitor.detect.change_points import CUSUM, Change, ChangePointDetector, median
from thinwire.monitor.detect.delay_matrix import (
    DELAYS,
    WIRE_REMEDY,
    Cell,
    DelayMatrix,
    Explanation,
    probe_for,
    slower_than_peers,
)
from thinwire.monitor.detect.link_history import LinkTimes
from thinwire.monitor.detect.progress import PROGRESS
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Evidence, Finding, joined, link_names


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinkConfig:
    """Constants of the detector of slow links."""

    peers_ratio: float = 3.0  # of a link that was slow from the start: links differ by nature
    little: float = 2.0  # ratio above which a young history is enough (LOG 2026-11-24)
    min_samples: int = 2  # values of a link in a matrix
    look_rounds: int = 24  # rounds after an alarm that tell the ratio
    max_faults: int = 6  # places of one update
    min_links: int = 4  # links until a common excess is taken off
    few_links: int = 6  # links up to which the least is the common excess, and above it the quartile
    own_share: float = 0.5  # of a place's excess; a link with less belongs to that place
    min_hosts: int = 3  # hosts until a common excess is taken off
    deviations: float = 3.0  # of the other links' spread that a place must exceed
    quartile: float = 0.6745  # of a normal distribution, in standard deviations


SLOW_LINKS = SlowLinkConfig()


def find_slow_links(job: Job, times: LinkTimes) -> list[Finding]:
    """Return the places of links that became slower, or were slower than their peers from the start.

    Lasting slowdowns come before those that have ended.
    """
    lasting, cells = _slow_places(job, times, is_over=False)
    over, _ = _slow_places(job, times, is_over=True, without=cells)
    return lasting + over or _slower_than_peers(job, times)


def _slow_places(
    job: Job, times: LinkTimes, *, is_over: bool, without: Collection[Cell] = frozenset()
) -> tuple[list[Finding], set[Cell]]:
    """Return findings, and the cells that they explain."""
    found: list[Finding] = []
    told: set[Cell] = set()
    search = _Search(job, times, is_over=is_over, without=without)
    while len(found) < SLOW_LINKS.max_faults and (alarmed := search.alarms()):
        first = min(alarmed, key=lambda cells: (alarmed[cells].seen_round, sorted(cells)))
        change = alarmed[first]
        explained, cells = search.explain(first, alarmed)
        if explained is None:
            search.refused.add(first)
            continue
        one = _slow_link(job, times, explained, change.since_round, change.since_s, change.seen_round)
        found.append(replace(one, until_s=change.until_s) if is_over else one)
        told |= cells
        search.left -= cells
    return found, told


class _Search:
    """Search for one slow place after the other."""

    def __init__(self, job: Job, times: LinkTimes, *, is_over: bool, without: Collection[Cell]) -> None:
        self._job, self._times, self._is_over = job, times, is_over
        self.left = {cell for cell in times.watches if cell not in without}  # links that no place explains
        self.refused: set[frozenset[Cell]] = set()  # alarms that no place explains
        self._alone: dict[frozenset[Cell], Change] = {}
        for cell in self.left:
            change = _change_of(times.watches[cell], times.alone.get(cell, times.watches[cell]))
            if not is_over:
                change = times.soon.get(cell, change)
            if change is not None and change.is_over == is_over:
                self._alone[frozenset([cell])] = change
        # cached by first and last round, the latter also by the number of links left
        self._longer: dict[tuple[int, int], dict[Cell, float]] = {}
        self._explained: dict[tuple[int, int, int], tuple[dict[Cell, float], Explanation | None]] = {}

    def alarms(self) -> dict[frozenset[Cell], Change]:
        """Return the alarms of single links, and of endpoints with several links left."""
        found = {cells: change for cells, change in self._alone.items() if cells <= self.left}
        for end in self._times.ends:
            if (change := end.watch.change) is not None and change.is_over == self._is_over:
                own = end.cells & self.left
                if len(own) > 1:
                    found.setdefault(own, change)
        return {cells: change for cells, change in found.items() if cells not in self.refused}

    def explain(
        self, first: frozenset[Cell], alarmed: Mapping[frozenset[Cell], Change]
    ) -> tuple[Explanation | None, frozenset[Cell]]:
        """Return the place that explains an alarm, and the links that it explains; None if there is none."""
        change = alarmed[first]
        last = max(change.since_round + SLOW_LINKS.look_rounds, 2 * change.seen_round - change.since_round)
        last = min(last, change.until_round - 1) if change.is_over else last
        key = (change.since_round, last, len(self.left))
        if key not in self._explained:
            matrix = self._matrix(change.since_round, last)
            self._explained[key] = matrix, DelayMatrix(_bare(matrix), self._job.host_of).explain()
        matrix, explained = self._explained[key]
        if explained is None:
            return None, frozenset()
        own = min(explained.excess, median([*_bare({cell: matrix.get(cell, 0.0) for cell in first}).values()]))
        least = DELAYS.min_link if explained.is_wire_alone else DELAYS.min_endpoint
        if own < math.log(least) or not _stands_out(matrix, explained, alarmed):
            return None, frozenset()
        if own < min(math.log(SLOW_LINKS.little), self._spread(explained)):
            return None, frozenset()
        # the alarm's own link too, if its excess is small
        is_little = len(first) == 1 and matrix.get(min(first), 0.0) < SLOW_LINKS.own_share * explained.excess
        return explained, explained.cells | explained.following(matrix) | (first if is_little else frozenset())

    def _spread(self, explained: Explanation) -> float:
        """Return the spread of a single link with a young baseline; else 0."""
        pairs = [(self._times.watches[cell], self._times.alone.get(cell)) for cell in explained.cells]
        usual = [watch.usual for pair in pairs for watch in pair if watch is not None]
        is_early = min(one.count for one in usual) < 2 * CUSUM.min_history
        return max(one.scale for one in usual) if is_early and explained.is_wire_alone else 0.0

    def _matrix(self, first: int, last: int) -> dict[Cell, float]:
        """Return the log ratio of each link, less the common excess of the best links."""
        known = self._longer.get((first, last))
        if known is None:
            known = self._longer[first, last] = _longer(self._times, first, last)
        found, host_of = {cell: excess for cell, excess in known.items() if cell in self.left}, self._job.host_of
        # a busy machine slows all links; one slow host of three leaves a quarter of the links usual, one of two none,
        # and two slow places of three hosts may leave a single link
        hosts = {host_of[rank] for cell in found for rank in cell}
        has_others = len(found) >= SLOW_LINKS.min_links and len(hosts) >= SLOW_LINKS.min_hosts
        least = (
            sorted(found.values())[len(found) // 4 if len(found) > SLOW_LINKS.few_links else 0] if has_others else 0.0
        )
        common = max(0.0, least)
        return {cell: excess - common for cell, excess in found.items()}


def _change_of(watch: ChangePointDetector, alone: ChangePointDetector) -> Change | None:
    """Return the change of a link: an alarm of either of its durations, which ends with the first of both."""
    # the duration without other messages varies less if many share an access, the plain one if few do. `_matrix` checks
    # that both became longer
    changes = [one.change for one in (watch, alone) if one.change is not None]
    over = [change for change in changes if change.is_over]
    lasting = [change for change in changes if not change.is_over]
    fresh = [change for change in lasting if all(change.since_round > past.until_round for past in over)]
    # of two lasting changes the later one began with the fault, not with noise before it
    return max(fresh or over, key=lambda one: one.since_round, default=None)


def _bare(matrix: Mapping[Cell, float]) -> dict[Cell, float]:
    """Return a matrix without excess that is too small for a fault."""
    return {cell: excess if excess >= math.log(CUSUM.min_ratio) / 2 else 0.0 for cell, excess in matrix.items()}


def _longer(times: LinkTimes, first: int, last: int) -> dict[Cell, float]:
    """Return the log ratio of each link in some rounds: the lesser of both durations."""
    found = {}
    for cell, watch in times.watches.items():
        values = watch.values_in(first, last)
        if len(values) >= SLOW_LINKS.min_samples:
            found[cell] = min(median(values), times.alone.get(cell, watch).excess_in(first, last))
    return found


def _stands_out(matrix: Mapping[Cell, float], explained: Explanation, alarmed: Collection[frozenset[Cell]]) -> bool:
    """Return whether the excess of a place is beyond the spread of the other links."""
    # links that wait for acknowledgements are neither faulty nor usual
    beside = explained.cells | explained.following(matrix)
    # links with an alarm of their own and half the excess have another fault
    alone = {min(cells) for cells in alarmed if len(cells) == 1}
    beside |= {cell for cell in alone if matrix.get(cell, 0.0) >= explained.excess / 2}
    others = sorted(excess for cell, excess in matrix.items() if cell not in beside)
    if len(others) < SLOW_LINKS.min_links:
        return True
    # the lower half shows the spread without faults
    middle = median(others)
    deviation = (middle - others[len(others) // 4]) / SLOW_LINKS.quartile
    return explained.excess >= middle + SLOW_LINKS.deviations * deviation / math.sqrt(len(explained.cells))


def _slow_link(
    job: Job, times: LinkTimes, explained: Explanation, since_round: int, since_s: float, seen_round: int
) -> Finding:
    usual_s = median([times.watches[cell].usual_s for cell in explained.cells])
    ratio, named = math.exp(explained.excess), joined(explained.places)
    retries = sum(times.retries.get(cell, 0) for cell in explained.cells)
    num_rounds = max(len(times.watches[cell].since(since_round)) for cell in explained.cells)
    is_young = num_rounds < CUSUM.far_samples  # a third far value is no passing trouble
    return Finding(
        kind="communication slow",
        places=explained.places,
        since_s=since_s, since_round=since_round, seen_round=seen_round,
        evidence=Evidence(
            "slow_link", times_longer=round(ratio, 2), usual_s=round(usual_s, 6), now_s=round(usual_s * ratio, 6),
            links=link_names(explained.cells), explained=round(explained.fit, 3), retries=retries,
            clock_error_s=round(job.alignment.error_s, 6),
        ),
        text=f"Messages over {named} take {ratio:.1f} times as long as they did, counted from when both ends are "
        f"ready{f'; {num_rounds} rounds so far' if is_young else ''}.",
        confidence=min(PROGRESS.unsure if is_young else 1.0, explained.confidence) * job.trust,
        remedy=WIRE_REMEDY,
        probe=probe_for(explained.places),
    )  # fmt: skip


def _slower_than_peers(job: Job, times: LinkTimes) -> list[Finding]:
    """Return links between hosts that were slow from the start: three times the median of similar ones, or more."""
    ordered: dict[tuple[int], dict[Cell, list[float]]] = defaultdict(dict)
    for (cell, classed), values in times.times.items():
        if len(values) >= CUSUM.min_history and job.host_of[cell[0]] != job.host_of[cell[1]]:
            ordered[(classed,)][cell] = sorted(values)
    groups = {group: {cell: median(values) for cell, values in own.items()} for group, own in ordered.items()}
    found = []
    for group, explained, middle_s in slower_than_peers(groups, job.host_of, ratio=SLOW_LINKS.peers_ratio):
        # small messages on busy machines vary tenfold: quartiles must not overlap
        others = [own[-1 - len(own) // 4] for cell, own in ordered[group].items() if cell not in explained.cells]
        slow = [own[len(own) // 4] for own in (ordered[group][cell] for cell in explained.cells)]
        if not others or median(slow) <= median(others):
            continue
        ratio, named = math.exp(explained.excess), joined(explained.places)
        begin_s = min((message.sent_posted_s or 0.0 for message in job.messages), default=0.0)
        found.append(Finding(
            kind="communication slow", places=explained.places, since_s=begin_s, since_round=0, seen_round=-1,
            evidence=Evidence(
                "link_peers", times_longer_than_peers=round(ratio, 2), peers_s=round(middle_s, 6),
                clock_error_s=round(job.alignment.error_s, 6),
            ),
            text=f"Messages over {named} have taken {ratio:.1f} times as long as those between other hosts since the "
            "records begin; it may be the rate of this wire.",
            confidence=0.5 * job.trust,
            remedy="measure this wire with thinwire probe; if it is its own rate, let thinwire plan know",
            probe=probe_for(explained.places),
        ))  # fmt: skip
    return found
