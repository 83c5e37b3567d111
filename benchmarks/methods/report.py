"""What `compare.py` and `lab_times.py` have stored, as tables for the docs and as figures.

    python benchmarks/methods/report.py                              # the tables, in Markdown
    python benchmarks/methods/report.py --figures docs/assets        # and methods-digits.svg, methods-language.svg

Each difference is between runs of the same seed. Bits and bytes were counted by the transport; copies are those of the
methods' own cards.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lab_times
from compare import RESULTS, TASKS, entries, read
from scatter import Dot, scatter

from thinwire.charts import Axis
from thinwire.methods import about, recipe

REFERENCE = "all-reduce, AdamW"
RATE = "20mbit"
GROUPS = ("gradients or momenta, at every step", "what 10 local steps came to")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One entry of `compare.py` over its seeds.

    Attributes:
        name: In the table.
        method: The method's name.
        losses: Of the global parameters, one a seed.
        accuracies: The same, in percent; empty where the task has none.
        differences: To the reference with the same seed: points of accuracy where there is one, else percent of the
            loss; empty for the reference itself, and where it was not run.
        bits: That one replica sends a parameter and step.
        times_fewer: How many times fewer bytes that is than an all-reduce in float32 sends.
        step_s: Seconds a step in the lab; None where it was not measured.
        computing: The part of that time in which a replica computes.
    """

    name: str
    method: str
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    differences: tuple[float, ...]
    bits: float
    times_fewer: float
    step_s: float | None = None
    computing: float = 0.0

    @property
    def copies(self) -> str:
        """Extra copies of the parameters, without what they are for."""
        return re.sub(r"\s*\([^)]*\)", "", about(self.method).memory)


def rows(task: str, lines: Sequence[Mapping[str, Any]], times: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each entry that was run, in the order of `compare.py`.

    Args:
        task: Of `compare.TASKS`.
        lines: As `compare.py` stores them, of any task.
        times: As `lab_times.py` stores them; they are of the language task.
    """
    own = [line for line in lines if line["task"] == task and line["steps"] == TASKS[task]["steps"]]
    reference = {line["seed"]: line for line in own if line["name"] == REFERENCE}
    timed = {line["name"]: line for line in times if line["rate"] == RATE} if task == "language" else {}
    replicas = TASKS[task]["replicas"]
    found = []
    for name, entry in entries(task).items():
        runs = sorted((line for line in own if line["name"] == name), key=lambda line: line["seed"])
        if not runs:
            continue
        bits = statistics.median(run["bits"] for run in runs)
        row = Row(
            name=name,
            method=entry["method"],
            losses=tuple(run["val_loss"] for run in runs),
            accuracies=tuple(100 * run["accuracy"] for run in runs if "accuracy" in run),
            differences=tuple(
                _difference(run, reference[run["seed"]])
                for run in runs
                if run["seed"] in reference and name != REFERENCE
            ),
            bits=bits,
            times_fewer=64 * (replicas - 1) / replicas / bits,
            step_s=timed[name]["wall_s"] / timed[name]["steps"] if name in timed else None,
            computing=timed[name]["compute_utilisation"] if name in timed else 0.0,
        )
        found.append(row)
    return found


def table(found: Sequence[Row]) -> str:
    """Return the rows in Markdown; columns that no row fills are left out."""
    has_accuracy, has_times = any(row.accuracies for row in found), any(row.step_s is not None for row in found)
    head = ["method", "seeds", *(["accuracy"] if has_accuracy else []), "loss"]
    head += ["accuracy against all-reduce" if has_accuracy else "loss against all-reduce", "bits a parameter and step"]
    head.append("times fewer bytes")
    head += [f"s a step at {RATE.replace('mbit', ' Mbit/s')}", "computing"] if has_times else []
    head.append("extra copies")
    lines = [head, ["---"] * len(head)]
    for row in found:
        cells = [row.name, str(len(row.losses))]
        cells += [spread(row.accuracies, "{:.1f}", " %")] if has_accuracy else []
        cells += [spread(row.losses, "{:.4f}" if has_accuracy else "{:.3f}")]
        cells += [spread(row.differences, "{:+.1f}", " points" if has_accuracy else " %")]
        cells += [_number(row.bits), _number(row.times_fewer)]
        if has_times:
            cells += ["", ""] if row.step_s is None else [f"{row.step_s:.2f}", f"{100 * row.computing:.0f} %"]
        lines.append([*cells, row.copies])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def figure(task: str, found: Sequence[Row]) -> str:
    """Return the figure as SVG: loss against bits, every method a point at its median, a line from min to max."""
    dots = [
        Dot(
            name=row.name, x=row.bits, y=statistics.median(row.losses), low=min(row.losses), high=max(row.losses),
            group=int(recipe(row.method)().update(2).program.has_local_steps),
        )
        for row in found
    ]  # fmt: skip
    labels = {"digits": "loss on the test images (log scale)", "language": "validation loss, nats per token"}
    return scatter(
        dots,
        title=f"Loss against bits sent, all methods, {task}",
        x=Axis(label="bits that a replica sends a parameter and step (log scale)", scale="log"),
        y=Axis(label=labels[task], write="{:.3g}".format, scale="log" if task == "digits" else "linear"),
        groups=GROUPS,
    )


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """Return the median, and the range where there are several values."""
    if not values:
        return ""
    middle, low, high = (_write(found(values), form) for found in (statistics.median, min, max))
    return middle + unit if len(values) == 1 else f"{middle}{unit} ({low} to {high})"


def _difference(run: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    if "accuracy" in run:
        return 100 * float(run["accuracy"] - reference["accuracy"])
    return 100 * float(run["val_loss"] / reference["val_loss"] - 1)


def _write(value: float, form: str) -> str:
    written = form.format(value)
    return written if float(written) else form.format(0.0)  # no -0.0


def _number(value: float) -> str:
    """Write three digits, or all in front of the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--times", type=Path, default=lab_times.RESULTS)
    parser.add_argument("--figures", type=Path, help="the folder that the figures are written to")
    options = parser.parse_args()
    for task in TASKS:
        found = rows(task, read(options.results), read(options.times))
        if not found:
            continue
        print(f"\n{task}\n\n{table(found)}")
        if options.figures:
            (options.figures / f"methods-{task}.svg").write_text(figure(task, found))


if __name__ == "__main__":
    main()
