"""All replicas do the same number of steps: what counts as one, what happens where they differ, and how they stop."""

from __future__ import annotations

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.errors import DeadlineExceeded, DesyncError, PayloadError
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


# what a replica does after 6 steps, and how an error names it
CALLS = {
    "close": (lambda one: one.close(), "ended after 6 steps with close()"),
    "merge": (lambda one: one.close(final_exchange=True), "ended after 6 steps with close(final_exchange=True)"),
    "vote": (lambda one: one.should_stop(), "waits in should_stop() after 6 steps"),
}


@pytest.mark.parametrize("calls", [("close", "merge"), ("merge", "close"), ("merge", "vote"), ("vote", "merge")])
def test_replicas_that_end_unlike_each_other_learn_what_each_did(calls):
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, diloco(sync_interval=2))
        call, _ = CALLS[calls[transport.replica]]
        try:
            for step in range(6):
                steps(model, optimizer, 1, replica=transport.replica, start=step)
                if "vote" in calls and (step < 3 or (calls[transport.replica] == "vote" and step < 5)):
                    optimizer.should_stop()
            call(optimizer)
        except DesyncError as error:
            return str(error)
        except DeadlineExceeded as error:  # one of two that wait for each other, as they run in turns
            assert f"replica {1 - transport.replica} did not send the end of the run within" in str(error)

    found = [text for text in thinwire.run_replicas(2, replica_main) if text is not None]
    assert found
    for text in found:
        for replica, call in enumerate(calls):
            assert f"replica {replica} {CALLS[call][1]}" in text
        assert text.endswith("should_stop() after each step on all, and close(final_exchange=True) once it is True")
        assert "control" not in text


def test_should_stop_refuses_a_closed_optimizer_and_what_is_no_bool():
    optimizer = wrap(build("linear"), None, diloco(sync_interval=2))
    for wrong in (None, torch.ones(2) > 0, 1):
        with pytest.raises(ValueError, match=r"got .*; allowed True or False; try should_stop\(bool\(\.\.\.\)\)"):
            optimizer.should_stop(wrong)
    assert optimizer.should_stop(torch.tensor(1.0) > 0) and not optimizer.should_stop(bool(None))
    optimizer.close()
    with pytest.raises(RuntimeError, match=r"should_stop\(\) after close\(\)"):
        optimizer.should_stop()


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


@pytest.mark.parametrize(("place", "value"), [(16, 4), (17, 2)])
def test_a_status_with_impossible_flags_is_refused(place, value):
    payload = ReplicaStatus(steps=1, launched_step=1).to_tensor()
    payload[place] = value
    with pytest.raises(PayloadError, match="replica 3 sent a status with the flags"):
        read_status(payload, replica=3)


def test_a_skipped_step_is_left_out_where_the_scalers_of_the_others_leave_it_out():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, all_reduce())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(6):
            if step == 3 and transport.replica == 1:
                optimizer.skip_step()
            else:
                loss = loss_of(model, step=step, replica=transport.replica) * (float("inf") if step == 3 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        optimizer.close(final_exchange=True)
        return values(model)

    one, other = thinwire.run_replicas(2, replica_main)
    assert same(one, other) and all(bool(value.isfinite().all()) for value in one)


def test_no_step_is_skipped_where_gradients_are_averaged_within_a_closure():
    def closure_of(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, step=1, replica=0)
            loss.backward()
            return loss

        return closure

    model = build("linear")
    needing = wrap(model, None, all_reduce(), torch.optim.LBFGS(model.parameters(), max_iter=1))
    with pytest.raises(ValueError, match=r"got skip_step\(\); allowed step\(closure\); try a closure"):
        needing.skip_step()
    needing.step(closure_of(model, needing))
    model = build("linear")
    given = wrap(model, None, all_reduce())
    given.step(closure_of(model, given))
    with pytest.raises(ValueError, match="averaged at each call of a closure"):
        given.skip_step()


def test_a_loop_that_asks_for_a_stop_for_ever_without_a_step_is_ended():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, diloco(sync_interval=4))
        for step in range(3):
            steps(model, optimizer, 1, replica=transport.replica, start=step)
            optimizer.should_stop()
        while True:  # skip_step() was forgotten
            optimizer.should_stop(True)

    with pytest.raises(DesyncError, match=r"10000 times after step 3 without a step.*call skip_step\(\)"):
        thinwire.run_replicas(2, replica_main)


def test_two_wrappers_that_step_one_model_in_turns_are_refused():
    model = build("linear")
    one, two = (wrap(model, None, diloco(sync_interval=2)) for _ in range(2))
    steps(model, one, 2)
    steps(model, two, 2)  # as where training goes on with a new wrapper
    with pytest.raises(ValueError, match=r"in turns.*try thinwire\.split_model.*thinwire\.MultiOptimizer"):
        steps(model, one, 1)
    parts = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    joined = wrap(model, None, diloco(sync_interval=2), thinwire.MultiOptimizer(parts))
    steps(model, joined, 2)
    assert joined.steps_done == 2
