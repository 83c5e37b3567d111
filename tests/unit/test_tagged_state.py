"""State as data: what is saved, restored, taken over and reset, by the tags of a dataclass's fields."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from thinwire.errors import CheckpointError
from thinwire.tagged_state import adopt, load, own, owner, same, save, take_over, transfer


@dataclass(slots=True)
class Inside:
    factors: list[float] = same("factor", default_factory=list)


@dataclass(slots=True)
class Whole:
    sums: list[torch.Tensor] = same("sum")
    rest: torch.Tensor = own("what was not sent")
    part: torch.Tensor = owner("the owner's part")
    inside: Inside = same("factors", default_factory=Inside)
    counts: list[int] = same("count", default_factory=lambda: [0, 0])
    waiting: dict[int, torch.Tensor] = own("what waits", like="sums", default_factory=dict)
    cache: list[str] = field(default_factory=list)


def fresh() -> Whole:
    return Whole([torch.zeros(3), torch.zeros(2)], torch.zeros(3), torch.zeros(()))


def filled() -> Whole:
    waiting = {1: torch.full((2,), 5.0)}
    found = Whole([torch.ones(3), torch.full((2,), 2.0)], torch.full((3,), 3.0), torch.tensor(4.0), waiting=waiting)
    found.inside.factors, found.counts, found.cache = [0.5, 2.0], [7, 8], ["not saved"]
    return found


def equal(one: Whole, other: Whole) -> bool:
    return repr(save(one)) == repr(save(other))


def test_what_is_saved_comes_back_and_only_that() -> None:
    saved, other = save(filled()), fresh()
    assert "cache" not in saved
    load(other, saved)
    assert equal(other, filled()) and other.cache == []
    assert [type(number) for number in (*other.counts, *other.inside.factors)] == [int, int, float, float]
    saved["sums"]["0"].add_(1)
    assert torch.equal(other.sums[0], torch.ones(3)), "a copy"
    load(other, save(fresh()))
    assert equal(other, fresh())


@pytest.mark.parametrize("is_own", [True, False])
def test_another_set_of_replicas_keeps_what_is_the_same_and_ones_own(is_own: bool) -> None:
    state = filled()
    lines = adopt(state, save(filled()), is_own=is_own)
    expected = filled()
    expected.part = torch.zeros(())
    if not is_own:
        expected.rest, expected.waiting = torch.zeros(3), {}
    assert equal(state, expected)
    assert lines == (["the owner's part"] if is_own else ["what was not sent", "the owner's part", "what waits"])


def test_a_replica_that_joins_takes_the_tensors_that_are_the_same_on_all() -> None:
    given, state = transfer(filled()), fresh()
    assert list(given) == ["sums.0", "sums.1"]
    take_over(state, given)
    assert torch.equal(state.sums[1], torch.full((2,), 2.0)) and torch.equal(state.rest, torch.zeros(3))
    for wrong in ({"sums.0": torch.ones(3)}, given | {"sums.1": torch.ones(5)}):
        with pytest.raises(CheckpointError, match=r"sums\.1 does not fit"):
            take_over(state, wrong)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sums": {"0": torch.ones(3)}}, "holds 1 times what is called sum, this run 2 times"),
        ({"sums": {"0": torch.ones(3), "1": torch.ones(9)}}, r"sum 1 has the shape \(9,\), this run's \(2,\)"),
        ({"rest": torch.ones(4)}, r"what was not sent has the shape \(4,\), this run's \(3,\); resume with its model"),
        ({"counts": torch.tensor([1, 2, 3])}, "count has 3 numbers, this run's 2"),
        ({"waiting": {"0": torch.ones(2)}}, r"what waits 0 has the shape \(2,\), this run's \(3,\)"),
        ({"waiting": {"2": torch.ones(2)}}, r"what waits 2 has the shape \(2,\), this run's none"),
        ({"inside": {}}, "keeps nothing here, this run factors"),
        ({"more": torch.ones(1)}, "keeps counts, inside, more, part, rest, sums, waiting here"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(change: dict[str, object], words: str) -> None:
    state = fresh()
    wrong = save(filled()) | change
    for take in (lambda: load(state, wrong), lambda: adopt(state, wrong, is_own=True)):
        with pytest.raises(CheckpointError, match=words):
            take()
        assert equal(state, fresh())
