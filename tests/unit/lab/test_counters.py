"""From the kernel's text to counts, samples and the highest rate in any window."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab.counters import (
    BEAT_S,
    Counters,
    CounterSampler,
    at,
    between,
    parse_devices,
    peak_rate,
    read_samples,
    sample_line,
    sent_by,
)

TEXT = """\
Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop (and so forth)|bytes packets errs drop (and so forth)
    lo:       1       2    3    4 5 6 7 8        9 10 11 12 13 14 15 16
  eth0:    1000      20    0    0 0 0 0 0     3000 40  0  0  0  0  0  0
 eth01:{received:>8} 21    0    0 0 0 0 0     3001 41  0  0  0  0  0  0
"""


def counters(sent: int, received: int = 0) -> Counters:
    return Counters(sent_bytes=sent, received_bytes=received, sent_packets=0, received_packets=0)


def test_the_counts_of_the_interface_are_found_by_its_whole_name() -> None:
    text = TEXT.format(received=7)
    assert parse_devices(text, interface="eth0") == Counters(
        sent_bytes=3000, received_bytes=1000, sent_packets=40, received_packets=20
    )
    assert parse_devices(text, interface="eth01").received_bytes == 7


def test_a_count_that_leaves_no_space_after_the_name_is_read() -> None:
    assert parse_devices(TEXT.format(received=12345678901), interface="eth01").received_bytes == 12345678901


@pytest.mark.parametrize("text", ["", TEXT.format(received=1).replace("eth", "ens"), "eth0: 1 2 3\n"])
def test_an_interface_that_is_not_there_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="/proc/net/dev has no interface 'eth0'"):
        parse_devices(text, interface="eth0")


def test_samples_are_read_back_up_to_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "counters.jsonl"
    lines = [sample_line(time_s, [counters(sent, 1), counters(2, sent)]) for time_s, sent in ((1.5, 10), (1.75, 20))]
    path.write_text("\n".join(lines) + "\n")
    samples = read_samples(path)
    assert [sample.time_s for sample in samples] == [1.5, 1.75]
    assert sent_by(samples, host=0) == [(1.5, 10), (1.75, 20)]
    assert samples[1].received_bytes == (1, 20)
    path.write_text("\n".join(lines)[:-3])
    assert read_samples(path) == samples[:1]


def test_a_span_of_samples_holds_the_counts_at_its_ends(tmp_path: Path) -> None:
    path = tmp_path / "counters.jsonl"
    path.write_text("".join(sample_line(t, [counters(t * 10)]) + "\n" for t in range(5)))
    samples = read_samples(path)
    assert at(samples, time_s=2.5).sent_bytes == (25,), "counts grow evenly between two samples"
    assert at(samples, time_s=-1).sent_bytes == (0,), "before the first sample nothing had changed"
    assert sent_by(between(samples, start_s=0.5, end_s=3.0), host=0) == [(0.5, 5), (1, 10), (2, 20), (3.0, 30)]


STEPS = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 10_000)), min_size=1, max_size=30)


def points_of(steps: list[tuple[int, int]]) -> list[tuple[float, int]]:
    """Return samples at whole milliseconds."""
    times = itertools.accumulate(step for step, _ in steps)
    counts = itertools.accumulate(count for _, count in steps)
    return [(0.0, 0), *((time / 1000, count) for time, count in zip(times, counts, strict=True))]


def bytes_at(points: list[tuple[float, int]], time_s: float) -> float:
    for (before_s, before), (after_s, after) in itertools.pairwise(points):
        if before_s <= time_s <= after_s:
            return before + (after - before) * (time_s - before_s) / (after_s - before_s)
    return points[-1][1]


@given(STEPS)
def test_the_peak_is_the_highest_rate_of_any_window_of_100_ms(steps: list[tuple[int, int]]) -> None:
    points = points_of(steps)
    end_ms = round(points[-1][0] * 1000)
    found = max(bytes_at(points, (start + 100) / 1000) - bytes_at(points, start / 1000) for start in range(end_ms + 1))
    assert peak_rate(points, window_s=0.1) == pytest.approx(found * 8 / 0.1, rel=1e-6, abs=1e-3)


@given(STEPS, st.floats(0.01, 2.0))
def test_the_peak_is_at_least_the_average_and_at_most_everything_in_one_window(
    steps: list[tuple[int, int]], window_s: float
) -> None:
    points = points_of(steps)
    total, peak = points[-1][1] * 8, peak_rate(points, window_s=window_s)
    num_windows = math.ceil(points[-1][0] / window_s)  # that many cover all, so one of them holds its share
    assert total / num_windows / window_s * (1 - 1e-9) - 1e-6 <= peak <= total / window_s * (1 + 1e-9)


def test_what_was_never_or_once_sampled_has_no_peak() -> None:
    assert peak_rate([]) == peak_rate([(5.0, 1000)]) == 0.0


class Devices:
    """A file as the kernel's, whose counts a test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(0)
        self.file = path.open("rb")

    def set(self, sent: int) -> None:
        self.path.write_text(f"  eth0: 0 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n")


def test_a_sample_is_written_where_a_count_changed_and_the_one_before_that(tmp_path: Path) -> None:
    devices, path = Devices(tmp_path / "devices"), tmp_path / "counters.jsonl"
    sampler = CounterSampler([devices.file.fileno()], path=path)
    for beat, sent in enumerate((0, 0, 0, 5, 5, 9)):
        devices.set(sent)
        sampler.take_if_due(beat * BEAT_S * 1.01)
    assert [sample.sent_bytes[0] for sample in read_samples(path)] == [0, 0, 5, 5, 9]
    times = [sample.time_s for sample in read_samples(path)]
    assert times == sorted(times)


def test_nothing_is_sampled_before_it_is_due_unless_it_is_asked_for(tmp_path: Path) -> None:
    devices, path = Devices(tmp_path / "devices"), tmp_path / "counters.jsonl"
    sampler = CounterSampler([devices.file.fileno()], path=path)
    sampler.take_if_due(100.0)
    devices.set(7)
    sampler.take_if_due(100.0 + BEAT_S / 2)
    assert sampler.wait_s(100.0 + BEAT_S / 2) == pytest.approx(BEAT_S / 2)
    assert len(read_samples(path)) == 1
    assert sampler.take()[0].sent_bytes == 7
    assert len(read_samples(path)) == 2


def test_a_device_that_is_gone_keeps_its_last_counts(tmp_path: Path) -> None:
    devices = Devices(tmp_path / "devices")
    sampler = CounterSampler([devices.file.fileno()], path=tmp_path / "counters.jsonl")
    devices.set(7)
    assert sampler.take()[0].sent_bytes == 7
    devices.path.write_text("")
    assert sampler.take()[0].sent_bytes == 7
