"""Python calls of one launching step: how many functions of thinwire one `optimizer.step()` enters, and how many files.

One of two replicas of a small network trains by Streaming DiLoCo over the loopback transport. The step
that launches its second round is profiled; a change of file is a call whose function lies in another file of thinwire
than the function that was entered before it.

    python benchmarks/launching_step.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import thinwire
from thinwire.transport.base import Transport

_SOURCE = str(Path(thinwire.__file__).parent)
_INTERVAL = 4


class Calls:
    """Counts calls of functions in thinwire, generator expressions and comprehensions left out."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_SOURCE) and not code.co_name.startswith("<"):
            self.files.append(code.co_filename)

    @property
    def num_changes(self) -> int:
        return sum(one != other for one, other in zip(self.files, self.files[1:], strict=False))


def replica_main(transport: Transport) -> Calls:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    method = thinwire.methods.streaming_diloco(sync_interval=_INTERVAL, overlap_steps=1, num_fragments=1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
    calls = Calls()
    for step in range(1, 2 * _INTERVAL + 1):
        model(torch.full((1, 8), float(transport.replica))).square().mean().backward()
        if step == 2 * _INTERVAL:
            sys.setprofile(calls)
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
    optimizer.close()
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    calls = thinwire.run_replicas(2, replica_main)[0]
    print(json.dumps({"calls": len(calls.files), "files": len(set(calls.files)), "file_changes": calls.num_changes}))


if __name__ == "__main__":
    main()
