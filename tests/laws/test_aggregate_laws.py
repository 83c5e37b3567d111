"""Every rule that turns what the replicas sent into one vector, through the same promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.every_case import over
from thinwire.averaging.aggregation_rules import (
    Aggregate,
    CoordinateMedian,
    Mean,
    MedianNormClip,
    TrimmedMean,
    WeightedMean,
    token_weight,
)
from thinwire.methods.robust import Krum, MultiKrum
from thinwire.methods.robust.flag import FlagAggregator

# 4097 and 65537: just over a lane of the inner products and a block of the sums
AWKWARD_SIZES = (0, 1, 2, 1009, 4097, 32771, 65537)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A rule for a number of replicas, and what holds for it.

    Attributes:
        make: The rule for M replicas of which so many may be bad.
        least: The fewest replicas for so many bad ones.
        by_coordinate: Each coordinate is on its own, so the order of the replicas leaves no trace.
        moves_along: Adding one vector to all adds it to the result.
        stays_between: Whether the result lies between the honest values of each coordinate.
        room: How far beyond them it may lie, as a share of their range: a bad value may be kept where it is as close to
            the centre as the farthest honest one.
        survives_nan: Whether bad replicas may send NaN.
    """

    make: Callable[[int, int], Aggregate]
    least: Callable[[int], int] = lambda num_bad: 1
    by_coordinate: bool = False
    moves_along: bool = True
    stays_between: bool = False
    room: float = 0.0
    survives_nan: bool = True


CASES = {
    "mean": Case(make=lambda num, bad: Mean(), survives_nan=False),
    "median": Case(
        make=lambda num, bad: CoordinateMedian(), least=lambda bad: 2 * bad + 1, by_coordinate=True, stays_between=True
    ),
    "trimmed-mean": Case(
        make=lambda num, bad: TrimmedMean(num_bad=bad),
        least=lambda bad: 2 * bad + 1,
        by_coordinate=True,
        stays_between=True,
    ),
    "krum": Case(make=lambda num, bad: Krum(num_bad=bad), least=lambda bad: 2 * bad + 3),
    "multi-krum": Case(make=lambda num, bad: MultiKrum(num_bad=bad), least=lambda bad: 2 * bad + 3),
    "flag": Case(make=lambda num, bad: FlagAggregator(), least=lambda bad: 2 * bad + 1, moves_along=False),
    "flag-pairs": Case(
        make=lambda num, bad: FlagAggregator(num_columns=1, pair_weight=2.0, lengths="unit"), moves_along=False
    ),
    "weighted-mean": Case(make=lambda num, bad: WeightedMean(weights=(0.5,) * num), survives_nan=False),
    "median-norm-clip": Case(make=lambda num, bad: MedianNormClip(), least=lambda bad: 2 * bad + 1, moves_along=False),
}

every_rule = over(CASES)


def gathered(num_replicas: int, numel: int, *, seed: int = 0, spread: float = 0.5) -> torch.Tensor:
    """Make what replicas of one training send: a common direction, and something of their own."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator)
    return common + spread * torch.randn(num_replicas, numel, generator=generator)


@st.composite
def situations(draw: st.DrawFn, name: str) -> tuple[torch.Tensor, int]:
    """Draw a stack that holds enough replicas for its number of bad ones."""
    num_bad = draw(st.integers(0, 2))
    num = CASES[name].least(num_bad) + draw(st.integers(0, 4))
    numel = draw(st.sampled_from((0, 1, 2, 5, 101, 1009)))
    return gathered(
        num, numel, seed=draw(st.integers(0, 2**31)), spread=draw(st.sampled_from((0.0, 0.5, 8.0)))
    ), num_bad


@every_rule
def test_it_is_a_frozen_value_with_a_name(name: str) -> None:
    rule = CASES[name].make(7, 1)
    assert isinstance(rule, Aggregate)
    assert rule.name == name.removesuffix("-pairs")
    assert rule == CASES[name].make(7, 1) and hash(rule) == hash(CASES[name].make(7, 1))
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        rule.name = "other"  # type: ignore[misc]


@over(itertools.product(CASES, AWKWARD_SIZES))
def test_it_gives_one_float32_vector_leaves_the_stack_alone_and_does_not_care_for_its_layout(
    name: str, numel: int
) -> None:
    num = CASES[name].least(1) + 1
    stack = gathered(num, numel)
    before = stack.clone()
    result = CASES[name].make(num, 1)(stack)
    assert result.shape == (numel,) and result.dtype == torch.float32 and torch.isfinite(result).all()
    assert torch.equal(stack, before)
    result.add_(1)  # the result is nobody else's memory
    assert torch.equal(stack, before)
    assert torch.equal(CASES[name].make(num, 1)(stack.t().contiguous().t()) + 1, result)


@every_rule
def test_it_gives_the_same_bits_with_any_number_of_threads(name: str) -> None:
    num = CASES[name].least(2)
    stack, before = gathered(num, 200_003), torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(CASES[name].make(num, 2)(stack))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result.view(torch.int32), results[0].view(torch.int32)) for result in results)


@every_rule
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_the_order_of_the_replicas_does_not_matter(name: str, data: st.DataObject) -> None:
    stack, num_bad = data.draw(situations(name))
    order = data.draw(st.permutations(range(stack.shape[0])))
    rule = CASES[name].make(stack.shape[0], num_bad)
    first, second = rule(stack), rule(stack[list(order)])
    if CASES[name].by_coordinate:
        assert torch.equal(first, second)
    elif name != "flag" or _is_steady(stack, rule):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def _is_steady(stack: torch.Tensor, rule: Aggregate) -> bool:
    """Whether a slightly different stack gives a slightly different result: no two subspaces are as good."""
    nudged = stack * (1 + 1e-5 * torch.randn(stack.shape, generator=torch.Generator().manual_seed(1)))
    return torch.allclose(rule(stack), rule(nudged), rtol=1e-2, atol=1e-2)


@every_rule
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_where_all_agree_that_is_the_result(name: str, data: st.DataObject) -> None:
    stack, num_bad = data.draw(situations(name))
    same = stack[:1].expand_as(stack)
    result = CASES[name].make(stack.shape[0], num_bad)(same)
    if name == "flag-pairs" and stack.shape[1]:
        result = result * stack[0].norm()  # it gives unit vectors
    torch.testing.assert_close(result, stack[0], rtol=2e-6, atol=1e-6)


@every_rule
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_it_scales_with_what_is_sent(name: str, data: st.DataObject) -> None:
    stack, num_bad = data.draw(situations(name))
    rule = CASES[name].make(stack.shape[0], num_bad)
    factor = 1.0 if name == "flag-pairs" else 8.0
    assert torch.equal(rule(8.0 * stack), factor * rule(stack))  # a power of two: exact in every sum


@over(name for name, case in CASES.items() if case.moves_along)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_it_moves_along_when_all_are_moved(name: str, data: st.DataObject) -> None:
    stack, num_bad = data.draw(situations(name))
    rule = CASES[name].make(stack.shape[0], num_bad)
    # whole numbers: adding and comparing them is exact, so that no tie is broken by rounding
    whole = (8 * stack).round()
    shift = torch.arange(stack.shape[1]) % 17 - 8.0
    torch.testing.assert_close(rule(whole + shift), rule(whole) + shift, rtol=1e-6, atol=1e-5)


@over(name for name, case in CASES.items() if case.stays_between)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_bad_cannot_pull_it_out_of_the_range_of_the_honest(name: str, data: st.DataObject) -> None:
    stack, num_bad = data.draw(situations(name))
    size = data.draw(st.sampled_from((0.0, 1.0, 1e3, 1e30, float("inf"), float("nan"))))
    bad = data.draw(st.permutations(range(stack.shape[0])))[:num_bad]
    honest = [replica for replica in range(stack.shape[0]) if replica not in bad]
    stack[list(bad)] = gathered(num_bad, stack.shape[1], seed=7) * size
    result = CASES[name].make(stack.shape[0], num_bad)(stack)
    low, high = stack[honest].amin(dim=0), stack[honest].amax(dim=0)
    room = CASES[name].room * (high - low) * (1 + 1e-5)
    assert (result >= low - room).all() and (result <= high + room).all()


@pytest.mark.parametrize("size", [1e3, 1e30, float("inf"), float("nan")])
def test_krum_hands_on_an_honest_vector_where_the_bad_are_far(size: float) -> None:
    stack = gathered(9, 101)
    stack[::3] *= size
    assert any(torch.equal(Krum(num_bad=3)(stack), stack[replica]) for replica in (1, 2, 4, 5, 7, 8))


@over(itertools.product(CASES, (float("nan"), float("inf"), float("-inf"))))
def test_what_is_not_finite_is_left_out_or_shows(name: str, value: float) -> None:
    num = CASES[name].least(1) + 2
    stack = gathered(num, 101)
    stack[1, 17] = value
    result = CASES[name].make(num, 1)(stack)
    if CASES[name].survives_nan:
        assert torch.isfinite(result).all()
    else:
        assert not torch.isfinite(result[17])


@every_rule
def test_one_replica_is_handed_through_where_one_is_enough(name: str) -> None:
    if CASES[name].least(0) > 1:
        with pytest.raises(ValueError, match=rf"{name} needs at least 3 replicas, got num_replicas=1; add replicas"):
            CASES[name].make(1, 0)(gathered(1, 5))
    else:
        stack = gathered(1, 5)
        expected = stack[0] / stack[0].norm() if name == "flag-pairs" else stack[0]
        torch.testing.assert_close(CASES[name].make(1, 0)(stack), expected)


@pytest.mark.parametrize("name", ["trimmed-mean", "krum", "multi-krum"])
@pytest.mark.parametrize("num_bad", [0, 1, 3])
def test_one_replica_fewer_than_it_needs_is_refused(name: str, num_bad: int) -> None:
    least = CASES[name].least(num_bad)
    rule = CASES[name].make(least, num_bad)
    rule.check(least)
    with pytest.raises(ValueError, match=rf"{name} needs at least {least} replicas.*got num_replicas={least - 1}; "):
        rule.check(least - 1)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: Mean()(torch.zeros(3)), r"stack must be float32 of the shape .*got torch.float32 of \(3,\)"),
        (lambda: Mean()(torch.zeros(3, 2, dtype=torch.float64)), "stack must be float32.*got torch.float64"),
        (lambda: Mean()(torch.zeros(0, 2)), "mean needs at least 1 replicas, got num_replicas=0"),
        (lambda: TrimmedMean(num_bad=-1), "num_bad must be at least 0, got -1"),
        (lambda: Krum(num_bad=-1), "num_bad must be at least 0"),
        (lambda: MultiKrum(num_bad=1, num_kept=0), "num_kept must be at least 1, got 0"),
        (lambda: MultiKrum(num_bad=1, num_kept=3).check(5), "num_kept must be at most 2 for 5 replicas"),
        (lambda: WeightedMean(weights=()), r"weights must be finite.*got \(\)"),
        (lambda: WeightedMean(weights=(0.0, 0.0)), "not all 0"),
        (lambda: WeightedMean(weights=(1.0, -1.0)), "at least 0"),
        (lambda: WeightedMean(weights=(1.0, float("inf"))), "must be finite"),
        (lambda: WeightedMean(weights=(1.0,)).check(2), "one entry for each of 2 replicas, got 1"),
        (lambda: token_weight(num_tokens=5, num_steps=0), "num_tokens=5 in num_steps=0"),
        (lambda: FlagAggregator(num_columns=0), "num_columns must be at least 1, got 0"),
        (lambda: FlagAggregator(num_columns=3).check(2), "num_columns must be at most .*got 3 for num_replicas=2"),
        (lambda: FlagAggregator().check(0), "num_replicas=0"),
        (lambda: FlagAggregator(pair_weight=-1.0), "pair_weight must be at least 0"),
        (lambda: FlagAggregator(num_iterations=0), "num_iterations must be at least 1"),
        (lambda: FlagAggregator(lengths="long"), "lengths must be one of median, unit, given, got 'long'"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call()
