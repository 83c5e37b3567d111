"""Requests and bytes of stores: an hourly budget, list prices, and what the rounds of a run cost."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from thinwire.errors import refusal
from thinwire.units import format_bytes

_HOUR_S = 3600.0
# Requests beyond the even pace that may go at once, as a share of the hour's.
BURST = 0.05


class RequestBudget:
    """An hourly budget of requests, spent at an even pace; pure, time comes in as a number. Thread-safe.

    Polls wait until the pace has caught up. Other requests wait only when they are `BURST` of the hour ahead of it, so
    that no hour has more than the budget and `BURST` of it.

    Raises:
        ValueError: The budget is not positive.

    Example:
        >>> budget = RequestBudget(3600)  # 180 may go at once
        >>> [budget.take(now_s=0.0) for _ in range(181)][-1], budget.poll_wait_s(now_s=0.0)
        (1.0, 181.0)
    """

    def __init__(self, per_hour: float) -> None:
        if not per_hour > 0:
            raise refusal("the budget of requests is too small", got=per_hour, allowed="above 0 an hour",
                          remedy="3600")  # fmt: skip
        self._interval_s = _HOUR_S / per_hour
        self._ahead_s = max(BURST * _HOUR_S, self._interval_s)
        self._lock = threading.Lock()
        self._due_s = -math.inf  # when the pace has caught up with the requests so far

    def take(self, *, now_s: float) -> float:
        """Count a request, and return the seconds that it must wait."""
        with self._lock:
            self._due_s = max(self._due_s, now_s) + self._interval_s
            return max(0.0, self._due_s - now_s - self._ahead_s)

    def poll_wait_s(self, *, now_s: float) -> float:
        """Return the seconds until the next poll is within the pace."""
        with self._lock:
            return max(0.0, self._due_s - now_s)


# Larger payloads are cut into parts, each a blob of its own, and an index: what fails is sent again in such pieces.
PART_BYTES = 8 * 2**20
# Looks for a blob that is not there yet, of a member in a phase: polls double their pauses.
POLLS_A_PHASE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePrices:
    """List prices of a store, in USD; recalled, so check them against the provider's page.

    Attributes:
        name: The provider.
        put: Of a million writes or listings.
        get: Of a million reads.
        egress: Of a gigabyte that leaves the store.
    """

    name: str
    put: float = 0.0
    get: float = 0.0
    egress: float = 0.0


# By scheme; R2 and others speak S3 too, and charge other prices. Recalled on 2026-11-28.
PRICES = {
    "s3": StorePrices(name="S3", put=5.0, get=0.4, egress=0.09),
    "r2": StorePrices(name="R2", put=4.5, get=0.36, egress=0.0),
    "gs": StorePrices(name="GCS", put=5.0, get=0.4, egress=0.12),
    "az": StorePrices(name="Azure", put=5.0, get=0.4, egress=0.087),
    "file": StorePrices(name="a folder"),
    "memory": StorePrices(name="memory"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """Requests and bytes of all members in one round through a store.

    Example:
        >>> naive = round_cost("all-gather", members=8, payload_bytes=1e6)
        >>> naive.puts, naive.gets, naive.egress_bytes == 56e6
        (8, 56, True)
    """

    topology: str
    puts: int
    gets: int
    polls: int
    egress_bytes: float

    def usd(self, prices: StorePrices) -> float:
        requests_usd = (self.puts * prices.put + (self.gets + self.polls) * prices.get) / 1e6
        return requests_usd + self.egress_bytes / 1e9 * prices.egress

    def describe(self, prices: StorePrices, *, rounds_per_hour: float) -> str:
        """Return the cost of an hour and a day as a line."""
        hour_usd = self.usd(prices) * rounds_per_hour
        puts, reads, polls = (count * rounds_per_hour for count in (self.puts, self.gets, self.polls))
        egress = format_bytes(self.egress_bytes * rounds_per_hour)
        return (
            f"{self.topology}: {puts:,.0f} PUT, {reads:,.0f} GET and {polls:,.0f} polls an hour, {egress} read; "
            f"{hour_usd:.4g} USD an hour, {24 * hour_usd:.4g} USD a day"
        )


def round_cost(topology: str, *, members: int, payload_bytes: float) -> RoundCost:
    """Return what a round of "all-gather" or "two-phase" costs; without failures and late members."""
    others = members - 1
    if topology == "all-gather":
        blobs = _blobs(payload_bytes)
        return RoundCost(
            topology=topology, puts=members * blobs, gets=members * others * blobs, polls=members * POLLS_A_PHASE,
            egress_bytes=members * others * payload_bytes,
        )  # fmt: skip
    blobs = _blobs(payload_bytes / members)
    return RoundCost(
        topology=topology, puts=members * members * blobs, gets=2 * members * others * blobs,
        polls=2 * members * POLLS_A_PHASE, egress_bytes=2 * others * payload_bytes,
    )  # fmt: skip


def _blobs(payload_bytes: float) -> int:
    return 1 if payload_bytes <= PART_BYTES else math.ceil(payload_bytes / PART_BYTES) + 1
