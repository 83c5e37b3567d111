"""Payloads of an exchange: encode stages, the state they keep between rounds, and means of decoded payloads.

Payloads are decoded in one order everywhere and summed in float32; errors name the sender.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from thinwire.averaging.round_context import RoundContext, Steps
from thinwire.averaging.topology import Peers
from thinwire.codecs.base import Codec
from thinwire.codecs.error_feedback import SenderMemory
from thinwire.errors import CheckpointError, NonFiniteError
from thinwire.shared_random import derive_seed
from thinwire.tagged_state import load, reset, save


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """A codec that changes with the step, such as the warm-up of a density.

    Args:
        codecs: The first step of each code, ascending from 1, and the code. All have the same `wire_id`.

    Raises:
        ValueError: The steps do not ascend from 1, or the codes are of several kinds.
    """

    codecs: tuple[tuple[int, Codec], ...]

    def __post_init__(self) -> None:
        """Check the steps."""
        starts = [start for start, _ in self.codecs]
        if not starts or starts[0] != 1 or sorted(set(starts)) != starts:
            raise ValueError(f"the codes' first steps must ascend from 1, got {starts}")
        if len({codec.wire_id for _, codec in self.codecs}) > 1:
            raise ValueError("a ramp is made of one kind of code, only its numbers change")

    def at(self, step: int) -> Codec:
        """Return the code at a step."""
        return [codec for start, codec in self.codecs if start <= max(step, 1)][-1]


def codec_at(code: Codec | Ramp, step: int) -> Codec:
    """Return the code that holds at a step."""
    return code.at(step) if isinstance(code, Ramp) else code


def most_bytes(code: Codec | Ramp, numel: int) -> int:
    """Return the most payload bytes that `numel` elements take, at any step."""
    codecs = [codec for _, codec in code.codecs] if isinstance(code, Ramp) else [code]
    # a ramp may grow as well as shrink its payloads, so room is made for the largest
    return max(codec.payload_bytes(numel) for codec in codecs)


class EncodeStage:
    """Encodes the payloads of one stage.

    Args:
        code: The code.
        memory: Applied before the code; None for none.
        numel: Elements of the vectors that it remembers.

    Attributes:
        state: What the memory remembers.
    """

    def __init__(self, code: Codec | Ramp, memory: SenderMemory | None = None, *, numel: int = 0) -> None:
        self._code = code
        self._memory = memory
        self.state: Any = None if memory is None else memory.init(numel)

    @property
    def has_memory(self) -> bool:
        """Whether anything is remembered."""
        return self._memory is not None

    def codec(self, step: int) -> Codec:
        """Return the code at a step."""
        return codec_at(self._code, step)

    def encode(self, x: torch.Tensor, *, step: int, seed: int) -> torch.Tensor:
        """Encode a vector with the remembered residual added; remember the new residual."""
        codec = self.codec(step)
        if self._memory is None:
            return codec.encode(x, seed=seed)
        # error feedback: what earlier rounds dropped is added before this one is coded (arXiv 1901.09847)
        payload = codec.encode(self._memory.before(self.state, x), seed=seed)
        self._note(codec, [(payload, x.numel())])
        return payload

    @property
    def shared(self) -> torch.Tensor | None:
        """The remembered vector that must be the same on all members, `(numel,)`; None for none."""
        return getattr(self.state, "shared", None)

    def _note(self, codec: Codec, payloads: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Pass what the receivers decode to the memory."""
        assert self._memory is not None
        try:
            parts = [codec.decode(payload, numel=numel) for payload, numel in payloads]
        except NonFiniteError:
            return  # the run ends where it is decoded to be used, with this replica's name
        # the residual is what the receivers did not get, so it is measured against their decoding, not against x
        self._memory.after(self.state, torch.cat(parts))

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        """Return what is applied, from the mean of what all sent."""
        return mean if self._memory is None else self._memory.received(self.state, mean)


class ShardedEncodeStage(EncodeStage):
    """A stage that encodes a vector in parts, one for each owner; the memory covers the whole vector."""

    def encode_shards(
        self, x: torch.Tensor, bounds: Mapping[int, tuple[int, int]], *, step: int, seed: int
    ) -> dict[int, torch.Tensor]:
        """Encode each owner's part of a vector, this replica's own among them.

        Args:
            x: Floating, `(numel,)`.
            bounds: First element and end of each owner's part.
            step: Tells which code holds.
            seed: Selects the random stream.
        """
        codec = self.codec(step)
        # the residual is added before the cut: it belongs to elements, whoever owns their shard
        wanted = x if self._memory is None else self._memory.before(self.state, x)
        # a random stream for each shard: stochastic rounding draws by the place in the encoded part
        coded = {
            owner: codec.encode(wanted[start:stop], seed=derive_seed(seed, "shard", owner))
            for owner, (start, stop) in bounds.items()
        }
        if self._memory is not None:
            self._note(codec, [(coded[owner], stop - start) for owner, (start, stop) in bounds.items()])
        return coded


_MEMORIES = {"out": "what was not sent yet", "mean": "what the owner of a part remembers of its means"}


class StagedExchange(Protocol):
    """An exchange whose rounds need no more state than the stages of their fragment."""

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """Return the payload bytes that one replica sends for a tensor of `numel` elements, at most."""
        ...

    def round(self, stages: Mapping[str, Any], tensor: torch.Tensor, context: RoundContext) -> Steps:
        """Return the generator of one round of a fragment with these stages."""
        ...


class ExchangeState:
    """The state of an exchange on one replica, by fragment and stage.

    Args:
        spec: The exchange.
        stages: By fragment, and by name; what they remember is the state.
    """

    def __init__(self, spec: Any, stages: Sequence[Mapping[str, EncodeStage]]) -> None:
        self._spec = spec
        self._stages = stages

    def steps(self, tensor: torch.Tensor, context: RoundContext) -> Steps:
        spec: StagedExchange = self._spec
        return spec.round(self._stages[context.fragment], tensor, context)

    @property
    def has_memory(self) -> bool:
        return any(stage.has_memory for stages in self._stages for stage in stages.values())

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        num_bytes: int = self._spec.sent_bytes(numel, num_replicas=num_replicas)
        return num_bytes

    def shared_hash(self, fragment: int) -> int:
        found = 0  # no stage shares state: nothing to compare
        for stage in self._stages[fragment].values():
            # chained over the stages; sent with the reference hash, so that members whose state diverged find out
            if stage.shared is not None:
                found = zlib.crc32(stage.shared.cpu().numpy().tobytes(), found)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            str(fragment): {name: save(stage.state) for name, stage in stages.items() if stage.has_memory}
            for fragment, stages in enumerate(self._stages)
            if self.has_memory
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        if set(state) != set(own) or any(set(state[key]) != set(own[key]) for key in own):
            raise CheckpointError(
                f"the checkpoint remembers {_names(state)} of its exchanges, this run {_names(own)}; resume with its "
                f"method"
            )
        for fragment, stages in state.items():
            for name, vectors in stages.items():
                load(self._stages[int(fragment)][name].state, vectors)

    def adopt(self, state: Mapping[str, Any], *, is_own: bool) -> tuple[str, ...]:
        """See `BoundExchange.adopt`: what a replica remembers of its own sending stays with it.

        What receivers hold too must be the same on all, also on those that are new, and an owner's part is another one
        where the number of replicas is another.
        """
        lines = []
        for fragment, stages in enumerate(self._stages):
            for name, stage in stages.items():
                saved = state.get(str(fragment), {}).get(name)
                if saved is not None and not stage.has_memory:  # of another exchange, under which nothing is kept
                    lines.append(f"fragment {fragment}: {_MEMORIES[name]}")
                # a residual is true for its own sender only; shared and owners' state depends on who takes part
                if stage.has_memory and saved is not None and is_own and name == "out" and stage.shared is None:
                    load(stage.state, saved)
                elif stage.has_memory:
                    reset(stage.state)
                    lines.append(f"fragment {fragment}: {_MEMORIES[name]}")
        return tuple(lines)


def _names(state: Mapping[str, Any]) -> str:
    return ", ".join(f"{fragment}/{name}" for fragment, stages in state.items() for name in stages) or "nothing"


def mean_of(
    codec: Codec, payloads: Mapping[int, torch.Tensor], *, peers: Peers, numel: int, device: torch.device, what: str
) -> torch.Tensor:
    """Decode the payloads of all members and return their mean: float32, `(numel,)`; absent members count as zero.

    Raises:
        NonFiniteError: A payload held NaN or infinity; names its sender.
        PayloadError: A payload is broken.
    """
    total = torch.zeros(numel, dtype=torch.float32, device=device)
    for peer in peers.senders:  # one order everywhere: float addition is not associative
        total += decode(codec, payloads[peer].to(device), numel=numel, peer=peer, what=what)
    return total.div_(len(peers.members))  # absent members count as zero


def decode(codec: Codec, payload: torch.Tensor, *, numel: int, peer: int, what: str) -> torch.Tensor:
    """Decode one member's payload.

    Raises:
        NonFiniteError: It held NaN or infinity; names its sender.
        PayloadError: It is broken.
    """
    try:
        return codec.decode(payload, numel=numel)
    except NonFiniteError as failure:
        raise NonFiniteError(_diverged(peer, what=what)) from failure


def check_finite(mean: torch.Tensor, codec: Codec, payloads: Mapping[int, torch.Tensor], *, what: str) -> None:
    """Refuse a mean that is not finite.

    Raises:
        NonFiniteError: Names the member whose payload was not, or reports that the sum overflowed.
    """
    # the sum is finite only if every element is; decoding again to find the culprit happens once, in a run that ends
    if bool(torch.isfinite(mean.sum())) or bool(torch.isfinite(mean).all()):
        return
    for peer, payload in payloads.items():
        if not bool(torch.isfinite(codec.decode(payload, numel=mean.numel())).all()):
            raise NonFiniteError(_diverged(peer, what=what))
    raise NonFiniteError(f"{what}: the sum of the replicas' payloads overflows float32; lower the learning rate")


def refuse_non_finite(vector: torch.Tensor, *, peer: int, what: str) -> None:
    """Refuse what a member's payload decodes to where it is not finite.

    Raises:
        NonFiniteError: Names the member.
    """
    if not bool(torch.isfinite(vector.sum())) and not bool(torch.isfinite(vector).all()):
        raise NonFiniteError(_diverged(peer, what=what))


def _diverged(peer: int, *, what: str) -> str:
    return (
        f"{what}: replica {peer} sent NaN or infinity; its model has diverged: look at its loss, lower its learning "
        f"rate or clip its gradients, and resume from a checkpoint before that"
    )
