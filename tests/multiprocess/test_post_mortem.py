"""What `thinwire diagnose` says of the folders of a run under torchrun that has ended by a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import ADDRESSES, CABLE, NAMES, Hosts
from processes import free_port
from training_runs import COMMAND, DEADLINE_S, DOCUMENTS, OPTIONS

from thinwire.cli.main import main
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.runlog.run_folder import read_files

pytestmark = pytest.mark.multiprocess


class Ranks:
    """Two ranks of `thinwire train`, started as torchrun starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []
        (folder / "data.txt").write_text("\n".join(DOCUMENTS))

    def start(self, *, outs: list[Path], address: str, port: int, prefixes: list[list[str]], words: list[str]) -> None:
        for rank, (out, prefix) in enumerate(zip(outs, prefixes, strict=True)):
            line = [*prefix, *COMMAND, *OPTIONS, "--data", str(self.folder / "data.txt"), "--steps", "100000"]
            environment = {
                "RANK": str(rank), "LOCAL_RANK": "0" if prefix else str(rank), "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1" if prefix else "2", "MASTER_ADDR": address, "MASTER_PORT": str(port),
            }  # fmt: skip
            with (self.folder / f"rank-{rank}.err").open("wb") as err:
                self.running.append(subprocess.Popen(
                    [*line, "--out", str(out), *words], env={**os.environ, **environment}, stderr=err,
                    stdout=subprocess.DEVNULL,
                ))  # fmt: skip

    def wait_for_rounds(self, records: Path, count: int) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not records.exists() or records.read_text().count('"record":"operation"') < count:
            assert time.monotonic() < until_s and all(one.poll() is None for one in self.running), self.said()
            time.sleep(0.1)

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("rank-*.err")))

    def close(self) -> None:
        for one in self.running:
            one.kill()
            one.wait()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_a_rank_that_was_killed_is_named_after_the_other_has_ended(ranks: Ranks) -> None:
    run = ranks.folder / "run"
    ranks.start(outs=[run, run], address="127.0.0.1", port=free_port(), prefixes=[[], []], words=[])
    ranks.wait_for_rounds(run / "records-rank-1.jsonl", 20)
    ranks.running[1].send_signal(signal.SIGKILL)
    assert ranks.running[0].wait(DEADLINE_S) == 1
    findings = diagnose(read_files([run]))
    assert [one.where for one in findings if "hang" in one.kind] == ["rank 1"], findings
    assert main(["diagnose", str(run)]) == 3


def test_a_cut_cable_is_named_by_the_records_of_both_hosts(ranks: Ranks, hosts: Hosts) -> None:
    secret, outs = ranks.folder / "secret", [ranks.folder / f"host-{rank}" for rank in range(2)]
    subprocess.run([sys.executable, "-m", "thinwire.cli.main", "secret", str(secret)], check=True, timeout=DEADLINE_S)
    prefixes = [
        ["nsenter", f"--net={hosts.place(rank)[0]}", "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"',
         NAMES[rank]]
        for rank in range(2)
    ]  # fmt: skip
    ranks.start(outs=outs, address=ADDRESSES[0], port=29400, prefixes=prefixes, words=["--secret", str(secret)])
    ranks.wait_for_rounds(outs[1] / "records-rank-1.jsonl", 20)
    hosts.on(1, "ip", "link", "set", CABLE, "down")
    assert [one.wait(DEADLINE_S) for one in ranks.running] == [1, 1], ranks.said()
    assert "FileNotFoundError" not in ranks.said()
    findings = [one for one in diagnose(read_files(outs)) if "hang" in one.kind]
    assert [one.kind for one in findings] == ["communication hang"] and "0 <-> 1" in findings[0].where, findings
    for rank, out in enumerate(outs):
        (own,) = [one for one in diagnose(read_files([out])) if "hang" in one.kind]
        assert own.confidence <= 0.5 and own.evidence["judged_from"] == [rank]
        assert f"link 0 <-> 1 or rank {1 - rank}" in own.where
