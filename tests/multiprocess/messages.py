"""Messages that the tests of both real transports send, and what became of them."""

from __future__ import annotations

import time
from typing import Any

import torch

from thinwire.errors import TransportError
from thinwire.transport.base import Envelope, Pending
from thinwire.transport.streams import ROUNDS

SOON_S = 600.0
# Less than a fault costs that goes unseen: the deadlines of these jobs are 50 and 60 s, and some waits have none.
HANGS_S = 30.0


def content(size: int, *, sender: int, round_id: int) -> torch.Tensor:
    """Bytes that tell sender and round apart everywhere, not only at the start."""
    return ((torch.arange(size) * 31 + 97 * sender + 13 * round_id) % 251).to(torch.uint8)


def envelope_of(size: int, round_id: int, *, fragment: int = 0, **more: Any) -> Envelope:
    return Envelope(stream=ROUNDS, key=(round_id, fragment), payload_bytes=size, numel=size, **more)


def failure_of(pending: Pending, *, deadline_s: float = SOON_S) -> list[Any]:
    """Return the error's class and text and the seconds until it came."""
    start = time.monotonic()
    try:
        pending.wait(deadline_s=deadline_s)
    except TransportError as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return ["", "", time.monotonic() - start]
