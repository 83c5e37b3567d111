"""Exchanges large messages with the other host, both ways at once; the second host comes late, or they are spread."""

from __future__ import annotations

import sys
import time

import torch

import thinwire
from thinwire.transport.base import Envelope, Kind

num_bytes, late_s, spread_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
transport = thinwire.connect()
peer = 1 - transport.replica
for number in range(3):
    time.sleep(0.3 + late_s * transport.replica)
    envelope = Envelope(kind=Kind.ROUND, round_id=number, payload_bytes=num_bytes, spread_s=spread_s)
    receive = transport.receive(source=peer, envelope=envelope)
    send = transport.send(torch.full((num_bytes,), peer, dtype=torch.uint8), to=peer, envelope=envelope)
    received = receive.wait(deadline_s=30)
    send.wait(deadline_s=30)
    assert received is not None and bool((received.payload == transport.replica).all())
transport.close()
