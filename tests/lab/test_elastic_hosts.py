"""An elastic run of real processes on three hosts: one is killed, one cut off, one stopped; all come back and agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab import Lab
from thinwire.runlog.run_folder import read_files

pytestmark = pytest.mark.multiprocess
CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos"
# Machines that do other work at the same time may take several times as long.
PATIENCE_S = 300.0
STEPS, STEP_S = 120, 0.45


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(CHAOS))
    import chaos_checks
    import chaos_job

    return chaos_job, chaos_checks


def write_text(folder: Path) -> None:
    folder.mkdir()
    for number in range(40):
        words = " ".join(f"word{(number * number + 7 * place) % 211}" for place in range(400))
        (folder / f"{number}.txt").write_text(words)


class Watch:
    """Waits for what becomes of a run."""

    def __init__(self, job: Any, checks: Any) -> None:
        self.job, self.checks = job, checks

    def wait_until(self, what: Callable[[], bool], why: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < until_s, f"{why}: {said(self.job.folder)}"
            self.job.look()
            time.sleep(0.2)

    def replica(self, host: int) -> int | None:
        lives = self.job.hosts[host].lives
        return lives[-1].replica if lives else None

    def wait_until_all_count(self, since_s: float, *, but: tuple[int | None, ...] = ()) -> None:
        """Wait until each host's replica, none of those named, is in a mean that was applied since then."""

        def all_count() -> bool:
            rounds = self.checks.applied(self.job.folder)
            lines = [line for lines in rounds.values() for line in lines if line["at_s"] > since_s]
            members = {member for line in lines for member in line["members"]} - set(but)
            return all(self.replica(host) in members for host in range(3))

        self.wait_until(all_count, "not all are counted")

    def wait_until_others_go_on(self, *, without: int | None) -> None:
        """Wait until a mean was applied from now on that one replica is not in."""
        since_s = time.time()

        def is_applied() -> bool:
            rounds = self.checks.applied(self.job.folder)
            return any(
                line["at_s"] > since_s and without not in line["members"] for lines in rounds.values() for line in lines
            )

        self.wait_until(is_applied, f"no mean without replica {without}")


def words(tmp_path: Path) -> list[str]:
    return [
        "--replicas", "1", "--data", str(tmp_path / "text"), "--model", "tiny", "--tokenizer", "bytes", "--steps",
        str(STEPS),
        "--batch-size", "1", "--seq-len", "32", "--sync-interval", "9", "--overlap-steps", "2", "--threads", "1",
        "--eval-every", "0", "--final-eval-batches", "2", "--cache-dir", str(tmp_path / "cache"),
    ]  # fmt: skip


def test_replicas_that_were_killed_cut_off_and_stopped_come_back_and_hold_the_same_bits(
    tmp_path: Path, chaos: tuple[Any, Any]
) -> None:
    chaos_job, checks = chaos
    write_text(tmp_path / "text")
    with Lab(hosts=3, rate="50mbit") as lab:
        job = chaos_job.ChaosJob(lab, tmp_path / "run", step_s=STEP_S, words=words(tmp_path))
        watch = Watch(job, checks)
        job.start_first()
        for host in (1, 2):
            job.join(host)
        watch.wait_until_all_count(0.0)
        killed = watch.replica(1)
        job.kill(1)
        lab.cut(2)
        watch.wait_until_others_go_on(without=watch.replica(2))
        lab.mend(2)
        watch.wait_until_all_count(time.time(), but=(killed,))
        with job.stopped(2):
            watch.wait_until_others_go_on(without=watch.replica(2))
        watch.wait_until_all_count(time.time(), but=(killed,))
        watch.wait_until(lambda: not any(host.is_running for host in job.hosts), "the run does not end")
        assert [host.launcher.exit_code for host in job.hosts] == [0, 0, 0]
    compared, odd = checks.desyncs(checks.applied(tmp_path / "run"))
    assert not odd and compared > STEPS // 20
    assert len(list((tmp_path / "run").glob("host-*/summary.json"))) == 1
    flows = read_files(sorted((tmp_path / "run").glob("host-*/records-rank-*.jsonl"))).flows
    # all that were there to the end, and the connections between them
    last = {watch.replica(host) for host in range(3)}
    assert {(one.rank, one.peer) for one in flows if one.busy_s > 0} >= {(a, b) for a in last for b in last if a != b}


def said(folder: Path) -> str:
    logs = [*folder.glob("host-*.err"), *folder.glob("host-*/logs/*.err")]
    return "\n".join(f"{path}: {path.read_text(errors='replace')[-1500:]}" for path in logs)
