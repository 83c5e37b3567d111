"""Fragments are found from the model, whatever its author called its parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reference.small_models import Transformer, build
from thinwire.sync.fragments import Pattern, find_blocks


def test_repeated_blocks_are_found_and_the_rest_is_the_rest():
    found = find_blocks(Transformer(layers=5))
    assert len(found.blocks) == 5
    assert all(name.startswith("blocks.3.") for name in found.blocks[3])
    assert found.rest == ("embed.weight", "norm.weight", "norm.bias")


def test_a_tied_head_belongs_to_the_embedding_only_and_an_untied_one_to_itself():
    assert "head.weight" not in find_blocks(Transformer(is_tied=True)).rest
    assert "head.weight" in find_blocks(Transformer(is_tied=False)).rest


def test_frozen_parameters_belong_nowhere_and_unused_ones_somewhere():
    found = find_blocks(build("unused"))
    names = [name for block in found.blocks for name in block] + list(found.rest)
    assert "frozen" not in names
    assert "never.weight" in names


def test_blocks_spread_over_several_containers_are_all_found():
    class Stage(nn.Sequential):
        pass

    class Basic(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3)

    model = nn.Sequential(nn.Conv2d(1, 2, 3), Stage(Basic(), Basic()), Stage(Basic(), Basic()), nn.Linear(2, 2))
    assert len(find_blocks(model).blocks) in (2, 4)
    names = [name for block in find_blocks(model).blocks for name in block]
    assert len(names) == 8


def test_a_block_shared_by_all_layers_is_one_block():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.Linear(4, 4)
            self.layers = nn.ModuleList([layer] * 3)
            self.out = nn.Linear(4, 2)

    found = find_blocks(Shared())
    names = [name for block in found.blocks for name in block] + list(found.rest)
    assert sorted(names) == ["layers.0.bias", "layers.0.weight", "out.bias", "out.weight"]


def test_where_nothing_repeats_the_models_own_children_are_the_blocks():
    found = find_blocks(build("lstm"))
    assert len(found.blocks) == 3
    assert found.rest == ()


def test_a_bare_parameter_model_is_one_fragment():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

    assert Pattern().partition(find_blocks(Bare())) == (("weight",),)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        Pattern().partition(find_blocks(nn.ReLU()))


def test_more_fragments_than_blocks_are_refused_with_the_limit():
    with pytest.raises(
        ValueError, match=r"num_fragments must be at most 6 for this model \(5 blocks and the rest\), got 7"
    ):
        Pattern(num_fragments=7).partition(find_blocks(Transformer(layers=5)))


@pytest.mark.parametrize("bad", [{"layers_per_fragment": 0}, {"num_fragments": 0}, {"order": "random"}])
def test_bad_patterns_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Pattern(**bad)
