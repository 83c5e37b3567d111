"""Records of a GPU run: one JSON line a result, written at once, so that a run cut off at any second stays readable."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FILE = "results.jsonl"


def append(folder: Path, line: dict[str, Any]) -> None:
    """Append one line by one write, so that a killed process leaves no half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(line) + "\n").encode()
    file = os.open(folder / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            data = b"\n" + data  # the line before was torn
        os.write(file, data)
    finally:
        os.close(file)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a folder; a torn last line, as a full disk leaves it, counts as not written."""
    path = folder / FILE
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


@dataclass(kw_only=True)
class Part:
    """One part of the run: its options, and the results that it has already.

    Attributes:
        name: Of the part.
        device: What it runs on; `cpu` tries the part without a GPU.
        is_tiny: Whether sizes are those of a test.
        folder: Where results go.
        ends_s: Time of `time.monotonic` at which no new result is begun.
    """

    name: str
    device: torch.device
    is_tiny: bool
    folder: Path
    ends_s: float

    def __post_init__(self) -> None:
        self._done = {
            line["key"]: line for line in read(self.folder) if line.get("part") == self.name and line["state"] == "done"
        }
        self.num_failed = self.num_left = 0

    def measure(
        self, key: str, work: Callable[[], dict[str, Any] | None], *, needs_s: float = 0.0
    ) -> dict[str, Any] | None:
        """Do a piece of work unless its result is stored, and store it; a failure is stored and passed over.

        Args:
            key: Names the result within the part.
            work: Returns the result's numbers, or None where the next call must go on with it.
            needs_s: Seconds that it likely takes: it is left for the next call where fewer are left.

        Returns:
            The line, also one of an earlier call; None where it is left.
        """
        if key in self._done:
            return self._done[key]
        if time.monotonic() + needs_s > self.ends_s:
            self.num_left += 1
            return None
        began_s = time.monotonic()
        line: dict[str, Any] = {"part": self.name, "key": key, "device": self.device.type}
        try:
            found = work()
            if found is None:
                self.num_left += 1
                return None
            line |= {"state": "done", **found}
        except Exception as failure:
            self.num_failed += 1
            line |= {"state": "failed", "error": f"{type(failure).__name__}: {failure}"[:2000]}
            traceback.print_exc()
        line["seconds"] = round(time.monotonic() - began_s, 3)
        append(self.folder, line)
        numbers = {name: value for name, value in line.items() if name not in ("part", "key", "device")}
        print(f"{self.name} {key}: {json.dumps(numbers)}"[:1500], flush=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return line

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any], *, repeats: int = 5, warm_ups: int = 2) -> dict[str, Any]:
        """Return the seconds of some work: median, least and most of the repeats."""
        seconds = []
        for repeat in range(warm_ups + repeats):
            self.wait()
            began_s = time.perf_counter()
            work()
            self.wait()
            if repeat >= warm_ups:
                seconds.append(time.perf_counter() - began_s)
        return spread(seconds)

    @contextmanager
    def peak_bytes(self) -> Iterator[Callable[[], int]]:
        """Yield a function that returns the most device memory that was added since; 0 on a CPU."""
        if self.device.type != "cuda":
            yield lambda: 0
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.max_memory_allocated() - before


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "repeats": len(values)}


def part_from_command_line(name: str, description: str) -> Part:
    """Read the options that every part has."""
    parser = argparse.ArgumentParser(description=description.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=60.0, help="no new result is begun after so many")
    options = parser.parse_args()
    return Part(
        name=name, device=torch.device(options.device), is_tiny=options.tiny, folder=options.out,
        ends_s=time.monotonic() + options.seconds,
    )  # fmt: skip


def finish(part: Part) -> None:
    """Exit: 0 where all is done, 1 where something failed, 3 where something is left for the next call."""
    raise SystemExit(1 if part.num_failed else 3 if part.num_left else 0)
