"""Rungs G1 and G2 of the quality ladder (14M and 35M parameters) on one GPU: data-parallel training and IsoLoCo.

First both train on G1 for as many steps as this call has time for, which says little of the loss. Then whole runs go on
from call to call, from states beside the text: G1, then G2. G1 wants 277 million tokens, each read once. The text is
what lies on the machine: Python sources, headers and documentation. Where it holds fewer tokens, runs are shorter: each
line says how many steps it had, and `share` which part of the rung that is. Each side has one learning rate: nothing is
tuned.
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

from thinwire.workloads.language import open_corpus

ENTRIES = (("data-parallel", 1), ("iso-loco", 2))
LRS = {"G1": {"data-parallel": 1.6e-2, "iso-loco": 8e-3}, "G2": {"data-parallel": 1.08e-2, "iso-loco": 5.2e-3}}
LRS["A"] = LRS["G1"]
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


def rung_of(part: Part, folder: Path, *, name: str = "G1") -> rungs.Rung:
    """Return a rung on this machine's text; in a test, rung A on sources of thinwire."""
    if part.is_tiny:
        return dataclasses.replace(rungs.RUNGS["A"], data=str(Path(train.thinwire.__file__).parent / "codecs"))
    return dataclasses.replace(rungs.RUNGS[name], data=str(folder / "text"))


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
    name: str, replicas: int, *, steps: int, folder: Path, rung: rungs.Rung, part: Part, in_pieces: bool = False
) -> dict[str, Any] | None:
    """Train an entry of the ladder for some steps; None where it is in pieces, and the next call goes on."""
    entry = next(one for one in rungs.ENTRIES if one.name == name)
    settings = {
        "rung": rung.name, "name": name, "method": entry.method, "options": dict(entry.options), "inner": entry.inner,
        "replicas": replicas, "windows": rung.windows, "lr": LRS[rung.name][name], "seed": 0, "steps": steps,
    }  # fmt: skip
    minutes = max(0.01, (part.ends_s - time.monotonic()) / 60) if in_pieces else None
    found = train.train(settings, minutes=minutes, cache=folder / "cache", rung=rung, device=part.device)
    return None if found is None else {**found, "share": steps / rung.steps}


def tokens_of(rung: rungs.Rung, folder: Path) -> int:
    """Return how many tokens of text there are to train on."""
    corpus = open_corpus(rung.data, cache=folder / "cache", tokenizer=rung.tokenizer, vocab_size=rung.vocab_size)
    return len(corpus.train)


def steps_of(rung: rungs.Rung, folder: Path) -> int:
    """Return the steps of a whole run: those of the rung, or of one epoch, in whole intervals."""
    one_epoch = (tokens_of(rung, folder) - 1) // rung.seq_len // rung.windows
    return min(rung.steps, one_epoch) // rungs.SYNC_INTERVAL * rungs.SYNC_INTERVAL


def plan(folder: Path, rung: rungs.Rung, part: Part) -> dict[str, Any]:
    """Choose the steps of the short runs: no more than the time allows for both."""
    times = {}
    for name, replicas in ENTRIES:
        probe = run(name, replicas, steps=PROBE_STEPS, folder=folder, rung=rung, part=part)
        assert probe is not None
        times[name] = probe["wall_s"] / PROBE_STEPS
    fits = int((part.ends_s - time.monotonic()) / sum(times.values())) // rungs.SYNC_INTERVAL * rungs.SYNC_INTERVAL
    return {"steps": min(steps_of(rung, folder), fits), "whole_steps": steps_of(rung, folder), "step_s": times}


def main() -> None:
    part = part_from_command_line("loss", __doc__ or "")
    folder = Path(tempfile.gettempdir(), "thinwire-gpu-text")  # a gigabyte, which is no result
    rung = rung_of(part, folder)
    if not part.is_tiny:
        part.measure("text", lambda: gather(folder, rung), needs_s=40.0)
    planned = part.measure("plan", lambda: plan(folder, rung, part))
    steps = 30 if part.is_tiny else (planned or {}).get("steps", 0)
    for name, replicas in ENTRIES if steps else ():
        part.measure(name, lambda n=name, r=replicas: run(n, r, steps=steps, folder=folder, rung=rung, part=part))  # type: ignore[misc]
    if planned and not part.is_tiny:
        for rung in (rung_of(part, folder, name="G1"), rung_of(part, folder, name="G2")):
            for name, replicas in ENTRIES:
                part.measure(
                    f"{rung.name} {name}",
                    lambda n=name, r=replicas, g=rung: run(  # type: ignore[misc]
                        n, r, steps=steps_of(g, folder), folder=folder, rung=g, part=part, in_pieces=True
                    ),
                    needs_s=30.0,
                )
    finish(part)


if __name__ == "__main__":
    main()
