"""Records of transfers, rates out of them, and numbers with units."""

from __future__ import annotations

import json

import pytest

from thinwire.events import Transfer, TransferLog
from thinwire.units import format_bytes, format_count, format_rate, format_seconds, parse_rate, parse_seconds


def transfer(start, end, size, *, direction="sent", error=""):
    return Transfer(
        direction=direction, peer=1, kind="round", round_id=0, fragment=0, phase=0, payload_bytes=size,
        wire_bytes=size + 56, started_s=start, finished_s=end, error=error,
    )  # fmt: skip


def test_the_ring_is_bounded_but_totals_and_sinks_see_everything():
    seen = []
    log = TransferLog(capacity=3, sinks=[seen.append])
    late = []
    for number in range(5):
        log.add(transfer(number, number + 1, 100))
        if number == 2:
            log.add_sink(late.append)
    assert len(log) == 3
    assert [t.started_s for t in log] == [2, 3, 4]
    assert len(seen) == 5
    assert len(late) == 2
    assert log.totals("sent").wire_bytes == 5 * 156
    assert log.totals("sent").payload_bytes == 500
    assert log.totals("received").messages == 0


def test_a_failed_transfer_is_kept_but_counts_no_bytes():
    log = TransferLog()
    log.add(transfer(0, 1, 100, error="replica 1 closed its connection"))
    assert len(log) == 1
    assert log.totals("sent").messages == 0


def test_a_log_without_room_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        TransferLog(capacity=0)


def test_a_record_is_one_json_line():
    line = transfer(0.5, 1.5, 7).to_json()
    assert "\n" not in line
    assert json.loads(line)["wire_bytes"] == 63


@pytest.mark.parametrize(("text", "value"), [("5mbit", 5e6), ("1.5 Gbit/s", 1.5e9), ("800k", 8e5), ("2e3 bps", 2000.0)])
def test_rates_are_read_with_their_prefix(text, value):
    assert parse_rate(text) == value


@pytest.mark.parametrize("text", ["", "fast", "-5mbit", "5 mbyte", "1e", "5mbit extra"])
def test_what_is_no_rate_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match=r"the rate cannot be read; got .* try 5mbit"):
        parse_rate(text)


def test_durations_are_read_and_refused():
    assert [parse_seconds(t) for t in ("40ms", "2 s", "10min", "1h")] == [0.04, 2.0, 600.0, 3600.0]
    with pytest.raises(ValueError, match=r"the duration has no unit; got '40'; .* try 40s"):
        parse_seconds("40")


def test_a_rate_without_a_unit_is_refused():
    with pytest.raises(ValueError, match=r"the rate has no unit; got '100'; .* try 100mbit"):
        parse_rate("100")


def test_numbers_are_written_with_three_figures():
    assert [format_bytes(b) for b in (0, 999, 1000, 12_345, 123_456_789)] == [
        "0 B", "999 B", "1.00 kB", "12.3 kB", "123 MB",
    ]  # fmt: skip
    assert format_rate(2.5e9) == "2.50 Gbit/s"
    assert format_count(3_050_496) == "3.05 M"
    assert [format_seconds(s) for s in (5e-5, 0.0123, 4.26, 75, 3723)] == [
        "50 us", "12.3 ms", "4.3 s", "1:15 min", "1:02:03",
    ]  # fmt: skip


def test_a_duration_that_rounds_up_to_the_next_unit_is_told_in_that_unit():
    assert [format_seconds(s) for s in (0.0009994, 0.0009997, 0.99994, 0.99996, 59.94, 59.96, 60, 3599.4, 3599.6)] == [
        "999 us", "1.0 ms", "999.9 ms", "1.0 s", "59.9 s", "1:00 min", "1:00 min", "59:59 min", "1:00:00",
    ]  # fmt: skip
