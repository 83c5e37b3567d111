"""A transport for one of several owners, whose messages never meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thinwire.transport.base import Envelope, Pending, Transport, TransportWrapper, innermost

_owners: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class OwnedTransport(TransportWrapper):
    """Addresses the messages of one owner apart from those of all others on the same transport.

    Owners are counted as they come, so all replicas must make theirs in the same order.

    Args:
        inner: The transport that moves the bytes; also one that others use beside this.

    Example:
        >>> from thinwire.transport.loopback import LoopbackWorld
        >>> transport = LoopbackWorld(2).transports[0]
        >>> OwnedTransport(transport).owner, OwnedTransport(transport).owner
        (0, 1)
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        shared = innermost(inner)
        self.owner = _owners.get(shared, 0)
        _owners[shared] = self.owner + 1

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        return self.inner.send(payload, to=to, envelope=replace(envelope, owner=self.owner))

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        return self.inner.receive(source=source, envelope=replace(envelope, owner=self.owner))
