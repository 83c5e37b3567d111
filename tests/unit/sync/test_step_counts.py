"""All replicas do the same number of steps: what counts as one, what happens where they differ, and how they stop."""

from __future__ import annotations

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.errors import DesyncError, PayloadError
from thinwire.methods import all_reduce, decoupled_diloco, diloco, masha1, noloco, streaming_diloco
from thinwire.sync.control_messages import ReplicaStatus, read_status
from thinwire.transport.recording import RecordingTransport

METHODS = {
    "all-reduce": all_reduce,
    "diloco": lambda: diloco(sync_interval=5),
    "streaming": lambda: streaming_diloco(sync_interval=4, overlap_steps=2, layers_per_fragment=1),
    "noloco": lambda: noloco(sync_interval=5),
}


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_a_first_step_counts_also_where_learning_rate_and_gradients_are_zero(gradient):
    model = build("linear")
    inner = torch.optim.AdamW(model.parameters(), lr=0.0)
    optimizer = wrap(model, None, diloco(sync_interval=2), inner)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    assert optimizer.steps_done == 1


def end_after(counts, method):
    """Return what each replica of a loop raises that does so many steps and then closes."""

    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, method())
        try:
            steps(model, optimizer, counts[transport.replica], replica=transport.replica)
            optimizer.close(final_exchange=True)
        except DesyncError as error:
            return str(error)

    return thinwire.run_replicas(len(counts), replica_main)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("counts", [(22, 30), (30, 22), (22, 23), (21, 21, 30, 21)])
def test_different_numbers_of_steps_are_named_on_all_replicas(method, counts):
    for told in end_after(counts, METHODS[method]):
        assert told is not None
        assert f"ended after {min(counts)} steps" in told
        assert f"replica {counts.index(max(counts))} " in told
        assert "skip_step()" in told and "should_stop()" in told


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_that_one_replica_leaves_out_counts_as_a_step(method):
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, METHODS[method](), torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(1, 13):
            loss = loss_of(model, step=step, replica=transport.replica)
            if transport.replica == 1 and step in (4, 7):
                (loss * torch.nan).backward()
                optimizer.skip_step()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        optimizer.close(final_exchange=True)
        with optimizer.global_parameters():
            return optimizer.steps_done, values(model)

    (count, one), (_, other) = thinwire.run_replicas(2, replica_main)
    assert count == 12
    assert same(one, other)
    assert all(torch.isfinite(value).all() for value in one)


def test_a_skipped_step_trains_nothing_by_itself_and_gives_the_others_gradients_of_zero():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, all_reduce())
        before = values(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * (torch.nan if transport.replica else 1.0)
        optimizer.skip_step() if transport.replica else optimizer.step()
        return before, values(model)

    for before, after in thinwire.run_replicas(2, replica_main):
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(new, old - 0.05 * 0.5)
    alone = build("linear")
    optimizer = wrap(alone, None, diloco(sync_interval=2))
    before = values(alone)
    optimizer.skip_step()
    assert same(before, values(alone)) and optimizer.steps_done == 1


def test_a_method_that_asks_for_gradients_within_a_step_refuses_to_skip_one():
    model = build("linear")
    with pytest.raises(ValueError, match=r"gradients within a step, so none can be left out; .*; try a closure"):
        wrap(model, None, masha1()).skip_step()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("every", [1, 3])
def test_all_replicas_stop_after_the_same_step_within_two_intervals_of_the_first_request(method, every):
    def replica_main(transport):
        model = build("linear")
        recording = RecordingTransport(transport)
        optimizer = wrap(model, recording, METHODS[method]())
        for step in range(1, 100):
            steps(model, optimizer, 1, replica=transport.replica, start=step - 1)
            if step % every == 0 and optimizer.should_stop(transport.replica == 1 and step == 12):
                break
        optimizer.close(final_exchange=True)
        with optimizer.global_parameters():
            return optimizer.steps_done, values(model)

    found = thinwire.run_replicas(3, replica_main)
    interval = METHODS[method]().schedule.sync_interval
    assert {count for count, _ in found} == {found[0][0]}
    assert 12 < found[0][0] <= 12 + 2 * interval + 2 * every
    assert same(found[0][1], found[1][1]) and same(found[0][1], found[2][1])


def test_one_replica_alone_stops_when_it_asks():
    optimizer = wrap(build("linear"), None, diloco(sync_interval=2))
    assert not optimizer.should_stop(False)
    assert optimizer.should_stop(True)


def test_votes_after_different_steps_name_both():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, noloco(sync_interval=50))
        for step in range(1, 200):
            steps(model, optimizer, 1, replica=transport.replica, start=step - 1)
            if (step + transport.replica) % 5 == 0:
                optimizer.should_stop()

    with pytest.raises(DesyncError, match=r"replica 0 after 50 steps, replica 1 after 54 steps; call should_stop\(\)"):
        thinwire.run_replicas(2, replica_main)


def test_a_method_whose_replicas_may_be_late_refuses_an_agreed_stop_and_its_remedy_works():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, decoupled_diloco(sync_interval=4))
        with pytest.raises(RuntimeError, match="once steps_done reaches a number that all know"):
            optimizer.should_stop()
        while optimizer.steps_done < 12:
            steps(model, optimizer, 1, replica=transport.replica, start=optimizer.steps_done)
        optimizer.close(final_exchange=True)
        with optimizer.global_parameters():
            return values(model)

    assert same(*thinwire.run_replicas(2, replica_main))


@pytest.mark.parametrize("place", [16, 17])
def test_a_status_with_impossible_flags_is_refused(place):
    payload = ReplicaStatus(steps=1, launched_step=1).to_tensor()
    payload[place] = 2
    with pytest.raises(PayloadError, match="replica 3 sent a status with flags"):
        read_status(payload, replica=3)
