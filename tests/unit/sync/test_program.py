"""Programs of one's own: messages in a stream of the method's, and what a step puts back when it fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import thinwire
from tests.reference.loops import values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.errors import DeadlineExceeded
from thinwire.methods import local_sgd
from thinwire.sync.outer_optimizer import PlainSGD
from thinwire.sync.program import (
    ExchangeRound,
    Gradients,
    Parts,
    Program,
    Receive,
    Requests,
    Rounds,
    Scheduled,
    Send,
    TakeInnerStep,
)
from thinwire.sync.schedule import Round
from thinwire.sync.updates import OuterStep
from thinwire.transport.base import Envelope
from thinwire.transport.streams import Stream, register

LOSSES = register(Stream(name="losses", number=201, most_bytes=8))


class LossesToTheNext(Program):
    """A local step; each replica tells the next one its loss."""

    needs_closure = True
    has_local_steps = True

    def step(self, parts: Parts) -> Requests:
        transport = parts.transport
        me, count = transport.replica, transport.num_replicas
        loss = yield Gradients()
        envelope = Envelope(stream=LOSSES, key=(0,), numel=1, payload_bytes=8)
        payload = torch.tensor([float(loss)], dtype=torch.float64).view(torch.uint8)
        yield Send(to=(me + 1) % count, payload=payload, envelope=envelope)
        received = yield Receive(source=(me - 1) % count, envelope=envelope)
        yield TakeInnerStep()
        yield Rounds()
        return float(loss), float(received.view(torch.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Talking(OuterStep):
    program: ClassVar[Program] = LossesToTheNext()


class Silent(LossesToTheNext):
    """Moves the parameters, waits for a message that nobody sends, and puts them back."""

    def step(self, parts: Parts) -> Requests:
        [first, *_] = parts.view.parameters.parameters[0]
        first.add_(1)
        try:
            yield Receive(source=1 - parts.transport.replica, envelope=Envelope(stream=LOSSES, key=(1,)))
        finally:
            first.sub_(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(OuterStep):
    program: ClassVar[Program] = Silent()


def method_of(update: OuterStep) -> thinwire.Method:
    plain = local_sgd(sync_interval=2)
    return thinwire.Method(
        name="talking", schedule=plain.schedule, topology=plain.topology, view=plain.view, exchange=plain.exchange,
        update=lambda num_replicas: update,
    )  # fmt: skip


def test_a_program_sends_and_receives_in_a_stream_of_its_own() -> None:
    def replica_main(transport: Any) -> list[Any]:
        model = build("linear")
        optimizer = wrap(model, transport, method_of(Talking(optimizer=PlainSGD())))
        told = []
        for step in range(1, 5):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step=step, replica=transport.replica)
                loss.backward()
                return loss.detach()

            told.append(optimizer.step(closure))
        optimizer.close(final_exchange=True)
        return told

    found = thinwire.run_replicas(3, replica_main)
    for replica, told in enumerate(found):
        assert [of_other for _, of_other in told] == [own for own, _ in found[replica - 1]]
    assert len({own for told in found for own, _ in told}) == 12


def test_a_step_that_fails_runs_the_end_of_its_program() -> None:
    def replica_main(transport: Any) -> bool:
        model = build("linear")
        optimizer = wrap(model, transport, method_of(Waiting(optimizer=PlainSGD())))
        before = values(model)
        with pytest.raises(DeadlineExceeded):
            optimizer.step(lambda: torch.zeros(()))
        optimizer.abandon()
        return all(map(torch.allclose, before, values(model)))

    assert thinwire.run_replicas(2, replica_main) == [True, True]


class Asking(Program):
    """Asks for given things."""

    def __init__(self, *requests: Any) -> None:
        self.requests = requests

    def step(self, parts: Parts) -> Requests:
        named: list[Any] = []
        for request in self.requests:
            answer = yield ExchangeRound(round=named[0], tensor=torch.zeros(4)) if request == "exchange" else request
            named = answer if isinstance(request, Scheduled) else named


@pytest.mark.parametrize(
    ("requests", "text"),
    [
        ((42,), "a program of talking asks for what no engine does; got 42; allowed the requests of"),
        ((None,), "asks for what no engine does; got None"),
        ((Rounds(), "rounds"), "asks for what no engine does; got 'rounds'"),
        ((ExchangeRound(round=Round(id=0, fragment=0, launch_step=1, apply_step=1), tensor=torch.zeros(4)),),
         "a program exchanges a round that this step has not, or twice"),
        ((Scheduled(), Scheduled(), "exchange", "exchange"), "that this step has not, or twice; got Round"),
    ],
)  # fmt: skip
def test_what_a_program_cannot_ask_for_is_refused(requests: tuple[Any, ...], text: str) -> None:
    class Own(OuterStep):
        program: ClassVar[Program] = Asking(*requests)

    def replica_main(transport: Any) -> None:
        optimizer = wrap(build("linear"), transport, method_of(Own(optimizer=PlainSGD())))
        with pytest.raises(ValueError, match=text):
            optimizer.step()
        optimizer.abandon()

    thinwire.run_replicas(2, replica_main)
