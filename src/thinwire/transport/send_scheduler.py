"""Send scheduler of a blob store: bulk answers yield to all others, but never starve."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from thinwire.transport.wire.receive_window import Window

# Of bulk on its way at a time: on a thin wire the least, on a far one as many as make it come faster.
LEAST_BULK, MOST_BULK = 2, 8
# How long bulk may be held back by others.
LONGEST_HOLD_S = 1.0
# An answer that takes longer goes on, but a replica that does not take it keeps nobody else from theirs.
LONGEST_PLACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An ask that a library answers.

    Attributes:
        peer: Who asked.
        number: Of the ask.
        name: What for.
    """

    peer: int
    number: int
    name: bytes = field(compare=False)


class Lanes:
    """The answers that are on their way, and the bulk that waits; replicas take turns.

    A bulk answer begins while fewer of them than a window are on their way, and no other answer; where others are, one
    at a time begins all the same after `LONGEST_HOLD_S` in which no bulk was on its way.

    Example:
        >>> lanes = Lanes()
        >>> lanes.begin_other()
        >>> lanes.add(Order(peer=3, number=0, name=b"state/0"), now_s=0.0)
        >>> lanes.next_bulk(now_s=0.5), lanes.due_s()
        (None, 1.0)
        >>> lanes.end_other()
        >>> lanes.next_bulk(now_s=0.5).name
        b'state/0'
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Order]] = {}
        self._began_s: dict[Order, float] = {}
        self._window = Window(least=LEAST_BULK, most=MOST_BULK)  # it counts answers here
        self._others = 0
        self._held_since_s = 0.0

    @property
    def num_waiting(self) -> int:
        """How many bulk answers wait."""
        return sum(len(orders) for orders in self._waiting.values())

    def add(self, order: Order, *, now_s: float) -> None:
        """Have a bulk answer wait for its turn.

        Args:
            order: The ask.
            now_s: Seconds that only grow.
        """
        if not self._waiting and not self._began_s:
            self._held_since_s = now_s
        self._waiting.setdefault(order.peer, deque()).append(order)

    def begin_other(self) -> None:
        """Count an answer that is not bulk and on its way."""
        self._others += 1

    def end_other(self) -> None:
        """Count it no longer."""
        self._others -= 1

    def next_bulk(self, *, now_s: float) -> Order | None:
        """Return the bulk answer that may begin now, and count it as on its way; None where none may."""
        due_s = self.due_s(now_s=now_s)
        if due_s is None or due_s > now_s:
            return None
        peer = next(iter(self._waiting))
        orders = self._waiting.pop(peer)
        order = orders.popleft()
        if orders:
            self._waiting[peer] = orders  # behind the others
        self._began_s[order] = now_s
        return order

    def end_bulk(self, order: Order, *, now_s: float) -> None:
        """Count a bulk answer no longer."""
        del self._began_s[order]
        self._held_since_s = now_s
        if self._others or not self._waiting:
            self._window.pause()  # what it would measure is not the wire
        else:
            self._window.observe(1, now_s=now_s)

    def drop(self, order: Order) -> bool:
        """Forget a bulk answer that waits; tell whether there was one."""
        orders = self._waiting.get(order.peer)
        if orders is None or order not in orders:
            return False
        orders.remove(order)
        if not orders:
            del self._waiting[order.peer]
        return True

    def drop_all_of(self, peer: int) -> None:
        """Forget what waits for a replica."""
        self._waiting.pop(peer, None)

    def due_s(self, *, now_s: float = 0.0) -> float | None:
        """Return from when on a bulk answer may begin if nothing else happens, None where none waits."""
        if not self._waiting:
            return None
        places_s = sorted(began_s + LONGEST_PLACE_S for began_s in self._began_s.values())
        current_s = [place_s for place_s in places_s if place_s > now_s]
        allowed = 1 if self._others else self._window.num_bytes
        if len(current_s) >= allowed:
            return current_s[len(current_s) - allowed]
        if self._others:
            return self._held_since_s + LONGEST_HOLD_S
        return now_s
