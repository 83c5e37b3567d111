"""`thinwire demo`: a first run, the recipe `cpu-demo` in the folder `runs/demo`, and the commands to try after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thinwire.cli import train
from thinwire.cli.argument_parsing import command
from thinwire.cli.output import log
from thinwire.cli.recipes import path_of
from thinwire.training.config import free_folder

RECIPE = "cpu-demo"
_FOLDER = Path("runs/demo")
# Commands that go on with the run, and what each does.
NEXT = (
    ('generate {run} --prompt "def "', "continue a text with the trained model"),
    ("dashboard {run}", "show the run on a web page of this machine"),
    ("export {run} --to hf --out {run}/hf", "write a folder that transformers opens"),
    ("recipes ls", "list configurations for real networks"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Train a small model with two replicas on this machine: on real text, without a GPU, in about two minutes.

    It runs the recipe cpu-demo: thinwire recipes show cpu-demo. Nothing is downloaded and nothing listens outside of
    this machine.
    """

    out: Path | None = None
    """Folder of the run. Default: runs/demo, then runs/demo-2 and so on where a run is there."""
    steps: int = 300
    """Inner steps of every replica."""
    overwrite: bool = False
    """Replace the run in --out."""
    quiet: bool = False
    """Print nothing but the result and errors."""


@command("demo", DemoOptions)
def main(options: DemoOptions) -> int:
    """Run `thinwire demo`; return 0, 1 for an error while running, 2 for wrong options, 128 + N for signal N."""
    run = options.out or (_FOLDER if options.overwrite else free_folder(_FOLDER))
    words = ["--config", str(path_of(RECIPE)), "--out", str(run), "--steps", str(options.steps)]
    words += ["--overwrite"] * options.overwrite + ["--quiet"] * options.quiet
    if not options.quiet:
        log("two replicas train a small model on this Python's sources, which takes about two minutes", command="demo")
    code = train.main(words)
    if code == 0:
        _print_next(run)
    return code


def _print_next(run: Path) -> None:
    lines = [(f"thinwire {words.format(run=run)}", about) for words, about in NEXT]
    width = max(len(line) for line, _ in lines)
    print("\nNext:")
    for line, about in lines:
        print(f"  {line.ljust(width)}  {about}", flush=True)
