"""The prepared call on a GPU, tried on a CPU: cut off at some moment, and called again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_call_that_is_cut_off_leaves_readable_results_and_the_next_one_goes_on(tmp_path: Path) -> None:
    # the parts left out train for a minute of two cores, and are made of what other tests run
    parts = ["codec", "step", "watch", "sequence", "loss"]
    call = str(ROOT / "benchmarks" / "gpu" / "run.py")
    command = [sys.executable, call, "--device", "cpu", "--tiny", *(f"--only={part}" for part in parts)]
    results = tmp_path / "results.jsonl"

    def lines() -> list[dict[str, object]]:
        return [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []

    cut = subprocess.Popen([*command, "--out", str(tmp_path)], start_new_session=True, stdout=subprocess.DEVNULL)
    until_s = time.monotonic() + 300
    while len(lines()) < 5 and cut.poll() is None and time.monotonic() < until_s:
        time.sleep(0.02)
    os.killpg(cut.pid, signal.SIGKILL)
    cut.wait()
    before = [line for line in lines() if line["state"] == "done"]
    assert before
    whole = subprocess.run([*command, "--out", str(tmp_path)], check=False, capture_output=True, text=True, timeout=600)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    after = lines()
    assert all([(one["part"], one["key"]) for one in after].count((b["part"], b["key"])) == 1 for b in before)
    finished = {one["part"] for one in after if one["state"] == "finished"}
    assert finished == set(parts)
    again = subprocess.run(
        [*command, "--out", str(tmp_path)], check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert again.returncode == 0 and len(lines()) == len(after) + 1  # the machine
