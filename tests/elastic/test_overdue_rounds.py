"""Rounds whose results are overdue: training goes on until they are needed, or the others are past where they are."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_elastic_faults import FINAL, SOON_S, Street, are_alike, pause, street

from thinwire.averaging.quorum import read_part_header
from thinwire.elastic.round_driver import HEAD_BYTES, blob_name, round_of_name

__all__ = ["street"]


def holds_back(run: Street, number: int, *, round_id: int) -> threading.Event:
    """Let the decision of a round come to a replica only once the event is set."""
    is_held, session = threading.Event(), run.workers[number].session
    inner = session.receive

    def hear(message: dict[str, Any]) -> None:
        if message["kind"] == "decision" and message["round"] == round_id:
            is_held.wait(SOON_S)
        inner(message)

    run.town._homes[run.workers[number].resident.token] = lambda message: threading.Thread(
        target=hear, args=(message,), daemon=True
    ).start()
    return is_held


def looked_for(what: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + SOON_S
    while not what() and time.monotonic() < end_s:
        time.sleep(0.01)
    return what()


@pytest.mark.parametrize(("bears", "blend"), [(False, 0.5), (True, 0.5), (True, 0.0)])
def test_training_goes_on_while_a_round_is_overdue_until_its_fragment_is_launched_again(
    street: Callable[..., Street], bears: bool, blend: float
) -> None:
    run = street(2, interval=20, steps=60, bears=bears, blend=blend)
    exchanged: list[tuple[int, int]] = []
    first, second = run.workers
    first.driver.observers[:] = [
        SimpleNamespace(on_exchanged=lambda step: exchanged.append((step, first.optimizer.steps_done)))
    ]
    is_held = holds_back(run, 0, round_id=1)
    second.pause = lambda step: pause(0, step) if step < 50 else (is_held.wait(SOON_S), None)[1]
    run.begin()
    assert looked_for(lambda: first.optimizer.steps_done >= (50 if bears else 31))
    time.sleep(0.5)  # and it comes no further
    # launched after step 30 and due after 31, the next one of its fragment is launched after 50
    assert first.optimizer.steps_done == (50 if bears else 31)
    assert first.steps[-1] == (49 if bears else 30)
    assert [step for step, _ in exchanged] == list(range(1, 31))
    is_held.set()
    values = [worker.end() for worker in run.workers]
    assert are_alike(*values)
    assert [step for step, _ in exchanged] == list(range(1, 61))


def test_who_is_behind_trains_on_while_it_catches_up_and_all_of_it_counts_later(street: Callable[..., Street]) -> None:
    run = street(3, interval=20, steps=120, bears=True, patience_steps=5.0)
    first, *others = run.workers
    offered: dict[int, tuple[int, int]] = {}
    publish = first.resident.shelf.publish

    def watch(name: bytes, payload: torch.Tensor) -> None:
        round_id = round_of_name(name)
        if name == blob_name(round_id, first.replica):
            offer, _ = read_part_header(payload[HEAD_BYTES:], step=1000, what="a part")
            offered[round_id] = offer.num_tokens, first.num_batches
        publish(name, payload)

    first.resident.shelf.publish = watch
    is_held = holds_back(run, 0, round_id=1)
    known = first.resident.seat.known_step
    first.pause = lambda step: (looked_for(lambda: known() >= 70), None)[1] if step == 45 else pause(0.005, step)
    for other in others:
        other.pause = lambda step: (is_held.wait(SOON_S), None)[1] if step == 75 else pause(0.005, step)
    run.begin()
    # the others are past the launch after step 50, which needs what round 1 came to
    assert looked_for(lambda: first.steps.count(49) > 5), first.steps
    assert first.optimizer.steps_done in (49, 50)
    is_held.set()
    values = [worker.end() for worker in run.workers]
    assert are_alike(values[0], values[1]) and are_alike(values[0], values[2])
    counted = [number for number, members in run.members().items() if first.replica in members and number < FINAL]
    for fragment in (0, 1):
        own = [number for number in sorted(counted) if number % 2 == fragment]
        assert own[-1] > 6, "it takes part again"
        assert sum(offered[number][0] for number in own) == 6 * offered[own[-1]][1], "each token counts once"
