"""A checkpoint is whole or does not count at any instant, also that of a writer's death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints

PROGRAM = Path(__file__).with_name("killed_writer.py")
ENDLESS = """
# begins with torch loaded
import sys, torch, warnings
warnings.simplefilter('ignore')
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints
from thinwire.elastic.global_state import GlobalState

checkpoints = GlobalCheckpoints(sys.argv[1], keep_last=1)
for step in range(int(sys.argv[2]), 1 << 30):
    state = GlobalState(step=step, parameters={"w": torch.full((300_000,), float(step))}, note={"tokens": step})
    checkpoints.save(state)
    if step % 3 == 0:
        checkpoints.wait()
    print(step, flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["folder", "url"])
@pytest.mark.parametrize(("what", "stride"), [("next", 5), ("other", 11), ("again", 11)])
def test_a_writer_may_be_killed_at_any_line(tmp_path: Path, kind: str, what: str, stride: int) -> None:
    command = [sys.executable, str(PROGRAM), kind, str(tmp_path), what, "1", str(stride)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * stride > 150, "the writers were to die at many lines"


@pytest.mark.multiprocess
def test_a_run_that_is_killed_again_and_again_goes_on_from_a_whole_state(tmp_path: Path) -> None:
    step = 1
    for more_s in (0.0, 0.013, 0.031, 0.052):
        with subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(tmp_path), str(step)], stdout=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout is not None
            try:
                for _ in range(7):
                    assert running.stdout.readline()
                time.sleep(more_s)
            finally:
                running.send_signal(signal.SIGKILL)
        state = GlobalCheckpoints(tmp_path).latest().state
        assert state is not None and state.step > step
        assert bool((state.parameters["w"] == state.step).all()) and state.note == {"tokens": state.step}
        step = state.step + 1
