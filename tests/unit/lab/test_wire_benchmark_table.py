from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from thinwire import codecs
from thinwire.lab.counters import Sample
from thinwire.wire_benchmark.contenders import CONTENDERS
from thinwire.wire_benchmark.result_table import HEAD, describe, figure, markdown, rows, spread
from thinwire.wire_benchmark.runner import (
    CODEC_BYTES,
    BenchWire,
    GridCell,
    cells,
    deadline_s,
    kernel_numbers,
    summary,
)

THIN = BenchWire(rate_bits_per_s=5e6)


def run(name: str = "diloco", *, wire: BenchWire = THIN, repeat: int = 0, **changed: Any) -> dict[str, Any]:
    values = {
        "contender": name, "num_hosts": 2, "wire": wire, "repeat": repeat, "pace": False, "measured_steps": 60,
        "tokens_per_s": 100.0, "wall_s": 10.0, "sent_bytes_per_step": 1e5, "peak_bits_per_s": 5e6, "stalled_s": 5.0,
        "bytes_over_payload": 1.05, "val_loss": 6.0,
    }  # fmt: skip
    return values | changed


def test_a_share_is_of_the_same_contender_in_the_same_repeat() -> None:
    found = rows(
        [
            run(tokens_per_s=100.0, repeat=0),
            run(tokens_per_s=300.0, repeat=1),
            run(wire=BenchWire(), tokens_per_s=200.0, repeat=0),
            run(wire=BenchWire(), tokens_per_s=400.0, repeat=1),
            run("all-reduce", wire=BenchWire(), tokens_per_s=1.0, repeat=0),
        ]
    )
    assert [(row.contender, row.wire, row.shares) for row in found] == [
        ("diloco", THIN, (0.5, 0.75)),
        ("all-reduce", BenchWire(), ()),
        ("diloco", BenchWire(), ()),
    ]


def test_a_loss_counts_only_where_as_many_steps_were_run_as_without_a_limit() -> None:
    whole = run(wire=BenchWire(), val_loss=5.0)
    short, long = rows([run(measured_steps=3, val_loss=9.0), whole]), rows([run(val_loss=5.1), whole])
    assert (short[0].val_loss, long[0].val_loss) == ((), (5.1,))


def test_a_paced_run_is_a_row_of_its_own() -> None:
    found = rows([run(), run(pace=True), run(wire=BenchWire()), run(wire=BenchWire(), pace=True, tokens_per_s=400.0)])
    assert [(row.contender, row.shares) for row in found[:2]] == [("diloco", (1.0,)), ("diloco (paced)", (0.25,))]


def test_what_only_thinwire_counts_stays_empty_for_references() -> None:
    (row,) = rows([run("ddp", wire=BenchWire(), stalled_s=None, bytes_over_payload=None)])
    cell = dict(zip(HEAD, row.cells(), strict=True))
    assert (cell["stalled"], cell["bytes / payload"], cell["tokens/s"]) == ("", "", "100")


def test_the_table_has_a_line_a_row_and_the_figure_a_line_a_contender() -> None:
    found = rows([run(), run(wire=BenchWire()), run("ddp", tokens_per_s=5.0), run("ddp", wire=BenchWire())])
    assert len(markdown(found).splitlines()) == 2 + len(found)
    drawn = figure(found, num_hosts=2)
    ElementTree.fromstring(drawn)
    assert drawn.startswith("<svg") and 'xmlns="http://www.w3.org/2000/svg"' in drawn and "<style>" in drawn
    assert "diloco" in drawn and "ddp" in drawn and "torchft-diloco" not in drawn
    assert "no data" in figure(found, num_hosts=4)


def test_a_delayed_wire_says_its_delay() -> None:
    wire = BenchWire(rate_bits_per_s=20e6, latency_s=0.04, jitter_s=0.005, loss=0.001)
    assert describe(wire) == "20.0 Mbit/s, 40.0 ms +- 5.0 ms, 0.1% lost"


def test_a_spread_of_one_value_has_no_range() -> None:
    assert spread([0.5], "{:.2f}") == "0.50"


def test_every_contender_runs_on_a_wire_without_a_limit_first() -> None:
    found = list(cells(contenders=["all-reduce", "diloco"], num_hosts=[2], wires=[BenchWire(), THIN], repeats=range(2)))
    assert [(c.repeat, c.contender, c.wire) for c in found[:4]] == [
        (0, "all-reduce", BenchWire()), (0, "all-reduce", THIN), (0, "diloco", BenchWire()), (0, "diloco", THIN),
    ]  # fmt: skip
    assert len(found) == 8


def test_an_exchange_at_every_step_gets_as_many_steps_as_fit_the_budget_and_never_none() -> None:
    wires = [BenchWire(), THIN, BenchWire(rate_bits_per_s=1e6)]
    every = list(cells(contenders=["all-reduce"], num_hosts=[2], wires=wires, repeats=[0], budget_s=100.0))
    whole = list(cells(contenders=["diloco"], num_hosts=[2], wires=wires, repeats=[0], budget_s=1.0, intervals=2))
    assert [cell.measured_steps for cell in every] == [60, 5, 2]
    assert [cell.measured_steps for cell in whole] == [60, 60, 60]


def test_a_run_s_deadline_is_well_above_what_its_bytes_need() -> None:
    (cell,) = cells(contenders=["all-reduce"], num_hosts=[4], wires=[BenchWire(rate_bits_per_s=1e6)], repeats=[0])
    needed_s = cell.measured_steps * 1.5 * 3_050_000 * 32 / 1e6
    assert deadline_s(cell) > 5 * needed_s


def test_the_bytes_of_every_contender_are_those_of_its_codec() -> None:
    bits = {one.codec: codecs.by_name(one.codec).bits_per_element for one in CONTENDERS.values()}
    assert {codec: 8 * count for codec, count in CODEC_BYTES.items()} == bits


def test_a_cell_survives_its_line() -> None:
    (cell,) = cells(contenders=["diloco"], num_hosts=[2], wires=[THIN], repeats=[0])
    assert GridCell.from_json(cell.to_json()) == cell


def test_the_kernel_s_bytes_are_those_of_the_measured_span_and_the_payload_s_those_to_the_end() -> None:
    samples = [
        Sample(time_s=time_s, sent_bytes=(sent, 0), received_bytes=(0, sent))
        for time_s, sent in ((0.0, 500), (1.0, 1500), (2.0, 2500), (3.0, 2600))
    ]
    host = {
        "started_unix_s": 0.5, "ended_unix_s": 2.5, "contender": "diloco", "wall_s": 2.0, "tokens": 10,
        "gate_payload_bytes_sent": 2000, "gate_unix_s": 0.0, "stalled_s": 0.5, "val_loss": 1.0,
    }  # fmt: skip
    other = host | {"gate_payload_bytes_sent": None}
    numbers = kernel_numbers(samples, [host, other])
    assert (numbers[0]["sent_bytes"], numbers[0]["sent_bytes_since_gate"]) == (1550, 2100)
    assert numbers[0]["peak_sent_bits_per_s"] == pytest.approx(8000, rel=0.01)
    (cell,) = cells(contenders=["diloco"], num_hosts=[2], wires=[THIN], repeats=[0])
    found = summary({"cell": cell.to_json(), "hosts": [host, host], "kernel": [numbers[0], numbers[0]]})
    assert found["bytes_over_payload"] == 1.05
    assert found["tokens_per_s"] == 10.0
    silent = summary({"cell": cell.to_json(), "hosts": [other, other], "kernel": [numbers[1], numbers[1]]})
    assert silent["bytes_over_payload"] is None
