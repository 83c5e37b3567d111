"""`thinwire train` on two hosts: its own numbers beside what the kernel counted on their interfaces."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from thinwire.lab import Lab
from thinwire.lab.counters import peak_rate, sent_by

pytestmark = pytest.mark.multiprocess
RATE_BITS_PER_S = 4e6
OPTIONS = (  # noqa: SIM905 - the words as a user types them
    "--tokenizer bytes --batch-size 1 --seq-len 16 --steps 12 --sync-interval 6 --overlap-steps 2 --eval-every 0 "
    "--final-eval-batches 1 --checkpoint-every 0 --log-every 2 --threads 1"
).split()


def test_a_run_starts_without_a_warning_and_reports_no_rate_above_the_kernels(tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("\n".join(f"{number}: " + "a thin wire carries little. " * 60 for number in range(40)))
    command = [sys.executable, "-m", "thinwire.cli.main", "train", "--data", str(text), "--out", str(run), *OPTIONS]
    # the first host's diagnosis reads the run's folder while the second host is still to come: nobody has made it yet
    late = ["sh", "-c", 'sleep $((3 * RANK)); exec "$@"', "sh"]
    environment = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    with Lab(hosts=2, rate="4mbit") as lab:
        results = lab.run([*late, *command, "--cache-dir", str(tmp_path)], deadline_s=240, environment=environment)
        samples, counters = lab.samples(), lab.counters()
    for result in results:
        assert result.exit_code == 0, result.stderr
        assert "warning" not in result.stderr and "Error" not in result.stderr, result.stderr
    kernel = [peak_rate(sent_by(samples, host=host)) for host in range(2)]
    summary = json.loads((run / "summary.json").read_text())
    assert 0.5 * RATE_BITS_PER_S < summary["peak_bits_per_s"] <= max(kernel)
    for host in range(2):
        lines = [json.loads(line) for line in (run / f"metrics-replica-{host}.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "step"]
        assert all(line["sent_bits_per_s"] <= line["peak_bits_per_s"] <= kernel[host] for line in steps), kernel
        assert 0.85 * counters[host].sent_bytes < steps[-1]["sent_bytes"] < counters[host].sent_bytes
    assert summary["mean_bits_per_s"] < summary["peak_bits_per_s"]
