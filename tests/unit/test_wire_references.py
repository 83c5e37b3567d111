"""What thinwire's methods are measured against: torchft's DiLoCo gets the fragments and numbers that ours have."""

from __future__ import annotations

import sys

import pytest

from benchmarks.wire import references
from benchmarks.wire.references import matched_fragments, matched_numbers
from thinwire.errors import MissingExtra
from thinwire.methods import streaming_diloco
from thinwire.sync.fragments import find_blocks
from thinwire.workloads.language import build_model


def test_without_torchft_its_contender_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    for name in ("coordination", "local_sgd", "manager", "process_group"):
        monkeypatch.setitem(sys.modules, f"torchft.{name}", None)
    with pytest.raises(MissingExtra, match=r"torchft is not installed; .* pip install torchft"):
        references.load_torchft()


def test_another_package_that_torchft_misses_is_named_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry")

    monkeypatch.setattr(references.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="opentelemetry"):
        references.load_torchft()


def test_torchft_gets_the_fragments_that_ours_have() -> None:
    model = build_model("nano", vocab_size=257)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [{names[id(parameter)] for parameter in part.parameters()} for part in matched_fragments(model)]
    fragments = streaming_diloco().view.fragments  # type: ignore[attr-defined]
    assert found == [set(part) for part in fragments.partition(find_blocks(model))]


@pytest.mark.parametrize(
    ("wanted", "taken"), [((30, 3), (30, 3)), ((100, 3), (99, 3)), ((30, 12), (30, 9)), ((3, 5), (3, 0))]
)
def test_torchft_gets_the_nearest_numbers_that_it_takes(wanted: tuple[int, int], taken: tuple[int, int]) -> None:
    assert matched_numbers(sync_interval=wanted[0], overlap_steps=wanted[1], num_fragments=3) == taken


def test_an_interval_that_is_too_short_for_torchft_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sync_interval must be at least 3 for torchft, .* got 2"):
        matched_numbers(sync_interval=2, overlap_steps=0, num_fragments=3)
