"""Definitions of a run's numbers, and rates that never exceed what the kernel transmitted."""

from __future__ import annotations

import json
import random
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopback_connections import THERE, connection

from tests.sample_runs import step_line
from thinwire.cli.view import RunState, progress_line
from thinwire.events import TransferLog
from thinwire.monitor.dashboard.chart_data import timeline
from thinwire.monitor.dashboard.snapshot import snapshot
from thinwire.monitor.detect.timeline import build
from thinwire.monitor.report.figures import utilisation
from thinwire.recording.metrics import KernelCounts, Meter
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Span
from thinwire.runlog.run_folder import StepMetrics, Summary, parse_metrics
from thinwire.runlog.run_numbers import RATE_WINDOW_S, RunNumbers, SendRate, time_left_s
from thinwire.transport.tcp_stats import ConnectionStats, connection_stats

LINK_BITS_PER_S = 10e6


def _line(step: int, **changes: object) -> StepMetrics:
    line = parse_metrics(step_line(step, **changes), source="a line")
    assert isinstance(line, StepMetrics)
    return line


def test_what_crosses_a_border_inside_a_replica_is_sent_too_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    border = TransferLog()
    meter = Meter(tmp_path, replica=0, log=TransferLog(), border=border)
    border.count("sent", "activations", peer=1, num_bytes=700)
    border.count("received", "activations", peer=1, num_bytes=300)
    meter.write_step(1, stalled_s=0.0, rounds_in_flight=0)
    state = meter.state_dict(stalled_s=0.0)
    meter.close()
    later = Meter(tmp_path, replica=0, log=TransferLog(), border=border)
    later.load_state_dict(state)
    later.write_step(2, stalled_s=0.0, rounds_in_flight=0)
    later.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics-replica-0.jsonl").read_text().splitlines()]
    assert [[line["sent_bytes"], line["received_bytes"]] for line in lines] == [[700, 300], [1400, 600]]


class ShapedLink:
    """A link of constant rate behind a large buffer, whose acknowledgements come late and in bursts."""

    def __init__(self, bursts: list[tuple[float, int]], *, ahead: int, delay_s: float, every_s: float) -> None:
        self._bursts, self._ahead, self._delay_s, self._every_s = bursts, ahead, delay_s, every_s

    def carried(self, time_s: float) -> float:
        """Return the bytes that have crossed the link."""
        carried = busy_until_s = 0.0
        for at_s, size in self._bursts:
            begin_s = max(at_s, busy_until_s)
            busy_until_s = begin_s + 8 * size / LINK_BITS_PER_S
            carried += min(size, max(0.0, (time_s - begin_s) * LINK_BITS_PER_S / 8))
        return carried

    def sample(self, time_s: float) -> tuple[int, int]:
        """Return the transmitted and the acknowledged bytes."""
        handed = sum(size for at_s, size in self._bursts if at_s <= time_s)
        seen_s = max(0.0, time_s - self._delay_s)
        acknowledged = self.carried(seen_s - seen_s % self._every_s)
        return int(min(handed, self.carried(time_s) + self._ahead)), int(acknowledged)


@pytest.mark.parametrize("seed", range(8))
def test_the_peak_stays_below_the_links_rate_and_near_it_in_a_long_burst(seed: int) -> None:
    chance = random.Random(seed)
    bursts = [(float(at_s), 4_000_000 if at_s == 40 else 300_000) for at_s in range(0, 60, 5)]
    link = ShapedLink(bursts, ahead=128_000, delay_s=chance.uniform(0.01, 0.2), every_s=chance.choice([0.01, 0.1, 0.5]))
    rate, time_s = SendRate(), 0.0
    while time_s < 60:
        transmitted, acknowledged = link.sample(time_s)
        rate.add(began_s=time_s, ended_s=time_s, transmitted=transmitted, acknowledged=acknowledged)
        if chance.random() < 0.1:
            assert rate.since_mark() <= rate.peak_bits_per_s
        time_s += chance.uniform(0.05, 0.6)
    assert 0.7 * LINK_BITS_PER_S < rate.peak_bits_per_s <= LINK_BITS_PER_S


def test_a_burst_into_a_buffer_counts_over_a_second_at_least() -> None:
    rate = SendRate()
    rate.add(began_s=0.0, ended_s=0.0, transmitted=0, acknowledged=0)
    assert rate.since_mark() == 0
    rate.add(began_s=0.1, ended_s=0.1, transmitted=1_000_000, acknowledged=1_000_000)
    assert rate.peak_bits_per_s == rate.since_mark() == pytest.approx(8e6 / RATE_WINDOW_S)
    rate.add(began_s=3.0, ended_s=3.0, transmitted=1_000_000, acknowledged=1_000_000)
    assert rate.since_mark() == 0 and rate.peak_bits_per_s == pytest.approx(8e6 / RATE_WINDOW_S)


def test_a_connection_that_is_new_or_new_again_adds_nothing_of_its_past() -> None:
    def stats(transmitted: int, acknowledged: int) -> ConnectionStats:
        return ConnectionStats(
            silence_s=0, rtt_s=0, sent_bytes=acknowledged, received_bytes=0, transmitted_bytes=transmitted
        )

    counts = KernelCounts()
    counts.update({"a": stats(1000, 1000)})
    counts.update({"a": stats(1500, 1400), "b": stats(9000, 9000)})
    assert (counts.transmitted, counts.acknowledged) == (500, 400)
    counts.update({"a": stats(70, 70)})
    assert (counts.transmitted, counts.acknowledged) == (500, 400)
    counts.update({"a": stats(170, 170), "b": stats(9001, 9001)})
    assert (counts.transmitted, counts.acknowledged) == (601, 501)


def test_a_connection_that_has_carried_nothing_has_no_rate(stack: ExitStack) -> None:
    own, other = connection(stack, THERE)
    counts, rate = KernelCounts(), SendRate()

    def sample(at_s: float) -> float:
        found = connection_stats(own)
        assert found is not None
        counts.update({"a": found})
        rate.add(began_s=at_s, ended_s=at_s, transmitted=counts.transmitted, acknowledged=counts.acknowledged)
        return rate.since_mark()

    assert sample(0.0) == sample(1.0) == rate.peak_bits_per_s == 0
    own.sendall(bytes(1000))
    while len(other.recv(1000, socket.MSG_PEEK)) < 1000:
        pass
    until_s = time.monotonic() + 60
    while counts.acknowledged < 1000 and time.monotonic() < until_s:
        sample(2.0)
    assert (counts.transmitted, counts.acknowledged) == (1000, 1000)
    assert sample(2.0) == rate.peak_bits_per_s == 8000


def test_each_number_follows_its_definition() -> None:
    summary = Summary(
        method="streaming-diloco", replicas=2, steps=100, samples=80_000, val_loss=4.2, wall_s=50.0,
        samples_per_s=1600.0, payload_bytes=990_000, wire_bytes_sent=1_000_000, wire_bytes_received=900_000,
        peak_bits_per_s=3e6, compute_utilisation=0.9, global_parameters_sha256="ab", allreduce_bytes=2.2e8,
    )  # fmt: skip
    numbers = RunNumbers.of_summary(summary)
    assert (numbers.mean_bits_per_s, numbers.step_s, numbers.samples_per_s) == (160_000, 0.5, 1600)
    assert numbers.times_fewer_bytes == pytest.approx(220) and numbers.waiting == pytest.approx(0.1)
    assert numbers.texts() == {
        "sent_bytes": "1.00 MB", "received_bytes": "900 kB", "mean_bits_per_s": "160 kbit/s",
        "peak_bits_per_s": "3.00 Mbit/s", "times_fewer_bytes": "220", "step_s": "500.0 ms", "waiting": "10.0 %",
        "wall_s": "50.0 s", "tokens_per_s": "1,600 tokens/s",
    }  # fmt: skip


def test_lines_give_what_the_summary_gives_and_a_run_without_a_line_gives_nothing() -> None:
    lines = [
        _line(100, time_s=50.0, sent_bytes=900_000, tokens=40_000, stalled_s=4.0, peak_bits_per_s=3e6),
        _line(100, time_s=49.0, sent_bytes=1_100_000, tokens=40_000, stalled_s=5.88, peak_bits_per_s=2e6),
    ]
    numbers = RunNumbers.of_lines(lines)
    assert numbers is not None
    assert (numbers.sent_bytes, numbers.mean_bits_per_s, numbers.peak_bits_per_s) == (1e6, 160_000, 3e6)
    assert (numbers.step_s, numbers.samples_per_s) == (0.5, 1600) and numbers.waiting == pytest.approx(0.1)
    old = RunNumbers.of_lines([_line(10)])
    assert old is not None and old.waiting is None and old.to_json()["times_fewer_bytes"] is None
    assert RunNumbers.of_lines([]) is None


def test_the_time_left_leaves_out_what_comes_before_the_first_line() -> None:
    first, last = _line(10, time_s=30.0), _line(60, time_s=55.0)
    assert time_left_s([(first, last)], total_steps=100) == pytest.approx(40 * 0.5)
    assert time_left_s([(first, first)], total_steps=100) == pytest.approx(90 * 3.0)
    assert time_left_s([(first, last), (first, first)], total_steps=60) == pytest.approx(50 * 3.0)
    assert time_left_s([(last, last)], total_steps=60) == 0
    assert time_left_s([], total_steps=60) is None


def test_waiting_and_computing_are_one_number_in_every_view(tmp_path: Path) -> None:
    line = _line(100, time_s=10.0, stalled_s=0.44, compute_fraction=0.53)
    numbers = RunNumbers.of_lines([line])
    assert numbers is not None and numbers.waiting == pytest.approx(0.044)
    assert line.computing == pytest.approx(1 - 0.044), "of the run so far, not of the time since the line before"
    assert "computing 96 %" in progress_line(RunState(total_steps=100, steps={0: line}, first={0: line}))
    (tmp_path / "metrics-replica-0.jsonl").write_text(
        json.dumps(step_line(100, time_s=10.0, stalled_s=0.44, compute_fraction=0.53)) + "\n"
    )
    found = snapshot(tmp_path)
    assert found["replicas"][0]["computing"] == pytest.approx(0.956)
    (waiting,) = [one["value"] for one in found["run"]["numbers"] if one["name"] == "waiting"]
    assert waiting == pytest.approx(0.044)
    assert (
        "95.6 % of the whole run" in utilisation(SimpleNamespace(replicas={0: SimpleNamespace(steps=[line])})).caption
    )


def test_a_lane_counts_as_waiting_only_what_the_training_thread_waited() -> None:
    spans = [Span(rank=0, kind="compute", step=step, started_s=2.0 * step, done_s=2.0 * step + 1.0, stalled_s=0.25)
             for step in range(9)]  # fmt: skip
    (lane,) = timeline(build(from_records(spans)))["lanes"]
    assert lane["waiting"] == pytest.approx(8 * 0.25 / 17) and lane["computing"] == pytest.approx(1 - 8 * 0.25 / 17)
