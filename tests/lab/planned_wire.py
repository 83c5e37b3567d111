"""A rank that keeps messages in flight to all ranks of other leaves, over thinwire's own wire.

`python planned_wire.py SECRET ROUNDS [PLAN]` prints one JSON object: whether every round of each peer arrived whole,
and the share and bytes of each path.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from pathlib import Path

import torch

from thinwire.transport.base import Envelope, Pending
from thinwire.transport.connect import connect
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.streams import ROUNDS

NUM_BYTES, IN_FLIGHT, LAST_S = 200_000, 4, 60.0
PORT_RANGE = "29600-29600"


def content(sender: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * sender + number % 7)
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator)


def envelope(number: int) -> Envelope:
    return Envelope(stream=ROUNDS, key=(number,), payload_bytes=NUM_BYTES)


def exchange(transport: RecordingTransport, peer: int, num_rounds: int, found: dict[str, object]) -> None:
    """Send and receive so many rounds of one peer, some of them in flight at any time."""
    own = [content(transport.replica, number) for number in range(7)]
    others = [content(peer, number) for number in range(7)]
    pending: deque[tuple[int, Pending, Pending]] = deque()
    is_right = True
    for number in range(num_rounds + IN_FLIGHT):
        if number < num_rounds:
            receive = transport.receive(source=peer, envelope=envelope(number))
            pending.append((number, receive, transport.send(own[number % 7], to=peer, envelope=envelope(number))))
        if number >= IN_FLIGHT:
            first, receive, send = pending.popleft()
            message = receive.wait(deadline_s=LAST_S)
            send.wait(deadline_s=LAST_S)
            is_right &= message is not None and torch.equal(message.payload, others[first % 7])
    found[str(peer)] = is_right


def main() -> None:
    secret, num_rounds, *plan = sys.argv[1:]
    transport = connect(
        secret=Path(secret), traffic_plan=Path(plan[0]) if plan else None, port_range=PORT_RANGE, deadline_s=60
    )
    half = transport.num_replicas // 2
    peers = [peer for peer in range(transport.num_replicas) if (peer < half) != (transport.replica < half)]
    found: dict[str, object] = {}
    threads = [threading.Thread(target=exchange, args=(transport, peer, int(num_rounds), found)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wire = transport.inner
    paths = {str(peer): [(one.share, one.sent_bytes) for one in wire.paths(peer)] for peer in peers}
    print(json.dumps({"peers": found, "paths": paths}), flush=True)
    transport.close()


if __name__ == "__main__":
    main()
