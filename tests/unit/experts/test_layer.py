"""Layers of experts that ranks share, as threads of one process, against the same layer in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.every_case import over
from tests.sequence_ranks import ThreadPeers, on_ranks
from thinwire import ActivationCode, experts
from thinwire.errors import NonFiniteError, PayloadError
from thinwire.experts.exchange import exchange_counts

WIDTH, COUNTS = 6, (7, 0, 5, 2)  # tokens of each rank
CODE = ActivationCode("block-int8", "block-int4")


def layer_of(k: int, dtype: torch.dtype, *, num_experts: int = 8) -> experts.ExpertLayer:
    torch.manual_seed(3)
    layer = experts.ExpertLayer(WIDTH, 10, num_experts, k).to(dtype)
    with torch.no_grad():
        layer.router.weight[1] = -3 * torch.ones(WIDTH)  # with positive tokens no one chooses expert 1 unless all do
    return layer


def tokens_of(size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    counts = COUNTS[:size] if size > 1 else (5,)
    return [torch.rand(count, WIDTH, generator=generator).to(dtype) for count in counts]


def loss_of(made: Tensor) -> Tensor:
    return (made * torch.linspace(-1, 2, made.shape[-1]).to(made.dtype)).sin().sum()


def numbers(layer: Any, tokens: Tensor) -> dict[str, Tensor]:
    rows = tokens.clone().requires_grad_()
    made = layer(rows)
    loss_of(made).backward()
    found = {"output": made.detach(), "inputs": rows.grad}
    return found | {name: parameter.grad for name, parameter in layer.named_parameters()}


def shared(layer: Any, parts: list[Tensor], **how: Any) -> tuple[list[dict[str, Tensor]], dict[tuple[int, int], int]]:
    """Return the numbers of each rank, and the bytes that it sent to others after the ranks were compared."""

    def work(peers: ThreadPeers) -> tuple[dict[str, Tensor], dict[int, int]]:
        own = copy.deepcopy(layer)
        experts.parallelize(own, peers, **how)
        ways = [(peers.rank, other) for other in range(peers.size) if other != peers.rank]
        before = {way: peers.ways.sent[way] for way in ways}
        return numbers(own, parts[peers.rank]), {way: peers.ways.sent[way] - before[way] for way in ways}

    ranks, _ = on_ranks(len(parts), work)
    return [one for one, _ in ranks], {way: count for _, sent in ranks for way, count in sent.items()}


@over(
    (size, k, dtype, bound)
    for size in (1, 2, 4) for k in (1, 2, 8) for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-6))
)  # fmt: skip
def test_experts_on_several_ranks_have_outputs_and_gradients_of_one_process(
    size: int, k: int, dtype: torch.dtype, bound: float
) -> None:
    layer, parts = layer_of(k, dtype), tokens_of(size, dtype)
    wanted = numbers(copy.deepcopy(layer), torch.cat(parts))
    ranks, _ = shared(layer, parts)
    assert wanted["up"][1].any() == (k == 8), "expert 1 has no token"
    for name, whole in wanted.items():
        of_ranks = torch.stack if name == "router.weight" else torch.cat
        found = of_ranks([one[name] for one in ranks])
        # gradients of experts are the mean over the ranks, as data parallelism makes those of the router
        found = found.sum(0) if name == "router.weight" else found * (size if name in ("up", "down") else 1)
        assert (found - whole).abs().max() <= bound * whole.abs().max(), name


@over([(None,), (CODE,)])
def test_counted_bytes_are_those_of_the_formula_in_each_direction(code: ActivationCode | None) -> None:
    layer, parts = layer_of(2, torch.float32), tokens_of(4, torch.float32)
    _, sent = shared(layer, parts, dispatch=experts.tokens(code=code))
    chosen = [layer.route(part)[1] // 2 for part in parts]  # the rank of each choice
    rows = [[int((of_rank == rank).sum()) for rank in range(4)] for of_rank in chosen]
    assert not sum(rows[1]) and sum(map(sum, rows)) == 2 * sum(COUNTS)
    policy = experts.tokens(code=code)
    for (one, other), count in sent.items():
        # rows to its experts, and gradients of what it made of the other's rows; each is answered
        there, back = [rows[one][other]], [rows[other][one]]
        sizes = {"width": WIDTH, "item_bytes": 4}
        formula = sum(
            policy.sent_bytes(number, backward=backward, **sizes)
            for number in (there, back) for backward in (False, True)
        )  # fmt: skip
        assert count == formula + (8 // 4 + 1) * 8, "and the counts of rows"


@over([(4, 2, 2), (2, (1, 4), 2), (4, (8, 2), 8), (2, 3, 1), (1, 4, 2)])
def test_chunks_change_neither_numbers_nor_uncoded_bytes(size: int, chunks: Any, k: int) -> None:
    layer, parts = layer_of(k, torch.float64), tokens_of(size, torch.float64)
    whole, sent = shared(layer, parts)
    found, sent_in_chunks = shared(layer, parts, dispatch=experts.tokens(chunks=chunks))
    assert sent_in_chunks == sent
    for one, other in zip(whole, found, strict=True):
        for name in one:
            torch.testing.assert_close(other[name], one[name], rtol=0, atol=1e-9, msg=name)


def test_chunks_train_experts_whose_rows_have_no_gradient_and_compute_without_one() -> None:
    layer = layer_of(2, torch.float64)
    rows = torch.rand(9, WIDTH, dtype=torch.float64)

    def work(peers: ThreadPeers, chunks: int) -> tuple[Tensor, Tensor]:
        own = copy.deepcopy(layer)
        experts.parallelize(own, peers, dispatch=experts.tokens(chunks=chunks))
        own.router.requires_grad_(False)
        loss_of(own(rows)).backward()
        with torch.no_grad():
            return own(rows), own.up.grad  # type: ignore[return-value]

    one, other = (on_ranks(2, lambda peers, chunks=chunks: work(peers, chunks))[0] for chunks in (1, 2))
    for (made, up), (wanted, wanted_up) in zip(other, one, strict=True):
        torch.testing.assert_close(made, wanted)
        torch.testing.assert_close(up, wanted_up)


def test_a_layer_that_was_called_before_its_experts_were_shared_has_the_same_numbers() -> None:
    layer, parts = layer_of(2, torch.float64), tokens_of(2, torch.float64)
    wanted, _ = shared(layer, parts)

    def work(peers: ThreadPeers) -> dict[str, Tensor]:
        own = copy.deepcopy(layer)
        with torch.no_grad():
            own(parts[peers.rank])  # as a sample before training
        experts.parallelize(own, peers)
        return numbers(own, parts[peers.rank])

    for found, exact in zip(on_ranks(2, work)[0], wanted, strict=True):
        assert all(torch.equal(found[name], exact[name]) for name in exact)


@pytest.mark.parametrize("chunks", [0, 65, (2, 3)])
def test_chunks_that_do_not_divide_each_other_are_refused(chunks: Any) -> None:
    with pytest.raises(ValueError, match=r"got chunks=.*; allowed 1 to 64, such as 4, or .2, 4.; try chunks=2"):
        experts.tokens(chunks=chunks)
    experts.tokens(chunks=2)


def test_coded_tokens_are_near_the_exact_ones_and_own_rows_are_not_coded() -> None:
    layer, parts = layer_of(2, torch.float64), tokens_of(2, torch.float64)
    exact, _ = shared(layer, parts)
    coded, _ = shared(layer, parts, dispatch=experts.tokens(code=ActivationCode("block-int8", "block-int8")))
    for one, other in zip(exact, coded, strict=True):
        for name in one:
            error = (one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-9)
            assert error < 0.02, (name, error)
    alone, _ = shared(layer, parts[:1], dispatch=experts.tokens(code=CODE))
    wanted = numbers(copy.deepcopy(layer), parts[0])
    assert all(torch.equal(alone[0][name], wanted[name]) for name in wanted)


@over([("mixtral", "eager", torch.float64, 1e-12), ("qwen3_moe", "grouped_mm", torch.float32, 1e-6)])
def test_a_transformers_mixture_has_the_gradients_of_one_process(
    kind: str, product: str, dtype: torch.dtype, bound: float
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}  # fmt: skip
    more = {"num_local_experts": 4} if kind == "mixtral" else {"num_experts": 4, "moe_intermediate_size": 8}
    config = transformers.AutoConfig.for_model(kind, **sizes, **more, num_experts_per_tok=2, head_dim=4)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=product).to(dtype)
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(2))
    model(input_ids=tokens).logits.square().mean().backward()

    def work(peers: ThreadPeers) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        own.zero_grad()
        names = [name for name, _ in own.named_parameters()]
        experts.parallelize(own, peers)
        own(input_ids=tokens[peers.rank * 2 :][:2]).logits.square().mean().backward()
        assert [name for name, _ in own.named_parameters()] == names, "checkpoints know the weights"
        return {name: parameter.grad for name, parameter in own.named_parameters()}

    ranks, _ = on_ranks(2, work)
    for name, parameter in model.named_parameters():
        parts = [one[name] for one in ranks]
        found = torch.cat(parts) if ".experts." in name else torch.stack(parts).mean(0)
        assert (found - parameter.grad).abs().max() <= bound * parameter.grad.abs().max(), name


def test_what_cannot_be_shared_is_refused_with_a_remedy_that_works() -> None:
    layer = layer_of(2, torch.float32, num_experts=6)
    with pytest.raises(ValueError, match=r"got 6 experts on 4 ranks; allowed 1, 2, 3, 6 ranks; try --ep 3"):
        shared(layer, tokens_of(4, torch.float32))
    shared(layer, tokens_of(4, torch.float32)[:3])
    with pytest.raises(ValueError, match=r"got top_k 3 of 2 experts; allowed 1 to 2; try top_k=2"):
        experts.ExpertLayer(4, 4, 2, 3)
    with pytest.raises(ValueError, match="dim is too small; got 0"):
        experts.ExpertLayer(0, 4, 2)
    with pytest.raises(ValueError, match="no layer of experts"):
        experts.parallelize(torch.nn.Linear(2, 2), ThreadPeers(None, 0, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fixed size; got channel-bits/block-int4; .* try ActivationCode"):
        experts.tokens(code=ActivationCode("channel-bits"))
    with pytest.raises(ValueError, match="most_rows is out of range; got 0"):
        experts.tokens(most_rows=0)

    def differ(peers: ThreadPeers) -> None:
        experts.parallelize(layer_of(2, torch.float32, num_experts=4 + 4 * peers.rank), peers)

    with pytest.raises(ValueError, match="do not share experts alike"):
        on_ranks(2, differ)


def test_logits_that_are_not_finite_are_refused_with_layer_and_rank() -> None:
    layer = torch.nn.Sequential(layer_of(2, torch.float32))
    layer[0].router.weight.data[3] = float("nan")

    def work(peers: ThreadPeers) -> None:
        experts.parallelize(layer, peers)
        layer(torch.ones(2, WIDTH))

    with pytest.raises(NonFiniteError, match=r"0: logits of the router hold NaN or infinity on rank 0"):
        on_ranks(1, work)


@over([([5, -1, 4],), ([3, 3, 7],), ([1 << 40, 0, 1 << 40],), ([9, 0, 9],)])
def test_announced_rows_are_bounded_before_memory_is_taken(announced: list[int]) -> None:
    def work(peers: ThreadPeers) -> None:
        layer = layer_of(2, torch.float32, num_experts=4)
        layer.peers = peers
        ranks = layer.ranks(torch.device("cpu"))
        if peers.rank:
            peers.exchange([(0, torch.tensor(announced))], [])
        else:
            exchange_counts([1, 2, 3, 4], ranks, most_rows=8)

    with pytest.raises(PayloadError, match=r"expert layer: rank 1 announces .* try tokens\(most_rows=\)"):
        on_ranks(2, work)


@over((code,) for code in (None, ActivationCode("block-int8", "block-int8")))
def test_chunks_under_autocast_have_the_numbers_of_whole_messages(code: ActivationCode | None) -> None:
    class Automatic(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of(2, torch.float32)

        def forward(self, tokens: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                made: Tensor = self.layer(tokens)
            return made

    parts = tokens_of(4, torch.float32)
    wanted, _ = shared(Automatic(), parts, dispatch=experts.tokens(code=code))
    found, _ = shared(Automatic(), parts, dispatch=experts.tokens(code=code, chunks=(2, 4)))
    for own, whole in zip(found, wanted, strict=True):
        for name, value in whole.items():
            assert own[name].dtype == value.dtype
            assert (own[name] - value).abs().sum() <= 0.02 * value.abs().sum(), name


def test_a_checkpoint_around_chunks_has_the_numbers_of_one_process() -> None:
    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of(2, torch.float64)

        def part(self, tokens: Tensor) -> Tensor:
            made: Tensor = self.layer(tokens.tanh())
            return made

        def forward(self, tokens: Tensor) -> Tensor:
            made: Tensor = checkpoint(self.part, tokens, use_reentrant=False)
            return made

    parts = tokens_of(4, torch.float64)
    wanted = numbers(Again(), torch.cat(parts))
    found, _ = shared(Again(), parts, dispatch=experts.tokens(chunks=(2, 4)))
    assert torch.allclose(torch.cat([one["inputs"] for one in found]), wanted["inputs"], rtol=1e-9)
    ups = torch.cat([one["layer.up"] for one in found]) * len(parts)
    assert torch.allclose(ups, wanted["layer.up"], rtol=1e-9)


def test_a_second_backward_pass_of_chunks_is_refused_and_whole_messages_take_it() -> None:
    def work(peers: ThreadPeers, *, chunks: int) -> None:
        layer = layer_of(2, torch.float64)
        experts.parallelize(layer, peers, dispatch=experts.tokens(chunks=chunks))
        made = layer(tokens_of(2, torch.float64)[peers.rank]).sum()
        made.backward(retain_graph=True)
        made.backward()

    with pytest.raises(ValueError, match=r"one backward pass.*tokens\(chunks=1\)"):
        on_ranks(2, lambda peers: work(peers, chunks=2))
    on_ranks(2, lambda peers: work(peers, chunks=1))


@over(
    (change,) for change in ({"hidden": 9}, {"top_k": 1}, {"dim": 5}, {"dispatch": experts.tokens(chunks=2)},
                             {"dispatch": experts.tokens(code=CODE)})
)  # fmt: skip
def test_ranks_whose_layers_differ_are_refused(change: dict[str, Any]) -> None:
    def work(peers: ThreadPeers) -> None:
        sizes = {"dim": 6, "hidden": 8, "num_experts": 4, "top_k": 2} | (change if peers.rank else {})
        experts.parallelize(experts.ExpertLayer(**sizes), peers)

    with pytest.raises(ValueError, match=r"do not share experts alike.*the same model on all ranks"):
        on_ranks(2, work)
