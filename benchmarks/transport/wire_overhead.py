"""What authenticated and encrypted messages cost, beside the bytes that the log counts.

    python benchmarks/transport/wire_overhead.py

Two replicas in one process swap messages over the loopback interface. Bytes are those that the kernel says the other
end has acknowledged (TCP's payload, without its own headers), per message and direction; receipts and requests go the
other way and are counted there, where as many are sent. Heartbeats are measured while nothing else is sent.
"""

from __future__ import annotations

import time

import torch

from thinwire.transport.addresses import Address
from thinwire.transport.base import Envelope
from thinwire.transport.message import HEADER_BYTES
from thinwire.transport.secret import Secret
from thinwire.transport.streams import ROUNDS
from thinwire.transport.wire.wire_transport import WireTransport

SIZES = (0, 1_000, 65_480, 65_481, 1_000_000, 20_000_000)
DEADLINE_S = 60.0


def swap(pair: list[WireTransport], size: int, number: int) -> None:
    envelope = Envelope(stream=ROUNDS, key=(number,), payload_bytes=size)
    receives = [pair[me].receive(source=1 - me, envelope=envelope) for me in range(2)]
    sends = [pair[me].send(torch.zeros(size, dtype=torch.uint8), to=1 - me, envelope=envelope) for me in range(2)]
    for pending in (*receives, *sends):
        pending.wait(deadline_s=DEADLINE_S)


def sent_bytes(pair: list[WireTransport]) -> int:
    time.sleep(0.2)  # until all is acknowledged
    reading = pair[0].reading(1)
    assert reading is not None
    return reading.sent_bytes


def main() -> None:
    pair = [
        WireTransport(replica=replica, num_replicas=2, secret=Secret(key=bytes(32)), address="127.0.0.1")
        for replica in range(2)
    ]
    pair[1].dial({0: Address(host="127.0.0.1", port=pair[0].port)}, deadline_s=DEADLINE_S)
    print(f"joining: {sent_bytes(pair)} bytes from the one that is dialled")
    before = sent_bytes(pair)
    time.sleep(10)
    beats = (sent_bytes(pair) - before) / 10.2
    print(f"silence: {beats:.0f} bytes/s each way")
    print("| payload | counted | crossed the socket | more |\n| --- | --- | --- | --- |")
    number = 0
    for size in SIZES:
        rounds = 20 if size < 1_000_000 else 3
        before, start = sent_bytes(pair), time.monotonic()
        for _ in range(rounds):
            number += 1
            swap(pair, size, number)
        crossed = (sent_bytes(pair) - before - beats * (time.monotonic() - start)) / rounds
        counted = size + HEADER_BYTES
        print(f"| {size:,} | {counted:,} | {crossed:,.0f} | {crossed - counted:,.0f} ({crossed / counted - 1:.2%}) |")
    for transport in pair:
        transport.close()


if __name__ == "__main__":
    main()
