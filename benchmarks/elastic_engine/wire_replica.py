"""One replica that swaps small messages with each other one over the authenticated wire, a line of JSON for each.

python wire_replica.py SECRET
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch

import thinwire
from thinwire.errors import ThinwireError
from thinwire.transport.base import Envelope
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.streams import ROUNDS

SIZE = 4_000
PAUSE_S = 0.1
DEADLINE_S = 120.0
_line = threading.Lock()


def swap_with(peer: int, transport: RecordingTransport) -> None:
    """Swap until it fails; each peer has a thread, so none waits for another."""
    payload = torch.zeros(SIZE, dtype=torch.uint8)
    for number in range(1_000_000):
        envelope, error = Envelope(stream=ROUNDS, key=(number,), payload_bytes=SIZE), ""
        try:
            receive = transport.receive(source=peer, envelope=envelope)
            transport.send(payload, to=peer, envelope=envelope).wait(deadline_s=DEADLINE_S)
            receive.wait(deadline_s=DEADLINE_S)
        except (ThinwireError, TimeoutError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        line = json.dumps({"at_s": time.monotonic(), "peer": peer, "error": error})
        with _line:
            print(line, flush=True)
        if error:
            return
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    joined = thinwire.connect(secret=Path(sys.argv[1]))
    for other in range(joined.num_replicas):
        if other != joined.replica:
            threading.Thread(target=swap_with, args=(other, joined), daemon=True).start()
    time.sleep(600)
