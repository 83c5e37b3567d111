"""A judge of a running job: it is fed records as they are written, and says which findings are new and which are over.

Nothing here runs by itself: who has the files calls `take` and `look`, and decides how often.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from thinwire.monitor.detect.clocks import SightingBook
from thinwire.monitor.detect.detector_state import History
from thinwire.monitor.detect.diagnose import findings_of
from thinwire.monitor.detect.heartbeat_jitter import Lateness
from thinwire.monitor.detect.missing_heartbeats import find_silent
from thinwire.monitor.detect.progress import UNSURE
from thinwire.monitor.detect.timeline import build
from thinwire.monitor.detect.window import Window
from thinwire.monitor.findings import Finding, Place
from thinwire.monitor.runlog.records import Record

_MOST_CASES = 64
# What may have been a very slow message is not over before so many times as long have gone by without another.
_HELD = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A finding that is new, or over.

    Attributes:
        case: Counts the causes of the run, from 0; the same for `new` and `over`.
        state: Which.
        finding: The finding as it was seen last.
        age_s: Seconds from when it began, by the records, to the latest record.
    """

    case: int
    state: Literal["new", "over"]
    finding: Finding
    age_s: float

    def to_json(self, *, at_s: float) -> dict[str, Any]:
        """Return a line of `findings.jsonl`; `at_s` in seconds since 1970."""
        return {
            "at": round(at_s, 3), "state": self.state, "case": self.case, "age_s": round(self.age_s, 3),
            "finding": self.finding.to_json(),
        }  # fmt: skip


@dataclass(slots=True)
class _Case:
    """One cause, as far as it was seen."""

    finding: Finding
    number: int = -1
    seen: int = 0
    gone: int = 0
    age_s: float = 0.0
    last_s: float = 0.0

    def may_return(self, now_s: float) -> bool:
        """Return whether a hang that may have been a very slow message may come again with the next one."""
        waited_s = self.finding.evidence.get("waited_s", 0.0)
        return self.finding.confidence <= UNSURE and now_s - self.last_s < _HELD * waited_s

    @property
    def is_told(self) -> bool:
        return self.number >= 0


class LiveJudge:
    """Judges a job again and again, and tells of each cause once.

    A finding must be there at several looks before it is new, and be gone for several before it is over. Two findings
    are of one cause where they are of one kind and name a common place, or where one's ranks are among the other's:
    what was ambiguous and becomes exact is no second cause. A hang that may be a very slow wire or rank is over only
    when twice as long as it lasted has gone by without another, so that it is told once and not message by message.

    Args:
        looks_until_new: Looks in a row that a finding must be there.
        looks_until_over: Looks in a row that it must be gone.
        most_records: See `Window`.
        own_host: See `Lateness`.

    Attributes:
        num_failed: Looks at which the rules themselves failed; nothing is told then.
        problem: What the rules failed with the last time.

    Example:
        >>> from thinwire.monitor.synthetic_jobs import rehearse
        >>> from thinwire.monitor.scenes import Fault, Scene
        >>> slow = Fault(kind="slow link", place=Place(kind="link", ranks=(0, 1)), begin=20, severity=6.0)
        >>> judge = LiveJudge(looks_until_new=2)
        >>> judge.take(rehearse(Scene(hosts=("a", "b", "c"), rounds=40, faults=(slow,))))
        >>> judge.look(), [(news.state, news.finding.where) for news in judge.look()]
        ([], [('new', 'link 0 -> 1')])
    """

    def __init__(
        self, *, looks_until_new: int = 2, looks_until_over: int = 5, most_records: int = 3000, own_host: str = ""
    ) -> None:
        for name, value in (("looks_until_new", looks_until_new), ("looks_until_over", looks_until_over)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._until_new, self._until_over = looks_until_new, looks_until_over
        self._window = Window(most_records=most_records)
        self._history, self._book, self._lateness = History(), SightingBook(), Lateness(own_host)
        self._cases: list[_Case] = []
        self._num_told = 0
        self.num_failed = 0
        self.problem = ""

    def take(self, records: Iterable[Record]) -> None:
        """Take records in, in the order in which each rank wrote them."""
        for record in records:
            self._window.add(record)

    def ranks(self) -> frozenset[int]:
        """Return the ranks that are known."""
        return frozenset(self._window.ranks())

    def look(self, *, without: Collection[int] = frozenset()) -> list[News]:
        """Judge what there is, and return what is new or over since the last look.

        Args:
            without: Ranks that take part no more, or were told to pause.
        """
        try:
            job = build(self._window.records(without=without), self._book)
            job.late_s = self._lateness.take(job)
            # the hang tells more of one who is waited for than its silence does: it comes first, and is the same cause
            findings = [*findings_of(job, self._history), *find_silent(job)]
        except Exception as error:  # whatever strangers wrote, the run goes on
            self.num_failed += 1
            self.problem = f"{type(error).__name__}: {error}"[:300]
            return []
        hosts = self._window.hosts()
        seen: list[_Case] = []
        for finding in findings:
            if finding.until_s is not None:
                continue
            case = self._case_of(finding, hosts)
            if case is None:
                continue
            if not any(case is other for other in seen):
                seen.append(case)
                case.finding = _sharper(case.finding, finding)
                case.age_s, case.last_s = max(0.0, job.now_s - finding.since_s), job.now_s
        return self._count(seen, job.now_s)

    @property
    def is_unsure(self) -> bool:
        """Whether there is a finding that was not there often enough to be told: it is worth looking again soon."""
        return any(not case.is_told for case in self._cases)

    def still_told(self) -> list[News]:
        """Return what is told of and not over, as it was seen last, the oldest first."""
        told = sorted((case for case in self._cases if case.is_told), key=lambda case: case.number)
        return [News(case=case.number, state="new", finding=case.finding, age_s=case.age_s) for case in told]

    def _case_of(self, finding: Finding, hosts: Mapping[int, str]) -> _Case | None:
        for case in self._cases:
            if is_one_cause(case.finding, finding, hosts=hosts):
                return case
        if len(self._cases) >= _MOST_CASES:
            return None
        self._cases.append(_Case(finding))
        return self._cases[-1]

    def _count(self, seen: list[_Case], now_s: float) -> list[News]:
        news: list[News] = []
        for case in [*self._cases]:
            if any(case is one for one in seen):
                case.seen, case.gone = case.seen + 1, 0
                if not case.is_told and case.seen >= self._until_new:
                    case.number, self._num_told = self._num_told, self._num_told + 1
                    news.append(News(case=case.number, state="new", finding=case.finding, age_s=case.age_s))
                continue
            case.seen, case.gone = 0, case.gone + 1
            if case.is_told and (case.gone < self._until_over or case.may_return(now_s)):
                continue
            self._cases.remove(case)
            if case.is_told:
                news.append(News(case=case.number, state="over", finding=case.finding, age_s=case.age_s))
        return news


def is_one_cause(one: Finding, other: Finding, *, hosts: Mapping[int, str]) -> bool:
    """Tell whether two findings are of one cause.

    Args:
        one: A finding.
        other: Another one.
        hosts: The host of each rank.
    """
    if one.kind != other.kind:
        return False
    if set(one.places) & set(other.places):
        return True
    first, second = _ranks(one.places, hosts), _ranks(other.places, hosts)
    return bool(first) and bool(second) and (first <= second or second <= first)


def _ranks(places: Collection[Place], hosts: Mapping[int, str]) -> set[int]:
    named = {rank for place in places for rank in place.ranks}
    return named | {rank for rank, host in hosts.items() if any(host in place.hosts for place in places)}


def _sharper(old: Finding, new: Finding) -> Finding:
    """Return what is known now; the begin stays where it was seen first."""
    since = {"since_s": old.since_s, "since_round": old.since_round} if old.since_s < new.since_s else {}
    return replace(new, **since)  # type: ignore[arg-type]
