"""Shares of data sets: together they are the set, none twice, and a position is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import CheckpointError
from thinwire.integrations.data import LengthBalancedSampler, ReplicaSampler, split_dataset
from thinwire.transport.loopback import LoopbackTransport, LoopbackWorld


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[LoopbackTransport], dict[str, int | bool]]:
    replicas = draw(st.integers(1, 5))
    count = draw(st.integers(replicas, 40))
    options = {"seed": draw(st.integers(0, 9)), "shuffle": draw(st.booleans()), "equal": draw(st.booleans())}
    return count, LoopbackWorld(replicas).transports, options


@given(world=worlds(), epochs=st.integers(1, 3))
def test_the_union_of_the_shares_is_the_set_without_overlap(world: tuple, epochs: int) -> None:
    count, transports, options = world
    samplers = [ReplicaSampler(range(count), transport, **options) for transport in transports]
    orders = []
    for _ in range(epochs):
        shares = [list(sampler) for sampler in samplers]
        assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
        taken = list(chain.from_iterable(shares))
        left_out = count % len(transports) if options["equal"] else 0
        assert len(set(taken)) == len(taken) == count - left_out and set(taken) <= set(range(count))
        if options["equal"]:
            assert len({len(share) for share in shares}) == 1
        orders.append(taken)
    if options["shuffle"] and count > 20 and epochs > 1:
        assert orders[0] != orders[1]


def endless(sampler: ReplicaSampler) -> Iterator[int]:
    while True:
        yield from sampler


@given(world=worlds(), taken=st.integers(0, 90))
def test_a_sampler_goes_on_from_its_state(world: tuple, taken: int) -> None:
    count, transports, options = world
    for transport in transports:
        one, other, sought = (ReplicaSampler(range(count), transport, **options) for _ in range(3))

        first = endless(one)
        list(islice(first, taken))
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        sought.seek(taken)
        expected = list(islice(first, 20))
        assert list(islice(endless(other), 20)) == expected == list(islice(endless(sought), 20))


def test_a_loader_reads_its_share_batch_by_batch() -> None:
    points = torch.arange(10)
    seen = [
        torch.cat(list(torch.utils.data.DataLoader(points, batch_size=2, sampler=ReplicaSampler(points, transport))))
        for transport in LoopbackWorld(2).transports
    ]
    assert sorted(torch.cat(seen).tolist()) == list(range(10))


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"num_examples": 11}, {"replica": 1}, {"position": -1}, {"epoch": "x"}]
)
def test_a_state_of_another_run_is_refused(change: dict[str, object]) -> None:
    sampler = ReplicaSampler(range(10), LoopbackWorld(2).transports[0])
    with pytest.raises(CheckpointError):
        sampler.load_state_dict({**sampler.state_dict(), **change})


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("fewer examples than there are replicas; got 1")):
        ReplicaSampler(range(1), LoopbackWorld(2).transports[0])


@pytest.mark.parametrize("count", [7, 8])
def test_hugging_face_data_sets_are_split_whole_or_in_equal_shares(count: int) -> None:
    import datasets  # takes seconds, which each worker that collects would spend

    whole = datasets.Dataset.from_dict({"x": list(range(count))})
    transports = LoopbackWorld(2).transports
    shares = [split_dataset(whole, transport)["x"][:] for transport in transports]
    assert sorted(chain.from_iterable(shares)) == list(range(count))
    streams = [split_dataset(whole.to_iterable_dataset(), transport) for transport in transports]
    assert sorted(row["x"] for stream in streams for row in stream) == list(range(count))
    assert [len(split_dataset(whole, transport, equal=True)) for transport in transports] == [count // 2, count // 2]
    with pytest.raises(ValueError, match="equal shares need a known length; got a stream"):
        split_dataset(whole.to_iterable_dataset(), transports[0], equal=True)


def balanced(rank: int = 0, **changes: Any) -> LengthBalancedSampler:
    given = {"num_ranks": 2, "sequences_per_step": 4, "max_tokens": 50, "seed": 3, **changes}
    return LengthBalancedSampler(list(range(1, 20)), rank=rank, **given)


def test_the_steps_of_an_epoch_hold_every_sequence_once_and_the_next_epoch_has_another_order() -> None:
    ranks = [balanced(rank) for rank in (0, 1)]
    epochs = []
    for _ in range(2):
        steps = list(zip(*ranks, strict=True))
        taken = [i for step in steps for share in step for one in share.passes for i in one]
        assert len(taken) == len(set(taken)) == 16 and len(steps) == len(ranks[0]) == 4
        assert all(share.num_tokens == step[0].num_tokens for step in steps for share in step)
        epochs.append(taken)
    assert epochs[0] != epochs[1] and ranks[0].epoch == 2


def test_a_balanced_sampler_goes_on_where_it_was_saved() -> None:
    first, second = balanced(), balanced()
    steps = iter(first)
    next(steps)
    second.load_state_dict(first.state_dict())
    assert list(second) == list(steps)
    with pytest.raises(CheckpointError, match="max_tokens 50 instead of 40"):
        balanced(max_tokens=40).load_state_dict(first.state_dict())
    with pytest.raises(CheckpointError, match="corrupt"):
        first.load_state_dict({**first.state_dict(), "position": 9})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 2}, "rank is no rank"),
        ({"sequences_per_step": 1}, "2 ranks to 19 sequences"),
        ({"sequences_per_step": 20}, "2 ranks to 19 sequences"),
        ({"max_tokens": 18}, "got 19 tokens; allowed at most 18"),
    ],
)
def test_a_balanced_sampler_refuses_what_cannot_be_shared(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        balanced(**changes)
