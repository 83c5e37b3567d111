"""States that a replica shows to those that come are let go once nobody asks for them any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from thinwire.elastic.coordinator_session import StateOffer
from thinwire.elastic.global_state import GlobalState, pack
from thinwire.elastic.replica_state import most_state_bytes
from thinwire.elastic.state_transfer import chunk_name
from thinwire.errors import Refused
from thinwire.training.elastic import states
from thinwire.training.elastic.states import CheckpointPolicy, StateKeeper, state_name
from thinwire.transport.blob_store import BlobStore

UNWANTED_S = 1.0
STEP = 12


class Shown:
    """A keeper that shows one state, and the library that others ask."""

    def __init__(self) -> None:
        self.answers: list[bool] = []
        transport = SimpleNamespace(replica=0, respond=self._answer)
        self.library, self.told = BlobStore(cast(Any, transport)), threading.Event()
        session = SimpleNamespace(view=SimpleNamespace(floor_step=0), send=lambda kind, **fields: self.told.set())
        self.keeper = StateKeeper(
            cast(Any, SimpleNamespace(library=self.library, session=session)), model=cast(Any, None),
            optimizer=cast(Any, SimpleNamespace(engine=SimpleNamespace())),
            policy=CheckpointPolicy(checkpoints=None, every=None, last_step=100), warn=pytest.fail,
        )  # fmt: skip
        state = GlobalState(step=STEP, parameters={"w": torch.ones(5)}, outer={"momentum.0": torch.ones(5)})
        self.keeper._tasks.put((state, False))
        assert self.told.wait(10)

    def _answer(self, peer: int, number: int, payload: torch.Tensor, *, is_there: bool = True, **rest: object) -> Any:
        self.answers.append(is_there)
        return SimpleNamespace(on_finish=lambda end: end())

    def ask(self, number: int) -> None:
        self.library._on_peer_request(1, number, chunk_name(state_name(STEP), 0))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    monkeypatch.setattr(states, "_UNWANTED_S", UNWANTED_S)
    monkeypatch.setattr(states, "_LOOK_S", 0.02)
    found = Shown()
    yield found
    found.keeper.close()


def test_a_state_that_nobody_asks_for_is_let_go_and_who_asks_later_is_told_so(shown: Shown) -> None:
    assert shown.library.num_bytes > 0
    until_s = time.monotonic() + 10
    while shown.library.num_bytes and time.monotonic() < until_s:
        time.sleep(0.01)
    assert shown.library.num_bytes == 0
    shown.ask(0)
    assert shown.answers == [False]


def test_a_state_stays_for_as_long_as_somebody_asks_for_it(shown: Shown) -> None:
    begun_s, number = time.monotonic(), 0
    while time.monotonic() - begun_s < 1.5 * UNWANTED_S:
        shown.ask(number)
        number += 1
        time.sleep(0.01)
    assert shown.library.num_bytes > 0 and all(shown.answers)


def test_a_state_larger_than_the_model_has_is_refused_before_memory_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("memory was asked for")

    monkeypatch.setattr(states, "IncomingState", asked)
    offer = StateOffer(step=4, root=64 * "a", num_bytes=1 << 38, holders=(2,), note={})
    most = most_state_bytes(torch.nn.Linear(8, 8))
    with pytest.raises(Refused, match=r"offered with 275 GB, and one of this model has at most 16.8 MB: replica 2"):
        states.fetch(
            offer, membership=cast(Any, SimpleNamespace(session=None)), most_bytes=most, report=lambda text: None
        )


def test_the_bound_of_a_state_holds_those_of_all_outer_optimizers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    parameters = dict(model.named_parameters())
    outer = {f"{kind}.0": torch.zeros(sum(p.numel() for p in parameters.values())) for kind in ("momentum", "second")}
    detached = {name: p.detach() for name, p in parameters.items()}
    assert pack(GlobalState(step=1, parameters=detached, outer=outer)).numel() <= most_state_bytes(model)
