"""MASHA1 and MASHA2: compressed exchange for variational inequalities, saddle points and GANs (arXiv 2110.03313).

Find z with F(z) = (1/M) sum_m F_m(z) = 0; for a minimisation F is the gradient, for min_x max_y f it is
(grad_x f, -grad_y f). With a reference point w whose F(w) all replicas know:

    half = tau z + (1 - tau) w - gamma F(w)
    MASHA1: z = half - gamma Q_server(mean_m Q(F_m(half) - F_m(w)))               Q unbiased
    MASHA2: z = half - C_server(mean_m C(gamma (F_m(half) - F_m(w)) + e_m) + e)   C contractive; e_m, e keep its loss
    with probability 1 - tau, by a coin that all replicas toss alike: w = z, and F_m(w) is exchanged dense

The method asks for gradients at points of its own choice, so it needs `DistributedOptimizer.step(closure)`, with the
same loss at both evaluations of a step: one batch, and the same dropout. The inner optimizer, torch.optim.SGD without
momentum, says gamma, of the order of sqrt(1 - tau) / L in theory, and the weight decay, which is added to each F_m.

What we changed: without `server_codec` there is no server; everyone sends to everyone and computes the same mean, so
that there is no second coding. With it, replica 0 is the server. F_m(w) is computed again at each step rather than
kept, on the same batch as F_m(half), which is the same number where the loss has no batches. The exchange of F(w) comes
at the start of the step after the coin.

`thinwire train` gives it a closure over the step's batch. What the theory has then no longer holds: F(w) is that of the
one batch at which w was taken, and its noise stays in every step until the next w, 1 / (1 - tau) steps on average (the
paper's own variants for batches are not built); the gradient of a language model is not monotone; and with clipping F_m
is the clipped gradient of the replica, each evaluation for itself, whose mean is zero elsewhere. With clipping off and
a batch that never changes it is the method of the paper.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from thinwire.averaging.exchange import (
    LATE_STEP,
    AllGather,
    BoundExchange,
    EncodeStage,
    Exchange,
    Ramp,
    Shapes,
    Stages,
    cheapest,
    check_finite,
    code_for,
    codec_at,
    decode,
    laid_out,
    late_traffic,
    mean_of,
    most_bytes,
    numel_of,
)
from thinwire.averaging.message_pattern import RoundTraffic, StarMessages
from thinwire.averaging.round_context import Average, RoundContext, RoundNote, Steps, Wait
from thinwire.codecs import Codec, Sign, float32, random_k, top_k
from thinwire.codecs.error_feedback import ErrorFeedback, SenderMemory, Shift
from thinwire.compat import kind_of
from thinwire.methods.ef21 import check_contractive
from thinwire.methods.registry import About, register
from thinwire.shared_random import derive_seed
from thinwire.sync.fragments import Pattern, find_blocks, parameters_by_name
from thinwire.sync.method import Method
from thinwire.sync.program import ExchangeRound, Gradients, Parts, Program, Requests, Scheduled
from thinwire.sync.schedule import RandomRefresh, Round
from thinwire.sync.updates import Update
from thinwire.sync.views import BoundView, GlobalParameters, checksum
from thinwire.tagged_state import same
from thinwire.transport.base import Received
from thinwire.transport.shards import drop_gathered, flatten, gradient_shard, real_shard, unflatten_into

ABOUT = About(
    paper="arXiv 2110.03313",
    exchanged="differences of the operator at two points, compressed, and now and then whole",
    bits="twice the codec's (M - 1)",
    memory="3 (reference point, its operator, the point itself); MASHA2 4 (also residuals)",
    restrictions="step(closure) with the same loss at both evaluations; inner SGD without momentum; two passes a step",
    inner_optimizer="plain-sgd",  # it uses no more of the optimizer than its rate and decay
)


@register(ABOUT)
def masha1(
    *, codec: Codec | None = None, server_codec: Codec | None = None, refresh_probability: float | None = None,
    ascent: tuple[str, ...] = (), seed: int = 0,
) -> Method:  # fmt: skip
    """Solve a variational inequality with an unbiased code, by steps with a closure.

    Args:
        codec: The code of the differences, unbiased; `random_k(scale=True)` by default.
        server_codec: The code of their mean, with replica 0 as the server; None for no server.
        refresh_probability: 1 - tau, in (0, 1]; by default the code's size as a share of float32's, so that refreshes
            cost as much as the rest.
        ascent: Names of the parameters, or of modules, that maximise the loss.
        seed: Selects the coins.

    Raises:
        ValueError: A code is biased, or a number out of its range.

    Example:
        >>> masha1(ascent=("critic",)).schedule.probability < 0.01
        True
    """
    differences = random_k(scale=True) if codec is None else codec
    for code in (differences, server_codec):
        if code is not None and (isinstance(code, Sign) or (code.is_sparse and not getattr(code, "scale", False))):
            raise ValueError(
                f"{code.name} is biased: what it drops is lost, because MASHA1 has no error feedback; take "
                f"random_k(scale=True) or a code with stochastic rounding, or masha2()"
            )
    return _masha("masha1", differences, server_codec, refresh_probability, ascent=ascent, seed=seed, memory=None)


@register(ABOUT)
def masha2(
    *, codec: Codec | None = None, server_codec: Codec | None = None, refresh_probability: float | None = None,
    ascent: tuple[str, ...] = (), seed: int = 0,
) -> Method:  # fmt: skip
    """Solve a variational inequality with a contractive code and error feedback, by steps with a closure.

    Args:
        codec: The code of the differences, contractive; `top_k()` by default.
        server_codec: The code of their mean, with replica 0 as the server; None for no server.
        refresh_probability: 1 - tau, in (0, 1]; by default the code's size as a share of float32's, so that refreshes
            cost as much as the rest.
        ascent: Names of the parameters, or of modules, that maximise the loss.
        seed: Selects the coins.

    Raises:
        ValueError: A code is not contractive, or a number out of its range.

    Example:
        >>> masha2(refresh_probability=0.3).update(2).present_weight
        0.7
    """
    differences = top_k() if codec is None else codec
    for code in (differences, server_codec):
        if code is not None:
            check_contractive(code)
    memory = ErrorFeedback()
    return _masha("masha2", differences, server_codec, refresh_probability, ascent=ascent, seed=seed, memory=memory)


def _masha(
    name: str, codec: Codec, server_codec: Codec | None, refresh_probability: float | None, *, ascent: tuple[str, ...],
    seed: int, memory: SenderMemory | None,
) -> Method:  # fmt: skip
    if refresh_probability is not None and not 0 < refresh_probability <= 1:
        raise ValueError(
            f"refresh_probability must be in (0, 1], got {refresh_probability}; the code's density is usual"
        )
    probability = min(1.0, codec.bits_per_element / 32) if refresh_probability is None else refresh_probability
    differences: Exchange = AllGather(codec=codec, memory=memory)
    if server_codec is not None:
        differences = Star(codec=codec, server_codec=server_codec, memory=memory, server_memory=memory)
    return Method(
        name=name,
        schedule=RandomRefresh(probability=probability, seed=seed),
        view=Operator(ascent=ascent),
        exchange=lambda num_replicas: (differences, cheapest(float32(), num_replicas=num_replicas)),
        update=lambda num_replicas: Extragradient(present_weight=1 - probability, sends_moves=memory is not None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """The operator of a variational inequality at any point: the gradients of all trainable parameters, with signs.

    For a minimisation it is the gradient; for a game of several players that share one loss, those of the players that
    maximise it are negated. The inner optimizer's weight decay is added to all of them, as to gradients, so it pulls
    every player to zero.

    Args:
        ascent: Parameters that maximise the loss, by name; the name of a module stands for all below it.
        hash_interval: Every how many steps the parameters are hashed to prove that replicas agree.

    Raises:
        ValueError: `hash_interval` is below 1.
    """

    ascent: tuple[str, ...] = ()
    hash_interval: int = 50

    def __post_init__(self) -> None:
        if self.hash_interval < 1:
            raise ValueError(f"hash_interval must be at least 1, got {self.hash_interval}")

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundOperator:
        return BoundOperator(self, model, inner)


class BoundOperator:
    """See `Operator`."""

    def __init__(self, spec: Operator, model: nn.Module, inner: torch.optim.Optimizer | None) -> None:
        names = Pattern(num_fragments=1).partition(find_blocks(model))[0]
        by_name = parameters_by_name(model)
        self._rises = [any(_is_below(name, wanted) for wanted in spec.ascent) for name in names]
        for wanted in spec.ascent:
            if not any(_is_below(name, wanted) for name in names):
                raise ValueError(
                    f"ascent names {wanted!r}, but the model has no trainable parameter of that name or below it; it "
                    f"has {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
                )
        self._model = model
        self._tensors = [by_name[name] for name in names]
        self._hash_interval = spec.hash_interval
        self._inner = inner
        # every replica holds the global values in its own parameters already: no second copy
        self.parameters = GlobalParameters(model, [names], has_values=False)
        self.parameters.need_float32("this method moves the parameters as one vector")

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        return tuple(real_shard(tensor).shape for tensor in self._tensors)

    def read(self, round: Round) -> torch.Tensor:
        return self.values()

    def read_last(self, fragment: int) -> torch.Tensor:
        raise NotImplementedError("gradients are exchanged at every step; nothing is left for a final exchange")

    def reference_hash(self, round: Round) -> int:
        """Hash the parameters at every `hash_interval`-th step: all replicas ask at the same point."""
        if round.launch_step % self._hash_interval:
            return 0
        return checksum(self.point().cpu())

    def values(self) -> torch.Tensor:
        """Return the operator where the closure was called last: float32, `(numel,)`; 0 where there is no gradient."""
        found = [gradient_shard(tensor) for tensor in self._tensors]
        # looked up at every step: the inner optimizer's groups are others once a state was loaded
        groups = self._inner.param_groups if self._inner is not None else []
        decays = {id(tensor): group.get("weight_decay", 0.0) for group in groups for tensor in group["params"]}
        flat = flatten(found)
        parts = torch.split(flat, [tensor.numel() for tensor in found])
        for part, tensor, rises in zip(parts, self._tensors, self._rises, strict=True):
            if rises:
                part.neg_()
            if tensor.grad is not None and decays.get(id(tensor)):
                part.add_(real_shard(tensor).reshape(-1), alpha=decays[id(tensor)])
        return flat

    def point(self) -> torch.Tensor:
        """Return the parameters: float32, `(numel,)`."""
        return flatten(self.parameters.locals(0))

    def move_to(self, point: torch.Tensor) -> None:
        unflatten_into(point, self.parameters.locals(0))
        drop_gathered(self._model)


class ExtragradientStep(Program):
    """Two evaluations of the operator a step, at points that the update chooses."""

    needs_closure = True

    def step(self, parts: Parts) -> Requests:
        assert isinstance(parts.update, Extragradient)
        return parts.update.step(parts.update_state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extragradient(Update):
    """Half a step with the reference point's operator, the other half with what has changed since.

    With z the parameters, w the reference point and F the operator, all replicas' mean:

        half = tau z + (1 - tau) w - gamma F(w)
        z = half - gamma mean_m(F_m(half) - F_m(w))

    Channel 0 carries `F_m(half) - F_m(w)`, channel 1 `F_m(w)` in the rounds in which w becomes z. gamma is the inner
    optimizer's learning rate, and its weight decay times z is part of every F_m; else nothing of it is used.

    Args:
        present_weight: tau, in [0, 1).
        sends_moves: Whether gamma times the difference is what is sent, so that what error feedback keeps are moves
            of the parameters.

    Raises:
        ValueError: `present_weight` is out of its range.
    """

    program: ClassVar[Program] = ExtragradientStep()

    present_weight: float
    sends_moves: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.present_weight < 1:
            raise ValueError(f"present_weight must be in [0, 1), got {self.present_weight}")

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> ExtragradientState:
        if not isinstance(view, BoundOperator):
            raise ValueError("Extragradient() asks for gradients at points of its own; use Operator() as the view")
        assert inner is not None
        _check_inner(inner, view)
        reference = view.point()
        return ExtragradientState(view, inner, reference, torch.zeros_like(reference))

    def step(self, state: ExtragradientState) -> Requests:
        """Return the generator of one step, which returns the loss at the half step."""
        present = half = state.view.point()
        is_done = False
        try:
            rounds = yield Scheduled()
            refreshes = [round for round in rounds if round.channel == 1]
            changes = [round for round in rounds if round.channel == 0]
            reference = present.clone() if refreshes else state.reference
            state.view.move_to(reference)
            yield Gradients()
            own, mean = state.view.values(), state.mean
            for round in refreshes:
                mean = (yield ExchangeRound(round=round, tensor=own.clone())).mean
            lr, tau = _learning_rate(state.inner), self.present_weight
            half = present.mul(tau).add_(reference, alpha=1 - tau).sub_(mean, alpha=lr)
            state.view.move_to(half)
            loss = yield Gradients()
            change = state.view.values().sub_(own)
            for round in changes:
                if self.sends_moves:
                    half.sub_((yield ExchangeRound(round=round, tensor=change.mul_(lr))).mean)
                else:
                    half.sub_((yield ExchangeRound(round=round, tensor=change)).mean, alpha=lr)
            state.reference, state.mean = reference, mean
            is_done = True
            return loss
        finally:
            state.view.move_to(half if is_done else present)

    def apply(self, state: ExtragradientState, round: Round, average: Average) -> None:
        raise NotImplementedError("the program takes its means in itself")


@dataclass(slots=True)
class ExtragradientState:
    """State of `Extragradient`: w and F(w), both float32, `(numel,)`; `inner` says the step size."""

    view: BoundOperator
    inner: torch.optim.Optimizer
    reference: torch.Tensor = same("reference point")
    mean: torch.Tensor = same("mean operator at the reference point")


def _is_below(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(wanted + ".")


def _learning_rate(inner: torch.optim.Optimizer) -> float:
    rates = {float(group["lr"]) for group in inner.param_groups}
    if len(rates) > 1:
        raise ValueError(f"the step size is one number for all parameters, got the learning rates {sorted(rates)}")
    return rates.pop()


def _check_inner(inner: torch.optim.Optimizer, view: BoundOperator) -> None:
    remedy = "give torch.optim.SGD(model.parameters(), lr=...), which only says the step size and the weight decay"
    if kind_of(inner) is not torch.optim.SGD:
        raise ValueError(
            f"this method makes the whole step itself, and the inner {type(inner).__name__} none; {remedy}"
        )
    for group in inner.param_groups:
        for name in ("momentum", "nesterov", "maximize"):
            if group[name]:
                raise ValueError(
                    f"this method makes the whole step itself, so the inner SGD's {name}={group[name]} would do "
                    f"nothing; {remedy}"
                )
    stepped = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    missing = [tensor for tensor in view.parameters.parameters[0] if id(tensor) not in stepped]
    if missing:
        raise ValueError(f"the inner optimizer lacks {len(missing)} of the model's trainable parameters; {remedy}")
    _learning_rate(inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """One of the replicas is the server: it sums what the others send, codes the mean again and sends it to all.

    Each value is coded twice, in codes that may differ; what the second coding drops, the server can remember. The
    server, too, uses the decoded mean, so that all replicas hold the same bits. A member sends one payload, the
    server M - 1. A sparse code of the mean is fine here, because there is one mean and one coder of it.

    Args:
        codec: The code towards the server, or codes that change with the step.
        server_codec: The code of the mean.
        memory: What a member remembers of what the first coding dropped; None for nothing.
        server_memory: What the server remembers of what the second one dropped.
        server: The replica that is the server.

    Raises:
        ValueError: The memory is one whose receivers must get the mean as it is.
    """

    codec: Codec | Ramp
    server_codec: Codec | Ramp
    memory: SenderMemory | None = None
    server_memory: SenderMemory | None = None
    server: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.memory, Shift):
            raise ValueError(
                "Shift() is remembered by the receivers too, and a mean that is coded again would part them; use "
                "AllGather() with Shift(), or ErrorFeedback() here"
            )

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        if not 0 <= self.server < num_replicas:
            raise ValueError(f"server must be one of the {num_replicas} replicas, got {self.server}")
        stages = []
        for tensors in shapes:
            numel = numel_of(tensors)
            # the server alone codes the mean, so it alone has a residual of it
            memory = self.server_memory if replica == self.server else None
            stages.append(
                {
                    "out": EncodeStage(code_for(self.codec, tensors), self.memory, numel=numel),
                    "mean": EncodeStage(code_for(self.server_codec, tensors), memory, numel=numel),
                }
            )
        return BoundExchange(self, stages)

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        stages = {"out": EncodeStage(self.codec), "mean": EncodeStage(self.server_codec)}
        return self.round(stages, tensor, context)

    def round(self, stages: Stages, tensor: torch.Tensor, context: RoundContext) -> Steps:
        out: EncodeStage = stages["out"]
        back: EncodeStage = stages["mean"]
        numel, device, peers = tensor.numel(), tensor.device, context.peers
        codec, mean_codec = out.codec(context.step), back.codec(context.step)
        own = None
        if peers.me in peers.senders:
            # absent members (partial participation) send nothing, but receive the mean
            own = out.encode(tensor, codec, seed=context.seed)
        del tensor  # while the round is in flight, only its payload takes memory
        # members see each other only through the server, which compares the hashes of all
        hashes = {peers.me: context.reference_hash}
        if peers.me == self.server:
            payloads = {} if own is None else {peers.me: own}
            coded = yield from self._serve(payloads, hashes, codec, back, numel=numel, device=device, context=context)
        else:
            sends = () if own is None else (
                context.transport.send(
                    own.cpu(), to=self.server, envelope=context.sending(own, codec=codec, numel=numel)
                ),
            )  # fmt: skip
            expected = context.receiving(mean_codec, numel=numel, phase=1)
            receives = (context.transport.receive(source=self.server, envelope=expected),)
            received = yield Wait(receives=receives, sends=sends)
            coded = received[0].payload.to(device)
            hashes[self.server] = RoundNote.of(received[0]).reference_hash
        what = context.describe()
        mean = decode(mean_codec, coded, numel=numel, peer=self.server, what=what)
        if context.must_be_finite:
            check_finite(mean, mean_codec, {self.server: coded}, what=what)
        return Average(mean=out.received(mean), reference_hashes=hashes)

    def _serve(
        self, payloads: dict[int, torch.Tensor], hashes: dict[int, int], codec: Codec, back: EncodeStage, *, numel: int,
        device: torch.device, context: RoundContext,
    ) -> Generator[Wait, Sequence[Received], torch.Tensor]:  # fmt: skip
        """Gather the members' payloads and hashes, send the coded mean to all, and return it."""
        peers, transport, what = context.peers, context.transport, context.describe()
        sources = [peer for peer in peers.senders if peer != peers.me]
        expected = context.receiving(codec, numel=numel)
        receives = tuple(transport.receive(source=peer, envelope=expected) for peer in sources)
        received = yield Wait(receives=receives, sends=())
        payloads |= {peer: message.payload for peer, message in zip(sources, received, strict=True)}
        hashes |= {peer: RoundNote.of(message).reference_hash for peer, message in zip(sources, received, strict=True)}
        mean = mean_of(codec, payloads, peers=peers, numel=numel, device=device, what=what)
        if context.must_be_finite:
            check_finite(mean, codec, payloads, what=what)
        # a fresh stream: the mean must not be coded with the draws that coded the parts
        mean_codec = back.codec(context.step)
        coded = back.encode(mean, mean_codec, seed=derive_seed(context.seed, "mean"))
        envelope = context.sending(coded, codec=mean_codec, numel=numel, phase=1)
        on_host = coded.cpu()
        yield Wait(receives=(), sends=tuple(transport.send(on_host, to=p, envelope=envelope) for p in peers.others))
        return coded

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """See `BoundExchange.sent_bytes`: the server's or a member's, whichever is more."""
        if num_replicas == 1:
            return 0
        return max(most_bytes(self.codec, numel), (num_replicas - 1) * most_bytes(self.server_codec, numel))

    def traffic(self, shapes: Shapes, *, num_members: int) -> RoundTraffic:
        late = replace(self, server_codec=laid_out(codec_at(self.server_codec, LATE_STEP), shapes))
        return late_traffic(late, shapes, StarMessages(server=self.server), num_members=num_members)
