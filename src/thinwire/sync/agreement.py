"""Whether the replicas hold the same global parameters: their hashes travel with the rounds."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.errors import DesyncError
from thinwire.sync.schedule import Round


def check_agreement(hashes: Mapping[int, int], *, round: Round) -> None:
    """Hold the replicas' hashes of their global values against each other.

    Raises:
        DesyncError: They differ; names the replicas that are not with the majority, or all where there is none.
    """
    counts: dict[int, list[int]] = {}
    for replica, value in hashes.items():
        counts.setdefault(value, []).append(replica)
    if len(counts) <= 1:
        return
    largest = max(counts.values(), key=len)
    odd = sorted(set(hashes) - set(largest))
    if 2 * len(largest) <= len(hashes):
        odd = sorted(hashes)
    names = ", ".join(str(replica) for replica in odd)
    who = f"replica {names} disagrees with the others" if len(odd) == 1 else f"replicas {names} disagree"
    raise DesyncError(
        f"{who} about the global parameters of fragment {round.fragment}, or what is remembered of them, in round "
        f"{round.id}; something changed them outside the optimizer, a replica went on after a failed round, or the "
        f"hosts run different code; resume from a checkpoint before that"
    )
