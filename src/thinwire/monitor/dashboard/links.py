"""Bytes and rates of each link, from what the replicas wrote of their transfers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RECENT_S = 10.0
_MOST_RECENT = 2000
_MOST_LINKS = 4096
_MOST_SHOWN = 200
Cell = tuple[int, int]


@dataclass(slots=True)
class _Traffic:
    """One direction between two replicas, as one of them tells it."""

    num_bytes: int = 0
    messages: int = 0
    failed: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MOST_RECENT))


class LinkTotals:
    """Sums over all transfers that one replica wrote, by (from, to).

    Args:
        rank: Who wrote.

    Attributes:
        latest_s: The latest time of all, on this replica's clock.
        earliest_s: The earliest.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.restart()

    def restart(self) -> None:
        """Forget all transfers."""
        self._links: dict[Cell, _Traffic] = defaultdict(_Traffic)
        self.latest_s = 0.0
        self.earliest_s = 0.0

    def add(self, *, peer: int, is_sent: bool, num_bytes: int, done_s: float, failed: bool) -> None:
        """Count one transfer.

        Raises:
            ValueError: More links than any replica has.
        """
        cell = (self.rank, peer) if is_sent else (peer, self.rank)
        if cell not in self._links and len(self._links) >= _MOST_LINKS:
            raise ValueError(f"more than {_MOST_LINKS} links of one replica")
        link = self._links[cell]
        self.earliest_s = done_s if not self.latest_s else min(self.earliest_s, done_s)
        self.latest_s = max(self.latest_s, done_s)
        if failed:
            link.failed += 1
            return
        link.messages += 1
        link.num_bytes += num_bytes
        link.recent.append((done_s, num_bytes))

    def told(self) -> dict[Cell, dict[str, Any]]:
        """Return each link's sums and its rates: over all, and over the latest seconds of this replica's clock."""
        whole_s = max(self.latest_s - self.earliest_s, 1e-3)
        recent_s = min(RECENT_S, whole_s)
        found = {}
        for cell, link in self._links.items():
            recent = sum(size for at_s, size in link.recent if at_s > self.latest_s - recent_s)
            found[cell] = {
                "from": cell[0], "to": cell[1], "bytes": link.num_bytes, "messages": link.messages,
                "failed": link.failed, "mean_bits_per_s": round(8 * link.num_bytes / whole_s, 1),
                "now_bits_per_s": round(8 * recent / recent_s, 1),
            }  # fmt: skip
        return found


def links_told(totals: Mapping[int, LinkTotals]) -> dict[str, Any]:
    """Join what all replicas tell: the sender's word on a link, the receiver's where the sender's is not there."""
    joined: dict[Cell, dict[str, Any]] = {}
    for rank, own in sorted(totals.items()):
        for cell, told in own.told().items():
            if cell[0] == rank or cell not in joined:
                joined[cell] = {**told, "told_by": rank}
    busiest = sorted(joined.values(), key=lambda link: -link["bytes"])
    shown = sorted(busiest[:_MOST_SHOWN], key=lambda link: (link["from"], link["to"]))
    return {"links": shown, "num_left_out": len(busiest) - len(shown), "recent_s": RECENT_S}
