"""One replica of a job of torchft's: a small all-reduce a step, and a line of JSON for all that happens.

Time-outs are torchft's own defaults, 60 s, unless LIMIT_S says otherwise for all of them. `use_async_quorum` is off, as
torchft's DiLoCo demands.

python torchft_replica.py REPLICA LIGHTHOUSE_URL ADDRESS MIN_REPLICAS STATE_BYTES FIRST_STEP GO_FILE [LIMIT_S]

The first step waits for GO_FILE.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

STEP_S = 0.1
NUMBERS = 1_000


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"at_s": time.monotonic(), "event": event, **fields}), flush=True)


class Replica:
    """Its state is a count of committed steps, and ballast of a known size."""

    def __init__(
        self, name: str, *, lighthouse: str, address: str, min_replicas: int, state_bytes: int, limit_s: int
    ) -> None:
        limit = timedelta(seconds=limit_s)
        torch.manual_seed(0)
        self.state = {"total": torch.zeros(1), "ballast": torch.rand(state_bytes // 4)}
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=limit), timeout=limit, quorum_timeout=limit, connect_timeout=limit,
            load_state_dict=self._load, state_dict=lambda: self.state,
            min_replica_size=min_replicas, use_async_quorum=False, rank=0, world_size=1, store_addr=address,
            store_port=self._store.port, lighthouse_addr=lighthouse, hostname=address, replica_id=name,
            init_sync=False,  # all start from the same seed
        )  # fmt: skip

    def _load(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state
        tell("loaded", total=float(state["total"]))

    def step(self) -> None:
        began_s = time.monotonic()
        self.manager.start_quorum()
        quorum_s = time.monotonic() - began_s
        time.sleep(STEP_S)
        gradient = torch.ones(NUMBERS)
        self.manager.allreduce(gradient).wait()
        is_committed = self.manager.should_commit()
        if is_committed:
            self.state["total"] += gradient[0]
        error = self.manager.errored()
        tell(
            "step", ok=is_committed, step=self.manager.current_step(), participants=self.manager.num_participants(),
            quorum_s=quorum_s, took_s=time.monotonic() - began_s, total=float(self.state["total"]),
            error=None if error is None else _short(error.original_exception),
        )  # fmt: skip


def _short(error: Exception) -> str:
    text = str(error)  # gloo begins with the place in its source
    return (text.partition("] ")[2] if text.startswith("[") else text)[:160]


def main(words: list[str]) -> None:
    tell("imported")
    first_step, go = int(words[5]), Path(words[6])
    replica = Replica(
        words[0], lighthouse=words[1], address=words[2], min_replicas=int(words[3]), state_bytes=int(words[4]),
        limit_s=int(words[7]) if len(words) > 7 else 60,
    )  # fmt: skip
    if first_step:
        replica.manager.load_state_dict({"step": first_step, "batches_committed": first_step})
        replica.state["total"] = torch.tensor([-1e6])
    tell("joined")
    while not go.exists():
        time.sleep(0.01)
    while True:
        try:
            replica.step()
        except Exception as error:
            tell("raised", error=f"{type(error).__name__}: {str(error)[:300]}")
            raise


if __name__ == "__main__":
    main(sys.argv[1:])
