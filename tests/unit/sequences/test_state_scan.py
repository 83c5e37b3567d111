"""Scans of linear attention's states: exact, and as many bytes whatever the length of the sequence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.every_case import over
from tests.sequence_ranks import ThreadPeers, on_ranks
from thinwire import sequences
from thinwire.sequences.linear_attention import LEAST_LOG_GATE, gated_attention, shared_gated_attention
from thinwire.sequences.state_scan import ScanPlan, scan_plan, scan_states

BATCH, HEADS, D_K, D_V = 2, 2, 6, 4


def inputs(seq_len: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(BATCH, HEADS, seq_len, width, generator=generator).double() for width in (D_K, D_K, D_V, D_K)]
    drawn[3] = torch.nn.functional.logsigmoid(drawn[3] * 4).clamp(min=LEAST_LOG_GATE)
    return [*drawn, torch.randn(drawn[2].shape, generator=generator).double()]


def step_by_step(query: Any, key: Any, value: Any, log_gates: Any) -> torch.Tensor:
    state, outputs = torch.zeros(BATCH, HEADS, D_K, D_V).double(), []
    for position in range(query.shape[2]):
        state = log_gates[:, :, position].exp().unsqueeze(-1) * state
        state = state + key[:, :, position].unsqueeze(-1) * value[:, :, position].unsqueeze(-2)
        outputs.append((query[:, :, position].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 2)


def alone(whole: list[torch.Tensor], attend: Any) -> list[Any]:
    own = [one.clone().requires_grad_() for one in whole[:4]]
    output = attend(*own)
    (output * whole[4]).sum().backward()
    return [output.detach(), *(one.grad for one in own)]


def shared(whole: list[torch.Tensor], ranks: int, plan: ScanPlan) -> tuple[list[torch.Tensor], dict[Any, int]]:
    def work(peers: ThreadPeers) -> list[Any]:
        own = [one.chunk(ranks, 2)[peers.rank].clone() for one in whole]
        return alone(own, lambda *four: shared_gated_attention(*four, peers=peers, plan=plan))

    found, sent = on_ranks(ranks, work)
    return [torch.cat(parts, 2) for parts in zip(*found, strict=True)], sent


def test_chunks_give_what_one_position_after_the_other_gives() -> None:
    for seq_len in (1, 16, 37):
        whole = inputs(seq_len)
        chunked = alone(whole, lambda *four: gated_attention(*four)[0])
        for one, wanted in zip(chunked, alone(whole, step_by_step), strict=True):
            assert (one - wanted).abs().max() < 1e-10


@over([(ranks, plan) for ranks in (1, 2, 3, 4, 5, 8) for plan in (
    ScanPlan(kind="chain", pieces=1), ScanPlan(kind="chain", pieces=4), ScanPlan(kind="gather"), ScanPlan(kind="tree"),
)])  # fmt: skip
def test_every_scan_is_exact_and_sends_the_numbers_of_its_formula_at_any_length(ranks: int, plan: ScanPlan) -> None:
    for length in (3, 20):
        whole = inputs(length * ranks)
        found, sent = shared(whole, ranks, plan)
        for one, wanted in zip(found, alone(whole, lambda *four: gated_attention(*four)[0]), strict=True):
            assert (one - wanted).abs().max() < 1e-10
        for rank in range(ranks):
            how: Any = {"rank": rank, "ranks": ranks, "state": BATCH * HEADS * D_K * D_V, "decay": BATCH * HEADS * D_K}
            numbers = plan.sent_numbers(**how) + plan.sent_numbers(**how, reverse=True)
            assert sum(count for way, count in sent.items() if way[0] == rank) == 8 * numbers


def test_a_chain_sends_a_state_where_a_gather_sends_one_to_each_rank() -> None:
    """Volumes of arXiv 2507.01004: d_k d_v against P d_k d_v; 1,024 and 4,096 bytes for 16 x 16 on 4 ranks."""
    chain, gather = ScanPlan(kind="chain", pieces=4), ScanPlan(kind="gather")
    how: Any = {"rank": 0, "ranks": 4, "state": 16 * 16, "decay": 0}
    assert 4 * chain.sent_numbers(**how) == 1024
    assert 4 * (gather.sent_numbers(**how) + 16 * 16) == 4096, "with the part that stays"
    # two sites, 32 layers, 8 heads of 128 x 128 in float32
    assert 32 * 4 * chain.sent_numbers(rank=0, ranks=2, state=8 * 128 * 128, decay=8 * 128) == pytest.approx(
        16.8e6, rel=2e-3
    )


def test_the_plan_follows_latency_and_rate() -> None:
    how: Any = {"ranks": 8, "width": 64}
    assert scan_plan(**how, state_bytes=5e8).kind == "chain"
    assert scan_plan(**how, state_bytes=5e5).kind == "tree"
    assert scan_plan(**how, state_bytes=1e3).kind == "gather"
    for kind in ("chain", "gather", "tree"):
        assert scan_plan(kind, **how, state_bytes=1e3).kind == kind
    # ZeCO's table 2 in ms: its times grow with the ranks, 0.207 + 0.00784 (P - 1); 2.165 for 256
    pieces = 16
    chain = ScanPlan(kind="chain", pieces=pieces)
    step_s = 0.00784e-3
    rate: Any = {"latency_s": 0.0, "bytes_per_s": 1 / (step_s * pieces)}
    found = chain.seconds(ranks=256, state_bytes=1.0, **rate) - chain.seconds(ranks=2, state_bytes=1.0, **rate)
    assert found == pytest.approx(254 * step_s)
    assert pytest.approx(2.165, rel=0.02) == 0.207 + 0.00784 * 255
    with pytest.raises(ValueError, match="unknown scan of states; got 'ring'"):
        scan_plan("ring", **how, state_bytes=1e3)


@pytest.mark.parametrize("name", ["ranks", "width", "state_bytes", "latency_s", "bytes_per_s"])
def test_absurd_numbers_of_a_scan_are_refused_with_one_that_works(name: str) -> None:
    options: dict[str, Any] = {"ranks": 4, "width": 64, "state_bytes": 5e5}
    for wrong in (-1, math.nan, math.inf, 10**400):
        with pytest.raises(ValueError, match=f"{name} is out of range; got .*; try {name}=") as refused:
            scan_plan(**{**options, name: wrong})
        number = str(refused.value).rsplit("=", 1)[1]
        scan_plan(**{**options, name: float(number) if "." in number else int(number)})


def test_states_that_do_not_fit_are_refused() -> None:
    state, decay = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match=r"3 pieces.*try pieces=2"):
        on_ranks(1, lambda peers: scan_states(state, decay, peers=peers, plan=ScanPlan(kind="chain", pieces=3)))


def test_gates_whose_products_would_overflow_are_refused() -> None:
    drawn = torch.randn(4, 1, 1, 40, 4, generator=torch.Generator().manual_seed(1))
    for gate in (2 * LEAST_LOG_GATE, 0.1, float("nan")):
        with pytest.raises(ValueError, match=r"allowed -5 to 0; try log_gates.clamp\(LEAST_LOG_GATE, 0\)"):
            gated_attention(*drawn[:3], torch.full((1, 1, 40, 4), gate))
    output, _, _ = gated_attention(*drawn[:3], (20 * drawn[3]).clamp(LEAST_LOG_GATE, 0))
    assert output.isfinite().all()


def test_a_public_name_is_the_function_each_time() -> None:
    for _ in range(2):
        for name in sequences.__all__:
            assert type(getattr(sequences, name)).__name__ != "module", name
