"""Admission of connections before authentication: quotas by address, and who loses a place when there is none left."""

from __future__ import annotations

import random
from collections import OrderedDict

_MOST_TRUSTED_ADDRESSES = 1024


class PendingConnections:
    """Connections that have not authenticated yet, bounded so that a flood takes no place from other addresses.

    An address beyond its quota loses its own oldest connection. Beyond the bound for all, the address with the most
    connections loses its oldest one; where each has few, a random one goes, so that a handshake of a few round trips
    has a chance whatever the rate of the flood. Addresses that have authenticated before are chosen last.

    Args:
        most_each: Connections of one address.

    Example:
        >>> pending = PendingConnections(most_each=2, most=4)
        >>> [pending.add(number, "192.0.2.1") for number in range(3)], pending.add(3, "192.0.2.2")
        ([None, None, 0], None)
    """

    def __init__(self, *, most_each: int, most: int, rng: random.Random | None = None) -> None:
        self._most_each = most_each
        self._most = most
        self._rng = rng or random.Random()
        self._addresses: dict[int, str] = {}
        # the connections of each address, oldest first
        self._held: dict[str, dict[int, None]] = {}
        self._trusted: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, number: int, address: str) -> int | None:
        """Note a new connection; return the one that must end for it, if any."""
        self.remove(number)
        self._addresses[number] = address
        held = self._held.setdefault(address, {})
        held[number] = None
        if len(held) > self._most_each:
            return self._end(address)
        if len(self._addresses) > self._most:
            return self._end(self._largest())
        return None

    def remove(self, number: int) -> None:
        address = self._addresses.pop(number, None)
        if address is not None:
            del self._held[address][number]
            if not self._held[address]:
                del self._held[address]

    def trust(self, address: str) -> None:
        """Note that a connection of an address has authenticated; the latest such addresses are kept."""
        self._trusted[address] = None
        self._trusted.move_to_end(address)
        if len(self._trusted) > _MOST_TRUSTED_ADDRESSES:
            self._trusted.popitem(last=False)

    def _largest(self) -> str:
        """Return the address that loses a connection: one of those with the most, trusted ones last."""
        free = [address for address in self._held if address not in self._trusted] or [*self._held]
        most = max(len(self._held[address]) for address in free)
        return self._rng.choice([address for address in free if len(self._held[address]) == most])

    def _end(self, address: str) -> int:
        number = next(iter(self._held[address]))
        self.remove(number)
        return number
