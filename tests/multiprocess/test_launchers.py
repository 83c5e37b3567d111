"""The examples of the launchers as a reader starts them: Slurm, mpirun and torchrun's variables give the same bits."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import DEADLINE_S
from processes import ENVIRONMENT_OF_TORCHRUN, run
from slurm_cluster import cluster, why_not

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
LINE = re.compile(r"replica (\d) of (\d): loss [0-9.]+, parameters ([0-9a-f]{16})")


def run_example() -> None:
    sys.argv = ["train.py"]
    runpy.run_path(str(LAUNCH / "train.py"), run_name="__main__")


@pytest.fixture(scope="module")
def expected() -> str:
    """Return the hash of the parameters that two replicas reach under torchrun's variables."""
    text = "".join(outcome.stdout for outcome in run(run_example, num_ranks=2))
    return digest_of(text, replicas=["0", "1"])


def digest_of(text: str, *, replicas: list[str]) -> str:
    found = sorted(LINE.findall(text))
    assert [replica for replica, _, _ in found] == replicas, text
    assert {num for _, num, _ in found} == {"2"}
    (digest,) = {digest for _, _, digest in found}
    return digest


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT_OF_TORCHRUN}
    paths = [str(Path(sys.executable).parent), own["PATH"]]
    return {**own, "OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(paths)}


@pytest.mark.skipif(bool(why_not()), reason=f"no Slurm here: {why_not()}")
def test_slurm_starts_replicas_of_two_ranks_with_the_bits_of_torchrun(expected: str, tmp_path: Path) -> None:
    with cluster() as found:
        own = {**environment(), "SLURM_CONF": found["SLURM_CONF"]}
        place = ["--nodes=1", "--ntasks-per-node=4", f"--output={tmp_path}/log"]
        words = [str(LAUNCH / "slurm.sbatch"), "--ranks-per-replica", "2"]
        done = subprocess.run(
            ["sbatch", "--wait", *place, *words], env=own, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S,
            check=False,
        )  # fmt: skip
        log = (tmp_path / "log").read_text()
        assert done.returncode == 0, done.stderr + log
        assert digest_of(log, replicas=["0", "0", "1", "1"]) == expected
        # in the batch script itself, without srun, the loop would train one replica alone
        script = "python -c 'import thinwire; thinwire.connect()'"
        alone = ["--wait", "--ntasks=2", f"--output={tmp_path}/alone", "--wrap", script]
        refused = subprocess.run(
            ["sbatch", *alone], env=own, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert refused.returncode == 1
        assert "SLURM_NTASKS=2; allowed a task of srun" in (tmp_path / "alone").read_text()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun not installed (apt-get install openmpi-bin)")
def test_mpirun_starts_two_replicas_with_the_bits_of_torchrun(expected: str) -> None:
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    root["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    done = subprocess.run(
        [str(LAUNCH / "mpirun.sh")], env={**environment(), **root}, cwd=ROOT, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert digest_of(done.stdout, replicas=["0", "1"]) == expected
