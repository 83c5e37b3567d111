"""How long two replicas take to swap messages, both ways at once, over gloo or with a secret.

thinwire lab --hosts 2 --rate 5mbit --latency 20ms -- python benchmarks/transport/swap.py 1000000 3
thinwire lab --hosts 2 --rate 5mbit --latency 20ms -- python benchmarks/transport/swap.py 1000000 3 job.secret
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import thinwire
from thinwire.transport.base import Envelope
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.streams import ROUNDS

DEADLINE_S = 200.0


def swap(transport: RecordingTransport, size: int, number: int) -> None:
    peer, envelope = 1 - transport.replica, Envelope(stream=ROUNDS, key=(number,), payload_bytes=size)
    receive = transport.receive(source=peer, envelope=envelope)
    send = transport.send(torch.zeros(size, dtype=torch.uint8), to=peer, envelope=envelope)
    receive.wait(deadline_s=DEADLINE_S)
    send.wait(deadline_s=DEADLINE_S)


def main(size: int, rounds: int, secret: Path | None) -> None:
    transport = thinwire.connect(secret=secret)
    swap(transport, 1, 0)
    began_s, cpu_s = time.monotonic(), time.process_time()
    for number in range(1, rounds + 1):
        swap(transport, size, number)
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    swap(transport, 1, rounds + 1)
    transport.close()
    print(f"{'with a secret' if secret else 'gloo'}: {took_s / rounds:.3f} s a round, {cpu_s / rounds:.3f} s of CPU")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
