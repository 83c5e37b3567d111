"""Shared attention against attention in one process: output, all gradients, and counted bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.every_case import over
from tests.sequence_ranks import ThreadPeers, on_ranks, whole_attention
from thinwire import compat
from thinwire.errors import ThinwireError
from thinwire.sequences.block_tables import POLICIES, SequencePlan, sequence_plan
from thinwire.sequences.sharing import SequenceAttention, attention

BATCH, WIDTH = 2, 6
TABLES = (*POLICIES[1:], "keys-at-home")
SITES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((0,),), 2: ((0, 0), (0, 1)), 4: ((0, 0, 0, 0), (0, 0, 1, 1)), 5: ((0,) * 5, (0, 0, 1, 1, 1), (0, 1, 2, 3, 4)),
    6: ((0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 1, 1)),
}  # fmt: skip


def plans(size: int, kind: str) -> list[SequencePlan]:
    found = []
    heads = {5: 10, 6: 6}.get(size, 4)
    kv_heads = {"MHA": heads, "GQA": heads // 2, "MQA": 1}[kind]
    for sites in SITES[size]:
        for policy in TABLES:
            try:
                found.append(sequence_plan(policy, sites=sites, heads=heads, kv_heads=kv_heads))
            except ValueError:  # heads or sites that the policy refuses
                assert policy in ("heads", "heads+sites", "two-level")
    return found


def inputs(plan: SequencePlan, *, slices: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(plan.num_ranks)
    seq_len = plan.num_parts * slices
    shapes = [(BATCH, heads, seq_len, WIDTH) for heads in (plan.heads, plan.kv_heads, plan.kv_heads)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    return [one.to(dtype) for one in (*drawn, weights)]


def shared(plan: SequencePlan, whole: list[torch.Tensor], documents: torch.Tensor | None = None) -> Any:
    """Return output and gradients over all positions, and the bytes of each pass by (source, target)."""

    def work(peers: ThreadPeers) -> Any:
        attend = SequenceAttention(plan, peers)
        attend.set_documents(documents)
        own = attend.own_positions(whole[0].shape[2])
        query, key, value = (one[:, :, own].clone().requires_grad_() for one in whole[:3])
        before = dict(peers.ways.sent)
        output = attend(query, key, value)
        forward = {way: count - before[way] for way, count in peers.ways.sent.items() if way[0] == peers.rank}
        between = dict(peers.ways.sent)
        (output * whole[3][:, :, own]).sum().backward()
        backward = {way: count - between[way] for way, count in peers.ways.sent.items() if way[0] == peers.rank}
        return own, [output.detach(), query.grad, key.grad, value.grad], forward, backward

    ranks, _ = on_ranks(plan.num_ranks, work)
    found = [torch.zeros_like(one) for one in (whole[0], *whole[:3])]
    sent: list[dict[tuple[int, int], int]] = [{}, {}]
    for own, tensors, *passes in ranks:
        for into, tensor in zip(found, tensors, strict=True):
            into[:, :, own] = tensor
        for into, counted in zip(sent, passes, strict=True):
            into.update({way: count for way, count in counted.items() if count})
    return found, sent


def alone(whole: list[torch.Tensor], documents: torch.Tensor | None = None) -> list[torch.Tensor]:
    query, key, value = (one.clone().requires_grad_() for one in whole[:3])
    output = whole_attention(query, key, value, documents)
    (output * whole[3]).sum().backward()
    return [output.detach(), query.grad, key.grad, value.grad]  # type: ignore[list-item]


@over([(size, kind) for size in SITES for kind in ("MHA", "GQA", "MQA")])
def test_every_table_gives_the_output_and_gradients_of_one_process_and_sends_the_bytes_of_its_formula(
    size: int, kind: str
) -> None:
    for plan in plans(size, kind):
        for keeps in (True, False) if len(set(plan.sites)) > 1 else (True,):
            plan = replace(plan, table=replace(plan.table, keeps_border=keeps))
            whole = inputs(plan, slices=3)
            found, sent = shared(plan, whole)
            for name, one, wanted in zip(("output", "query", "key", "value"), found, alone(whole), strict=True):
                assert (one - wanted).abs().max() < 1e-10, (plan.policy, plan.sites, name)
            for backward, counted in enumerate(sent):
                predicted = plan.sent_bytes(batch=BATCH, seq_len=whole[0].shape[2], head_dim=WIDTH, item_bytes=8,
                                            log_sum_bytes=8, backward=bool(backward))  # fmt: skip
                assert counted == predicted, (plan.policy, plan.sites, backward)


def test_documents_of_a_packed_row_do_not_meet_and_their_keys_do_not_cross() -> None:
    for policy in ("ring", "zigzag", "helper", "two-level", "heads", "heads+sites"):
        plan = sequence_plan(policy, sites=(0, 0, 1, 1), heads=4, kv_heads=2)
        whole = inputs(plan, slices=4)
        positions = torch.arange(whole[0].shape[2])
        # the first row's documents end inside parts, the second row's where a site ends
        documents = torch.stack([(positions * 3) // len(positions), positions // (len(positions) // 2)])
        found, _ = shared(plan, whole, documents)
        for one, wanted in zip(found, alone(whole, documents), strict=True):
            assert (one - wanted).abs().max() < 1e-10, policy
        if policy == "ring":
            documents[0] = documents[1]
            found, (forward, backward) = shared(plan, whole, documents)
            assert plan.border_bytes(forward) == plan.border_bytes(backward) == 0 < sum(forward.values())
            for one, wanted in zip(found, alone(whole, documents), strict=True):
                assert (one - wanted).abs().max() < 1e-10


def test_half_precision_stays_as_near_to_the_exact_result_as_one_process() -> None:
    for dtype, most in ((torch.bfloat16, 1.5), (torch.float32, 1e-5)):
        for policy in ("helper", "two-level", "heads+sites"):
            plan = sequence_plan(policy, sites=(0, 0, 1, 1), heads=4, kv_heads=2)
            whole = inputs(plan, slices=8, dtype=dtype)
            exact = alone([one.double() for one in whole])
            errors = [
                (one.double() - wanted).abs().max() for one, wanted in zip(shared(plan, whole)[0], exact, strict=True)
            ]
            plain = [(one.double() - wanted).abs().max() for one, wanted in zip(alone(whole), exact, strict=True)]
            # partial gradients are rounded once more on their way
            limits = [most * max(plain)] * 4 if dtype is torch.bfloat16 else [most] * 4
            assert all(error <= limit for error, limit in zip(errors, limits, strict=True)), (policy, errors, plain)


def test_rows_of_more_than_one_chunk_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.sequences.block_attention._ROWS_AT_ONCE", 4)
    plan = sequence_plan("ring", sites=(0, 0), heads=4, kv_heads=2)
    whole = inputs(plan, slices=11)
    documents = (torch.arange(22) // 9).expand(BATCH, -1)
    for numbers in (None, documents):
        for one, wanted in zip(shared(plan, whole, numbers)[0], alone(whole, numbers), strict=True):
            assert (one - wanted).abs().max() < 1e-10


def test_a_nan_names_the_rank_and_the_layer() -> None:
    plan = sequence_plan("ring", sites=(0, 0), heads=1)

    def work(peers: ThreadPeers) -> str:
        attend = SequenceAttention(plan, peers)
        query = torch.full((1, 1, 2, 4), float("nan") if peers.rank else 1.0)
        if peers.rank == 0:
            attend(query, query, query)
            return ""
        with pytest.raises(ThinwireError, match="NaN on rank 1 of 2, layer 7"):
            attend(query, query, query, layer=7)
        return "refused"

    assert on_ranks(2, work)[0] == ["", "refused"]


@over([("ring", "helper", (2, 2)), ("ring", "ring", (4, 2))])
def test_ranks_that_were_started_unlike_are_refused(first: str, second: str, heads: tuple[int, int]) -> None:
    def work(peers: ThreadPeers) -> str:
        with pytest.raises(ValueError, match=r"do not share sequences alike.*the same --cp and --cp-policy"):
            attention(peers, heads=heads[peers.rank], policy=(first, second)[peers.rank])
        return "refused"

    assert on_ranks(2, work)[0] == ["refused"] * 2


def test_shapes_that_the_plan_does_not_have_are_refused() -> None:
    def work(peers: ThreadPeers) -> None:
        with pytest.raises(ValueError, match="got 3 sites; allowed 1 numbers; try 0"):
            attention(peers, heads=2, sites=[0, 0, 0])
        attend = attention(peers, heads=2, kv_heads=1)
        query, key = torch.ones(1, 2, 4, 8), torch.ones(1, 1, 4, 8)
        with pytest.raises(ValueError, match=r"other shapes.*allowed 2 heads of queries, and \(1, 1, 4, 8\)"):
            attend(query, query, query)
        attend.set_documents(torch.zeros(1, 5, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"other sequences; got \(1, 5\); allowed \(1, 4\)"):
            attend(query, key, key)

    on_ranks(1, work)


def test_the_flash_operator_of_a_gpu_returns_what_is_merged() -> None:
    """Shapes alone: torch's operator runs here on the meta device."""
    query, key = (torch.empty(2, heads, 8, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    output, log_sums = compat.flash_attention(query, key, key, scale=0.25, is_causal=True)
    assert output.shape == query.shape and log_sums.shape == query.shape[:3] and log_sums.dtype == torch.float32
    grads = compat.flash_attention_backward(query, query, key, key, output, log_sums, scale=0.25, is_causal=False)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]


def test_the_flash_operator_of_a_gpu_gets_contiguous_log_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one of two parts of a rank are a view, which the kernel would read as the wrong rows."""
    given: list[torch.Tensor] = []
    real = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

    class Watched:
        @staticmethod
        def default(*args: Any, **kwargs: Any) -> Any:
            given.extend(args[:6])
            return real(*args, **kwargs)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", Watched)
    rows = torch.empty(2, 4, 16, 16, dtype=torch.bfloat16, device="meta")
    log_sums = torch.empty(2, 4, 16, device="meta")
    own, sums = rows.chunk(2, 2)[1], log_sums.chunk(2, 2)[1]
    compat.flash_attention_backward(own.expand(2, 4, 8, 16), own, own, own, own, sums, scale=0.25, is_causal=True)
    assert given[5].is_contiguous() and given[0].is_contiguous()
