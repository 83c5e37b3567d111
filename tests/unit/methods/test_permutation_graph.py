from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.convnets import Mlp, MlpMixer, ResNet
from thinwire.methods.dimat.matching import permute
from thinwire.methods.dimat.permutation_graph import find_permutations

IMAGES = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class WithFunctions(nn.Module):
    """A convnet of calls of functions and methods, with its sizes read from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 5, 3)
        self.depthwise = nn.Conv2d(5, 5, 3, groups=5, padding=1)
        self.second = nn.Conv2d(5, 6, 1)
        self.gate = nn.Linear(6, 6)
        self.third = nn.Linear(6 * 9, 7)
        self.out = nn.Linear(7, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = functional.max_pool2d(functional.relu(self.first(images)), 2)
        hidden = self.second(functional.dropout(torch.tanh(self.depthwise(hidden)), 0.5, self.training))
        hidden = hidden * 2 + functional.gelu(hidden)
        hidden = hidden.view(hidden.size(0), -1)
        return functional.log_softmax(self.out(self.third(hidden).relu()), dim=1)


class Gated(nn.Module):
    """Squeeze and excitation: the mean over positions is a factor of every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5)
        self.squeeze, self.excite = nn.Conv2d(5, 3, 1), nn.Conv2d(3, 5, 1)
        self.out = nn.Linear(5, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(images))
        hidden = hidden * self.excite(self.squeeze(hidden.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return self.out(hidden.mean((-1, -2)))


class Recurrent(nn.Module):
    """One layer used twice on its own output, so its rows and its columns are one group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.out = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.again(self.again(self.first(rows).relu()).relu()).relu())


def flat_norm() -> nn.Sequential:
    """Normalises after the flatten: every channel has four entries there."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.PReLU(5), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.BatchNorm1d(20), nn.LayerNorm(20),
        nn.Linear(20, 4), nn.ReLU(), nn.Linear(4, 3),
    )  # fmt: skip


MODELS = {
    "mlp": (Mlp, ROWS), "residual-layernorm": (MlpMixer, ROWS), "resnet": (ResNet, IMAGES),
    "functions": (WithFunctions, IMAGES), "gated": (Gated, IMAGES), "recurrent": (Recurrent, ROWS),
    "flat-norm": (flat_norm, IMAGES),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_after_every_group_was_permuted(name: str) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(1)
    model = build().double().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.add_(torch.rand_like(tensor))  # no two units are alike, nor the statistics of BatchNorm
    groups = find_permutations(model, sample=inputs).groups
    generator = torch.Generator().manual_seed(2)
    orders = [torch.randperm(group.num_units, generator=generator) for group in groups]
    before, state = model(inputs), model.state_dict()
    permuted = permute(state, groups, orders)
    assert any(not torch.equal(permuted[key], state[key]) for key in state)
    model.load_state_dict(permuted)
    assert torch.allclose(model(inputs), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mlp", [7, 5]),
        ("residual-layernorm", [8, 11, 11]),
        ("resnet", [4, 4, 6, 6]),
        ("functions", [5, 6, 7]),
        ("gated", [5, 3]),
        ("recurrent", [5]),
        ("flat-norm", [5, 4]),
    ],
)
def test_every_hidden_layer_is_in_one_group_and_residual_branches_share_theirs(name: str, sizes: list[int]) -> None:
    build, inputs = MODELS[name]
    graph = find_permutations(build().double(), sample=inputs)
    assert [group.num_units for group in graph.groups] == sizes
    state = graph.traced.state_dict()
    places = [(axis.name, axis.dim) for group in graph.groups for axis in group.axes]
    assert len(places) == len(set(places))
    for group in graph.groups:
        assert all(state[axis.name].shape[axis.dim] == group.num_units * axis.block for axis in group.axes)


def test_the_columns_after_a_flatten_move_in_blocks() -> None:
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Flatten(), nn.Linear(5 * 36, 3))
    (group,) = find_permutations(model, sample=IMAGES.float()).groups
    assert [(axis.name, axis.dim, axis.block) for axis in group.axes] == [
        ("0.weight", 0, 1),
        ("0.bias", 0, 1),
        ("2.weight", 1, 36),
    ]


def test_units_that_are_added_to_the_input_or_reach_the_output_keep_their_order() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.last = nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = rows + self.outer(self.inner(rows).relu())
            return rows, self.last(rows)

    (group,) = find_permutations(Added().double(), sample=ROWS).groups
    assert {axis.name for axis in group.axes} == {"inner.weight", "inner.bias", "outer.weight"}


def test_tied_tensors_move_under_all_their_names() -> None:
    model = Mlp()
    model.alias = model.second  # type: ignore[assignment]
    groups = find_permutations(model, sample=ROWS.float()).groups
    names = {axis.name for axis in groups[1].axes}
    assert {"second.weight", "alias.weight", "second.bias", "alias.bias", "out.weight"} == names


def test_a_parameter_that_is_used_without_a_module_keeps_the_order_of_its_units() -> None:
    class Scaled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(7))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.second(self.first(rows) * self.scale))
            return out

    (group,) = find_permutations(Scaled(), sample=ROWS.float()).groups
    assert group.num_units == 5


def test_a_layer_used_on_the_input_and_on_hidden_units_keeps_their_order() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 2)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.inner(self.shared(self.shared(rows).relu())).relu())
            return out

    (group,) = find_permutations(Both(), sample=ROWS.float()).groups
    assert {axis.name for axis in group.axes} == {"inner.weight", "inner.bias", "out.weight"}


def test_norms_with_different_blocks_for_the_same_entries_keep_their_order() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.mid = nn.Conv2d(2, 4, 7), nn.BatchNorm1d(16), nn.Linear(16, 16)
            self.out = nn.Linear(16, 2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.norm(self.mid(self.norm(self.conv(images).flatten(1)))))
            return out

    assert find_permutations(Twice().double(), sample=IMAGES).groups == ()


def test_a_single_layer_has_no_hidden_units() -> None:
    assert find_permutations(nn.Linear(6, 2), sample=ROWS.float()).groups == ()


@pytest.mark.parametrize("mode", [True, False])
def test_modes_and_buffers_are_as_before(mode: bool) -> None:
    model = ResNet().double().train(mode)
    model.norm.train(not mode)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_permutations(model, sample=IMAGES)
    assert model.training is mode and model.norm.training is not mode
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Does(nn.Module):
    """A convolution, then whatever a test wants, then a layer that reads it."""

    def __init__(self, what: object, *layers: nn.Module) -> None:
        super().__init__()
        self.conv, self.what, self.layers = nn.Conv2d(2, 4, 3), what, nn.ModuleList(layers)

    def forward(self, images: torch.Tensor) -> object:
        return self.what(self, self.conv(images))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), r"1 \(GroupNorm\) is not understood"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 2, 3)), r"1 \(ConvTranspose2d\) is not understood"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2)), r"1 \(Conv2d\) has groups=2"),
        (nn.Sequential(nn.Conv2d(2, 6, 3), nn.Linear(6, 2)), r"1 \(Linear\) reads across positions"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(2), nn.MaxPool1d(2), nn.BatchNorm1d(4), nn.Flatten(0, 1)),
         r"4 \(Flatten\) flattens with other dimensions"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(1), nn.MaxPool1d(2)), r"2 \(MaxPool1d\) pools over the units"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.utils.spectral_norm(nn.Conv2d(4, 4, 3))),
         "weight of 1 is computed from other tensors"),
        (nn.Sequential(nn.Linear(8, 5), nn.BatchNorm2d(2)), r"1 \(BatchNorm2d\) has parameters for dimension 1"),
        (nn.Sequential(nn.Linear(8, 5), nn.Conv2d(2, 2, 3, groups=2)), r"1 \(Conv2d\) reads across positions"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(0, 1)), r"1 \(Flatten\) flattens with other dimensions"),
        (Does(lambda _, x: torch.cat([x, x], dim=1)), "cat.* is not understood"),
        (Does(lambda _, x: x[:, :2]), "getitem.* is not understood"),
        (Does(lambda _, x: x.chunk(2, dim=1)[0]), "chunk.* is not understood"),
        (Does(lambda _, x: x.mean(1)), "mean.* takes the mean over the units"),
        (Does(lambda _, x: x.view(x.shape[0], 2, -1)), "view.* turns .* into"),
        (Does(lambda _, x: x + x.mean((2, 3))[:, :, None, None]), "getitem.* is not understood"),
        (Does(lambda m, x: m.layers[0](x) + m.layers[1](x), nn.Conv2d(4, 3, 1), nn.Conv2d(4, 1, 1)),
         "add.* joins tensors of shapes"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name_with_the_remedy(model: nn.Module, named: str) -> None:
    with pytest.raises(ValueError, match=named + r"(.|\n)*without matching \('none'\)"):
        find_permutations(model.double(), sample=IMAGES)


def test_a_model_that_branches_on_its_input_is_refused() -> None:
    model = Does(lambda _, x: x.relu() if x.sum() > 0 else x)
    with pytest.raises(ValueError, match=r"Does cannot be traced by torch.fx \((.|\n)*without branches"):
        find_permutations(model.double(), sample=IMAGES)
