"""Incremental state of the detectors for a running job: each update costs only the new records."""

from __future__ import annotations

import math
from dataclasses import replace
from heapq import nlargest

from thinwire.monitor.detect.link_history import LinkHistory, LinkTimes, link_times
from thinwire.monitor.detect.timeline import Job, Message
from thinwire.monitor.detect.work_history import WorkHistory, WorkTimes, work_times

# Rounds and steps whose numbers are so far behind are those of a job that began anew.
_AGAIN = 64
_LATEST = 32
# Jobs with fewer records or rounds are judged from nothing: clocks are known the better the more messages there are.
_LEAST_RECORDS, _LEAST_ROUNDS = 2000, 8
# With so many records they are not.
_MOST_RECORDS = 10_000


class History:
    """Remembers what was recorded of a job's links and work.

    Jobs whose messages or work cannot be numbered throughout (several communicators with messages; no spans of work,
    as with plain calls of torch) are judged by what is kept of their records alone, and so are those that have just
    begun.
    """

    def __init__(self) -> None:
        self._links, self._work = LinkHistory(), WorkHistory()
        self._is_remembered = False
        self._since_s = -math.inf

    def take(self, job: Job) -> tuple[LinkTimes, WorkTimes]:
        """Take in what is new, and return all that is known of who takes part.

        Args:
            job: What was recorded lately.
        """
        job = self._of_now(job)
        anew_s = self._anew_s(job) if self._is_remembered else None
        if anew_s is not None:
            self._links, self._work, self._is_remembered = LinkHistory(), WorkHistory(), False
            self._since_s = anew_s
            job = self._of_now(job)
        self._is_remembered = self._is_remembered or _is_worth_it(job)
        if not self._is_remembered:
            return link_times(job), work_times(job)
        is_one = len({message.communicator for message in job.messages}) == 1
        has_spans = any(span.kind == "compute" for span in job.spans)
        return (
            self._links.take(job, settled_s=settled_s(job)) if is_one else link_times(job),
            self._work.take(job, is_all=False) if has_spans else work_times(job),
        )

    def _of_now(self, job: Job) -> Job:
        """Return a job without what was recorded before it began anew."""
        if self._since_s == -math.inf:
            return job
        messages = [message for message in job.messages if _done_s(message) >= self._since_s]
        return replace(job, messages=messages, spans=[span for span in job.spans if span.done_s >= self._since_s])

    def _anew_s(self, job: Job) -> float | None:
        """Return since when all is far behind what was seen before, if it is."""
        rounds = ((one.received_done_s, one.operation) for one in job.messages if one.received_done_s is not None)
        steps = ((span.done_s, span.step) for span in job.spans if span.kind == "compute")
        for done, newest in ((rounds, self._links.newest), (steps, self._work.newest)):
            latest = nlargest(_LATEST, done)
            if latest and max(number for _, number in latest) < newest - _AGAIN:
                return latest[-1][0]
        return None


def _is_worth_it(job: Job) -> bool:
    count = len(job.messages) + len(job.spans)
    if count < _LEAST_RECORDS:
        return False
    return count >= _MOST_RECORDS or len({message.operation for message in job.messages}) >= _LEAST_ROUNDS


def settled_s(job: Job) -> float:
    """Return until when all ranks have written that are not silent."""
    seen = [
        seen_s
        for rank, seen_s in job.last_seen_s.items()
        if rank not in job.unsteady and job.now_s - seen_s <= job.silence_s(rank)
    ]
    return min(seen, default=job.now_s)


def _done_s(message: Message) -> float:
    return math.inf if message.received_done_s is None else message.received_done_s
