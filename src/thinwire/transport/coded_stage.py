"""Pipeline stage of torch's whose messages to and from other sites are coded.

torch's schedules ask a stage for its messages, then compute. This one replaces the messages that cross a border by
payloads, and fills torch's own buffers from them just before a pass. Only public methods of torch's stage are
overridden. The shapes of the first step cross as torch sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from thinwire.errors import refusal

# Of a code's name, as ranks compare it.
_NAME_BYTES = 64


class StageCode(Protocol):
    """Code of activations and their gradients, as `thinwire.ActivationCode`."""

    @property
    def name(self) -> str:
        """Both codecs."""
        ...

    def payload_bytes(self, numel: int, *, is_forward: bool) -> int:
        """Return the size of a payload."""
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
        **more: As of `PipelineStage`.

    Raises:
        ValueError: Ranks have different codes.

    Example:
        ```python
        stage = CodedStage(part, rank, world, device, code=thinwire.ActivationCode())
        schedule = Schedule1F1B(stage, 8, loss_fn=loss)
        ```
    """

    def __init__(
        self, submodule: nn.Module, stage_index: int, num_stages: int, device: torch.device, *,
        code: StageCode | None = None, sites: Sequence[int] | None = None, group: dist.ProcessGroup | None = None,
        **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(submodule, stage_index, num_stages, device, group=group, **more)
        places = list(range(num_stages) if sites is None else sites)
        if len(places) != num_stages:
            raise refusal("sites must name the site of each stage", got=len(places), allowed=num_stages,
                          remedy=str(list(range(num_stages))))  # fmt: skip
        self._code = code
        own = places[stage_index]
        # neighbours by direction: whether a message from or to them is coded
        self._is_coded = {
            neighbour: code is not None and places[neighbour] != own
            for neighbour in (stage_index - 1, stage_index + 1) if 0 <= neighbour < num_stages
        }  # fmt: skip
        # payloads on their way, by direction and micro-batch, with the buffers that they fill
        self._awaited: dict[tuple[bool, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        _compare_codes("" if code is None else code.name, places, device=device, group=group)

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
        """Forget the step, payloads of a failed one included."""
        self._awaited.clear()
        super().clear_runtime_states()

    def _neighbour(self, *, is_forward: bool, is_sender: bool) -> int:
        return self.stage_index + (1 if is_forward == is_sender else -1)

    def _sends(self, ops: list[dist.P2POp], micro_batch: int, *, is_forward: bool) -> list[dist.P2POp]:
        if not ops or self._code is None or not self._is_coded[self._neighbour(is_forward=is_forward, is_sender=True)]:
            return ops
        source = f"stage {self.stage_index}, micro-batch {micro_batch}"
        return [_with_tensor(op, self._code.encode(op.tensor, is_forward=is_forward, source=source)) for op in ops]

    def _receives(self, ops: list[dist.P2POp], micro_batch: int, *, is_forward: bool) -> list[dist.P2POp]:
        if not ops or self._code is None or not self._is_coded[self._neighbour(is_forward=is_forward, is_sender=False)]:
            return ops
        pairs = []
        for op in ops:
            size = self._code.payload_bytes(op.tensor.numel(), is_forward=is_forward)
            pairs.append((torch.empty(size, dtype=torch.uint8, device=op.tensor.device), op.tensor))
        self._awaited[is_forward, micro_batch] = pairs
        return [_with_tensor(op, payload) for op, (payload, _) in zip(ops, pairs, strict=True)]

    def _decode(self, micro_batch: int, *, is_forward: bool) -> None:
        for payload, out in self._awaited.pop((is_forward, micro_batch), ()):
            sender = self._neighbour(is_forward=is_forward, is_sender=False)
            source = f"stage {sender}, micro-batch {micro_batch}"
            assert self._code is not None, "nothing is awaited without a code"
            self._code.decode(payload, out, is_forward=is_forward, source=source)


def _with_tensor(op: dist.P2POp, tensor: torch.Tensor) -> dist.P2POp:
    return dist.P2POp(op.op, tensor, op.peer, op.group, op.tag)


def _compare_codes(name: str, sites: Sequence[int], *, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Refuse codes that differ between the ranks of a pipeline; all ranks call it."""
    text = f"{name or 'none'} over sites {'-'.join(map(str, sites))}".encode()[:_NAME_BYTES]
    own = torch.tensor(list(text.ljust(_NAME_BYTES)), dtype=torch.uint8, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    names = [bytes(one.tolist()).decode(errors="replace").rstrip() for one in found]
    if len(set(names)) > 1:
        raise refusal(
            "the ranks of a pipeline have different activation codes", got=", ".join(names),
            allowed="one code on all ranks", remedy=f"--activation-code {name or 'none'} on each",
        )  # fmt: skip
