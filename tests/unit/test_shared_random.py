from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_processes import DEADLINE_S

from thinwire.shared_random import derive_seed

LABELS = st.lists(st.one_of(st.text(max_size=5), st.integers()), max_size=4)


def test_the_seed_is_the_same_in_every_version() -> None:
    assert derive_seed(17, "sampler", 3) == 9080365832536582789


@given(base=st.integers(), labels=LABELS)
def test_a_seed_fits_in_63_bits(base: int, labels: list[str | int]) -> None:
    assert 0 <= derive_seed(base, *labels) < 2**63


@given(first=LABELS, second=LABELS)
def test_different_paths_give_different_seeds(first: list[str | int], second: list[str | int]) -> None:
    assert (derive_seed(0, *first) == derive_seed(0, *second)) == (first == second)


@pytest.mark.parametrize(
    ("first", "second"),
    [(("ab",), ("a", "b")), ((1,), ("1",)), ((12,), (1, 2)), ((), ("",)), ((-1,), (1,)), (("a", ""), ("", "a"))],
)
def test_labels_are_not_joined(first: tuple[str | int, ...], second: tuple[str | int, ...]) -> None:
    assert derive_seed(5, *first) != derive_seed(5, *second)


@pytest.mark.parametrize("label", [True, 1.5, None, b"x"])
def test_a_label_of_another_type_is_refused_by_value(label: object) -> None:
    with pytest.raises(ValueError, match="integers and texts, got"):
        derive_seed(0, label)  # type: ignore[arg-type]


def test_the_module_needs_no_torch() -> None:
    code = "import sys, thinwire.shared_random; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S).returncode == 0
