"""Quorum averaging: a server closes a round once enough parts have arrived, so a slow member delays no other.

Every member sends one message for each round, in the order of the rounds, and gets one in return, however late: so
no message is ever left unread, and a member that is many rounds behind can still apply all of them.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from thinwire.averaging.aggregation_rules import WeightedMean, token_weight
from thinwire.averaging.exchange import (
    BoundExchange,
    EncodeStage,
    Shapes,
    decode,
    laid_out,
    late_traffic,
    numel_of,
    refuse_non_finite,
)
from thinwire.averaging.message_pattern import RoundTraffic, StarMessages
from thinwire.averaging.round_context import Average, Progress, RoundContext, RoundNote, Steps, Wait
from thinwire.codecs.base import Codec
from thinwire.errors import DeadlineExceeded, PayloadError, ThinwireError
from thinwire.shared_random import derive_seed
from thinwire.transport.base import Envelope, Pending, Received

_PART_HEADER = struct.Struct("<QQQ")
_MEAN_HEADER = struct.Struct("<QQ")
PART_HEADER_BYTES = _PART_HEADER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHeader:
    """Header of a member's part.

    Attributes:
        num_tokens: Tokens since the last of the fragment's rounds that counted it.
        num_steps: Inner steps since then.
        has_part: Whether a part follows; else the member asks for the result of a closed round.
    """

    num_tokens: int = 0
    num_steps: int = 0
    has_part: bool = False

    @property
    def weight(self) -> float:
        return token_weight(num_tokens=self.num_tokens, num_steps=self.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanHeader:
    """Header of the server's mean.

    Attributes:
        members: Who is in it, in ascending order.
        progress: The server's progress when it sent this.
    """

    members: tuple[int, ...]
    progress: Progress


def mean_header_bytes(num_replicas: int) -> int:
    """Return the bytes of a mean's header.

    Example:
        >>> mean_header_bytes(64), mean_header_bytes(65)
        (24, 32)
    """
    return _MEAN_HEADER.size + 8 * (-(-num_replicas // 64))


def with_part_header(offer: PartHeader, part: torch.Tensor | None) -> torch.Tensor:
    """Prepend the header to a coded part.

    Args:
        offer: The header.
        part: uint8, one-dimensional, CPU; None where it has none.

    Returns:
        uint8, one-dimensional, CPU.
    """
    word = _bytes(_PART_HEADER.pack(offer.has_part, offer.num_tokens, offer.num_steps))
    return word if part is None else torch.cat([word, part])


def read_part_header(payload: torch.Tensor, *, step: int | None, what: str) -> tuple[PartHeader, torch.Tensor]:
    """Split a message into the header and the coded part.

    Args:
        payload: uint8, one-dimensional, CPU: what a member sent.
        step: The step that the round was launched at, where no replica has done more steps than these; None where a
            replica may train on while it stays at a step.
        what: Names round and sender.

    Raises:
        PayloadError: It is too short, or its numbers cannot be.
    """
    if payload.numel() < PART_HEADER_BYTES:
        raise PayloadError(f"{what}: {payload.numel()} bytes, fewer than an offer's {PART_HEADER_BYTES}")
    kind, num_tokens, num_steps = _PART_HEADER.unpack(bytes(payload[:PART_HEADER_BYTES].numpy()))
    if kind not in (0, 1):
        raise PayloadError(f"{what}: an offer begins with 0 or 1, got {kind}")
    is_too_many = step is not None and num_steps > step
    if not num_steps <= num_tokens or (num_tokens and not num_steps) or is_too_many:
        when = "" if step is None else f", {step} steps after the start"
        raise PayloadError(
            f"{what}: it offers {num_tokens} tokens of {num_steps} steps{when}; the replicas run different set-ups, or "
            f"the sender lies"
        )
    if not kind and (num_tokens or payload.numel() > PART_HEADER_BYTES):
        raise PayloadError(f"{what}: it has no part, but offers {num_tokens} tokens and {payload.numel()} bytes")
    offer = PartHeader(num_tokens=num_tokens, num_steps=num_steps, has_part=bool(kind))
    return offer, payload[PART_HEADER_BYTES:].clone()  # codecs want their bytes at the start of a storage


def with_mean_header(verdict: MeanHeader, mean: torch.Tensor, *, num_replicas: int) -> torch.Tensor:
    """Prepend the header to a coded mean: uint8, one-dimensional, CPU."""
    mask = sum(1 << member for member in verdict.members)
    size = mean_header_bytes(num_replicas) - _MEAN_HEADER.size
    numbers = _MEAN_HEADER.pack(verdict.progress.step, verdict.progress.closed_step)
    return torch.cat([_bytes(numbers + mask.to_bytes(size, "little")), mean])


def read_mean_header(
    payload: torch.Tensor, *, num_replicas: int, server: int, least: int, step: int, what: str
) -> tuple[MeanHeader, torch.Tensor]:
    """Split a message into the header and the coded mean.

    Args:
        payload: uint8, one-dimensional, CPU: what the server sent.
        num_replicas: How many replicas there are.
        server: Which one the server is; it is in every mean.
        least: How many must be in a mean.
        step: The step that the round was launched at; the server has come as far.
        what: Names the round and the server.

    Raises:
        PayloadError: It is too short, or its values are impossible.
    """
    size = mean_header_bytes(num_replicas)
    if payload.numel() < size:
        raise PayloadError(f"{what}: {payload.numel()} bytes, fewer than a verdict's {size}")
    word = bytes(payload[:size].numpy())
    reached, closed = _MEAN_HEADER.unpack(word[: _MEAN_HEADER.size])
    mask = int.from_bytes(word[_MEAN_HEADER.size :], "little")
    members = tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)
    if reached < step or closed > reached:
        raise PayloadError(
            f"{what}: the server says that it was at step {reached} with all rounds up to step {closed} closed, for a "
            f"round of step {step}; that cannot be"
        )
    if server not in members or len(members) < least or members[-1] >= num_replicas:
        raise PayloadError(
            f"{what}: a mean is said to be of the replicas {', '.join(map(str, members)) or 'none'}; it must hold the "
            f"server, replica "
            f"{server}, and at least {least} of {num_replicas}"
        )
    return MeanHeader(members=members, progress=Progress(step=reached, closed_step=closed)), payload[size:].clone()


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


# Polling interval in seconds while a late member is waited for.
_POLL_S = 0.005


class Straggler:
    """One late member of one closed round, as a transfer that is done when it has been answered.

    Nothing is sent to a member before it asks, so that no messages pile up for a suspended replica, and the
    answer reports the progress of the others when it resumes, not when it stopped.

    Args:
        peer: The member.
        pending: What it still has to send.
        check: Raises where what it sent is not what it must be.
        answer: Starts to send the mean.
    """

    def __init__(
        self, pending: Pending, *, peer: int, check: Callable[[Received], None], answer: Callable[[], Pending]
    ) -> None:
        self.peer = peer
        self._pending: Pending | None = pending
        self._check = check
        self._answer = answer
        self._sent: Pending | None = None
        self._failure: ThinwireError | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Read the member's part if it has arrived, and return whether its answer is sent."""
        with self._lock:  # the round's thread and that of a later round may check at the same time
            try:
                if self._pending is not None and self._pending.done():
                    received = self._pending.wait(deadline_s=0.0)
                    assert received is not None
                    self._pending = None
                    self._check(received)
                    self._sent = self._answer()
                return self._failure is not None or (self._sent is not None and self._sent.done())
            except ThinwireError as failure:
                self._failure = failure
                return True

    def wait(self, *, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while not self.done():
            if time.monotonic() > end_s:
                raise DeadlineExceeded(
                    f"replica {self.peer} did not ask for a closed round within {deadline_s:.3g} s, the deadline that "
                    f"follows from measured times; see the log there"
                )
            time.sleep(_POLL_S)
        if self._failure is not None:
            raise self._failure
        assert self._sent is not None
        self._sent.wait(deadline_s=deadline_s)


Found = dict[int, tuple[PartHeader, torch.Tensor, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """One replica is the server: it averages the parts that came in time, weighted, and reports whose they were.

    A round closes when all parts are there, or, once `grace_steps` of the server's own steps have passed since the
    launch, as soon as `quorum` are, its own among them. So the grace period scales with the time that steps take,
    and no timeout in seconds is guessed. A member whose part comes later gets the mean in answer to it. One that is so
    late that it knows the round to be closed sends no part, and asks for the mean.

    A part counts by the tokens behind it, times the tokens a step (see `token_weight`).

    Args:
        codec: The code of the parts.
        server_codec: The code of the mean.
        quorum: K: how many parts are enough, at least 1.
        grace_steps: For how many of its own steps the server waits for the others too.
        most_behind: So many rounds of a fragment may wait for the same late member; then the server waits for it. It
            bounds what the server keeps for members that are late.
        server: The replica that is the server.

    Raises:
        ValueError: A number is out of its range.
    """

    codec: Codec
    server_codec: Codec
    quorum: int
    grace_steps: int = 0
    most_behind: int = 4
    server: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("quorum", self.quorum, 1), ("grace_steps", self.grace_steps, 0), ("most_behind", self.most_behind, 1),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        if not 0 <= self.server < num_replicas:
            raise ValueError(f"server must be one of the {num_replicas} replicas, got {self.server}")
        self.check(num_replicas)
        return _BoundQuorum(self, shapes, num_replicas=num_replicas)

    def check(self, num_replicas: int) -> None:
        """Refuse a quorum that there are not enough replicas for.

        Raises:
            ValueError: Names both numbers.
        """
        if self.quorum > num_replicas:
            raise ValueError(
                f"quorum must be at most the number of replicas, {num_replicas}, got {self.quorum}; {num_replicas} "
                f"waits for all"
            )

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """See `BoundExchange.sent_bytes`: the server's or a member's, whichever is more."""
        if num_replicas == 1:
            return 0
        mean_bytes = mean_header_bytes(num_replicas) + self.server_codec.payload_bytes(numel)
        return max(PART_HEADER_BYTES + self.codec.payload_bytes(numel), (num_replicas - 1) * mean_bytes)

    def traffic(self, shapes: Shapes, *, num_members: int) -> RoundTraffic:
        traffic = late_traffic(self, shapes, StarMessages(server=self.server), num_members=num_members)
        sent_bytes = self.sent_bytes(numel_of(shapes), num_replicas=num_members)
        return replace(traffic, sent_bytes=sent_bytes, quorum=self.quorum)


class _BoundQuorum(BoundExchange):
    """See `Quorum`. Nothing is remembered that a checkpoint would have to hold.

    What is late at a checkpoint is not late after it: all replicas go on from the same step, and each has waited for
    all the means up to there before it wrote its own state.
    """

    _spec: Quorum

    def __init__(self, spec: Quorum, shapes: Sequence[Shapes], *, num_replicas: int) -> None:
        codecs = {"out": spec.codec, "mean": spec.server_codec}
        super().__init__(spec, [{name: EncodeStage(laid_out(c, one)) for name, c in codecs.items()} for one in shapes])
        self._num_replicas = num_replicas
        self._late: list[list[Straggler]] = [[] for _ in shapes]
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        # two messages in a row: each may be spread over half of the time
        context = replace(context, spread_s=context.spread_s / 2)
        is_server = context.peers.me == self._spec.server
        return self._serve(tensor, context) if is_server else self._take_part(tensor, context)

    def _take_part(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        numel, device, server, me = tensor.numel(), tensor.device, self._spec.server, context.peers.me
        out, back = self._codecs(context)
        offer, part = PartHeader(), None
        if not context.is_closed:  # else no part can count any more, and an empty message requests the mean
            offer = PartHeader(num_tokens=context.num_tokens, num_steps=context.num_steps, has_part=True)
            part = out.encode(tensor, seed=context.seed).cpu()
        del tensor  # while the round is in flight, only its payload takes memory
        message = with_part_header(offer, part)
        envelope = context.sending(message, codec=out, numel=numel)
        sends = (context.transport.send(message, to=server, envelope=envelope),)
        expected = _larger(context.receiving(back, numel=numel, phase=1), mean_header_bytes(self._num_replicas))
        receives = (context.transport.receive(source=server, envelope=expected),)
        received = yield Wait(receives=receives, sends=sends)
        what = f"{context.describe()} from replica {server}"
        verdict, coded = read_mean_header(
            received[0].payload, num_replicas=self._num_replicas, server=server, least=self._spec.quorum,
            step=context.step, what=what,
        )  # fmt: skip
        if me in verdict.members and part is None:
            raise PayloadError(f"{what}: replica {me} is said to be in the mean, but has sent no part")
        mean = self._decoded(back, coded, numel=numel, device=device, context=context)
        hashes = {me: context.reference_hash, server: RoundNote.of(received[0]).reference_hash}
        is_counted = me in verdict.members
        context.hear(verdict.progress, is_counted)
        return Average(mean=mean, reference_hashes=hashes, members=verdict.members, is_counted=is_counted)

    def _serve(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        numel, device, me = tensor.numel(), tensor.device, context.peers.me
        out, back = self._codecs(context)
        own = out.encode(tensor, seed=context.seed)
        del tensor
        with self._lock:  # open rounds limit the closed step that is reported to late members
            self._open[context.round_id] = context.step
        try:
            offer = PartHeader(num_tokens=context.num_tokens, num_steps=context.num_steps, has_part=True)
            found: Found = {me: (offer, own, context.reference_hash)}
            late = yield from self._gather(found, out, numel=numel, context=context)
        finally:
            with self._lock:
                del self._open[context.round_id]
        members = tuple(sorted(found))
        weights = {member: found[member][0].weight for member in members}
        what, parts = context.describe(), []
        for member in members:
            part = decode(out, found[member][1].to(device), numel=numel, peer=member, what=what)
            if context.must_be_finite:
                refuse_non_finite(part, peer=member, what=what)
            parts.append(part)
        mean = WeightedMean(weights=tuple(weights.values()))(torch.stack(parts))
        # a fresh stream: the mean must not be coded with the draws that coded the parts
        coded = back.encode(mean, seed=derive_seed(context.seed, "mean")).cpu()

        def send(peer: int) -> Pending:  # with this replica's progress at that moment
            verdict = MeanHeader(members=members, progress=self._progress(context))
            message = with_mean_header(verdict, coded, num_replicas=self._num_replicas)
            envelope = context.sending(message, codec=back, numel=numel, phase=1)
            return context.transport.send(message, to=peer, envelope=envelope)

        def check(peer: int, received: Received) -> None:
            self._read_part_header(received, peer=peer, context=context)

        after = {
            peer: Straggler(pending, peer=peer, check=partial(check, peer), answer=partial(send, peer))
            for peer, pending in late.items()
        }
        self._late[context.fragment] += after.values()
        if len(members) > 1:  # late members are answered when they ask, by their `Straggler`
            yield Wait(sends=tuple(send(member) for member in members if member != me))
        mean = self._decoded(back, coded, numel=numel, device=device, context=context)
        # members whose global values differ must not average (see `check_hashes`)
        hashes = {member: found[member][2] for member in members}
        return Average(mean=mean, reference_hashes=hashes, members=members, weights=weights, after=after)

    def _gather(
        self, found: Found, out: Codec, *, numel: int, context: RoundContext
    ) -> Generator[Wait, Sequence[Received], dict[int, Pending]]:
        """Read the parts that arrive in time; return the pending ones."""
        # `most_behind` bounds what the server keeps for late members: beyond it, the server waits for them
        if overdue := self._overdue(context.fragment):
            yield Wait(watched=overdue, least=len(overdue))
        expected = replace(_larger(context.receiving(out, numel=numel), PART_HEADER_BYTES), takes_less=True)
        others = context.peers.others
        receives = {peer: context.transport.receive(source=peer, envelope=expected) for peer in others}
        if receives:
            # grace is counted in the server's steps, so it scales with the time that a step takes
            yield Wait(watched=receives, least=self._spec.quorum - 1, grace_steps=self._spec.grace_steps)
        late = {}
        for peer, pending in receives.items():
            if not pending.done():
                late[peer] = pending
                continue
            received = pending.wait(deadline_s=0.0)
            assert received is not None
            offer, part = self._read_part_header(received, peer=peer, context=context)
            if not offer.has_part:
                raise PayloadError(
                    f"{context.describe()}: replica {peer} asks for its result before it is closed; the replicas run "
                    f"different set-ups, or it lies"
                )
            found[peer] = offer, part, RoundNote.of(received).reference_hash
        return late

    def _overdue(self, fragment: int) -> dict[int, Pending]:
        """Return, by replica, the oldest of a fragment's rounds for those that are behind as far as they may be."""
        self._late[fragment] = [straggler for straggler in self._late[fragment] if not straggler.done()]
        by_peer: dict[int, list[Straggler]] = {}
        for straggler in self._late[fragment]:
            by_peer.setdefault(straggler.peer, []).append(straggler)
        return {peer: found[0] for peer, found in by_peer.items() if len(found) >= self._spec.most_behind}

    def _progress(self, context: RoundContext) -> Progress:
        # read the step before the open rounds: no round up to that step can still open afterwards
        reached = max(context.reached(), context.step)
        with self._lock:
            first_open = min(self._open.values(), default=reached + 1)
        return Progress(step=reached, closed_step=min(first_open - 1, reached))

    def _read_part_header(
        self, received: Received, *, peer: int, context: RoundContext
    ) -> tuple[PartHeader, torch.Tensor]:
        what = f"{context.describe()} from replica {peer}"
        return read_part_header(received.payload, step=context.step, what=what)

    def _decoded(
        self, back: Codec, coded: torch.Tensor, *, numel: int, device: torch.device, context: RoundContext
    ) -> torch.Tensor:
        server, what = self._spec.server, context.describe()
        mean = decode(back, coded.to(device), numel=numel, peer=server, what=what)
        if context.must_be_finite:
            refuse_non_finite(mean, peer=server, what=what)
        return mean

    def _codecs(self, context: RoundContext) -> tuple[Codec, Codec]:
        stages = self._stages[context.fragment]
        return stages["out"].codec(context.step), stages["mean"].codec(context.step)


def _larger(envelope: Envelope, num_bytes: int) -> Envelope:
    # room for the header in front of the payload, in bytes
    return replace(envelope, payload_bytes=envelope.payload_bytes + num_bytes)
