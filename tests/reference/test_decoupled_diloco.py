"""Decoupled DiLoCo against its rules in a plain loop: who is counted, by what weight, and what a late replica keeps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import thinwire
from tests.reference.late_replicas import reference, train_late
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build
from thinwire.averaging.quorum import PART_HEADER_BYTES, Quorum
from thinwire.averaging.round_context import Progress, RoundContext
from thinwire.averaging.topology import Peers
from thinwire.codecs import block_int8, float32
from thinwire.methods import decoupled_diloco, streaming_diloco
from thinwire.methods.masha import Star
from thinwire.sync.in_flight import launch
from thinwire.sync.schedule import Round

CODEC = block_int8()


def method(**more):
    arguments = {
        "sync_interval": 4, "overlap_steps": 1, "num_fragments": 1, "codec": CODEC,
        "outer_lr": 0.7, "blend": 0.25, "most_behind": 8,
    }  # fmt: skip
    return decoupled_diloco(**(arguments | more))


def check(script, found, **more):
    expected = reference(script, replicas=len(found), lr=0.7, mu=0.9, blend=0.25, codec=CODEC, **more)
    for one, (local, common) in zip(found, expected, strict=True):
        assert same(one["global"], common), "global parameters"
        assert same(one["local"], local), "local parameters"


def everyone_at(*steps, replicas=3):
    """Return rounds that all replicas launch after the same steps and apply one step later."""
    return [(tuple(range(replicas)), [step] * replicas, [step + 1] * replicas) for step in steps]


@pytest.mark.parametrize("tokens", [None, (3, 50, 7)])
def test_with_all_in_time_the_mean_is_weighted_by_tokens(tokens):
    found = thinwire.run_replicas(3, lambda t: train_late(t, method(), until=14, tokens=tokens))
    check(everyone_at(4, 8, 12), found, tokens=tokens, ends=[14] * 3)
    assert all(one["optimizer"].statistics.rounds_missed == 0 for one in found)


@pytest.mark.parametrize("late", [1, 2])
def test_a_late_replica_keeps_its_work_and_brings_it_all_to_the_next_round(late):
    # it does its 4th step when replica 0 is at its 8th, and after its 5th it passes over to there
    holds = [(late, 4, 6)]
    found = thinwire.run_replicas(3, lambda t: train_late(t, method(), until=10, holds=holds))
    launches, applies, ends = [8] * 3, [9] * 3, [10] * 3
    launches[late], applies[late], ends[late] = 5, 6, 7
    others = tuple(sorted({0, 1, 2} - {late}))
    script = [(others, [4] * 3, [5] * 3), ((0, 1, 2), launches, applies)]
    check(script, found, ends=ends)
    assert [one["own"] for one in found] == ends
    assert [one["optimizer"].statistics.rounds_missed for one in found] == [int(n == late) for n in range(3)]
    assert found[late]["optimizer"].statistics.steps_passed == 3


def test_a_replica_that_is_late_again_is_counted_once_when_it_comes():
    holds = [(2, 4, 6), (2, 7, 13)]
    found = thinwire.run_replicas(3, lambda t: train_late(t, method(), until=18, holds=holds, tokens=(5, 4, 3)))
    script = [
        ((0, 1), [4, 4, 4], [5, 5, 5]),
        ((0, 1, 2), [8, 8, 5], [9, 9, 6]),
        ((0, 1), [12, 12, 9], [13, 13, 10]),
        ((0, 1, 2), [16, 16, 10], [17, 17, 11]),
    ]
    check(script, found, ends=[18, 18, 12], tokens=(5, 4, 3))


def test_a_replica_that_is_behind_by_more_than_an_interval_takes_all_means_in_and_asks_without_a_part():
    found = thinwire.run_replicas(3, lambda t: train_late(t, method(), until=14, holds=[(2, 3, 9)]))
    script = [
        ((0, 1), [4, 4, 4], [5, 5, 5]),
        ((0, 1), [8, 8, 5], [9, 9, 5]),
        ((0, 1, 2), [12, 12, 5], [13, 13, 5]),
    ]
    check(script, found, ends=[14, 14, 6])
    assert found[2]["sent"] == [
        PART_HEADER_BYTES + size for size in (CODEC.payload_bytes(8), 0, CODEC.payload_bytes(8))
    ]


def test_a_slow_replica_sends_its_part_ahead_and_waits_only_for_results():
    def prepare(optimizer):
        if optimizer.transport.replica == 2:
            optimizer.next_stop = 6
            launched = Round(id=0, fragment=0, launch_step=0, apply_step=0)
            optimizer._engine.catch_up.hear(launched, Progress(step=1, closed_step=0), is_counted=False)
            optimizer._engine.catch_up.rate = 8.0

    found = thinwire.run_replicas(3, lambda t: train_late(t, method(), until=6, prepare=prepare))
    # after its first step it is where its second one will end: at the 4th, as far as it can be without a result
    check([((0, 1, 2), [4, 4, 1], [5, 5, 2])], found, ends=[6, 6, 2])
    assert found[2]["optimizer"].statistics.rounds_missed == 0


def test_with_one_other_replica_0_is_a_quorum_of_its_own():
    found = thinwire.run_replicas(2, lambda t: train_late(t, method(), until=10, holds=[(1, 2, 7)]))
    check([((0,), [4, 4], [5, 5]), ((0, 1), [8, 5], [9, 6])], found, ends=[10, 7])


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_with_everyone_and_plain_means_it_is_streaming_diloco_through_a_server(kind):
    common = {"sync_interval": 5, "overlap_steps": 2, "num_fragments": 3, "outer_lr": 0.6, "codec": float32()}
    star = Star(codec=float32(), server_codec=float32())
    streaming = replace(streaming_diloco(**common), exchange=lambda replicas: star)
    decoupled = decoupled_diloco(**common, quorum=3)

    def replica_main(transport, method):
        model = build(kind)
        optimizer = wrap(model, transport, method)
        steps(model, optimizer, 17, replica=transport.replica)
        local = values(model)
        with optimizer.global_parameters():
            return [*local, *values(model)]

    ours, theirs = (thinwire.run_replicas(3, partial(replica_main, method=m)) for m in (decoupled, streaming))
    for one, other in zip(ours, theirs, strict=True):
        for mine, expected in zip(one, other, strict=True):
            # the means are summed in float64 here, in float32 there
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


def test_parts_weigh_by_their_tokens_and_speed():
    shapes = [torch.Size([3, 4]), torch.Size([5]), torch.Size([6, 2]), torch.Size([2, 2, 2])]
    sizes = [shape.numel() for shape in shapes]
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(sum(sizes), generator=generator, dtype=torch.float64).float() for _ in range(3)]
    work = [(10, 5), (40, 8), (3, 3)]
    exchange = Quorum(codec=float32(), server_codec=float32(), quorum=3)

    def replica_main(transport):
        me = transport.replica
        bound = exchange.bind([shapes], replica=me, num_replicas=3)
        context = RoundContext(
            peers=Peers(me=me, members=(0, 1, 2)), transport=transport, round_id=0, step=9, num_tokens=work[me][0],
            num_steps=work[me][1],
        )  # fmt: skip
        round = Round(id=0, fragment=0, launch_step=9, apply_step=9)
        program = bound.steps(parts[me], context)
        return launch(program, round=round, deadline_s=5, in_background=False, let_others=transport.step_aside).result()

    weights = [tokens * tokens / steps for tokens, steps in work]
    mean = sum(weight * part.double() for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    for average in thinwire.run_replicas(3, replica_main):
        torch.testing.assert_close(average.mean.double(), mean, rtol=1e-6, atol=1e-7)
        assert average.members == (0, 1, 2) and average.is_counted
    assert thinwire.run_replicas(3, replica_main)[0].weights == dict(enumerate(weights))
