"""Result of one check of `thinwire doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check ended; `WRONG` alone makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        verdict: How it is.
        found: What was found, with numbers; for a skipped check the reason.
        remedy: What to do, empty where there is nothing to do.

    Example:
        >>> Check(name="memory", verdict=Verdict.OK, found="8.00 GB are free").to_json()["verdict"]
        'ok'
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Write it as plain values."""
        return {**asdict(self), "verdict": self.verdict.value}


def ok(name: str, found: str) -> Check:
    """Say that a thing is well."""
    return Check(name=name, verdict=Verdict.OK, found=found)


def warning(name: str, found: str, *, remedy: str) -> Check:
    """Say that a thing works, and may hurt."""
    return Check(name=name, verdict=Verdict.WARNING, found=found, remedy=remedy)


def wrong(name: str, found: str, *, remedy: str) -> Check:
    """Say that a thing does not work."""
    return Check(name=name, verdict=Verdict.WRONG, found=found, remedy=remedy)


def skipped(name: str, reason: str) -> Check:
    """Say that a thing could not be looked at, and why."""
    return Check(name=name, verdict=Verdict.SKIPPED, found=reason)


def wrong_by(name: str, error: Exception) -> Check:
    """Turn an error of the library, which says what is wrong and after a semicolon what to do, into a check."""
    found, _, remedy = str(error).partition("; ")
    return wrong(name, found, remedy=remedy or "see the text")
