"""Replicas that come late in the loopback world, by a script and not by a clock, and one plain loop of what they do."""

from __future__ import annotations

import copy

import torch

from tests.reference.loops import values, wrap
from tests.reference.plain_replicas import Replica, adamw
from tests.reference.small_models import build, loss_of
from thinwire.transport.base import Envelope
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.streams import CONTROL


def control(number):
    return Envelope(stream=CONTROL, key=(number,))


def wait_where_held(transport, holds, *, before):
    for number, (replica, step, _) in enumerate(holds):
        if replica == transport.replica and step == before:
            transport.receive(source=0, envelope=control(number)).wait(deadline_s=1)


def release(transport, holds, *, after, lets):
    for number, (replica, _, step) in enumerate(holds):
        if transport.replica == 0 and step == after:
            transport.send(torch.empty(0, dtype=torch.uint8), to=replica, envelope=control(number))
            if lets:
                transport.step_aside()


def train_late(
    transport, method, *, until, holds=(), lets=False, tokens=None, final=False, save_at=None, start=None, prepare=None
):
    """Train one replica until a step.

    Args:
        transport: Of a loopback world.
        method: The method.
        until: The last step.
        holds: (replica, before its own step, until replica 0 has done this step), each.
        lets: Whether replica 0 lets the others go on as far as they can when it has let one go.
        tokens: Tokens of each step, by replica.
        final: Whether there is a final exchange.
        save_at: The state after this step is handed back.
        start: Such a state, to go on from.
        prepare: Called with the optimizer before the first step.
    """
    me, model, recording = transport.replica, build("linear"), RecordingTransport(transport)
    optimizer = wrap(model, recording, method, adamw(model))
    own, saved = 0, None
    if start:
        own = start["own"]
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
    if prepare:
        prepare(optimizer)
    while optimizer.steps_done < until:
        own += 1
        wait_where_held(transport, holds, before=own)
        loss_of(model, step=own, replica=me).backward()
        if tokens:
            optimizer.count_tokens(tokens[me])
        optimizer.step()
        optimizer.zero_grad()
        release(transport, holds, after=optimizer.steps_done, lets=lets)
        if optimizer.steps_done == save_at:
            saved = copy.deepcopy({"own": own, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
    local = values(model)
    optimizer.close(final_exchange=final)
    sent = [t.payload_bytes for t in recording.log if t.direction == "sent" and t.kind == "round"]
    with optimizer.global_parameters():
        found = {"local": local, "global": values(model), "own": own, "sent": sent, "saved": saved}
        return {**found, "optimizer": optimizer}


def reference(script, *, replicas, lr, mu, blend, codec, tokens=None, ends=None):
    """Decoupled DiLoCo's rounds of one fragment, one after the other.

    Args:
        script: For each round its members, and for each replica its own inner steps at the launch and at the apply.
        replicas: How many.
        lr: Of the outer Nesterov.
        mu: Its momentum.
        blend: alpha.
        codec: Of the parts and of the mean.
        tokens: Tokens of each step, by replica.
        ends: Inner steps of each replica at the end.
    """
    everyone = [LateReplica("linear", number) for number in range(replicas)]
    for members, launches, applies in script:
        parts = [one.launch(own, codec=codec) for one, own in zip(everyone, launches, strict=True)]
        weights = [one.weight(tokens[one.number] if tokens else 1) for one in everyone]
        total = sum(weights[m] * parts[m].double() for m in members)
        mean = codec.encode((total / sum(weights[m] for m in members)).float())
        mean = codec.decode(mean, numel=total.numel())
        for one, own in zip(everyone, applies, strict=True):
            one.apply(own, mean, lr=lr, mu=mu, blend=blend if one.number in members else None)
    for one, own in zip(everyone, ends or [], strict=bool(ends)):
        one.train(own)
    return [one.result() for one in everyone]


class LateReplica(Replica):
    """One that knows how many steps it has done, and how many the rounds have counted."""

    done = counted = launched = 0

    def train(self, own):
        while self.done < own:
            self.done += 1
            self.inner_step(self.done)

    def launch(self, own, *, codec):
        self.train(own)
        self.launched = own
        flat = torch.cat([d.reshape(-1) for d in self.difference().values()])
        return codec.decode(codec.encode(flat), numel=flat.numel())

    def weight(self, tokens_a_step):
        steps = self.launched - self.counted
        return (steps * tokens_a_step) ** 2 / steps

    @torch.no_grad()
    def apply(self, own, mean, *, lr, mu, blend):
        with torch.enable_grad():
            self.train(own)
        trained = {name: p - self.phi[name] for name, p in self.theta.items()}
        sizes = [p.numel() for p in self.theta.values()]
        for (name, p), d in zip(self.phi.items(), mean.split(sizes), strict=True):
            self.momentum[name].mul_(mu).add_(d.view(p.shape))
            p.sub_(d.view(p.shape).add(self.momentum[name], alpha=mu), alpha=lr)
        if blend is not None:
            self.counted = self.launched
            self.start_again(blend)
        else:
            for name, p in self.theta.items():
                p.copy_(trained[name] + self.phi[name])
