from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.events import Transfer, TransferLog
from thinwire.sync.fragments import find_blocks
from thinwire.wire_benchmark.contenders import ABLATION, CONTENDERS, contender
from thinwire.wire_benchmark.worker import ByteMeter, WorkerOptions, closing, lr_factor, span
from thinwire.workloads.language import build_model


def options(**changed: Any) -> WorkerOptions:
    given: dict[str, Any] = {
        "contender": "diloco", "steps": 4, "sync_interval": 2, "overlap_steps": 1, "warmup_steps": 1,
        "result": Path("result.json"), "cache_dir": Path("cache"), "address": "127.0.0.1",
    }  # fmt: skip
    return WorkerOptions(**(given | changed))


def test_the_parts_of_streaming_diloco_are_all_there() -> None:
    assert {"all-reduce", "diloco", "streaming-dense", "streaming-e3m0", *ABLATION} <= set(CONTENDERS)


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_method_exchanges_what_its_contender_says(name: str) -> None:
    row = contender(name)
    method = row.method(sync_interval=30, overlap_steps=3)
    fragments = getattr(method.view, "fragments", None)
    blocks = find_blocks(build_model("nano", vocab_size=257))
    assert (fragments is not None and len(fragments.partition(blocks)) > 1) == row.has_fragments
    assert [getattr(method.schedule, "overlap_steps", 0)] == [3 if row.has_overlap else 0]
    assert method.schedule.sync_interval == (1 if row.kind == "every-step" else 30)
    sent_bytes = method.exchange(2).sent_bytes(64_000, num_replicas=2)
    bits = {"chunked-top-k-2bit": 0.234, "block-2bit": 2.0625, "e3m0": 4.125, "bfloat16": 16, "float32": 32}[row.codec]
    assert sent_bytes == pytest.approx(64_000 * bits / 8, rel=0.01)


def test_the_ablation_changes_one_part_at_a_time() -> None:
    def parts(name: str) -> tuple[bool, bool, str]:
        row = contender(name)
        return row.has_fragments, row.has_overlap, row.codec

    chain = [parts(name) for name in ABLATION[:4]]
    assert chain[0] == (False, False, "float32") and chain[-1] == (True, True, "e3m0")
    for before, after in itertools.pairwise(chain):
        assert sum(old != new for old, new in zip(before, after, strict=True)) == 1


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown contender; got 'streaming-e3m1'; allowed .*; try streaming-e3m0"):
        contender("streaming-e3m1")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"contender": "nobody"}, "unknown contender"),
        ({"steps": 0}, "steps must be positive, got 0"),
        ({"warmup_steps": 4}, r"warmup_steps must be in \[0, 4\)"),
        ({"warmup_steps": -1}, r"warmup_steps must be in \[0, 4\)"),
        ({"timeout_s": 0.0}, "timeout_s must be positive"),
        ({"model": "giant"}, "unknown model; got 'giant'"),
    ],
)
def test_a_bad_option_is_refused_with_its_value(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        options(**changed)


def test_paths_and_addresses_may_differ_between_hosts_and_nothing_else() -> None:
    other = options(result=Path("b"), cache_dir=Path("c"), address="10.0.0.2", data="other texts")
    assert other.shared() == options().shared()
    assert options(seed=1).shared() != options().shared()


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth() -> None:
    rates = [lr_factor(step, steps=1000) for step in range(1001)]
    assert rates[0] == pytest.approx(0.02, rel=0.01) and rates[-1] == pytest.approx(0.05)
    assert max(rates) == pytest.approx(1.0, abs=0.01) and rates.index(max(rates)) == 49


def test_a_span_counts_rounds_and_no_meetings() -> None:
    log = TransferLog()
    meter = ByteMeter(log, counts_bytes=True)

    def add(kind: str, payload_bytes: int, error: str = "") -> None:
        log.add(
            Transfer(
                direction="sent", peer=1, kind=kind, round_id=0, fragment=0, phase=0, payload_bytes=payload_bytes,
                wire_bytes=payload_bytes + 56, started_s=0.0, finished_s=1.0, error=error,
            )
        )  # fmt: skip

    add("round", 7)
    began = meter.read(stalled_s=lambda: 1.0)
    add("round", 100)
    add("control", 8192)
    add("round", 100, error="lost")
    ended = meter.read(stalled_s=lambda: 1.5)
    add("round", 30)
    closed = meter.read(stalled_s=lambda: 1.5)
    found = span(began, ended, step_s=[0.5, 0.25], tokens=64)
    assert (found["messages_sent"], found["payload_bytes_sent"], found["wire_bytes_sent"]) == (1, 100, 156)
    assert found["stalled_s"] == 0.5 and found["payload_bytes_received"] == 0
    assert closing(ended, ended, closed)["close_payload_bytes_sent"] == 30


def test_bytes_that_thinwire_does_not_send_are_not_known() -> None:
    meter = ByteMeter(TransferLog(), counts_bytes=False)
    began, ended = meter.read(stalled_s=lambda: None), meter.read(stalled_s=lambda: None)
    found = span(began, ended, step_s=[0.1], tokens=1)
    assert found["payload_bytes_sent"] is None and found["stalled_s"] is None
    assert found["wall_s"] >= 0 and found["ended_unix_s"] >= found["started_unix_s"]


def test_the_mean_of_an_uneven_last_batch_is_a_mean_over_tokens() -> None:
    from thinwire.wire_benchmark.worker import _mean_nll

    model = build_model("nano", vocab_size=257, max_seq_len=8, seed=1)
    tokens = torch.arange(24).reshape(3, 8)
    with torch.no_grad():
        whole = _mean_nll(model, [(tokens, tokens + 1)])
        parts = _mean_nll(model, [(tokens[:2], tokens[:2] + 1), (tokens[2:], tokens[2:] + 1)])
    assert parts == pytest.approx(whole, abs=1e-5)
