"""Decoders of a size, such as 7b."""

from __future__ import annotations

import pytest

from thinwire.workloads.language import PRESETS, build_model
from thinwire.workloads.language.presets import decoder_of


@pytest.mark.parametrize(
    ("name", "size"), [("10m", 1e7), ("125m", 125e6), ("1.5b", 1.5e9), ("7B", 7e9), ("70b", 7e10), ("2t", 2e12)]
)
def test_a_size_gives_a_decoder_of_about_so_many_parameters(name: str, size: float) -> None:
    model = build_model(name, max_seq_len=512, device="meta")
    parameters = list(model.parameters())
    assert abs(sum(p.numel() for p in parameters) / size - 1) < 0.06
    assert all(p.is_meta for p in parameters) and model.max_seq_len == 512


def test_the_shapes_are_those_of_known_decoders() -> None:
    # LLaMA has 32 layers of 4096 and 40 of 5120 (arXiv 2302.13971, table 2)
    assert abs(decoder_of(6.7e9).layers - 32) <= 2
    assert abs(decoder_of(13e9).layers - 40) <= 2


def test_a_preset_goes_before_a_size() -> None:
    model = build_model("1b", max_seq_len=1024, device="meta")
    assert sum(p.numel() for p in model.parameters()) == PRESETS["1b"].num_parameters


@pytest.mark.parametrize("name", ["7x", "b", "0b", "1m", "9e9t", "9" * 400 + "b", "99999999t", "", "llama"])
def test_what_is_neither_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown model; got .*; allowed nano, .*a size such as 125m|sizes from"):
        build_model(name, max_seq_len=512, device="meta")
