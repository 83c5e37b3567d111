"""From what NCCL's own tools tell to findings: times of its Inspector, and states of its RAS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from thinwire.monitor.findings import Finding
from thinwire.monitor.nccl.progress import short_hash
from thinwire.monitor.nccl.series import numbers_of, series_of
from thinwire.monitor.nccl.silent import find_gaps
from thinwire.monitor.nccl.slow import find_slow_collectives, find_slow_messages
from thinwire.monitor.nccl.states import find_in_snapshots
from thinwire.monitor.nccl.stragglers import find_late
from thinwire.monitor.nccl.values import NcclRecords


def find_in_nccl(records: NcclRecords, *, trust: float = 1.0) -> list[Finding]:
    """Return what NCCL's own tools show to be wrong.

    Args:
        records: Of all ranks and of all times there are any of.
        trust: Part of the lines that could be used, in [0, 1].

    Example:
        >>> find_in_nccl(NcclRecords())
        []
    """
    states = find_in_snapshots(records.snapshots, trust=trust)
    if not records.timings:
        return states
    timings = records.timings
    series, numbers = series_of(timings), numbers_of(timings)
    gone = {rank for one in states for rank in one.evidence.get("ranks", ())}
    # whose process RAS cannot reach, or who hangs, writes no file any more: that is told already
    gaps = [one for one in find_gaps(series, numbers, trust=trust) if not _ranks_of(one) or not _ranks_of(one) <= gone]
    return [
        *_with_hosts(states, records),
        *find_slow_messages(timings, numbers, trust=trust),
        *find_slow_collectives(series, numbers, trust=trust),
        *find_late(series, numbers, trust=trust),
        *gaps,
    ]


def _ranks_of(finding: Finding) -> set[int]:
    return set(finding.evidence.get("ranks", ()))


def _with_hosts(findings: list[Finding], records: NcclRecords) -> Iterator[Finding]:
    """Yield findings of RAS, which knows addresses only, with the hosts' names that the Inspector writes."""
    name_of = {(one.communicator, one.rank): one.host for one in records.timings}
    pairs = {
        (member.host, name_of[short_hash(one.communicator), rank])
        for snapshot in records.snapshots
        for one in snapshot.communicators
        for rank, member in one.members.items()
        if member.host and (short_hash(one.communicator), rank) in name_of
    }
    for finding in findings:
        said = f"{finding.where} {finding.evidence}"
        named = [f"{address} is {name}" for address, name in sorted(pairs) if address in said]
        yield replace(finding, evidence={**finding.evidence, "hosts": named[:16]}) if named else finding
