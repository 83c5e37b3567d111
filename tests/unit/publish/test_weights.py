"""Weights as words and back, at awkward shapes; and models that do not fit, which are named and left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from thinwire.publish import weights as weights_module
from thinwire.publish.manifest import WeightLayout, decode, encode
from thinwire.publish.weights import fragment_sizes, fragments_of, join_tensors, load_weights, specs_of, tensors_of


class Odd(nn.Module):
    """Tied, transposed, empty, scalar, complex and integer tensors, of an odd number of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 3)
        self.head = nn.Linear(3, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.none = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("waves", torch.randn(2, dtype=torch.complex64))


def through(model: nn.Module, *, is_exact: bool) -> tuple[WeightLayout, dict[str, Tensor]]:
    """Return a model's layout and tensors as a reader gets them."""
    tensors = tensors_of(model)
    layout = WeightLayout((specs_of(tensors, is_exact=is_exact),))
    words = list(fragments_of(tensors, layout.shards[0]))
    assert [len(fragment) for fragment in words] == [size for size, _ in fragment_sizes(layout.shards[0])]
    return layout, join_tensors(decode(encode(layout), WeightLayout, name="layout"), [words])


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("fragment", [1 << 20, 13])
def test_a_model_comes_back(monkeypatch: pytest.MonkeyPatch, *, is_exact: bool, fragment: int) -> None:
    """Every tensor: floats as bfloat16 or in their own type, all others bit for bit, tied ones once."""
    monkeypatch.setattr(weights_module, "FRAGMENT_WORDS", fragment)
    model = Odd()
    layout, found = through(model, is_exact=is_exact)
    for name, tensor in model.state_dict().items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() and not is_exact else tensor
        assert torch.equal(found[name], expected), name
        assert found[name].dtype == expected.dtype
    assert found["head.weight"] is found["embedding.weight"]
    other = Odd()
    load_weights(other, found, layout)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, found[name].to(tensor.dtype)), name


def test_a_model_that_does_not_fit_is_named_and_left_alone() -> None:
    """The first tensor of another shape or kind, that is missing, or tied to another one."""
    layout, found = through(Odd(), is_exact=False)
    wide, untied, integer = Odd(), Odd(), Odd()
    wide.turned = nn.Parameter(torch.zeros(7, 6))
    untied.scale = nn.Parameter(torch.zeros(1))
    integer.norm.register_buffer("num_batches_tracked", torch.tensor(0.0))
    tied = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2)})
    two, apart = through(tied, is_exact=False)
    shared = nn.ParameterDict({"a": torch.zeros(2)})
    shared["b"] = shared["a"]
    for model, first, names in (
        (wide, "turned", (layout, found)), (untied, "scale", (layout, found)),
        (integer, "norm.num_batches_tracked", (layout, found)), (nn.Linear(2, 2), "turned", (layout, found)),
        (shared, "b", (two, apart)),
    ):  # fmt: skip
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=f"do not fit this model; first in {first}"):
            load_weights(model, names[1], names[0])
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_adapters_alone_are_trainable_parameters() -> None:
    """What is frozen is neither published nor changed."""
    model = Odd()
    model.requires_grad_(False)
    model.turned.requires_grad_(True)
    assert list(tensors_of(model, trainable_only=True)) == ["turned"]
    model.turned.requires_grad_(False)
    with pytest.raises(ValueError, match=r"there are no weights to publish.*try trainable_only=False"):
        tensors_of(model, trainable_only=True)
    assert len(tensors_of(model, trainable_only=False)) == len(model.state_dict())


def test_what_is_no_tensor_of_plain_numbers_is_refused() -> None:
    """With the name, and what to pass."""
    with pytest.raises(ValueError, match=r"state cannot be published; got bytes.*pass a dict"):
        tensors_of({"state": b"opaque"})  # type: ignore[dict-item]
