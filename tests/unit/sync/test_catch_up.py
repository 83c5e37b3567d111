"""Late replicas: the others go on, nothing is left on the wire, and what cannot go on ends in an error with a name."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import thinwire
from tests.reference.late_replicas import control, train_late
from tests.reference.loops import same, values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.averaging.round_context import Average, Progress
from thinwire.codecs import float32
from thinwire.errors import CheckpointError, DeadlineExceeded, DesyncError, PayloadError, PeerLost
from thinwire.methods import decoupled_diloco
from thinwire.sync import views
from thinwire.sync.catch_up import QuorumCatchUp
from thinwire.sync.fragments import BlockParameters, Pattern
from thinwire.sync.in_flight import UncountedWork
from thinwire.sync.outer_optimizer import PlainSGD
from thinwire.sync.round_engine import RoundEngine
from thinwire.sync.schedule import Round
from thinwire.sync.updates import LateOuterStep, OuterStep
from thinwire.sync.views import PseudoGradient
from thinwire.transport.faulty import Fault, FaultyTransport
from thinwire.transport.loopback import LoopbackWorld
from thinwire.transport.streams import CONTROL

ROUND = Round(id=0, fragment=0, launch_step=4, apply_step=5)


def method(**more):
    arguments = {"sync_interval": 4, "overlap_steps": 1, "num_fragments": 1, "codec": float32(), "most_behind": 8}
    return decoupled_diloco(**(arguments | more))


def moved_model(dtype):
    """Return a model that has moved away from the global value, the view on it, and the value as it was."""
    model = build("linear").to(dtype)
    view = PseudoGradient(fragments=Pattern(num_fragments=1)).bind(model)
    start = values(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    return model, view, start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_not_counted_keeps_its_distance_from_the_global_value_bit_for_bit(dtype):
    model, view, start = moved_model(dtype)
    trained, mean = values(model), torch.linspace(-1, 1, 8)
    update = LateOuterStep(optimizer=PlainSGD(lr=0.5), blend=0.25)
    update.apply(
        update.init(view), ROUND, Average(mean=mean.clone(), reference_hashes={}, members=(0,), is_counted=False)
    )
    names = view.parameters.fragments[0]
    sizes = [dict(model.named_parameters())[name].numel() for name in names]
    moved = dict(zip(names, view.parameters.values[0].split(sizes), strict=True))
    for (name, p), before, old in zip(model.named_parameters(), trained, start, strict=True):
        kept = (before.float() - old.float()) + moved[name].view(p.shape)
        assert torch.equal(p.detach(), kept.to(dtype))
        assert not torch.equal(p.detach(), before)


def test_what_was_counted_is_blended_as_ever():
    found = []
    for kind in (LateOuterStep, OuterStep):
        model, view, _ = moved_model(torch.float32)
        update = kind(optimizer=PlainSGD(lr=0.5), blend=0.25)
        update.apply(
            update.init(view), ROUND, Average(mean=torch.linspace(-1, 1, 8), reference_hashes={}, members=(0, 1))
        )
        found.append(values(model))
    assert same(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_that_comes_after_its_step_erases_nothing_that_was_trained_since(dtype):
    average = lambda: Average(mean=torch.linspace(-1, 1, 8), reference_hashes={}, members=(0, 1))  # noqa: E731
    update, found = LateOuterStep(optimizer=PlainSGD(lr=0.5)), []
    for has_trained in (False, True):
        model, view, _ = moved_model(dtype)
        state = update.init(view)
        update.defer(state, ROUND)
        with torch.no_grad():
            for p in model.parameters() if has_trained else ():
                p.add_(0.25)
        update.apply(state, ROUND, average())
        found.append([p.detach().float() - (0.25 if has_trained else 0) for p in model.parameters()])
    in_time, view, _ = moved_model(dtype)
    update.apply(update.init(view), ROUND, average())
    exact = [p.detach().float() for p in in_time.parameters()]
    assert all(map(torch.equal, found[0], exact)), "nothing was trained since: the bits of a result in time"
    for late, value in zip(found[1], exact, strict=True):
        assert torch.allclose(late, value, atol=1e-6 if dtype == torch.float32 else 0.02)
    assert not state.at_due


def test_a_model_in_shards_is_refused(monkeypatch):
    view = PseudoGradient().bind(build("linear"))
    monkeypatch.setattr(views, "is_sharded", lambda tensor: True)
    with pytest.raises(ValueError, match="with a quorum a replica is one rank"):
        LateOuterStep(optimizer=PlainSGD()).init(view)


def test_at_the_end_nothing_is_left_on_the_wire_and_all_hold_one_model():
    world = LoopbackWorld(3)
    # late over the end of the others' training: they wait for it in the final exchange only
    holds = [(2, 6, 18)]
    found = world.run(lambda t: train_late(t, method(), until=18, holds=holds, final=True))
    assert not world._mail
    assert same(found[0]["global"], found[1]["global"]) and same(found[0]["global"], found[2]["global"])
    for one in found:
        engine = one["optimizer"]._engine
        assert not engine.state.settling and not engine.in_flight
        assert all(straggler.done() for late in engine.exchanges[0]._late for straggler in late)
    assert found[2]["own"] < 12 and found[0]["own"] == 18
    assert found[2]["optimizer"].statistics.rounds_missed == 3 and found[0]["optimizer"].statistics.rounds_missed == 0


def test_closing_without_a_final_exchange_answers_who_is_late():
    world = LoopbackWorld(2)
    found = world.run(lambda t: train_late(t, method(), until=9, holds=[(1, 4, 9)]))
    # whoever leaves last says so to one that has left
    assert {address.stream for _, _, address in world._mail} <= {CONTROL.number}
    assert same(found[0]["global"], found[1]["global"])


def test_nobody_falls_further_behind_than_the_bound():
    outstanding = []

    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, method(most_behind=2))
        if transport.replica == 2:
            transport.receive(source=0, envelope=control(0)).wait(deadline_s=1)
        for step in range(1, 40):
            loss_of(model, step=step, replica=transport.replica).backward()
            optimizer.step()
            if transport.replica == 0:
                late = optimizer._engine.exchanges[0]._late[0]
                outstanding.append((step, len(late), len(optimizer._engine.state.settling)))

    # rounds 0 and 1 are closed without it; the third, launched after step 12, waits for the first
    with pytest.raises(DeadlineExceeded, match=r"replica 2 did not send round 2 \(fragment 0\)"):
        thinwire.run_replicas(3, replica_main)
    assert outstanding[-1] == (12, 2, 2)


def test_without_a_quorum_the_round_waits_and_names_who_is_missing():
    holds = [(1, 4, 6), (2, 4, 6)]
    with pytest.raises(DeadlineExceeded, match=r"replicas 1, 2 did not send round 0 \(fragment 0\)"):
        thinwire.run_replicas(3, lambda t: train_late(t, method(), until=14, holds=holds))


def test_a_late_replica_passes_over_no_step_that_the_loop_needs():
    def replica_main(transport):
        model, seen = build("linear"), []
        optimizer = wrap(model, transport, method())
        own = 0
        while optimizer.steps_done < 14:
            if transport.replica == 2 and own == 3:
                transport.receive(source=0, envelope=control(0)).wait(deadline_s=1)
            own += 1
            loss_of(model, step=own, replica=transport.replica).backward()
            optimizer.next_stop = 7 if optimizer.steps_done < 7 else None
            optimizer.step()
            seen.append(optimizer.steps_done)
            if transport.replica == 0 and optimizer.steps_done == 10:
                transport.send(torch.empty(0, dtype=torch.uint8), to=2, envelope=control(0))
        optimizer.close()
        return seen

    assert thinwire.run_replicas(3, replica_main)[2] == [1, 2, 3, 4, 7, 13, 14]


@pytest.mark.parametrize("stop", [6, 9])
def test_a_run_goes_on_bit_for_bit_from_a_state_with_a_missed_round(stop):
    # at 6 the round that replica 2 missed is in flight; at 9 it has been taken in
    late = method(overlap_steps=3, grace_steps=1)
    holds = [(2, 4, 5)]
    # replica 0 waits for it to come so far, so that it is not ahead and nothing is passed over
    common = {"until": 18, "tokens": (3, 5, 9)}
    whole = thinwire.run_replicas(3, lambda t: train_late(t, late, **common, holds=holds, lets=True, save_at=stop))
    saved = [one["saved"] for one in whole]
    assert [f["is_counted"] for f in saved[2]["optimizer"]["sync"]["in_flight"]] == [stop > 7]
    resumed = thinwire.run_replicas(3, lambda t: train_late(t, late, **common, start=saved[t.replica]))
    for one, other in zip(whole, resumed, strict=True):
        assert same(one["local"], other["local"]) and same(one["global"], other["global"])
    assert whole[2]["optimizer"].statistics.rounds_missed == 1


def test_a_late_replica_with_another_global_value_is_found_out():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, method())
        if transport.replica == 2:
            optimizer._engine.view.parameters.values[0][1] += 1e-3
            transport.receive(source=0, envelope=control(0)).wait(deadline_s=1)
        while optimizer.steps_done < 6:
            loss_of(model, step=1, replica=transport.replica).backward()
            optimizer.step()
        if transport.replica == 0:
            transport.send(torch.empty(0, dtype=torch.uint8), to=2, envelope=control(0))
        optimizer.close()

    with pytest.raises(DesyncError, match="replicas 0, 2 disagree"):
        thinwire.run_replicas(3, replica_main)


def test_a_dead_replica_ends_the_run_by_name_also_where_a_quorum_is_left():
    script = [Fault(kind="die", replica=0, peer=2, round_id=1)]
    with pytest.raises(PeerLost, match="replica 2 closed its connection during round 1"):
        thinwire.run_replicas(3, lambda t: train_late(FaultyTransport(t, script), method(), until=14))


def quorum_policy(work: UncountedWork, *, drift_steps: int) -> QuorumCatchUp:
    policy = QuorumCatchUp()
    policy.bind(cast(RoundEngine, SimpleNamespace(state=SimpleNamespace(work=work), drift_steps=drift_steps)))
    return policy


def test_the_others_are_as_fast_as_they_were_over_some_steps_of_ones_own():
    work = UncountedWork(num_fragments=1)
    others, launched = quorum_policy(work, drift_steps=1000), Round(id=0, fragment=0, launch_step=0, apply_step=0)

    def heard(step, *, after, is_counted=False):
        for _ in range(after):
            work.add_step(num_tokens=1)
        others.hear(launched, Progress(step=step, closed_step=step - 1), is_counted)
        return others.rate, others.target(stop=10**6), others.target(stop=None)

    assert others.target(stop=5) == others.target(stop=None) == others.closed_step == 0
    assert heard(9, after=3, is_counted=True) == (1, 0, 0), "who is in time has no reason to hurry"
    assert heard(20, after=10) == (1, 20, 20)
    assert heard(30, after=0) == (1, 30, 30) and others.closed_step == 29
    assert heard(25, after=0) == (1, 30, 30), "an old word counts nothing"
    assert heard(33, after=1) == (1, 33, 33), "one step is no measure"
    assert heard(40, after=4) == (2, 41, 40), "10 steps in 5 since step 30; it aims at the end of its next one"
    work.add_step(num_tokens=1)
    assert (others.target(stop=10**6), others.target(stop=None), others.target(stop=42)) == (43, 40, 42)
    assert heard(44, after=1, is_counted=True) == (2, 45, 44), "one that hurries listens also in time"
    assert heard(46, after=3, is_counted=True) == (1, 46, 46), "6 steps in 5: as fast as itself"


def test_work_is_counted_up_to_the_launch_of_the_round_that_counted_it():
    work = UncountedWork(num_fragments=2)
    rounds = [replace(ROUND, id=number) for number in range(3)]
    work.add_step(num_tokens=10)
    work.launch(rounds[0])
    work.add_step(num_tokens=20)
    work.settle(rounds[0], is_counted=False)
    assert work.since(0) == (30, 2)
    work.launch(rounds[1])
    work.add_step(num_tokens=5)
    saved = copy.deepcopy(work.state_dict())
    work.settle(rounds[1], is_counted=True)
    assert (work.since(0), work.since(1)) == ((5, 1), (35, 3))
    again = UncountedWork(num_fragments=2)
    again.load_state_dict(saved)
    again.settle(rounds[1], is_counted=True)
    assert again.state_dict() == work.state_dict()
    with pytest.raises(CheckpointError, match="the work of 2 fragments, this run has 3"):
        UncountedWork(num_fragments=3).load_state_dict(saved)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: decoupled_diloco(quorum=0), "quorum must be at least 1, got 0"),
        (lambda: decoupled_diloco(quorum=4).exchanges(3), "at most the number of replicas, 3, got 4; 3 waits for all"),
        (lambda: decoupled_diloco(most_behind=0), "most_behind must be at least 1, got 0"),
        (lambda: decoupled_diloco(grace_steps=3), r"at most overlap_steps \(2\), got 3"),
        (lambda: decoupled_diloco(grace_steps=-1), "grace_steps must be at least 0"),
        (lambda: decoupled_diloco(overlap_steps=0), r"at least 1 and below sync_interval \(24\), got 0"),
        (lambda: decoupled_diloco(overlap_steps=24), r"below sync_interval \(24\), got 24"),
        (lambda: decoupled_diloco(overlap_steps=(1, 2)), r"overlap_steps must be one number here, got \(1, 2\)"),
        (lambda: decoupled_diloco(blend=1.0), r"blend must be in \[0, 1\), got 1.0"),
        (lambda: Pattern(most_fragments=1), "most_fragments must be at least 2, got 1"),
        (
            lambda: replace(decoupled_diloco().exchanges(2)[0], server=3).bind([], replica=0, num_replicas=2),
            "server must be one of the 2 replicas, got 3",
        ),
        (lambda: wrap(build("linear"), None, method()).count_tokens(0), "num_tokens must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_refused_with_its_limit(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(("blocks", "expected"), [(3, 4), (23, 24), (40, 24)])
def test_there_are_24_fragments_or_as_many_as_the_model_has_blocks_and_the_rest(blocks, expected):
    names = BlockParameters(blocks=tuple((f"b{n}",) for n in range(blocks)), rest=("embed", "head"))
    found = decoupled_diloco().view.fragments.partition(names)
    assert len(found) == expected
    assert sorted(sum(found, ())) == sorted([*sum(names.blocks, ()), *names.rest])


def test_stepping_aside_lets_the_others_go_on_as_far_as_they_can():
    events = []

    def replica_main(transport):
        if transport.replica == 0:
            events.append("first")
            assert transport.step_aside()
            events.append("again")
            assert not transport.step_aside(), "the others wait for this replica or have ended"
            transport.send(torch.empty(0, dtype=torch.uint8), to=1, envelope=control(0))
            assert transport.step_aside()
        elif transport.replica == 1:
            events.append("one waits")
            transport.receive(source=0, envelope=control(0)).wait(deadline_s=1)
            events.append("one is done")
        else:
            events.append("two is done")

    world = LoopbackWorld(3)
    world.run(replica_main)
    assert events == ["first", "one waits", "two is done", "again", "one is done"]
    assert not world.transports[0].step_aside(), "outside of a run there is nobody"


def test_others_that_are_said_to_be_further_than_they_can_be_are_not_followed() -> None:
    """A replica would pass over all the steps up to there."""
    others = quorum_policy(UncountedWork(num_fragments=1), drift_steps=60)
    launched = Round(id=3, fragment=0, launch_step=40, apply_step=42)
    others.hear(launched, Progress(step=100, closed_step=99), False)
    with pytest.raises(PayloadError, match=r"round 3 of step 40: .* at step 18446744073709551615, .* 100 at most"):
        others.hear(launched, Progress(step=2**64 - 1, closed_step=0), False)
    assert others.known_step == 100
