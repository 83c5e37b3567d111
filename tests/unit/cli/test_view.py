from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from live_processes import DEADLINE_S
from rich.console import Console

from tests.sample_runs import append, step_line, write_run
from thinwire.cli.tables import final_table
from thinwire.cli.view import LiveView, RunState, progress_table
from thinwire.errors import DataError

STEP = 0.01


def _wait(condition: Callable[[], bool], *, deadline_s: float = 5.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen before the deadline"
        time.sleep(STEP)


def _metrics(folder: Path, replica: int) -> Path:
    return folder / f"metrics-replica-{replica}.jsonl"


def _pipe() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=False, width=80), stream


def test_a_pipe_gets_one_line_for_each_log_interval_of_replica_0(tmp_path: Path) -> None:
    console, stream = _pipe()
    with LiveView(tmp_path, replicas=2, total_steps=300, console=console, period_s=STEP):
        append(_metrics(tmp_path, 1), step_line(10))
        append(_metrics(tmp_path, 0), step_line(10, loss=5.125))
        _wait(lambda: "step 10/300" in stream.getvalue())
        # each replica evaluates its part: the loss is shown once both are there, as the mean over all targets
        part = {"kind": "eval", "step": 20, "time_s": 8, "tokens": 9}
        append(_metrics(tmp_path, 1), step_line(20), {**part, "val_loss": 4.0, "targets": 1})
        append(_metrics(tmp_path, 0), step_line(20), {**part, "val_loss": 4.75, "targets": 2})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "loss 5.125" in lines[0] and "5.12 k tokens/s" in lines[0] and "peak 1.25 Mbit/s" in lines[0]
    assert lines[0].split("  ")[1] == "1:56 min left" and lines[1].startswith("step 20/300  1:52 min left")
    assert "validation loss of the global parameters 4.5000" in lines[2]
    assert "\x1b" not in stream.getvalue()


def test_no_rate_is_shown_before_something_was_sent(tmp_path: Path) -> None:
    console, stream = _pipe()
    with LiveView(tmp_path, replicas=1, total_steps=300, console=console, period_s=STEP):
        append(_metrics(tmp_path, 0), step_line(10, sent_bits_per_s=0.0, peak_bits_per_s=0.0))
        append(_metrics(tmp_path, 0), step_line(20, sent_bits_per_s=0.0, peak_bits_per_s=8e6))
    first, second = stream.getvalue().splitlines()
    assert "now -  peak -  in flight" in first
    assert "now 0 bit/s  peak 8.00 Mbit/s" in second


def test_what_was_written_just_before_the_end_is_still_shown(tmp_path: Path) -> None:
    console, stream = _pipe()
    with LiveView(tmp_path, replicas=1, total_steps=20, console=console, period_s=60):
        time.sleep(5 * STEP)
        append(_metrics(tmp_path, 0), step_line(20))
    assert "step 20/20" in stream.getvalue()


@pytest.mark.parametrize("after_step", [0, 20])
def test_a_resumed_run_says_only_what_is_new(tmp_path: Path, after_step: int) -> None:
    console, stream = _pipe()
    path = _metrics(tmp_path, 0)
    evaluation = {"kind": "eval", "step": 20, "time_s": 8, "tokens": 9, "val_loss": 4.0, "targets": 1}
    known = [step_line(10), step_line(20), evaluation]
    append(path, *known, step_line(30), {"kind": "error", "step": 33, "message": "peer lost"})
    with LiveView(tmp_path, replicas=1, total_steps=40, console=console, period_s=STEP, after_step=after_step) as view:
        _wait(lambda: after_step == 0 or 0 in view.state.steps)
        time.sleep(5 * STEP)
        # the replica cuts off what it wrote after its checkpoint, and goes on
        path.unlink()
        path.touch()
        append(path, *(line for line in known if line["step"] <= after_step))
        time.sleep(5 * STEP)
        append(path, step_line(30), {"kind": "error", "step": 31, "message": "no room"})
        _wait(lambda: "no room" in stream.getvalue())
    assert [words.split("  ")[0] for words in stream.getvalue().splitlines()] == [
        "step 30/40",
        "replica 0 failed: no room",
    ]
    assert (view.state.evaluation is not None) == (after_step == 20)


def warning_line(step: int, words: str) -> dict[str, object]:
    return {"kind": "warning", "step": step, "message": words}


def test_a_warning_is_told_on_lines_and_in_the_table_and_cannot_steer_the_terminal(tmp_path: Path) -> None:
    console, stream = _pipe()
    append(_metrics(tmp_path, 0), warning_line(1, "[bold]coding costs\x1b[2J"), step_line(10))
    with LiveView(tmp_path, replicas=1, total_steps=300, console=console, period_s=STEP) as view:
        pass
    assert stream.getvalue().splitlines()[0].startswith("warning: [bold]coding costs")
    assert "\x1b" not in stream.getvalue()
    table, shown = _pipe()
    table.print(progress_table(view.state, replicas=1, width=80))
    assert "warning: [bold]coding costs" in shown.getvalue() and "\x1b" not in shown.getvalue()


def test_a_resumed_run_says_its_own_warning_and_not_that_of_its_earlier_part(tmp_path: Path) -> None:
    console, stream = _pipe()
    path = _metrics(tmp_path, 0)
    append(path, warning_line(1, "on the old wire"), step_line(10), step_line(20))
    with LiveView(tmp_path, replicas=1, total_steps=40, console=console, period_s=STEP, after_step=20) as view:
        _wait(lambda: 0 in view.state.steps)
        path.unlink()
        path.touch()
        time.sleep(5 * STEP)
        append(path, warning_line(1, "on the old wire"), step_line(10), warning_line(21, "on this wire"))
        _wait(lambda: "this wire" in stream.getvalue())
    assert stream.getvalue().splitlines() == ["warning: on this wire"]
    assert view.state.warnings == {0: "on this wire"}


def test_quiet_shows_nothing(tmp_path: Path) -> None:
    console, stream = _pipe()
    append(_metrics(tmp_path, 0), step_line(10))
    with LiveView(tmp_path, replicas=1, total_steps=300, console=console, quiet=True):
        pass
    assert stream.getvalue() == ""


def test_a_broken_metrics_file_costs_one_warning_and_not_the_run(tmp_path: Path) -> None:
    console, stream = _pipe()
    _metrics(tmp_path, 0).write_text("garbage\n" * 3)
    with LiveView(tmp_path, replicas=1, total_steps=300, console=console, period_s=STEP):
        _wait(lambda: "live view stopped" in stream.getvalue())
    assert stream.getvalue().count("\n") == 1
    assert "training goes on" in stream.getvalue()


def test_a_console_that_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    console, stream = _pipe()
    stream.close()
    append(_metrics(tmp_path, 0), step_line(10))
    with LiveView(tmp_path, replicas=1, total_steps=300, console=console, period_s=STEP):
        time.sleep(5 * STEP)


def test_an_error_in_the_run_passes_through_the_view(tmp_path: Path) -> None:
    console, _ = _pipe()
    with (
        pytest.raises(KeyboardInterrupt),
        LiveView(tmp_path, replicas=1, total_steps=300, console=console, period_s=STEP),
    ):
        raise KeyboardInterrupt


def test_a_failed_replica_is_named_and_its_words_cannot_steer_the_terminal(tmp_path: Path) -> None:
    console, stream = _pipe()
    append(_metrics(tmp_path, 1), {"kind": "error", "step": 7, "message": "[bold]peer lost\x1b[2J"})
    with LiveView(tmp_path, replicas=2, total_steps=300, console=console, period_s=STEP):
        pass
    assert "replica 1 failed: [bold]peer lost" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("width", [72, 160])
@pytest.mark.parametrize("replicas", [1, 8])
def test_every_replica_has_a_row_with_all_of_its_numbers(tmp_path: Path, replicas: int, width: int) -> None:
    state = RunState(total_steps=300)
    for replica in range(replicas - 1):  # the last one has not written anything yet
        state.take(replica, json.dumps(step_line(30, loss=3 + replica)).encode())
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(progress_table(state, replicas=replicas, width=width))
    shown = capture.get()
    assert "0/300" in shown
    assert "…" not in shown, "a cell was cut off"
    for replica in range(replicas - 1):
        assert f"{3 + replica}.000" in shown
    if replicas > 1:
        assert "left" in shown
        for number in ("30/300", "2.56 k", "98 %", "30.0 kB", "27.0 kB", "20.0 kbit/s", "1.25 Mbit/s"):
            assert shown.count(number) == replicas - 1, number


PROGRAM = """
import sys, time
from pathlib import Path
from rich.console import Console
from thinwire.cli.view import LiveView
console = Console(stderr=True, width=100)
with LiveView(Path(sys.argv[1]), replicas=2, total_steps=300, console=console, period_s=0.02) as view:
    time.sleep(0.3)
    view.log("downtime: 0 s of 102 s")
    time.sleep(0.1)
print("done")
"""


def _screen(written: str) -> list[str]:
    """Return the lines that a terminal shows after what was written to it."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b\r\n]+|[\r\n]", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif match := re.fullmatch(r"\x1b\[([0-9]*)A", part):
            row = max(0, row - int(match[1] or 1))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return [line.rstrip() for line in lines]


def test_a_terminal_gets_a_table_that_stays_in_place_and_stdout_gets_nothing_of_it(tmp_path: Path) -> None:
    write_run(tmp_path, is_finished=False)
    terminal, other_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, stderr=other_end, env=environment
    ) as process:
        os.close(other_end)
        shown = b""
        while True:
            try:
                part = os.read(terminal, 65_536)
            except OSError:  # the other end was closed
                break
            if not part:
                break
            shown += part
        assert process.stdout is not None
        assert process.stdout.read() == b"done\n"
        assert process.wait(timeout=DEADLINE_S) == 0
    os.close(terminal)
    words = shown.decode()
    assert "\x1b[?25l" in words and "\x1b[?25h" in words, "the cursor is hidden, and shown again at the end"
    assert re.search(r"\x1b\[[0-9]*A", words), "the table is drawn over itself"
    assert words.count("300/300") >= 4
    shown_lines = _screen(words)
    assert sum("300/300" in line for line in shown_lines) == 2, "the table stays once, with a row for each replica"
    assert sum("validation loss of the global parameters 4.2000" in line for line in shown_lines) == 1
    assert shown_lines[0] == "thinwire: downtime: 0 s of 102 s", "a line from elsewhere stands above the table"


def test_the_table_at_the_end_says_what_was_reached_and_what_it_cost(tmp_path: Path) -> None:
    summary = json.loads((write_run(tmp_path / "run") / "summary.json").read_text())
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(final_table(summary))
    for words in ("4.2000 nats", "614,400", "12.4 MB", "3.66 GB", "296", "3.30 Mbit/s", "1.3 %", "ab" * 32):
        assert words in capture.get()
    with pytest.raises(DataError, match="val_loss"):
        final_table({name: value for name, value in summary.items() if name != "val_loss"})
