"""Duration of a message without the others: messages share a host's access link while they overlap.

A message that meets another one takes twice as long on a wire that is as good as ever. So when replicas come to their
rounds in another order, times change without any fault. Of each host's access, the time that a message had it is
divided by how many messages had it then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from thinwire.monitor.detect.timeline import Job, Message

_Access = tuple[str, str]


class _Shares:
    """How many messages cross one access in one direction, over time, as the integral of one over that number."""

    def __init__(self, stretches: Iterable[tuple[float, float]]) -> None:
        steps: dict[float, int] = defaultdict(int)
        for begin_s, end_s in stretches:
            steps[begin_s] += 1
            steps[end_s] -= 1
        self._times: list[float] = sorted(steps)
        self._counts: list[int] = []
        self._sums: list[float] = []
        count, total, last_s = 0, 0.0, 0.0
        for at_s in self._times:
            total += (at_s - last_s) / max(1, count)
            count += steps[at_s]
            self._counts.append(count)
            self._sums.append(total)
            last_s = at_s

    def between(self, begin_s: float, end_s: float) -> float:
        """Return the seconds that one message had the access for itself, counted so, from begin to end."""
        return self._until(end_s) - self._until(begin_s)

    def _until(self, at_s: float) -> float:
        place = bisect_right(self._times, at_s) - 1
        return self._sums[place] + (at_s - self._times[place]) / max(1, self._counts[place])


def alone_s(job: Job, messages: Iterable[Message]) -> dict[int, float]:
    """Return the seconds that each message would have taken alone, by the `id` of the message.

    Only messages whose ends both wrote all their times are there. One that has not come crosses its accesses until now.

    Example:
        >>> job = Job(host_of={0: "a", 1: "b", 2: "c"})
        >>> def sent(to, done_s):
        ...     return Message(0, to, "w", 0, 0, 9, sent_posted_s=0.0, received_posted_s=0.0, received_done_s=done_s)
        >>> both = [sent(1, 2.0), sent(2, 3.0)]
        >>> [alone_s(job, both)[id(message)] for message in both]  # they share what rank 0 can send for 2 s
        [1.0, 2.0]
    """
    own: dict[int, tuple[_Access, _Access, float, float]] = {}
    stretches: dict[_Access, list[tuple[float, float]]] = defaultdict(list)
    for message in messages:
        if (begin_s := message.begin_s) is None:
            continue
        done_s = job.now_s if message.received_done_s is None else message.received_done_s
        end_s = begin_s + max(0.0, done_s - begin_s)
        out, into = ("out", job.host_of[message.source]), ("in", job.host_of[message.destination])
        if message.received_done_s is not None:
            own[id(message)] = out, into, begin_s, end_s
        if out[1] != into[1]:
            stretches[out].append((begin_s, end_s))
            stretches[into].append((begin_s, end_s))
    shares = {access: _Shares(found) for access, found in stretches.items()}
    return {
        number: min(shares[access].between(begin_s, end_s) for access in (out, into))
        if out[1] != into[1]
        else end_s - begin_s
        for number, (out, into, begin_s, end_s) in own.items()
    }
