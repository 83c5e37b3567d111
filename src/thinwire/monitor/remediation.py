"""Remediation: a table from findings to actions, and the limits that keep actions harmless.

Nothing here acts: `Steering` decides, and the caller executes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from thinwire.monitor.detect.live import News
from thinwire.monitor.findings import Finding, Kind

ActionKind = Literal["warn", "exclude", "restart", "replace", "abort"]
ON_FINDING: tuple[str, ...] = ("off", "warn", "exclude", "restart", "replace", "abort")

# Actions that help against each kind. A new process on the same machine makes no link faster, and a clock that was set
# or a stall is no reason to lose a replica. Losses of small batches scatter, so that a person decides on divergence.
HELPS: Mapping[Kind, tuple[ActionKind, ...]] = {
    **dict.fromkeys(get_args(Kind), ()),
    **dict.fromkeys(("communication slow", "non-communication slow", "slowing compute"), ("exclude", "replace")),
    **dict.fromkeys(("communication hang", "non-communication hang", "desync", "non-finite loss"),
                    ("exclude", "restart", "replace", "abort")),
}  # fmt: skip
# Below this ratio a slow rank is only reported: others hardly wait, and other load often halves a machine's speed.
_LEAST_TIMES = 3.0
# Places with one rank.
_OF_ONE_RANK = ("rank", "sender", "receiver", "endpoint")
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Action for a finding."""

    kind: ActionKind  # of the action
    target: int | None  # rank, which is the replica's number in an elastic run; None for a warning or an abort
    case: int  # number of the cause in `News`
    why: str  # reason for the action, or for no more than a warning
    is_hang: bool = False  # whether the target does not answer, so that it cannot be asked to leave

    def to_json(self, *, at_s: float, finding: str, dry_run: bool, result: str) -> dict[str, Any]:
        """Return a line of `actions.jsonl`; `at_s` in seconds since 1970."""
        return {
            "at": round(at_s, 3), "action": self.kind, "target": "" if self.target is None else str(self.target),
            "dry_run": dry_run, "finding": finding, "case": self.case, "why": self.why, "result": result,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits of the actions.

    Attributes:
        on_finding: Strongest action; findings that it does not help against are only reported.
        least_confidence: Findings below it are only reported.
        cooldown_s: Seconds after an action to a rank without another one to it.
        settle_s: Seconds after any action without actions on slowness: a starting process slows its host.
        most_restarts: In an hour, of all replicas.
        least_share: Share of the largest number of replicas so far that always stays.
    """

    on_finding: ActionKind = "warn"
    least_confidence: float = 0.8
    cooldown_s: float = 120.0
    settle_s: float = 60.0
    most_restarts: int = 6
    least_share: float = 0.5

    def __post_init__(self) -> None:
        if self.on_finding not in ON_FINDING[1:]:
            raise ValueError(f"on_finding must be one of {', '.join(ON_FINDING[1:])}, got {self.on_finding!r}")
        if not 0 <= self.least_confidence <= 1 or not 0 < self.least_share <= 1:
            raise ValueError(
                f"least_confidence and least_share must be in [0, 1], got {self.least_confidence} and "
                f"{self.least_share}"
            )
        if min(self.cooldown_s, self.settle_s, self.most_restarts) < 0:
            raise ValueError(
                f"cooldown_s, settle_s and most_restarts must be at least 0, got {self.cooldown_s}, {self.settle_s} "
                f"and {self.most_restarts}"
            )


class Steering:
    """Decides on actions, once for each cause.

    Attributes:
        unsure: Causes below the least confidence, decided again when they exceed it.

    Example:
        >>> from thinwire.monitor.findings import Place
        >>> hang = Finding(kind="non-communication hang", places=(Place(kind="rank", ranks=(1,)),), since_s=0.0,
        ...                text="", confidence=0.95, remedy="")
        >>> news = News(case=0, state="new", finding=hang, age_s=2.0)
        >>> steering = Steering(Policy(on_finding="exclude"))
        >>> action = steering.decide(news, now_s=0.0, present=(0, 1, 2))
        >>> action.kind, action.target, steering.decide(news, now_s=1.0, present=(0, 1, 2))
        ('exclude', 1, None)
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._decided: set[int] = set()
        self.unsure: set[int] = set()
        self._acted_s: dict[int, float] = {}
        self._excluded: set[int] = set()
        self._restarts_s: deque[float] = deque()
        self._most_present = 0

    def decide(
        self, news: News, *, now_s: float, present: Collection[int], gone: Collection[int] = (), num_spares: int = 0
    ) -> Action | None:  # fmt: skip
        """Return the action for news; None if the finding has ended or was decided already.

        Args:
            news: Of a finding.
            now_s: Seconds on a clock that only grows.
            present: Ranks that take part.
            gone: Of these, the ranks whose process has ended: their launcher starts another one.
            num_spares: Spare hosts; without one, a replica is excluded instead of replaced.
        """
        self._most_present = max(self._most_present, len(present))
        if news.state != "new" or news.case in self._decided:
            return None
        kind, wanted = self.policy.on_finding, news.finding
        refusal = self._refusal(wanted, now_s=now_s)
        if kind in HELPS.get(wanted.kind, ()) and wanted.confidence < self.policy.least_confidence:
            if news.case in self.unsure:
                return None
            self.unsure.add(news.case)
        else:
            self.unsure.discard(news.case)
            self._decided.add(news.case)
        target = None if kind == "abort" else target_of(wanted)
        if not refusal and target in gone and kind in ("restart", "replace"):
            refusal = f"the process of replica {target} has ended, and its launcher starts another one"
        kind, more = ("exclude", " No spare host waits.") if kind == "replace" and not num_spares else (kind, "")
        if not refusal and kind in ("exclude", "restart", "replace"):
            refusal = self._limit(kind, target, now_s=now_s, present=present)
        if kind == "warn" or refusal:
            return Action(kind="warn", target=None, case=news.case, why=refusal or "reported only: --on-finding warn")
        if target is not None:  # for the limits of later actions
            self._acted_s[target] = now_s
            if kind == "restart":
                self._restarts_s.append(now_s)
            else:
                self._excluded.add(target)
        return Action(kind=kind, target=target, case=news.case, why=wanted.text + more, is_hang="hang" in wanted.kind)

    def _refusal(self, finding: Finding, *, now_s: float) -> str:
        """Return why a finding does not justify the allowed action, or an empty text."""
        kind = self.policy.on_finding
        if kind == "warn":
            return ""
        if kind not in HELPS.get(finding.kind, ()):
            return f"{kind} does not help against {finding.kind}"
        if finding.confidence < self.policy.least_confidence:
            return f"not sure enough: {finding.confidence:.2f} of {self.policy.least_confidence:.2f}"
        if "slow" not in finding.kind:
            return ""
        if not (finding.times_longer or 0.0) >= _LEAST_TIMES:
            return f"slower by less than {_LEAST_TIMES:g} times"
        since_s = now_s - max(self._acted_s.values(), default=-math.inf)
        said = f"the last action was {since_s:.0f} s ago and may be the reason"
        return said if since_s < self.policy.settle_s else ""

    def _limit(
        self, kind: ActionKind, target: int | None, *, now_s: float, present: Collection[int]
    ) -> str:  # fmt: skip
        """Return the limit that forbids an action to a rank, or an empty text."""
        if target is None:
            return "the finding names no single replica"
        if target not in present:
            return f"replica {target} takes part no more"
        since_s = now_s - self._acted_s.get(target, -math.inf)
        if since_s < self.policy.cooldown_s:
            return (
                f"something was done to replica {target} {since_s:.0f} s ago, and nothing else is before "
                f"{self.policy.cooldown_s:.0f} s"
            )
        if kind == "exclude":
            left = len(set(present) - self._excluded - {target})
            least = max(1, math.ceil(self.policy.least_share * self._most_present))
            said = f"only {left} of {self._most_present} replicas would be left, and {least} are the least"
            return said if left < least else ""
        if kind == "replace":  # another one comes for each that goes
            return ""
        while self._restarts_s and now_s - self._restarts_s[0] >= _HOUR_S:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= self.policy.most_restarts:
            return f"{len(self._restarts_s)} restarts in the last hour are the most"
        return ""


def target_of(finding: Finding) -> int | None:
    """Return the one rank that a finding blames; None if it names a link, a host, or several places.

    Example:
        >>> from thinwire.monitor.findings import Place
        >>> place = Place(kind="sender", ranks=(2,))
        >>> target_of(Finding(kind="desync", places=(place,), since_s=0.0, text="", confidence=1.0, remedy=""))
        2
    """
    if len(finding.places) != 1:
        return None
    (place,) = finding.places
    return place.ranks[0] if place.kind in _OF_ONE_RANK and len(place.ranks) == 1 else None
