"""Exchanges large messages with the other host over authenticated connections, both ways at once.

Prints the seconds of the fastest round.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import thinwire
from thinwire.transport.base import Envelope
from thinwire.transport.streams import ROUNDS

num_bytes, rounds, secret = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
transport = thinwire.connect(secret=secret)
peer, took_s = 1 - transport.replica, []
for number in range(rounds):
    start = time.monotonic()
    envelope = Envelope(stream=ROUNDS, key=(number,), payload_bytes=num_bytes)
    receive = transport.receive(source=peer, envelope=envelope)
    send = transport.send(torch.full((num_bytes,), peer, dtype=torch.uint8), to=peer, envelope=envelope)
    received = receive.wait(deadline_s=60)
    send.wait(deadline_s=60)
    assert received is not None and bool((received.payload == transport.replica).all())
    took_s.append(time.monotonic() - start)
transport.close()
print(min(took_s))
