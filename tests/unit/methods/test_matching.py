from __future__ import annotations

import builtins
import copy
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.methods.images import accuracy, convnet, load_digits, loss, train
from tests.convnets import Mlp, MlpMixer, ResNet
from thinwire.errors import MissingExtra, NonFiniteError
from thinwire.methods.dimat.matching import (
    assign,
    match_activations,
    match_and_merge,
    match_weights,
    permute,
    reset_statistics,
)
from thinwire.methods.dimat.permutation_graph import find_permutations

HALVES = {0: 0.5, 1: 0.5}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def varied(model: nn.Module, *, seed: int = 1) -> nn.Module:
    """Give every float a value of its own, so that no two units are alike and no bias hides."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.add_(torch.rand(tensor.shape, generator=generator) * 0.3)
    return model


MODELS = {
    "mlp": (Mlp, [random(64, 6), random(33, 6, seed=1)]),
    "layernorm": (MlpMixer, [random(64, 6), random(33, 6, seed=1)]),
    "resnet": (ResNet, [random(16, 2, 8, 8), random(7, 2, 8, 8, seed=1)]),
    "convnet": (lambda: convnet(width=6), [random(16, 1, 8, 8), random(9, 1, 8, 8, seed=1)]),
}


def permuted_copy(model: nn.Module, sample: torch.Tensor) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    groups = find_permutations(model, sample=sample).groups
    generator = torch.Generator().manual_seed(3)
    orders = [torch.randperm(group.num_units, generator=generator) for group in groups]
    return permute(model.state_dict(), groups, orders), orders


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, list[torch.Tensor]]:
    build, batches = MODELS[request.param]
    torch.manual_seed(5)
    return varied(build()), batches


def test_matching_a_permuted_copy_gives_back_the_model_bit_for_bit(case: Any) -> None:
    model, batches = case
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other, orders = permuted_copy(model, batches[0])
    assert any(not torch.equal(other[name], state[name]) for name in state)
    groups = find_permutations(model, sample=batches[0]).groups
    found = match_activations(model, other, batches)
    # what was moved away is found again: the permutations are each other's inverse
    assert all(torch.equal(order[back], torch.arange(len(order))) for order, back in zip(orders, found, strict=True))
    back = permute(other, groups, found)
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("method", ["activations", "none"])
def test_averaging_with_oneself_changes_nothing_but_the_statistics(case: Any, method: Any) -> None:
    model, batches = case
    reset_statistics(model, batches)
    before = copy.deepcopy(model.state_dict())
    other = permuted_copy(model, batches[0])[0] if method == "activations" else copy.deepcopy(before)
    match_and_merge(model, {3: other, 1: other}, {1: 0.25, 2: 0.5, 3: 0.25}, batches, method=method)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, before[name], rtol=1e-5, atol=1e-6), name


def test_weight_matching_finds_the_one_hidden_layer_of_a_permuted_copy() -> None:
    model = varied(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)))
    batches = [random(8, 6)]
    other, orders = permuted_copy(model, batches[0])
    groups = find_permutations(model, sample=batches[0]).groups
    (found,) = match_weights(model, other, groups)
    assert torch.equal(orders[0][found], torch.arange(20))
    before = copy.deepcopy(model.state_dict())
    match_and_merge(model, {1: other}, HALVES, batches, method="weights")
    assert all(torch.allclose(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weight_matching_of_several_layers_never_ends_below_the_order_it_started_from() -> None:
    one, two = varied(ResNet(), seed=1), varied(ResNet(), seed=2)
    groups = find_permutations(one, sample=random(2, 2, 8, 8)).groups
    found = permute(two.state_dict(), groups, match_weights(one, two.state_dict(), groups))
    likeness = [
        sum(float((value.detach() * state[name]).sum()) for name, value in one.named_parameters())
        for state in (two.state_dict(), found)
    ]
    assert likeness[1] > likeness[0]


def test_units_of_an_odd_scale_are_found_too() -> None:
    # correlation does not see the scale of a unit, nor a shift of it
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(torch.logspace(-2, 2, 9)[:, None])
        other[0].bias.mul_(torch.logspace(-2, 2, 9))
    state, orders = permuted_copy(other, random(4, 6))
    (found,) = match_activations(model, state, [random(200, 6)])
    assert torch.equal(orders[0][found], torch.arange(9))


def test_dead_units_take_the_places_that_are_left() -> None:
    model = varied(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)))
    model[0].bias.data[[2, 5]] = -1e3
    other, orders = permuted_copy(model, random(4, 6))
    (found,) = match_activations(model, other, [random(200, 6)])
    back = orders[0][found]
    alive = [unit for unit in range(9) if unit not in (2, 5)]
    assert torch.equal(back[alive], torch.tensor(alive)) and sorted(back[[2, 5]].tolist()) == [2, 5]


def test_the_weights_of_the_mixing_row_are_used() -> None:
    model = nn.Linear(2, 1)
    states = {name: {key: torch.full_like(value, name) for key, value in model.state_dict().items()} for name in (4, 9)}
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    match_and_merge(model, states, {4: 0.25, 7: 0.25, 9: 0.5}, [], method="none")
    assert model.weight.tolist() == [[5.75, 5.75]] and model.bias.tolist() == [5.75]


def test_a_replica_without_neighbours_only_measures_its_statistics() -> None:
    model = varied(ResNet())
    before = copy.deepcopy(model.state_dict())
    match_and_merge(model, {}, {0: 1.0}, [random(16, 2, 8, 8)])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) is not ("running" in name or "batches" in name), name


@pytest.mark.parametrize("mode", [True, False])
def test_modes_momenta_and_integer_buffers_stay_ones_own(mode: bool) -> None:
    model, other = varied(ResNet(), seed=1).train(mode), varied(ResNet(), seed=2)
    model.register_buffer("steps", torch.tensor(7))
    other.register_buffer("steps", torch.tensor(100))
    match_and_merge(model, {1: other.state_dict()}, HALVES, iter([random(16, 2, 8, 8), random(8, 2, 8, 8)]))
    assert model.training is mode and all(module.training is mode for module in model.modules())
    assert model.norm.momentum == 0.1 and model.norm.num_batches_tracked == 2
    assert model.steps == 7
    assert not model.stem.weight.grad_fn and model.stem.weight.requires_grad


def test_bfloat16_is_averaged_in_float32() -> None:
    model = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    states = {replica: {"weight": torch.full((1, 3), 1 + 2**-7, dtype=torch.bfloat16)} for replica in range(1, 16)}
    match_and_merge(model, states, dict.fromkeys(range(16), 1 / 16), [], method="none")
    assert model.weight.tolist() == [[1 + 2**-7] * 3]  # 1 + 15/16 * 2**-7, rounded once


def test_a_bfloat16_model_is_matched() -> None:
    model = varied(ResNet()).bfloat16()
    other, _ = permuted_copy(model, random(16, 2, 8, 8).bfloat16())
    before = copy.deepcopy(model.state_dict())
    match_and_merge(model, {1: other}, HALVES, [random(16, 2, 8, 8).bfloat16()])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, nn.Module]:
    digits = load_digits()
    models = []
    for seed in (0, 1):
        model = convnet(seed=seed)
        train(model, digits.train_images, digits.train_labels, steps=120, seed=seed)
        models.append(model)
    return models[0], models[1]


def merged_loss(trained: tuple[nn.Module, nn.Module], method: Any) -> tuple[float, float]:
    digits = load_digits()
    own = copy.deepcopy(trained[0])
    match_and_merge(
        own, {1: trained[1].state_dict()}, HALVES, list(digits.train_images[:512].split(128)), method=method
    )
    return loss(own, digits.test_images, digits.test_labels), accuracy(own, digits.test_images, digits.test_labels)


@pytest.mark.slow
def test_the_average_of_two_models_trained_apart_is_better_when_their_units_are_matched(trained: Any) -> None:
    digits = load_digits()
    ends = [accuracy(model, digits.test_images, digits.test_labels) for model in trained]
    assert min(ends) > 0.95
    found = {method: merged_loss(trained, method) for method in ("activations", "weights", "none")}
    assert found["activations"][0] < 0.8 * found["none"][0], found
    assert found["activations"][1] > found["none"][1], found
    assert found["weights"][0] < found["none"][0], found


@pytest.mark.slow
def test_the_same_models_and_batches_give_the_same_bits(trained: Any) -> None:
    assert merged_loss(trained, "activations") == merged_loss(trained, "activations")


@pytest.mark.parametrize(
    ("neighbours", "weights", "message"),
    [
        (
            [1],
            {0: 0.5, 2: 0.5},
            r"each neighbour and one replica more, this one, got \[0, 2\] for the neighbours \[1\]",
        ),
        ([1], {1: 1.0}, "one replica more"),
        ([1], {0: 0.2, 1: 0.2, 2: 0.6}, "one replica more"),
        ([1], {0: 0.5, 1: 0.4}, "at least 0 and sum to 1"),
        ([1], {0: 1.5, 1: -0.5}, "at least 0 and sum to 1"),
        ([1], {0: float("nan"), 1: 0.5}, "at least 0 and sum to 1"),
    ],
)
def test_weights_that_are_no_row_for_the_neighbours_are_refused(neighbours: Any, weights: Any, message: str) -> None:
    model = Mlp()
    with pytest.raises(ValueError, match=message):
        match_and_merge(model, dict.fromkeys(neighbours, model.state_dict()), weights, [random(4, 6)])


def test_a_state_dict_of_another_architecture_is_refused_with_its_replica() -> None:
    model = Mlp()
    state = dict(model.state_dict())
    with pytest.raises(ValueError, match=r"model of replica 1 lacks out\.bias"):
        match_and_merge(model, {1: {k: v for k, v in state.items() if k != "out.bias"}}, HALVES, [random(4, 6)])
    with pytest.raises(ValueError, match="model of replica 1 has an unknown extra"):
        match_and_merge(model, {1: state | {"extra": torch.ones(1)}}, HALVES, [random(4, 6)])
    with pytest.raises(ValueError, match=r"replica 1 has out.bias of shape \(4,\) instead of \(3,\)"):
        match_and_merge(model, {1: state | {"out.bias": torch.ones(4)}}, HALVES, [random(4, 6)])


@pytest.mark.parametrize("method", ["activations", "weights", "none"])
def test_a_neighbour_that_diverged_is_refused_and_leaves_the_model_as_it_was(method: Any) -> None:
    model = Mlp()
    before = copy.deepcopy(model.state_dict())
    broken = {name: tensor.clone() for name, tensor in before.items()}
    broken["second.weight"][1, 1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"second\.weight of replica 1 holds NaN .* resume from a checkpoint"):
        match_and_merge(model, {1: broken}, HALVES, [random(16, 6)], method=method)
    with pytest.raises(NonFiniteError, match=r"activations at .* hold NaN or infinity"):
        match_activations(model, broken, [random(16, 6)], replica=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_cannot_be_done_is_refused_with_the_remedy() -> None:
    model = Mlp()
    with pytest.raises(ValueError, match="method must be one of activations, weights, none, got 'zip'"):
        match_and_merge(model, {}, {0: 1.0}, [], method="zip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one batch, got 0"):
        match_and_merge(model, {1: model.state_dict()}, HALVES, [])
    with pytest.raises(ValueError, match="at least one batch, got 0"):
        match_and_merge(ResNet(), {}, {0: 1.0}, [], method="none")
    with pytest.raises(ValueError, match="batches must hold tensors of inputs, got tuple; leave out the labels"):
        match_and_merge(model, {}, {0: 1.0}, [(random(4, 6), torch.zeros(4))])  # type: ignore[list-item]
    groups = find_permutations(model, sample=random(4, 6)).groups
    with pytest.raises(ValueError, match="must hold each of 0 to 6 once"):
        permute(model.state_dict(), groups, [torch.zeros(7, dtype=torch.int64), torch.arange(5)])


def test_a_sharded_model_is_refused() -> None:
    from torch import distributed
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 2)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), DeviceMesh("cpu", [0])))
        with pytest.raises(ValueError, match="weight is a shard, and units can only be matched in whole models"):
            match_and_merge(model, {}, {0: 1.0}, [random(3, 4)])
    finally:
        distributed.destroy_process_group()


def test_without_scipy_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **settings: Any) -> Any:
        if name.startswith("scipy"):
            raise ModuleNotFoundError(name)
        return imported(name, *args, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"scipy is not installed; .*pip install 'thinwire\[match\]'"):
        assign(torch.eye(2))
