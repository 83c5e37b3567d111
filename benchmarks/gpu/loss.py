"""Rung G1 of the quality ladder (14M parameters) on one GPU: data-parallel training and IsoLoCo at equal tokens.

The rung wants 277 million tokens, each read once. The text is what lies on the machine: Python sources, headers and
documentation. Where it holds fewer tokens, or the time is short, the runs are shorter: each line says how many steps it
had, and `share` which part of the rung that is. Each side has one learning rate, so nothing is tuned.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from records import Part, finish, part_from_command_line

sys.path.insert(0, str(Path(__file__).parents[1] / "quality"))

import rungs
import train

from thinwire.data import open_corpus

ENTRIES = (("data-parallel", 1, 1.6e-2), ("iso-loco", 2, 8e-3))
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".c", ".cpp", ".cu"}
MOST_BYTES = 1_200_000_000
# Steps of a run have a warm-up and a cosine of their own, so a run that is cut off says nothing: it must be planned.
PROBE_STEPS = 60


def texts() -> Iterator[str]:
    """Return the different texts of this machine, up to `MOST_BYTES`."""
    seen: set[int] = set()
    total = 0
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/include", "/usr/share", "/opt"):
        for place, names, files in os.walk(root):
            names.sort()
            for path in (Path(place, name) for name in sorted(files)):
                if path.suffix not in SUFFIXES or path.is_symlink() or not path.is_file():
                    continue
                data = path.read_bytes()
                key = hash(data)
                if key in seen or not 200 < len(data) < 2_000_000 or b"\0" in data:
                    continue
                seen.add(key)
                total += len(data)
                if total > MOST_BYTES:
                    return
                try:
                    yield data.decode()
                except UnicodeDecodeError:
                    continue


def rung_of(part: Part, folder: Path) -> rungs.Rung:
    """Return the rung on this machine's text; in a test, rung A on sources of thinwire."""
    if part.is_tiny:
        return dataclasses.replace(rungs.RUNGS["A"], data=str(Path(train.thinwire.__file__).parent / "codecs"))
    return dataclasses.replace(rungs.RUNGS["G1"], data=str(folder / "text"), save_every=0)


def gather(folder: Path, rung: rungs.Rung) -> dict[str, Any]:
    """Write this machine's text as records of one file, and tokenise it."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    num_bytes = 0
    with (folder / "text" / "text.jsonl").open("w") as file:
        for text in texts():
            num_bytes += len(text)
            file.write(json.dumps({"text": text}) + "\n")
    found = open_corpus(rung.data, cache=folder / "cache", tokenizer=rung.tokenizer, vocab_size=rung.vocab_size)
    return {"characters": num_bytes, "train_tokens": len(found.train), "held_out_tokens": len(found.held_out)}


def run(
    name: str, replicas: int, lr: float, *, steps: int, folder: Path, rung: rungs.Rung, part: Part
) -> dict[str, Any]:
    """Train an entry of the ladder for some steps."""
    entry = next(one for one in rungs.ENTRIES if one.name == name)
    settings = {
        "rung": rung.name, "name": name, "method": entry.method, "options": dict(entry.options), "inner": entry.inner,
        "replicas": replicas, "windows": rung.windows, "lr": lr, "seed": 0, "steps": steps,
    }  # fmt: skip
    found = train.train(settings, minutes=None, cache=folder / "cache", rung=rung, device=part.device)
    assert found is not None
    return {**found, "share": steps / rung.steps}


def plan(folder: Path, rung: rungs.Rung, part: Part) -> dict[str, Any]:
    """Choose the steps of all runs: one epoch at most, and no more than the time allows for both."""
    corpus = open_corpus(rung.data, cache=folder / "cache", tokenizer=rung.tokenizer, vocab_size=rung.vocab_size)
    one_epoch = (len(corpus.train) - 1) // rung.seq_len // rung.windows
    times = {}
    for name, replicas, lr in ENTRIES:
        probe = run(name, replicas, lr, steps=PROBE_STEPS, folder=folder, rung=rung, part=part)
        times[name] = probe["wall_s"] / PROBE_STEPS
    left_s = part.ends_s - time.monotonic()
    fits = int(left_s / sum(times.values()))
    steps = min(rung.steps, one_epoch, fits) // rungs.SYNC_INTERVAL * rungs.SYNC_INTERVAL
    return {"steps": steps, "one_epoch": one_epoch, "step_s": times}


def main() -> None:
    part = part_from_command_line("loss", __doc__ or "")
    folder = Path(tempfile.gettempdir(), "thinwire-gpu-text")  # a gigabyte, which is no result
    rung = rung_of(part, folder)
    if not part.is_tiny:
        part.measure("text", lambda: gather(folder, rung), needs_s=40.0)
    planned = part.measure("plan", lambda: plan(folder, rung, part))
    steps = 30 if part.is_tiny else (planned or {}).get("steps", 0)
    for name, replicas, lr in ENTRIES if steps else ():
        part.measure(
            name,
            lambda n=name, r=replicas, x=lr: run(n, r, x, steps=steps, folder=folder, rung=rung, part=part),  # type: ignore[misc]
        )
    finish(part)


if __name__ == "__main__":
    main()
