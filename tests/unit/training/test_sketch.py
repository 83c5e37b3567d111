"""Models without values: named shapes, and decoders of a size."""

from __future__ import annotations

import pytest

from thinwire.training.models import PRESETS
from thinwire.training.models.presets import decoder_of, sketch_model


@pytest.mark.parametrize(
    ("name", "size"), [("10m", 1e7), ("125m", 125e6), ("1.5b", 1.5e9), ("7B", 7e9), ("70b", 7e10), ("2t", 2e12)]
)
def test_a_size_gives_a_decoder_of_about_so_many_parameters(name: str, size: float) -> None:
    model, can_train = sketch_model(name, seq_len=512)
    parameters = list(model.parameters())
    assert abs(sum(p.numel() for p in parameters) / size - 1) < 0.06
    assert all(p.is_meta for p in parameters) and not can_train


def test_the_shapes_are_those_of_known_decoders() -> None:
    # LLaMA has 32 layers of 4096 and 40 of 5120 (arXiv 2302.13971, table 2)
    assert abs(decoder_of(6.7e9, seq_len=2048).layers - 32) <= 2
    assert abs(decoder_of(13e9, seq_len=2048).layers - 40) <= 2


def test_a_named_model_is_the_one_that_train_builds() -> None:
    model, can_train = sketch_model("1b", seq_len=1024)
    assert can_train and sum(p.numel() for p in model.parameters()) == PRESETS["1b"].num_parameters


@pytest.mark.parametrize("name", ["7x", "b", "0b", "1m", "9e9t", "9" * 400 + "b", "99999999t", "", "llama"])
def test_what_is_neither_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"the models are|sizes from"):
        sketch_model(name, seq_len=512)
