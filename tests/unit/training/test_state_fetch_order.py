"""A state whose parameters are here and whose momenta still come, over connections that a test holds back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from thinwire.elastic.coordinator_session import CoordinatorView, Neighbour, StateOffer
from thinwire.elastic.global_state import GlobalState, pack
from thinwire.elastic.join import Membership
from thinwire.elastic.state_transfer import CHUNK_BYTES, publish_state
from thinwire.errors import DeadlineExceeded, Expelled, NotThere
from thinwire.sync.round_engine import RoundEngine
from thinwire.sync.updates import OuterState
from thinwire.training.elastic.states import IncomingState, fetch, state_name

STEP, SOON_S = 12, 120.0
HOLDER = 1


class Loan:
    """An ask that ends when the holder lets it, or is gone."""

    def __init__(self, payload: torch.Tensor) -> None:
        self.payload: torch.Tensor | None = payload
        self.then: list[Callable[[], None]] = []
        self.has_come = False

    def on_finish(self, then: Callable[[], None]) -> None:
        if self.has_come:
            then()
        else:
            self.then.append(then)

    def come(self) -> None:
        self.has_come = True
        for then in self.then:
            then()

    def wait(self, *, deadline_s: float) -> torch.Tensor:
        if not self.has_come:
            raise DeadlineExceeded("not yet")
        if self.payload is None:
            raise NotThere("replica 1 does not have it any more")
        return self.payload

    def cancel(self) -> None: ...


class Shelf:
    """A holder's blobs; chunks from some index on come only once they are let go."""

    def __init__(self, *, held_from: int) -> None:
        self.blobs: dict[bytes, torch.Tensor] = {}
        self.held_from: float = held_from
        self.held: list[Loan] = []
        self.lock = threading.Lock()

    def publish(self, name: bytes, payload: torch.Tensor, **rest: object) -> None:
        self.blobs[name] = payload

    def get(self, holder: int, name: bytes, *, most_bytes: int) -> Loan:
        loan, last = Loan(self.blobs[name]), name.rpartition(b"/")[2]
        with self.lock:
            if last.isdigit() and int(last) >= self.held_from:
                self.held.append(loan)
            else:
                loan.come()
        return loan

    def let_go(self, *, are_gone: bool = False) -> None:
        with self.lock:
            self.held_from = float("inf")
            held, self.held = self.held, []
            if are_gone:
                for name in self.blobs:
                    self.blobs[name] = cast(Any, None)
        for loan in held:
            loan.payload = None if are_gone else loan.payload
            loan.come()


class Case:
    """A replica that comes, and a holder with one chunk and a half of parameters and as much momentum."""

    def __init__(self, *, step_s: float = 10.0) -> None:
        numel = CHUNK_BYTES // 4 + CHUNK_BYTES // 8
        self.state = GlobalState(
            step=STEP, parameters={"w": torch.randn(numel)}, outer={"momentum.0": torch.randn(numel)}
        )
        self.shelf, vector = Shelf(held_from=2), pack(self.state)
        root = publish_state(cast(Any, self.shelf), state_name(STEP), vector)
        self.offer = StateOffer(step=STEP, root=root.hex(), num_bytes=vector.numel(), holders=(HOLDER,), note={})
        view = CoordinatorView(
            neighbours={HOLDER: Neighbour(replica=HOLDER, host="h", address="a", port=1, is_active=True)}
        )
        session = SimpleNamespace(
            view=view, changed=threading.Condition(), reach=lambda step: None, interval_steps=10, check=lambda: None,
            pace=SimpleNamespace(step_s=step_s), send=lambda kind, **fields: None,
        )  # fmt: skip
        self.membership = cast(Membership, SimpleNamespace(session=session, library=self.shelf))
        self.told: list[str] = []
        self.outer = OuterState(cast(Any, None), [], [torch.zeros(numel)])
        self.engine = cast(RoundEngine, SimpleNamespace(update_state=self.outer))

    def fetched(self, *, may_begin_early: bool) -> tuple[IncomingState, dict[str, torch.Tensor]]:
        return fetch(
            self.offer, membership=self.membership, most_bytes=self.offer.num_bytes, report=self.told.append,
            may_begin_early=may_begin_early,
        )  # fmt: skip


def test_the_parameters_are_taken_first_and_the_momenta_when_they_are_here() -> None:
    case = Case()
    coming, parameters = case.fetched(may_begin_early=True)
    assert torch.equal(parameters["w"], case.state.parameters["w"]) and coming.step == STEP
    assert not coming.is_here() and not case.outer.momentum[0].any() and not case.told
    threading.Timer(0.1, case.shelf.let_go).start()
    coming.load_into(case.engine)  # waits
    assert torch.equal(case.outer.momentum[0], case.state.outer["momentum.0"])
    assert coming.is_here() and "fetched the state of step 12" in case.told[0]
    coming.close()


@pytest.mark.parametrize(("may_begin_early", "step_s"), [(False, 10.0), (True, 0.0), (True, 1e-9)])
def test_all_is_waited_for_where_the_rest_may_not_come_late_or_would_come_too_late(
    may_begin_early: bool, step_s: float
) -> None:
    case = Case(step_s=step_s)
    has_been_let_go = threading.Event()
    threading.Timer(0.2, lambda: (has_been_let_go.set(), case.shelf.let_go())).start()
    coming, parameters = case.fetched(may_begin_early=may_begin_early)
    assert has_been_let_go.is_set() and torch.equal(parameters["w"], case.state.parameters["w"])
    coming.load_into(case.engine)  # all is here, and may not have been unpacked yet
    assert coming.is_here() and case.outer.momentum[0].any()
    coming.close()


def test_a_rest_that_nobody_holds_any_more_sends_the_replica_back() -> None:
    case = Case()
    coming, _ = case.fetched(may_begin_early=True)
    case.shelf.let_go(are_gone=True)
    with pytest.raises(Expelled, match=r"the rest of the state of step 12 could not be fetched: .*joining again"):
        coming.load_into(case.engine)
    assert coming.is_here(), "nobody waits for it any more"
    coming.close()


def test_who_leaves_fetches_no_more() -> None:
    case = Case()
    coming, _ = case.fetched(may_begin_early=True)
    began_s = time.monotonic()
    coming.close()
    assert time.monotonic() - began_s < SOON_S and not coming._thread.is_alive()
