"""Runs of a benchmark whose results are stored, a line of JSON each: what is stored does not run again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from thinwire.training.summary import describe_machine


def options(*, steps: int | None = None, **more: Any) -> argparse.Namespace:
    """Read the command line of the program that calls: seeds, the files, and options of its own with their defaults."""
    main: Any = sys.modules["__main__"]
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(main.__file__).parent / "results" / f"{Path(main.__file__).stem}.jsonl"
    if steps is not None:
        parser.add_argument("--steps", type=int, default=steps)
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/thinwire").expanduser())
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--report", action="store_true", help="show the stored results alone")
    return parser.parse_args()


def complete(
    given: argparse.Namespace, runs: Iterable[dict[str, Any]], train: Callable[..., dict[str, Any]]
) -> list[dict[str, Any]]:
    """Run and store what is missing; return all that is stored.

    Args:
        given: As `options` returns it.
        runs: Arguments of `train` that tell one run from another.
        train: Takes these and `cache`, and returns what was measured.
    """
    torch.set_num_threads(1)
    text = given.results.read_text() if given.results.exists() else ""
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    for run in () if given.report else runs:
        if not any(run.items() <= line.items() for line in lines):
            lines.append({**run, **train(**run, cache=given.cache), "machine": describe_machine(torch.device("cpu"))})
            with given.results.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(lines[-1], flush=True)
    return lines
