"""The examples as a reader runs them: real processes, alone and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# torchrun's ranks write a line's end on its own, so that two lines may come as one
LINE = re.compile(r"replica (\d)[^:]*: loss of the global parameters ([0-9.]+), .*?([0-9,]+) bytes sent")


def results(name: str, *, num_ranks: int | None = None) -> list[tuple[int, float, int]]:
    """Run an example and return replica, loss and bytes sent of each line it printed, in order."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [sys.executable, *(torchrun if num_ranks else []), str(EXAMPLES / name)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = sorted(LINE.findall(done.stdout))
    return [(int(replica), float(loss), int(sent.replace(",", ""))) for replica, loss, sent in found]


def test_every_example_is_run_here() -> None:
    tested = {"five_lines.py", "own_method.py", "fsdp_replicas.py"}
    tested.add("own_workload.py")  # in tests/unit/workloads/test_own_workload.py
    tested.add("gnn_pipeline.py")  # in tests/multiprocess/test_gnn_pipeline.py
    tested.add("ladder_residual.py")  # in tests/multiprocess/test_ladder_residual.py
    tested.add("talking_models.py")  # in tests/unit/split/test_talking.py
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_the_five_lines_train_alone_and_on_two_replicas_that_agree() -> None:
    [(_, alone, nothing)] = results("five_lines.py")
    assert nothing == 0
    first, second = results("five_lines.py", num_ranks=2)
    assert (first[0], second[0]) == (0, 1)
    assert first[1] == second[1]
    assert first[2] == second[2] > 0
    assert max(alone, first[1]) < 1.0, "guessing gives ln 4 = 1.39"


def test_a_method_of_ones_own_trains_two_replicas_that_agree() -> None:
    first, second = results("own_method.py")
    assert first[1:] == second[1:]
    assert first[1] < 0.1, "predicting zero gives more than 0.5"


def test_replicas_of_two_ranks_with_fsdp_agree_and_send_a_shard_each() -> None:
    found = results("fsdp_replicas.py", num_ranks=4)
    assert [replica for replica, _, _ in found] == [0, 0, 1, 1]
    assert len({loss for _, loss, _ in found}) == 1
    assert found[0][1] < 1.0, "guessing gives ln 4 = 1.39"
    assert len({sent for _, _, sent in found}) == 1
