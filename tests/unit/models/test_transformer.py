from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from live_processes import DEADLINE_S
from torch import Tensor
from torch.nn import functional as F

from tests.operator_counter import OperatorCounter
from thinwire.workloads.language import (
    PRESETS,
    Transformer,
    TransformerConfig,
    build_model,
    build_transformer,
    preset,
)
from thinwire.workloads.language.transformer import (
    RMS_EPSILON,
    TransformerStage,
    next_token_loss,
    rms_norm,
    rotate,
    split_heads,
)

TINY = TransformerConfig(vocab_size=31, dim=16, layers=3, heads=2, max_seq_len=12)


def random_tokens(*shape: int, vocab_size: int = 31, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# --- shape and size


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("nano", 3_050_496),
        ("35m", 35_265_792),
        ("150m", 144_301_440),
        ("400m", 388_930_560),
        ("1b", 1_273_598_976),
        ("moe-nano", 8_368_128),
        ("moe-35m", 123_395_328),
    ],
)
def test_a_preset_has_the_stated_number_of_parameters(name: str, parameters: int) -> None:
    model = build_model(name, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert preset(name).num_parameters == parameters


def test_the_presets_of_the_paper_have_its_layers_heads_and_mlp() -> None:
    shapes = {name: (c.layers, c.heads, c.mlp_dim, c.head_dim) for name, c in PRESETS.items()}
    assert shapes["35m"] == (6, 8, 2048, 64)
    assert shapes["1b"] == (24, 32, 8192, 64)


WITHOUT_COMPILER = """
import sys, torch, thinwire
from thinwire.training.build import make_inner_optimizer
from thinwire.training.config import TrainConfig
from thinwire.workloads.language import build_model

sketch = build_model("nano", device="meta")
assert sketch.cosines.shape[0] == sketch.max_seq_len
for name in ("adamw", "muon"):
    config = TrainConfig.of(lr=0.1, inner_optimizer=name)
    model = build_model("nano", vocab_size=257)
    inner = make_inner_optimizer(config, model)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=thinwire.methods.diloco(sync_interval=2))
    for _ in range(2):
        model.loss(*torch.zeros(2, 1, 8, dtype=torch.int64))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()
found = {"torch._dynamo", "sympy", "torch.distributed.fsdp"} & set(sys.modules)
assert not found, found
"""


@pytest.mark.slow
def test_a_model_is_built_and_trained_without_torchs_compiler() -> None:
    code = [sys.executable, "-c", WITHOUT_COMPILER]
    done = subprocess.run(code, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, f"every start of a replica would wait seconds for an import\n{done.stderr}"


@pytest.mark.parametrize("tied_head", [True, False])
def test_the_parameters_are_counted_without_building(tied_head: bool) -> None:
    config = TransformerConfig(vocab_size=31, dim=24, layers=2, heads=3, mlp_dim=40, tied_head=tied_head)
    model = Transformer(config)
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_block_has_twelve_times_the_squared_width_in_its_matrices() -> None:
    block = build_transformer(TINY).blocks[0]
    assert sum(parameter.numel() for parameter in block.parameters() if parameter.ndim == 2) == 12 * TINY.dim**2


def test_no_parameter_is_a_bias() -> None:
    assert not [name for name, _ in build_transformer(TINY).named_parameters() if "bias" in name]


def test_the_blocks_are_a_module_list_of_equal_blocks() -> None:
    model = build_transformer(TINY)
    assert isinstance(model.blocks, torch.nn.ModuleList)
    shapes = [[tuple(parameter.shape) for parameter in block.parameters()] for block in model.blocks]
    assert len(shapes) == 3
    assert shapes[0] == shapes[1] == shapes[2]


def test_the_state_holds_parameters_only() -> None:
    model = build_transformer(TINY)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"heads": 3}, "dim must be a multiple of 2 \\* heads.*got dim 16 with 3 heads"),
        ({"dim": 18, "heads": 2, "layers": 1, "vocab_size": 2}, "got dim 18 with 2 heads"),
        ({"z_loss": -1.0}, "z_loss must be 0 or more, got -1.0"),
        ({"z_loss": float("nan")}, "z_loss must be 0 or more, got nan"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_its_value(change: dict[str, int | float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TransformerConfig(**{"vocab_size": 31, "dim": 16, "layers": 3, "heads": 2, **change})  # type: ignore[arg-type]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown model; got 'nanoo'; .*try nano"):
        build_model("nanoo")


def test_a_name_near_nothing_is_answered_with_all_names() -> None:
    answer = r"unknown model; got '###'; allowed nano, .*, moe-35m, (tiny, moe-tiny, )?a size .*, hf:PATH"
    with pytest.raises(ValueError, match=answer):
        preset("###")


def test_what_the_data_decides_replaces_the_presets_values() -> None:
    config = preset("nano", vocab_size=257, max_seq_len=33, tied_head=False)
    assert (config.vocab_size, config.max_seq_len, config.tied_head) == (257, 33, False)
    assert config.dim == PRESETS["nano"].dim


# --- the first weights


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, same, other = (build_transformer(TINY, seed=seed) for seed in (7, 7, 8))
    for (name, a), b, c in zip(first.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == name.endswith("gain")


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build_transformer(TINY, seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_the_first_loss_is_near_that_of_a_uniform_guess() -> None:
    model = build_transformer(preset("nano", vocab_size=512), seed=0)
    tokens = random_tokens(4, 32, vocab_size=512)
    _, nll = model.loss(tokens, random_tokens(4, 32, vocab_size=512, seed=1))
    uniform = torch.log(torch.tensor(512.0)).item()
    assert uniform - 0.2 < nll.item() < uniform + 1.0


# --- what it computes


def test_a_later_token_does_not_change_an_earlier_logit() -> None:
    model = build_transformer(TINY)
    tokens = random_tokens(2, 12)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 31
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_order_of_earlier_tokens_matters() -> None:
    # Without positions, attention over a set would give the same last logit.
    model = build_transformer(TransformerConfig(vocab_size=31, dim=16, layers=1, heads=2, max_seq_len=12))
    tokens = random_tokens(1, 12)
    swapped = tokens.clone()
    swapped[0, [0, 5]] = tokens[0, [5, 0]]
    assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1])


def test_attention_scores_depend_on_distance_only() -> None:
    model = build_transformer(TINY)
    query, key = torch.randn(8), torch.randn(8)
    both = torch.stack((query, key)).reshape(1, 1, 2, 1, 8).expand(1, 12, 2, 1, 8)
    turned = rotate(both, (model.cosines, model.sines))[0, :, :, 0]
    scores = turned[:, 0] @ turned[:, 1].T
    torch.testing.assert_close(scores[5, 2], scores[11, 8])
    torch.testing.assert_close(scores[0, 0], query @ key)
    assert not torch.isclose(scores[5, 2], scores[5, 3])


def test_scaling_queries_and_keys_changes_nothing_because_they_are_normalised() -> None:
    model = build_transformer(TINY)
    tokens = random_tokens(2, 12)
    before = model(tokens)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.query_key_value.weight[: 2 * TINY.dim].mul_(100)
    torch.testing.assert_close(model(tokens), before, rtol=1e-3, atol=1e-3)


def test_a_tied_head_reads_the_embedding_and_an_untied_one_does_not() -> None:
    tied = build_transformer(TINY)
    untied = build_transformer(TransformerConfig(vocab_size=31, dim=16, layers=1, heads=2, tied_head=False))
    assert tied.head is None
    assert untied.head is not None
    assert untied.head.weight.shape == (31, 16)


def test_a_sequence_longer_than_the_limit_is_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match=r"at most 12 tokens.*got 13"):
        build_transformer(TINY)(random_tokens(1, 13))


def test_the_loss_is_the_nll_plus_the_weighted_square_of_the_log_normaliser() -> None:
    model = build_transformer(TINY)
    tokens, targets = random_tokens(2, 12), random_tokens(2, 12, seed=1)
    total, nll = model.loss(tokens, targets)
    logits = model(tokens)
    torch.testing.assert_close(nll, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    torch.testing.assert_close(total - nll, 1e-4 * logits.logsumexp(-1).square().mean())
    assert not nll.requires_grad


@pytest.mark.parametrize("shape", [(16,), (2, 1, 16), (5, 1)])
def test_the_norms_written_gradient_is_autograds(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    # Not contiguous, as queries and keys are when they come out of the joint product.
    values = torch.randn(3, 2, 4, 5, 16, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_()
    gain = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    ours = rms_norm(values, gain)
    plain = F.rms_norm(values, (16,), eps=RMS_EPSILON) * gain
    torch.testing.assert_close(ours, plain)
    got = torch.autograd.grad((ours * weights).sum(), (values, gain))
    expected = torch.autograd.grad((plain * weights).sum(), (values, gain))
    torch.testing.assert_close(got, expected)


def test_the_norm_of_a_row_of_zeros_is_zero_with_a_finite_gradient() -> None:
    values = torch.zeros(2, 4, requires_grad=True)
    rms_norm(values, torch.ones(4)).sum().backward()
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_the_losss_written_gradient_is_autograds(z_loss: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 5, 7, generator=generator)).requires_grad_()
    targets = random_tokens(2, 5, vocab_size=7)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    plain = plain + z_loss * logits.logsumexp(-1).square().mean()
    (expected,) = torch.autograd.grad(2.5 * plain, logits)
    total, _ = next_token_loss(logits, targets, z_loss=z_loss)
    (got,) = torch.autograd.grad(2.5 * total, logits)
    torch.testing.assert_close(total, plain)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("is_compiling", [False, True])
def test_positions_without_a_target_count_nothing(is_compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1, 2, 3, 4], [5, -1, -1, -1], [0, 6, -1, -1]])
    there = targets >= 0
    wanted = next_token_loss(logits[there], targets[there], z_loss=0.1)
    found = next_token_loss(logits, targets, z_loss=0.1, is_padded=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    (gradient,), (wanted_gradient,) = (torch.autograd.grad(one[0], logits) for one in (found, wanted))
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-15)
    nothing = next_token_loss(logits, torch.full((3, 4), -1), z_loss=0.1, is_padded=True)
    assert nothing[0].item() == nothing[1].item() == 0.0
    assert not torch.autograd.grad(nothing[0], logits)[0].any()


def test_the_loss_of_bf16_logits_is_computed_in_float32() -> None:
    logits = torch.full((1, 1, 4096), 0.5, dtype=torch.bfloat16)
    total, nll = next_token_loss(logits, torch.zeros(1, 1, dtype=torch.int64), z_loss=0.0)
    assert total.dtype == torch.float32
    assert nll.item() == pytest.approx(8.317766, abs=1e-5)


def test_bf16_autocast_gives_nearly_the_same_loss_and_float32_gradients() -> None:
    model = build_transformer(TINY)
    tokens, targets = random_tokens(4, 12), random_tokens(4, 12, seed=1)
    exact, _ = model.loss(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = model.loss(tokens, targets)
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}


def test_a_model_in_bf16_gives_finite_gradients_to_every_parameter() -> None:
    model = build_transformer(TINY).to(torch.bfloat16)
    model.loss(random_tokens(2, 12), random_tokens(2, 12, seed=1))[0].backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


@pytest.mark.slow
def test_compiling_changes_neither_loss_nor_gradients() -> None:
    model = build_transformer(TINY)
    tokens, targets = random_tokens(2, 12), random_tokens(2, 12, seed=1)
    total, _ = model.loss(tokens, targets)
    total.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    # This backend traces the graph as every other does, and needs no compiler for C++.
    compiled, _ = torch.compile(model.loss, backend="aot_eager")(tokens, targets)
    compiled.backward()
    torch.testing.assert_close(compiled, total)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_recomputed_activations_change_no_bit_and_are_not_kept() -> None:
    kept: dict[bool, int] = {}
    gradients = {}
    for recompute in (False, True):
        model = build_transformer(TINY)
        model.recompute = recompute
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss, _ = model.loss(random_tokens(2, 12), random_tokens(2, 12, seed=1))
        loss.backward()
        kept[recompute], gradients[recompute] = sum(sizes), [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(gradients[False], gradients[True], strict=True))
    assert kept[True] < kept[False] / 2


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_is_kept_is_not_computed_again_and_changes_no_bit(dtype: torch.dtype) -> None:
    calls, found = {}, {}
    for keeps in (False, True):
        model = build_transformer(TINY).to(dtype)
        model.recompute, model.keeps_attention = True, keeps
        with OperatorCounter() as counter:
            loss, _ = model.loss(random_tokens(2, 11), random_tokens(2, 11, seed=1))
            loss.backward()
        calls[keeps], found[keeps] = counter.calls, [loss, *(p.grad for p in model.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found[False], found[True], strict=True))
    assert (calls[False][ATTENTION], calls[True][ATTENTION]) == (6, 3), "3 layers"
    assert calls[False]["gelu"] == calls[True]["gelu"] == 6, "the rest is computed again"


def test_a_stage_of_a_pipeline_keeps_attention_too() -> None:
    model = build_transformer(TINY)
    model.keeps_attention = True
    stage = TransformerStage(model, range(3), has_embedding=True, has_head=True, num_recomputed=2)
    with OperatorCounter() as counter:
        stage(random_tokens(2, 11)).sum().backward()
    assert (counter.calls[ATTENTION], counter.calls["gelu"]) == (3, 5)


def test_a_few_steps_learn_a_repeated_sequence() -> None:
    model = build_transformer(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = random_tokens(1, 12)
    first = last = 0.0
    for step in range(30):
        total, nll = model.loss(tokens[:, :-1], tokens[:, 1:])
        first, last = (nll.item() if step == 0 else first), nll.item()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert last < first / 3


LINEAR = TransformerConfig(vocab_size=16, dim=24, layers=2, heads=3, max_seq_len=64, is_linear=True)


def test_linear_attention_follows_its_recurrence_and_reads_one_token_at_a_time_from_a_state() -> None:
    model = build_transformer(LINEAR, seed=1).double()
    attention: Any = model.blocks[0].attention
    stream = torch.randn(2, 37, 24, dtype=torch.float64)
    rotation = model.cosines[:37].double(), model.sines[:37].double()
    query, key, value = attention.project(stream, rotation)
    gates = torch.sigmoid(attention.gate_up(attention.gate_down(stream))).pow(1 / 16).view(2, 37, 3, 8).transpose(1, 2)
    state, rows = torch.zeros(2, 3, 8, 8, dtype=torch.float64), []
    for place in range(37):
        state = gates[:, :, place, :, None] * state + key[:, :, place, :, None] * value[:, :, place, None]
        rows.append(torch.einsum("bhk,bhkv->bhv", query[:, :, place] / 8**0.5, state))
    wanted = attention.out(attention.output_norm(torch.stack(rows, 2)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(stream, rotation), wanted, rtol=1e-10, atol=1e-10)
    tokens = torch.randint(16, (2, 37))
    whole = model(tokens)
    logits, cache = model.decode(tokens[:, :20])
    for place in range(20, 37):
        torch.testing.assert_close(logits, whole[:, place - 1], rtol=1e-10, atol=1e-10)
        logits, cache = model.decode(tokens[:, place : place + 1], cache)
    assert cache.states[0].shape == (2, 3, 8, 8), "as large after any text"
    assert sum(one.numel() for one in model.parameters()) == LINEAR.num_parameters


def test_linear_attention_learns_and_refuses_what_is_made_for_keys() -> None:
    model = build_transformer(LINEAR, seed=1)
    tokens = torch.arange(33).expand(4, -1) % 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss, nll = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in model.parameters())
        optimizer.step()
        losses.append(float(nll))
    assert losses[-1] < losses[0] / 4
    for refused in (lambda: model.stream_backward(2), lambda: split_heads(model, 3)):
        with pytest.raises(ValueError, match=r"linear attention does not go with .* try a model without linear-"):
            refused()
