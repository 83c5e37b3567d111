"""A transport for one of several owners: their messages never meet, and each carries a hash of its owner's data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thinwire.transport.base import OWNER_STRIDE, Envelope, Kind, Pending, Received, Transport

_owners: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class OwnedTransport:
    """Numbers the messages of one owner apart from those of all others on the same transport.

    Owners are counted as they come, so all replicas must make theirs in the same order.

    Args:
        inner: The transport that moves the bytes; also one that others use beside this.
        data_hash: Returns a hash that rounds carry to the other replicas, 0 for none.
        on_data_hash: Called with a replica and the hash that one of its rounds carried, from any thread.

    Example:
        >>> from thinwire.transport.loopback import LoopbackWorld
        >>> transport = LoopbackWorld(2).transports[0]
        >>> OwnedTransport(transport).owner, OwnedTransport(transport).owner
        (0, 1)
    """

    def __init__(
        self, inner: Transport, *, data_hash: Callable[[], int] = lambda: 0,
        on_data_hash: Callable[[int, int], None] = lambda replica, found: None,
    ) -> None:  # fmt: skip
        self.inner = inner
        self._data_hash, self._on_data_hash = data_hash, on_data_hash
        innermost: Any = inner
        while hasattr(innermost, "inner"):
            innermost = innermost.inner
        self.owner = _owners.get(innermost, 0)
        _owners[innermost] = self.owner + 1

    @property
    def replica(self) -> int:
        return self.inner.replica

    @property
    def num_replicas(self) -> int:
        return self.inner.num_replicas

    @property
    def runs_in_background(self) -> bool:
        return self.inner.runs_in_background

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        data_hash = self._data_hash() if envelope.kind is Kind.ROUND else 0
        return self.inner.send(payload, to=to, envelope=replace(self._own(envelope), data_hash=data_hash))

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        pending = self.inner.receive(source=source, envelope=self._own(envelope))
        return _Watched(pending, source, self._on_data_hash) if envelope.kind is Kind.ROUND else pending

    def close(self) -> None:
        self.inner.close()

    def _own(self, envelope: Envelope) -> Envelope:
        return replace(envelope, round_id=envelope.round_id + self.owner * OWNER_STRIDE)


class _Watched:
    """A receive that hands on the hash in its message."""

    def __init__(self, inner: Pending, source: int, on_data_hash: Callable[[int, int], None]) -> None:
        self._inner, self._source, self._on_data_hash = inner, source, on_data_hash

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, *, deadline_s: float) -> Received | None:
        received = self._inner.wait(deadline_s=deadline_s)
        if received is not None and received.data_hash:
            self._on_data_hash(self._source, received.data_hash)
        return received
