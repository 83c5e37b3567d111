"""Alignment of call sequences: whether a rank left a call out, made one more, swapped two, or ended its loop early.

Ranks stop at the first call that differs, so few calls behind it are recorded. Training repeats its calls, so the
sequence is continued by what followed the longest matching stretch of its own past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from thinwire.runlog.records import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentConfig:
    """Constants of the alignment."""

    history: int = 4096  # latest calls that a continuation is looked for in
    context: int = 64  # calls before a continuation that are compared
    ahead: int = 256  # calls that a sequence is continued by
    compared: int = 16  # calls that must match behind a shift
    near: int = 8  # distance of swapped calls
    shifted: int = 3  # recorded calls that prove a shift of calls that differ in their place in the code only


ALIGNMENT = AlignmentConfig()

DeviationKind = Literal["left out", "extra", "swapped", "early end", "new call"]


@dataclass(frozen=True, slots=True)
class Call:
    """Properties of a call that must be equal on all ranks."""

    kind: str  # such as `all_reduce`
    dtype: str  # of its elements
    count: int  # elements; -1 if unknown
    site: str = ""  # file and line of the caller; empty if unknown

    def __str__(self) -> str:
        size = str(self.count) if self.count > 0 else ""
        return f"{self.kind}({size})" + (f" at {self.site}" if self.site else "")


def call_of(operation: Operation) -> Call:
    """Return the call that an operation records.

    Example:
        >>> posted = Operation(communicator="w", rank=0, sequence=4, kind="all_reduce", count=3, posted_s=0.0)
        >>> print(call_of(posted))
        all_reduce(3)
    """
    return Call(operation.kind, operation.dtype, operation.count, operation.site)


@dataclass(frozen=True, slots=True)
class Deviation:
    """Difference between two sequences of calls."""

    kind: DeviationKind  # of the deviation
    calls: tuple[Call, ...]  # those that were left out or added, or the two that were swapped; the new call
    steps: int = 0  # for an early end: repetitions of the loop that are missing; 0 if unknown
    steps_done: int = 0  # for a new call: repetitions of the loop before it; 0 if unknown
    or_extra: tuple[Call, ...] = ()  # calls that may have been added instead, where the recorded calls do not decide it


def align(own: Sequence[Call], others: Sequence[Call], at: int) -> Deviation | None:
    """Return how a rank's calls differ from the others' from their first difference on; None if nothing fits.

    Args:
        own: The rank's calls.
        others: Calls of a rank of the majority, from the same first call on.
        at: Index of the first difference, in both.

    Example:
        >>> step = [Call("all_reduce", "float32", count) for count in (8, 4, 3)]
        >>> align([*step, *step[:2], step[0]], [*step, *step], at=5).kind
        'left out'
    """
    found = _aligned(own, others, at)
    if found is None or found.kind == "new call":  # ranks may make one call at two places
        return _aligned(_without_sites(own), _without_sites(others), at) or found
    return found


def _aligned(own: Sequence[Call], others: Sequence[Call], at: int) -> Deviation | None:
    mine, theirs = own[at:], others[at:]
    swap = _swap(mine, theirs)
    if swap is not None:
        return Deviation("swapped", swap)
    ahead = _continued(others)[at:]
    missing = _shift(mine, ahead)
    extra = tuple(mine[: _extra(own, theirs, at)])
    if not missing:
        return Deviation("extra", extra) if extra else _early_end(own, others, at)
    period = _period(others[:at])
    if period and missing >= 2 * period:
        return Deviation("early end", tuple(ahead[:missing]), missing // period if missing % period == 0 else 0)
    return Deviation("left out", tuple(ahead[:missing]), or_extra=extra)


def is_proved(own: Sequence[Call], others: Sequence[Call], at: int) -> bool:
    """Return whether calls that differ only by their place in the code are out of order, and not written twice.

    Ranks may make one call at two places, as in both branches of `if rank == 0`. So recorded calls must match again
    behind a swap or a shift, at several places.
    """
    mine, theirs = own[at:], others[at:]
    if _swap(mine, theirs) is not None:
        return True
    for one, other in ((mine, theirs), (theirs, mine)):
        shift = _shift(one, other)
        matched = one[: len(other) - shift][: ALIGNMENT.compared]
        if shift and len(set(matched)) >= ALIGNMENT.shifted:
            return True
    return False


def _without_sites(calls: Sequence[Call]) -> list[Call]:
    return [replace(call, site="") if call.site else call for call in calls]


def _swap(mine: Sequence[Call], theirs: Sequence[Call]) -> tuple[Call, Call] | None:
    """Return two calls that both have made, in different order."""
    for index in range(1, min(len(mine), len(theirs), ALIGNMENT.near)):
        if mine[0] == theirs[index] and theirs[0] == mine[index] and mine[1:index] == theirs[1:index]:
            return theirs[0], mine[0]
    return None


def _shift(one: Sequence[Call], other: Sequence[Call]) -> int:
    """Return the fewest calls of the other sequence that one begins behind; 0 if it begins behind none."""
    head = list(one[: ALIGNMENT.compared])
    for shift in range(1, len(other)):
        ahead = list(other[shift : shift + len(head)])
        if head[: len(ahead)] == ahead:
            return shift
    return 0


def _extra(own: Sequence[Call], theirs: Sequence[Call], at: int) -> int:
    """Return the number of calls that a rank made beside the others'; 0 if these do not follow, or repeat nothing."""
    mine = own[at:]
    if found := _shift(theirs, mine):
        return found
    is_twice = len(mine) <= at and list(mine) == list(own[at - len(mine) : at])
    return len(mine) if is_twice else 0


def _continued(calls: Sequence[Call]) -> list[Call]:
    """Return calls with those that followed the longest stretch of the past that is equal to their end."""
    past = list(calls[-ALIGNMENT.history :])
    last, best, length = len(past) - 1, -1, 0
    for place in range(last - 1, -1, -1):
        same = 0
        while same < min(ALIGNMENT.context, place + 1) and past[place - same] == past[last - same]:
            same += 1
        if same > length or (same == length and same == place + 1):  # the first epoch has no calls before it
            best, length = place, same
        if length == ALIGNMENT.context:
            break
    if best < 0:
        return list(calls)
    cycle = past[best + 1 :]
    return [*calls, *(cycle[index % len(cycle)] for index in range(ALIGNMENT.ahead))]


def _period(calls: Sequence[Call]) -> int:
    """Return the number of calls that the end of a sequence repeats; 0 if it repeats none."""
    past = list(calls[-2 * ALIGNMENT.ahead :])
    for period in range(1, len(past) // 2 + 1):
        if past[-period:] == past[-2 * period : -period]:
            return period
    return 0


def _repetitions(calls: Sequence[Call]) -> int:
    """Return how often a loop that sequences end in has run; 0 if its calls also occur before, in another order."""
    period = _period(calls)
    begin = len(calls) - period
    while period and begin >= period and calls[begin - period : begin] == calls[begin : begin + period]:
        begin -= period
    is_all = period and not set(calls[:begin]) & set(calls[begin:])
    return (len(calls) - begin) // period if is_all else 0


def _early_end(own: Sequence[Call], others: Sequence[Call], at: int) -> Deviation | None:
    """Return that a rank has left its loop: its call follows loops only, or has never been made before."""
    call = own[at]
    ends = [index for index, other in enumerate(others[:at]) if other == call]
    if not ends:
        return Deviation("new call", (call,), steps_done=_repetitions(others[:at])) if call.site else None
    length = ends[-1] - ends[-2] if len(ends) > 1 else ends[-1] + 1
    missing, period = ends[-1] + length - at, _period(others[:at])
    if missing <= 0 or not period:
        return None
    return Deviation("early end", (call,), missing // period if missing % period == 0 else 0)
