"""The live view of a run: reads the replicas' metrics as they are written, and never gets in the way of training."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from thinwire.cli.tables import plain
from thinwire.runlog.measures import shown_metric
from thinwire.runlog.run_folder import (
    ErrorMetrics,
    EvaluationMetrics,
    StepMetrics,
    WarningMetrics,
    join_evaluations,
    parse_metrics,
)
from thinwire.runlog.run_numbers import time_left_s
from thinwire.runlog.tailer import JsonlTailer
from thinwire.units import format_bytes, format_count, format_rate, format_seconds

_JOIN_S = 5.0


@dataclass(slots=True, kw_only=True)
class RunState:
    """Latest metrics of each replica, and its first line about steps."""

    total_steps: int
    steps: dict[int, StepMetrics] = field(default_factory=dict)
    first: dict[int, StepMetrics] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    parts: dict[int, EvaluationMetrics] = field(default_factory=dict)
    warnings: dict[int, str] = field(default_factory=dict)

    @property
    def evaluation(self) -> EvaluationMetrics | None:
        """The last evaluation, as far as replicas have written their parts of it."""
        return next(reversed(join_evaluations(self.parts.values())), None)

    @property
    def time_left(self) -> str:
        """Time until the last step, as text; empty at the end, and before the first line."""
        spans = ((self.first[replica], last) for replica, last in self.steps.items())
        left_s = time_left_s(spans, total_steps=self.total_steps)
        return format_seconds(max(1.0, left_s)) if left_s else ""

    def is_evaluated(self, *, replicas: int) -> bool:
        """Return whether all parts of the last evaluation are there; the one at the end is replica 0's alone."""
        last = max((part.step for part in self.parts.values()), default=0)
        count = sum(part.step == last for part in self.parts.values())
        return count == replicas or (last == self.total_steps and count > 0)

    def take(self, replica: int, line: bytes) -> str:
        """Take one line in and return its kind."""
        values = json.loads(line)
        match parse_metrics(values if isinstance(values, dict) else {}, source="a line of metrics"):
            case StepMetrics() as step:
                self.steps[replica] = step
                self.first.setdefault(replica, step)
            case EvaluationMetrics() as part:
                self.parts[replica] = part
            case ErrorMetrics(message=message):
                self.errors[replica] = message
            case WarningMetrics(message=message):
                self.warnings[replica] = message
        return str(values["kind"])


class LiveView:
    """Shows a run's progress on a console while a `with` block runs; whatever fails in it becomes one warning.

    Args:
        run_dir: The run's folder; its files may come later.
        replicas: How many replicas the run has.
        total_steps: Inner steps of the whole run.
        console: Where to show it; stderr by default. On a terminal a table that stays in place, elsewhere one line for
            each of replica 0's log intervals.
        quiet: Show nothing.
        period_s: Seconds between two reads of the files.
        after_step: The step that a resumed run goes on from, None for a new run. What was written up to it has been
            said before, and what stands in the files beyond it is about to be cut off.

    Attributes:
        state: Latest metrics of each replica.
        after_step: May be lowered until training goes on, where replicas have yet to agree on it.
    """

    def __init__(
        self, run_dir: Path, *, replicas: int, total_steps: int, console: Console | None = None, quiet: bool = False,
        period_s: float = 0.25, after_step: int | None = None,
    ) -> None:  # fmt: skip
        self.state = RunState(total_steps=total_steps)
        self._tails = {n: JsonlTailer(run_dir / f"metrics-replica-{n}.jsonl") for n in range(replicas)}
        self._console = console or Console(stderr=True)
        self._quiet = quiet
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="thinwire-view", daemon=True)
        self.after_step = after_step
        self._live: Live | None = None

    def log(self, text: str) -> None:
        """Print a line of the command on the console, above a table that stays in place."""
        self._print(f"thinwire: {text}")

    def _print(self, text: str) -> None:
        try:
            console = self._console if self._live is None else self._live.console
            console.print(plain(text), soft_wrap=True)
        except Exception:
            return  # the console itself is gone

    def __enter__(self) -> LiveView:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)

    def _watch(self) -> None:
        try:
            if self.after_step is not None:
                self._take_earlier()
            if self._console.is_terminal:
                self._show_table()
            else:
                self._show_lines()
        except Exception as error:  # a view must never end a run, whatever its terminal or its files do
            self._print(f"The live view stopped ({type(error).__name__}: {error}); training goes on.")

    def _show_table(self) -> None:
        with Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
            self._live = live
            while True:
                is_last = self._stop.is_set()  # asked first: what came before the end is shown
                self._read_new()
                live.update(
                    progress_table(self.state, replicas=len(self._tails), width=self._console.width), refresh=True
                )
                if is_last:
                    return
                self._stop.wait(self._period_s)

    def _show_lines(self) -> None:
        while True:
            is_last = self._stop.is_set()
            for text in self._read_new():
                self._console.print(plain(text), soft_wrap=True)
            if is_last:
                return
            self._stop.wait(self._period_s)

    def _take_earlier(self) -> None:
        """Take in silently what is there before training goes on; its errors are over."""
        for replica, tail in self._tails.items():
            while lines := tail.new_lines():
                for line in filter(self._is_earlier, lines):
                    self.state.take(replica, line)

    def _is_earlier(self, line: bytes, *, kinds: tuple[str, ...] = ("step", "eval")) -> bool:
        values = json.loads(line)
        is_of_step = isinstance(values, dict) and values.get("kind") in kinds
        return is_of_step and self.after_step is not None and values["step"] <= self.after_step

    def _read_new(self) -> list[str]:
        """Read new lines, and return a line of text for each that is shown without a table."""
        texts = []
        # Replica 0's line holds the speed of all replicas: it is read first, so that what they wrote before it is
        # read too, and taken last.
        new = {replica: self._tails[replica].new_lines() for replica in sorted(self._tails)}
        for replica in sorted(new, reverse=True):
            for line in new[replica]:
                if self._is_earlier(line, kinds=("warning",)):
                    continue  # read again before training goes on
                kind = self.state.take(replica, line)
                if kind == "error":
                    texts.append(f"replica {replica} failed: {self.state.errors[replica]}")
                elif kind == "warning":
                    texts.append(f"warning: {self.state.warnings[replica]}")
                elif self._is_earlier(line):  # a file that was cut is read again
                    continue
                elif kind == "eval" and self.state.evaluation and self.state.is_evaluated(replicas=len(self._tails)):
                    texts.append(evaluation_line(self.state.evaluation))
                elif replica == 0 and kind == "step":
                    texts.append(progress_line(self.state))
        return texts


def progress_line(state: RunState) -> str:
    """Return replica 0's progress in one line, with the speed of all replicas.

    Example:
        >>> line = StepMetrics(
        ...     step=30, time_s=12.3, loss=5.1, samples=30720, samples_per_s=2500.0, compute_fraction=0.99,
        ...     sent_bytes=123, received_bytes=99, sent_bits_per_s=1e5, peak_bits_per_s=2e6, rounds_in_flight=1,
        ... )
        >>> progress_line(RunState(total_steps=300, steps={0: line}, first={0: line})).split("  ")[:4]
        ['step 30/300', '1:51 min left', 'loss 5.100', '2.50 k tokens/s']
    """
    line = state.steps[0]
    speed = sum(other.samples_per_s for other in state.steps.values())
    left = f"  {state.time_left} left" if state.time_left else ""
    return (
        f"step {line.step}/{state.total_steps}{left}  loss {line.loss:.3f}  {format_count(speed)} {line.unit}/s  "
        f"computing {_percent(line.computing)}  sent {format_bytes(line.sent_bytes)}  "
        f"received {format_bytes(line.received_bytes)}  now {_rate(line, line.sent_bits_per_s)}  "
        f"peak {_rate(line, line.peak_bits_per_s)}  in flight {line.rounds_in_flight}"
    )


def evaluation_line(evaluation: EvaluationMetrics) -> str:
    """Return the loss of the global parameters in one line, and the metric where there is one."""
    metric = evaluation.metric
    also = "" if metric is None else f", {metric[0]} {shown_metric(metric)}"
    return f"step {evaluation.step}  validation loss of the global parameters {evaluation.val_loss:.4f}{also}"


def progress_table(state: RunState, *, replicas: int, width: int) -> RenderableType:
    """Return one row a replica (two lines each on a narrow terminal), and what concerns all below."""
    is_wide = width >= 120
    heads = _WIDE if is_wide else _NARROW
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    unit = next((line.unit for line in state.steps.values()), "tokens")
    for head in heads:
        table.add_column(
            head.replace("samples", unit), justify="left" if head in ("replica", "progress") else "right", no_wrap=True
        )
    for replica in range(replicas):
        line = state.steps.get(replica)
        step = line.step if line else 0
        bar = ProgressBar(total=max(1, state.total_steps), completed=step, width=20 if is_wide else 8)
        cells = _cells(line)
        if not is_wide:
            cells = {head: "\n".join(cells[part] for part in _STACKED[head]) for head in heads[3:]}
        table.add_row(str(replica), bar, f"{step}/{state.total_steps}", *(cells[head] for head in heads[3:]))
    below = [plain(evaluation_line(state.evaluation))] if state.evaluation else []
    if 0 in state.steps:
        left = f", {state.time_left} left" if state.time_left else ""
        below.append(plain(f"time {format_seconds(state.steps[0].time_s)}{left}"))
    below += [plain(f"warning: {words}") for words in state.warnings.values()]
    failed = [plain(f"replica {n} failed: {words}") for n, words in state.errors.items()]
    for words in failed:
        words.stylize("bold red")
    return Group(table, *below, *failed)


# Columns beside the replica's progress, by head: one line each, or two below each other on a narrow terminal.
_STACKED: Mapping[str, tuple[str, str]] = {
    f"{upper}\n{lower}": (upper, lower)
    for upper, lower in (
        ("loss", "samples/s"), ("computing", "in flight"), ("sent", "received"), ("rate now", "peak"),
    )
}  # fmt: skip
_NARROW = ("replica", "progress", "steps", *_STACKED)
_WIDE = ("replica", "progress", "steps", *(part for pair in _STACKED.values() for part in pair))


def _cells(line: StepMetrics | None) -> dict[str, str]:
    if line is None:
        return dict.fromkeys(_WIDE, "-")
    return {
        "loss": f"{line.loss:.3f}", "samples/s": format_count(line.samples_per_s),
        "computing": _percent(line.computing), "in flight": str(line.rounds_in_flight),
        "sent": format_bytes(line.sent_bytes), "received": format_bytes(line.received_bytes),
        "rate now": _rate(line, line.sent_bits_per_s), "peak": _rate(line, line.peak_bits_per_s),
    }  # fmt: skip


def _rate(line: StepMetrics, bits_per_s: float) -> str:
    """Return a rate of sending; none before the replica has sent anything while training."""
    return format_rate(bits_per_s) if line.peak_bits_per_s else "-"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %" if math.isfinite(fraction) else "-"
