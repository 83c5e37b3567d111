"""Exchanges large messages with the other host, both ways at once; the second host comes late, or they are spread.

Fails where the rest of a message was handed to gloo before the rest of the other host's was asked for, and where the
kernel does not tell what has come over gloo's connections, also in the middle of a message.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import thinwire
from thinwire.transport import process_group
from thinwire.transport.base import Envelope
from thinwire.transport.streams import ROUNDS

num_bytes, late_s, spread_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
transport = thinwire.connect()
posted: list[tuple[str, int]] = []


class Noting:
    """A group that notes what is posted to it."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, parts: list[torch.Tensor], to: int, tag: int) -> Any:
        posted.append(("send", tag))
        return self._group.send(parts, to, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def recv(self, parts: list[torch.Tensor], source: int, tag: int) -> Any:
        posted.append(("recv", tag))
        return self._group.recv(parts, source, tag)


gloo: Any = transport
while hasattr(gloo, "inner"):  # what records is around it
    gloo = gloo.inner
gloo._group = Noting(gloo._group)
peer = 1 - transport.replica
seen: list[int] = []


def look() -> None:
    reading = transport.reading(peer)
    seen.extend([] if reading is None else [reading.received_bytes])


def look_again(until: Callable[[], bool]) -> None:
    while not until():
        look()
        time.sleep(0.02)


def exchange(number: int, num_bytes: int, look_until: Callable[[Callable[[], bool]], None]) -> Envelope:
    envelope = Envelope(stream=ROUNDS, key=(number,), payload_bytes=num_bytes, spread_s=spread_s)
    receive = transport.receive(source=peer, envelope=envelope)
    send = transport.send(torch.full((num_bytes,), peer, dtype=torch.uint8), to=peer, envelope=envelope)
    look_until(receive.done)
    received = receive.wait(deadline_s=30)
    send.wait(deadline_s=30)
    assert received is not None and bool((received.payload == transport.replica).all())
    return envelope


for number in range(3):
    time.sleep(0.3 + late_s * transport.replica)
    envelope = exchange(number, num_bytes, look_again)
    tag = process_group.tag_of(envelope, rest=True)
    of_the_rest = [name for name, where in posted if where == tag]
    parts = len(of_the_rest) // 2
    assert parts > 1 and of_the_rest == ["recv"] * parts + ["send"] * parts, of_the_rest
    look()
# until this has come, the other host has closed none of its connections that were looked at
exchange(3, 1, lambda done: None)
assert seen == sorted(seen) and seen[-1] >= 3 * num_bytes, (len(seen), seen[-3:])
in_the_middle = {count // (num_bytes // 4) for count in seen}
assert num_bytes > 1_000_000 or len(in_the_middle) > 6, in_the_middle  # on a thin wire not only whole messages
transport.close()
