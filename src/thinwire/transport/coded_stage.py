"""Pipeline stage of torch's whose messages to and from other sites are coded.

torch's schedules ask a stage for its messages, then compute. This one replaces the messages that cross a border by
payloads, and fills torch's own buffers from them just before a pass. Only public methods of torch's stage are
overridden, but for one. The shapes of the first step cross as torch sends them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from thinwire.errors import refusal
from thinwire.events import TransferLog
from thinwire.transport.base import Envelope, Pending, Transport
from thinwire.transport.streams import ACTIVATIONS

_log = logging.getLogger(__name__)
# Of a code's name, as an error shows it; its hash is compared.
_NAME_BYTES, _HASH_BYTES = 128, 32


class StageMemory(Protocol):
    """Memory of a code at one end of a border, as `thinwire.codecs.delta_memory.DeltaMemory`."""

    @property
    def visits(self) -> list[int]:
        """Visits of each sample."""
        ...

    def payload_bytes(self, values: torch.Tensor) -> int:
        """Return the most bytes of a payload."""
        ...

    def encode(self, values: torch.Tensor, numbers: Sequence[int], *, source: str) -> torch.Tensor:
        """Encode a micro-batch of these samples."""
        ...

    def decode(self, payload: torch.Tensor, out: torch.Tensor, numbers: Sequence[int], *, source: str) -> int:
        """Decode a micro-batch of these samples; return the bytes that it takes."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all that it holds."""
        ...

    def load_state_dict(self, state: dict[str, torch.Tensor] | None) -> None:
        """Take a state, or forget all."""
        ...


class StageCode(Protocol):
    """Code of activations and their gradients, as `thinwire.ActivationCode`."""

    @property
    def name(self) -> str:
        """Both codecs."""
        ...

    def payload_bytes(self, numel: int, *, is_forward: bool) -> int:
        """Return the size of a payload, or the most it can be."""
        ...

    def has_fixed_size(self, *, is_forward: bool) -> bool:
        """Return whether each payload has that size; else it has so many bytes at most."""
        ...

    def make_memory(self) -> StageMemory | None:
        """Return an empty memory of activations for one border, or None."""
        ...

    def encode(self, values: torch.Tensor, *, is_forward: bool, source: str) -> torch.Tensor:
        """Encode a message."""
        ...

    def decode(self, payload: torch.Tensor, out: torch.Tensor, *, is_forward: bool, source: str) -> None:
        """Decode a message into torch's buffer."""
        ...


class CodedStage(PipelineStage):
    """A `PipelineStage` that codes what it exchanges with its neighbours.

    All ranks of the group make it at the same time: they compare their codes.

    Args:
        submodule: Chunk of the model.
        stage_index: Its place along the pipeline.
        num_stages: Stages of the pipeline.
        device: Of this rank.
        code: Of messages; None sends all as torch does.
        sites: Site of each stage, in order: messages inside a site are not coded. Default: each stage is one.
        group: Ranks of the pipeline. Default: all.
        wire: Carries coded messages instead of the group, such as an encrypted `WireTransport`; its replicas are the
            group's ranks. It stays the caller's, who closes it after a barrier.
        log: Counts coded messages that the group carries; a wire has a log of its own.
        **more: As of `PipelineStage`.

    Raises:
        ValueError: Ranks have different codes, or a wire has no code to carry.

    Example:
        ```python
        stage = CodedStage(part, rank, world, device, code=thinwire.ActivationCode())
        schedule = Schedule1F1B(stage, 8, loss_fn=loss)
        ```
    """

    def __init__(
        self, submodule: nn.Module, stage_index: int, num_stages: int, device: torch.device, *,
        code: StageCode | None = None, sites: Sequence[int] | None = None, group: dist.ProcessGroup | None = None,
        wire: Transport | None = None, log: TransferLog | None = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(submodule, stage_index, num_stages, device, group=group, **more)
        places = list(range(num_stages) if sites is None else sites)
        if len(places) != num_stages:
            raise refusal("sites must name the site of each stage", got=len(places), allowed=num_stages,
                          remedy=str(list(range(num_stages))))  # fmt: skip
        if wire is not None and code is None and len(set(places)) > 1:
            raise refusal("a wire carries coded messages", got="no code", allowed="an ActivationCode",
                          remedy='ActivationCode.parse("float32")')  # fmt: skip
        if code is not None and wire is None and device.type != "cpu" and not code.has_fixed_size(is_forward=True):
            raise refusal("payloads of changing size need a wire, or ranks on CPUs", got=f"{code.name} on {device}",
                          allowed="a code of fixed size", remedy="wire=WireTransport(...)")  # fmt: skip
        self._code, self._wire = code, wire
        self._log = TransferLog() if log is None else log
        self._step = 0
        self._sent: list[tuple[Pending, float]] = []
        own = places[stage_index]
        # neighbours by direction: whether a message from or to them is coded
        self._is_coded = {
            neighbour: code is not None and places[neighbour] != own
            for neighbour in (stage_index - 1, stage_index + 1) if 0 <= neighbour < num_stages
        }  # fmt: skip
        # payloads on their way, by direction and micro-batch, with the buffers that they fill
        self._awaited: dict[tuple[bool, int], list[tuple[torch.Tensor | Pending, torch.Tensor]]] = {}
        made = {number: code.make_memory() for number, is_coded in self._is_coded.items() if code and is_coded}
        # of activations, by neighbour; samples of this step and of the next one, and a hash of all that were named
        self.memories = {number: memory for number, memory in made.items() if memory is not None}
        self._samples: list[list[int]] = []
        self._next_samples: list[list[int]] = []
        self._named = torch.zeros(_HASH_BYTES, dtype=torch.uint8)
        self._group, self._device = group, device
        _compare_codes("" if code is None else code.name, places, device=device, group=group)

    def samples(self, numbers: Sequence[Sequence[int]]) -> None:
        """Name the samples of the next step, for a code with memory; each rank calls it before `schedule.step`.

        Args:
            numbers: For each micro-batch the numbers of its rows, all different.

        Raises:
            ValueError: A number occurs twice, or the data set has no such sample.
        """
        rows = [[int(number) for number in own] for own in numbers]
        flat = [number for own in rows for number in own]
        most = min((len(memory.visits) for memory in self.memories.values()), default=1 << 31)
        if not all(rows) or len(set(flat)) < len(flat) or not all(0 <= number < most for number in flat):
            raise refusal("a step names each of its samples once", got=str(rows)[:200], allowed=f"0 to {most - 1}",
                          remedy="numbers of rows in the data set, or a larger samples=")  # fmt: skip
        text = f"{bytes(self._named.tolist()).hex()} {rows}".encode()
        self._named = torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8)
        self._next_samples = rows

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's copies of a code with memory, to be saved between steps; they are not cloned."""
        return {"named": self._named, "memories": {key: one.state_dict() for key, one in self.memories.items()}}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take the copies of `state_dict`; None drops them. All ranks of the group call it, in one order of stages.

        Unless all ranks give copies after the same steps, all drop them, with a warning. Samples then cross uncoded.

        Raises:
            ValueError: The code has other samples than the one that was saved.
        """
        self._named = torch.zeros(_HASH_BYTES, dtype=torch.uint8) if state is None else state["named"].clone()
        own = self._named.to(self._device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(found, own, group=self._group)
        if any(not torch.equal(one, found[0]) for one in found):
            _log.warning("stage %d: the ranks have no copies of the same steps; all drop theirs", self.stage_index)
            self._named, state = torch.zeros_like(self._named), None
        for neighbour, memory in self.memories.items():
            memory.load_state_dict(None if state is None else state["memories"][neighbour])

    def _to_tensor(self, arg: Any) -> torch.Tensor:
        # torch finds the shapes by passes over memory that it has not written: NaN there would be taken for a fault
        found: torch.Tensor = super()._to_tensor(arg)
        if not isinstance(arg, torch.Tensor):
            with torch.no_grad():
                found.zero_()
        return found

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the activations of a micro-batch."""
        return self._receives(super().get_fwd_recv_ops(fwd_chunk_id), fwd_chunk_id, is_forward=True)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the gradients of a micro-batch."""
        return self._receives(super().get_bwd_recv_ops(bwd_chunk_id), bwd_chunk_id, is_forward=False)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the activations of a micro-batch."""
        return self._sends(super().get_fwd_send_ops(fwd_chunk_id), fwd_chunk_id, is_forward=True)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the gradients of a micro-batch."""
        return self._sends(super().get_bwd_send_ops(bwd_chunk_id), bwd_chunk_id, is_forward=False)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Decode the activations of a micro-batch, then run its forward pass."""
        self._decode(fwd_chunk_id, is_forward=True)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Decode the gradients of a micro-batch, then run its backward pass."""
        self._decode(bwd_chunk_id, is_forward=False)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def clear_runtime_states(self) -> None:
        """Begin a step: forget the payloads of a failed one, and see that all of the last one have arrived."""
        self._awaited.clear()
        for pending, deadline_s in self._sent:
            pending.wait(deadline_s=deadline_s)
        self._sent.clear()
        self._step += 1
        self._samples, self._next_samples = self._next_samples, []
        super().clear_runtime_states()

    def _neighbour(self, *, is_forward: bool, is_sender: bool) -> int:
        return self.stage_index + (1 if is_forward == is_sender else -1)

    def _memory(self, neighbour: int, micro_batch: int, *, is_forward: bool) -> tuple[StageMemory | None, list[int]]:
        """Return the memory of activations to or from a neighbour, and the samples of a micro-batch."""
        memory = self.memories.get(neighbour) if is_forward else None
        if memory is not None and micro_batch >= len(self._samples):
            raise refusal("the code has a memory, and the samples of this step were not named", got=len(self._samples),
                          allowed="a list for each micro-batch", remedy="stage.samples(...)")  # fmt: skip
        return memory, [] if memory is None else self._samples[micro_batch]

    def _most_bytes(self, tensor: torch.Tensor, neighbour: int, *, is_forward: bool) -> int:
        """Return the size of a payload, or the most that it can be."""
        assert self._code is not None, "nothing is coded without a code"
        memory = self.memories.get(neighbour) if is_forward else None
        if memory is None:
            return self._code.payload_bytes(tensor.numel(), is_forward=is_forward)
        return memory.payload_bytes(tensor)

    def _envelope(
        self, ops: Sequence[dist.P2POp], micro_batch: int, *, sender: int, is_forward: bool, size: int | None = None
    ) -> Envelope:
        """Return the address of a message on the wire; both ends count the same steps.

        Args:
            ops: The one message that torch would send.
            micro_batch: Its number.
            sender: Its stage.
            is_forward: Whether it holds activations.
            size: Of the payload; None for the receiver, who knows the most.

        Raises:
            ValueError: The stages exchange several tensors, which have no addresses of their own.
        """
        assert self._code is not None, "nothing is coded without a code"
        _only(ops)
        most_bytes = self._most_bytes(ops[0].tensor, sender, is_forward=is_forward) if size is None else size
        return Envelope(
            stream=ACTIVATIONS, key=(self._step << 16 | micro_batch, sender, int(is_forward)),
            numel=ops[0].tensor.numel(), payload_bytes=most_bytes,
            takes_less=size is None and not self._code.has_fixed_size(is_forward=is_forward),
        )  # fmt: skip

    def _sends(self, ops: list[dist.P2POp], micro_batch: int, *, is_forward: bool) -> list[dist.P2POp]:
        neighbour = self._neighbour(is_forward=is_forward, is_sender=True)
        if not ops or self._code is None or not self._is_coded[neighbour]:
            return ops
        source = f"stage {self.stage_index}, micro-batch {micro_batch}"
        memory, numbers = self._memory(neighbour, micro_batch, is_forward=is_forward)
        if memory is None:
            coded = [_with_tensor(op, self._code.encode(op.tensor, is_forward=is_forward, source=source)) for op in ops]
        else:
            coded = [_with_tensor(_only(ops), memory.encode(ops[0].tensor, numbers, source=source))]
        if self._wire is None:
            for op in coded:
                self._log.count("sent", ACTIVATIONS.name, peer=neighbour, num_bytes=op.tensor.nbytes)
            return coded
        self._sent = [(pending, deadline_s) for pending, deadline_s in self._sent if not pending.done()]
        size = len(coded[0].tensor)
        envelope = self._envelope(ops, micro_batch, sender=self.stage_index, is_forward=is_forward, size=size)
        to = self.stage_index_to_group_rank[neighbour]
        pending = self._wire.send(coded[0].tensor.cpu(), to=to, envelope=envelope)
        self._sent.append((pending, ACTIVATIONS.deadline_s(envelope.payload_bytes)))
        return []

    def _receives(self, ops: list[dist.P2POp], micro_batch: int, *, is_forward: bool) -> list[dist.P2POp]:
        neighbour = self._neighbour(is_forward=is_forward, is_sender=False)
        if not ops or self._code is None or not self._is_coded[neighbour]:
            return ops
        memory, _ = self._memory(neighbour, micro_batch, is_forward=is_forward)
        if self._wire is not None:
            envelope = self._envelope(ops, micro_batch, sender=neighbour, is_forward=is_forward)
            pending = self._wire.receive(source=self.stage_index_to_group_rank[neighbour], envelope=envelope)
            self._awaited[is_forward, micro_batch] = [(pending, ops[0].tensor)]
            return []
        payloads = []
        for op in ops if memory is None else [_only(ops)]:
            size = self._most_bytes(op.tensor, neighbour, is_forward=is_forward)
            # gloo fills the beginning where a payload is shorter; the rest must be zero
            payloads.append(torch.zeros(size, dtype=torch.uint8, device=op.tensor.device))
            if memory is None:
                self._log.count("received", ACTIVATIONS.name, peer=neighbour, num_bytes=size)
        buffers = [op.tensor for op in ops]
        self._awaited[is_forward, micro_batch] = list(zip(payloads, buffers, strict=True))
        return [_with_tensor(op, payload) for op, payload in zip(ops, payloads, strict=True)]

    def _decode(self, micro_batch: int, *, is_forward: bool) -> None:
        for awaited, out in self._awaited.pop((is_forward, micro_batch), ()):
            assert self._code is not None, "nothing is awaited without a code"
            sender = self._neighbour(is_forward=is_forward, is_sender=False)
            source = f"stage {sender}, micro-batch {micro_batch}"
            if isinstance(awaited, torch.Tensor):
                payload = awaited
            else:
                size = self._most_bytes(out, sender, is_forward=is_forward)
                received = awaited.wait(deadline_s=ACTIVATIONS.deadline_s(size))
                assert received is not None, "a receive returns its message"
                payload = received.payload.to(out.device)
            memory, numbers = self._memory(sender, micro_batch, is_forward=is_forward)
            if memory is None:
                self._code.decode(payload, out, is_forward=is_forward, source=source)
                continue
            size = memory.decode(payload, out, numbers, source=source)
            if self._wire is None:
                self._log.count("received", ACTIVATIONS.name, peer=sender, num_bytes=size)


def _only(ops: Sequence[dist.P2POp]) -> dist.P2POp:
    if len(ops) > 1:
        raise refusal("a wire or a memory carries one tensor between two stages", got=len(ops), allowed="1",
                      remedy="one tensor as the stage's output, or a CodedStage without both")  # fmt: skip
    return ops[0]


def _with_tensor(op: dist.P2POp, tensor: torch.Tensor) -> dist.P2POp:
    return dist.P2POp(op.op, tensor, op.peer, op.group, op.tag)


def _compare_codes(name: str, sites: Sequence[int], *, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Refuse codes that differ between the ranks of a pipeline; all ranks call it."""
    text = f"{name or 'none'} over sites {'-'.join(map(str, sites))}".encode()
    shown = text if len(text) <= _NAME_BYTES else text[: _NAME_BYTES - 3] + b"..."
    own = torch.tensor(list(hashlib.sha256(text).digest() + shown.ljust(_NAME_BYTES)), dtype=torch.uint8, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    if any(not torch.equal(one, own) for one in found):
        names = [bytes(one[_HASH_BYTES:].tolist()).decode(errors="replace").rstrip() for one in found]
        raise refusal(
            "the ranks of a pipeline have different activation codes", got=", ".join(names),
            allowed="one code on all ranks", remedy=f"--activation-code {name or 'none'} on each",
        )  # fmt: skip
