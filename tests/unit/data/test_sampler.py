"""Which tokens a replica sees, and when."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import CheckpointError, DataError
from thinwire.workloads.language import Sampler, validation_batches
from thinwire.workloads.sampler import PADDING

SETTINGS: dict[str, Any] = {"replica": 0, "num_replicas": 2, "batch_size": 3, "seq_len": 4, "seed": 7}


def numbered(count: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return tokens that are their own positions."""
    return np.arange(count, dtype=np.uint16)


def windows_of_an_epoch(
    *, num_windows: int, num_replicas: int, replica: int, epoch: int, seq_len: int = 4
) -> list[int]:
    """Return the numbers of the windows that a replica sees in an epoch."""
    sampler = Sampler(
        numbered(num_windows * seq_len + 1),
        replica=replica,
        num_replicas=num_replicas,
        batch_size=1,
        seq_len=seq_len,
        seed=3,
    )
    seen: list[int] = []
    for inputs, _ in sampler:
        if sampler.epoch > epoch:
            return seen
        if sampler.epoch == epoch:
            seen.append(int(inputs[0, 0]) // seq_len)
    raise AssertionError("the sampler ended")


@settings(deadline=None, max_examples=40)
@given(num_windows=st.integers(1, 60), num_replicas=st.integers(1, 6), epoch=st.integers(0, 3))
def test_in_an_epoch_each_window_is_used_by_exactly_one_replica_once(
    num_windows: int, num_replicas: int, epoch: int
) -> None:
    num_replicas = min(num_replicas, num_windows)
    shares = [
        windows_of_an_epoch(num_windows=num_windows, num_replicas=num_replicas, replica=replica, epoch=epoch)
        for replica in range(num_replicas)
    ]
    assert sorted(window for share in shares for window in share) == list(range(num_windows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=20), num_replicas=st.integers(1, 3),
    rest=st.integers(0, 3), batch_size=st.integers(1, 4),
)  # fmt: skip
def test_in_an_epoch_of_documents_each_token_but_the_first_is_a_target_once(
    lengths: list[int], num_replicas: int, rest: int, batch_size: int
) -> None:
    # each token says its document and its place there; 0 ends a document, and the last one may have no end
    texts = [[100 * (n + 1) + place for place in range(length)] for n, length in enumerate([*lengths, rest])]
    tokens = np.array([token for text in texts[:-1] for token in (*text, 0)] + texts[-1])
    wanted = sorted(
        (text[place], text[place + 1] if place + 1 < len(text) else 0)
        for number, text in enumerate(texts)
        for place in range(len(text) - (number == len(texts) - 1))
    )
    if sum(-(-length // 4) for length in lengths) + -(-max(0, rest - 1) // 4) < num_replicas:
        with pytest.raises(DataError, match="documents, and there are"):
            Sampler(tokens, replica=0, num_replicas=num_replicas, batch_size=1, seq_len=4, seed=3, end_of_text=0)
        return
    seen = []
    for replica in range(num_replicas):
        # one by one, so that no batch begins the next epoch
        sampler = Sampler(
            tokens, replica=replica, num_replicas=num_replicas, batch_size=1, seq_len=4, seed=3, end_of_text=0
        )
        for inputs, targets in sampler:
            if sampler.epoch:
                break
            assert 1 <= inputs.shape[1] <= 4 and (targets >= 0).all()
            seen += list(zip(inputs[0].tolist(), targets[0].tolist(), strict=True))
    assert sorted(seen) == wanted
    if wanted:
        several = Sampler(
            tokens, replica=0, num_replicas=1, batch_size=batch_size, seq_len=4, seed=3, end_of_text=0
        )  # fmt: skip
        inputs, targets = next(several)
        assert inputs.shape == targets.shape and inputs.shape[0] == batch_size
        counts = (targets >= 0).sum(1)
        assert counts.max() == inputs.shape[1] and counts.min() >= 1
        for row, count in zip(targets, counts, strict=True):
            assert (row[count:] == PADDING).all()


def test_documents_go_on_from_a_state_of_documents_alone() -> None:
    tokens = np.array([5, 6, 0, 7, 0, 8, 9, 4, 0, 3, 0])
    first, second, windows = (Sampler(tokens, **SETTINGS, **more) for more in ({"end_of_text": 0},) * 2 + ({},))
    for _ in range(3):
        next(first)
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        for one, other in zip(next(first), next(second), strict=True):
            assert torch.equal(one, other)
    with pytest.raises(CheckpointError, match="no state of a sampler"):
        windows.load_state_dict(first.state_dict())


def test_every_epoch_has_an_order_of_its_own() -> None:
    orders = [windows_of_an_epoch(num_windows=50, num_replicas=1, replica=0, epoch=epoch) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] != sorted(orders[0])


def test_the_order_is_the_same_in_every_version() -> None:
    # A change here splits runs whose replicas have different versions, and breaks their checkpoints.
    assert windows_of_an_epoch(num_windows=8, num_replicas=1, replica=0, epoch=0) == [6, 3, 5, 4, 7, 0, 1, 2]


@pytest.mark.parametrize("dtype", [np.uint16, np.dtype("<u4"), np.int64])
def test_targets_are_inputs_shifted_by_one(dtype: Any) -> None:
    tokens = np.random.default_rng(0).integers(0, 500, 101).astype(dtype)
    starts = set()
    for inputs, targets in islice(Sampler(tokens, **SETTINGS), 8):
        assert inputs.shape == targets.shape == (3, 4)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
            start = next(n for n in range(0, 97, 4) if tokens[n : n + 5].tolist() == [*row, target[-1]])
            assert target[:-1] == row[1:]
            starts.add(start)
    assert len(starts) > 8


def test_the_last_window_has_its_last_target() -> None:
    seen = {int(targets[0, -1]) for _, targets in islice(Sampler(numbered(9), **{**SETTINGS, "batch_size": 1}), 2)}
    seen |= {int(t[0, -1]) for _, t in islice(Sampler(numbered(9), **{**SETTINGS, "batch_size": 1, "replica": 1}), 2)}
    assert seen == {4, 8}


def test_a_batch_larger_than_a_share_goes_through_several_epochs() -> None:
    sampler = Sampler(numbered(13), **{**SETTINGS, "num_replicas": 1, "batch_size": 10})
    inputs, _ = next(sampler)
    starts = [row[0] // 4 for row in inputs.tolist()]
    assert [sorted(starts[part : part + 3]) for part in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert sampler.epoch == 3


@settings(deadline=None, max_examples=60)
@given(
    num_windows=st.integers(2, 40),
    batch_size=st.integers(1, 9),
    replica=st.integers(0, 1),
    before=st.integers(0, 30),
    drift=st.integers(0, 10),
)
def test_a_resumed_sampler_gives_the_same_batches(
    num_windows: int, batch_size: int, replica: int, before: int, drift: int
) -> None:
    arguments = {**SETTINGS, "batch_size": batch_size, "replica": replica}
    tokens = numbered(num_windows * 4 + 1)
    first = Sampler(tokens, **arguments)
    for _ in range(before):
        next(first)
    state = first.state_dict()
    resumed = Sampler(tokens, **arguments)
    for _ in range(drift):
        next(resumed)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for (inputs, targets), (other_inputs, other_targets) in zip(islice(first, 12), islice(resumed, 12), strict=True):
        assert torch.equal(inputs, other_inputs)
        assert torch.equal(targets, other_targets)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 8}, "seed 7 instead of 8"),
        ({"replica": 1}, "replica 0 instead of 1"),
        ({"num_replicas": 3}, "num_replicas 2 instead of 3"),
        ({"batch_size": 4, "seq_len": 5}, "batch_size 3 instead of 4, seq_len 4 instead of 5"),
    ],
)
def test_a_state_of_another_run_is_refused_with_what_differs(change: dict[str, int], said: str) -> None:
    state = Sampler(numbered(101), **SETTINGS).state_dict()
    with pytest.raises(CheckpointError, match=f"state is of another run: {said}; resume"):
        Sampler(numbered(101), **{**SETTINGS, **change}).load_state_dict(state)


def test_a_state_of_another_corpus_is_refused_with_both_sizes() -> None:
    state = Sampler(numbered(101), **SETTINGS).state_dict()
    with pytest.raises(CheckpointError, match="num_tokens 101 instead of 102"):
        Sampler(numbered(102), **SETTINGS).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"position": -1}, r"corrupt: epoch 0, position -1 of 13"),
        ({"position": 14}, r"corrupt: epoch 0, position 14 of 13"),
        ({"epoch": -1}, "corrupt: epoch -1, position 3 of 13"),
        ({"position": 1.0}, "no state of a sampler"),
        ({"position": True}, "no state of a sampler"),
        ({"more": 1}, "no state of a sampler"),
    ],
)
def test_a_corrupt_state_is_refused_and_changes_nothing(change: dict[str, Any], said: str) -> None:
    sampler = Sampler(numbered(101), **SETTINGS)
    next(sampler)
    before = sampler.state_dict()
    with pytest.raises(CheckpointError, match=said):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


def test_an_empty_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="got nothing"):
        Sampler(numbered(101), **SETTINGS).load_state_dict({})


@pytest.mark.parametrize("count", [0, 1, 4, 8])
def test_too_few_tokens_for_the_replicas_are_refused_with_the_counts(count: int) -> None:
    with pytest.raises(DataError, match=f"{count} tokens are too few: 2 replica windows of 4 tokens need 9"):
        Sampler(numbered(count), **SETTINGS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"seq_len": -1}, "seq_len must be at least 1, got -1"),
        ({"replica": 2}, r"replica must be in \[0, 2\), got 2"),
        ({"replica": -1}, r"replica must be in \[0, 2\), got -1"),
    ],
)
def test_an_argument_out_of_range_is_refused_with_its_value(change: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampler(numbered(101), **{**SETTINGS, **change})


# --- validation


def starts(batches: Any) -> list[list[int]]:
    return [[row[0] // 4 for row in inputs.tolist()] for inputs, _ in batches]


def test_validation_goes_through_all_windows_in_order() -> None:
    batches = list(validation_batches(numbered(30), batch_size=3, seq_len=4))
    assert starts(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    for inputs, targets in batches:
        assert torch.equal(targets, inputs + 1)


def test_a_limited_validation_is_spread_over_all_tokens() -> None:
    found = starts(validation_batches(numbered(401), batch_size=2, seq_len=4, max_batches=2))
    assert found == [[0, 25], [50, 75]]


def test_a_limit_beyond_the_tokens_repeats_nothing() -> None:
    assert starts(validation_batches(numbered(9), batch_size=3, seq_len=4, max_batches=5)) == [[0, 1]]


def test_too_few_tokens_to_validate_are_refused_at_once() -> None:
    with pytest.raises(DataError, match="4 tokens are too few: 1 validation windows of 4 tokens need 5"):
        validation_batches(numbered(4), batch_size=1, seq_len=4)


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "max_batches"])
def test_a_validation_argument_below_one_is_refused_with_its_value(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        validation_batches(numbered(9), **{"batch_size": 1, "seq_len": 4, name: 0})
