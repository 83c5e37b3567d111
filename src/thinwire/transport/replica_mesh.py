"""Device mesh of a replica's ranks: FSDP2 and tensor parallelism inside the replica, over torch's default group.

The axes are those of a plan inside a site: pp outermost, then dp_replicate, dp_shard, cp and tp. Ranks of cp share the
shards of the states too, so for FSDP2 they are ranks of dp_shard. The default group holds the replica's ranks alone
(`connect(solo=True, ranks_per_replica=N)`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire import compat
from thinwire.events import TransferLog
from thinwire.transport.base import Envelope, RankSubset, Transport
from thinwire.transport.process_group import ProcessGroupTransport
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.shards import is_a, named_failures
from thinwire.transport.streams import ACTIVATIONS

if TYPE_CHECKING:
    from thinwire.transport.coded_stage import CodedStage, StageCode  # its module takes a second to import
    from thinwire.transport.path_group import PathGroup

# Receives of a pipeline rank that wait at once before their time; a recorder has a thread for each.
_RECEIVES_AHEAD = 8
_AXES = ("pp", "dp_replicate", "dp_shard", "tp")


class ReplicaMesh:
    """Place of this rank among those of its replica, and the collectives between them.

    Args:
        device: This rank's device.
        pp: Pipeline stages.
        dp_replicate: Copies of the sharded states.
        dp_shard: Shards of the states.
        cp: Ranks that share each sequence.
        tp: Ranks that share each layer.
        ep: Ranks that share the experts, neighbours among those of dp_shard and cp.
        sites: Site of each pipeline stage; None where each is one of its own.
        wire: Encrypted connections between the replica's ranks: what crosses a border takes them instead of the group.
        stages: Joins the stages of a pipeline that come and go, instead of groups of torch's; one rank each.

    Attributes:
        rank: Place in the replica; 0 leads.
        size: Ranks of the replica.
        data_rank: Place among the ranks that read different sequences.
        data_ranks: How many these are.
        gradient_ranks: Ranks over which gradients are averaged: those, and the ranks of cp.
        context_group: Process group of the ranks that share a sequence; None where each is alone.
        expert_mesh: Mesh of the ranks that share experts; None where each is alone.
        stage: Place along the pipeline.
        coded_stages: Of this rank in the runtime that `pipeline` made last.
        peers: Transport between the replica's own ranks, for notes.
        border: Messages between stages at different sites.
    """

    def __init__(
        self, *, device: torch.device, pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, cp: int = 1, tp: int = 1,
        ep: int = 1, sites: Sequence[int] | None = None, wire: Transport | None = None, stages: PathGroup | None = None,
    ) -> None:  # fmt: skip
        self.device, self.stages, self.border = device, stages, TransferLog()
        self.expert_mesh: Any = None
        self.coded_stages: list[CodedStage] = []
        self._num_sent: Counter[tuple[int, int, int]] = Counter()
        if stages is not None:
            self.rank = self.stage = stages.replica
            self.size, self._sizes = pp, {**dict.fromkeys(_AXES, 1), "cp": 1, "pp": pp}
            self.data_rank, self.data_ranks, self.gradient_ranks = 0, 1, 1
            self.context_group, self._sites = None, tuple(range(pp))
            self._wire: Transport | None = stages
            self.peers: Transport = stages
            return
        from torch.distributed.device_mesh import init_device_mesh  # takes a second to import, as FSDP below

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        sizes = (pp, dp_replicate, dp_shard * cp, tp)
        self._mesh = init_device_mesh(device.type, sizes, mesh_dim_names=_AXES)
        self._sizes = {**dict(zip(_AXES, sizes, strict=True)), "cp": cp}
        place = {name: self._mesh.get_local_rank(name) for name in _AXES}
        self.data_rank = place["dp_replicate"] * dp_shard + place["dp_shard"] // cp
        self.data_ranks = dp_replicate * dp_shard
        self.gradient_ranks = self.data_ranks * cp
        self.context_group = self._group_of_context()
        if ep > 1:
            axes = ("pp", "copies", "ep", "tp")  # of experts: those of dp_replicate, and of shards of the rest
            experts = init_device_mesh(device.type, (pp, self.gradient_ranks // ep, ep, tp), mesh_dim_names=axes)
            self.expert_mesh, self._copies_group = experts["ep"], experts.get_group("copies")
        self.stage = place["pp"]
        self._pipe_group = self._mesh.get_group("pp")
        self._sites = tuple(range(pp) if sites is None else sites)
        self._wire = None
        if wire is not None:
            pipe = RankSubset(wire, dist.get_process_group_ranks(self._pipe_group))
            self._wire = RecordingTransport(pipe, log=self.border)
        self._data_group = self._group_of("dp_replicate", "dp_shard")
        # notes travel over gloo, whatever the device
        self.peers = ProcessGroupTransport(dist.new_group(backend="gloo"))

    def size_of(self, axis: str) -> int:
        """Return the ranks along an axis."""
        return self._sizes[axis]

    def split_layers(self, modules: Sequence[nn.Module], *, columns: Sequence[str], rows: Sequence[str]) -> None:
        """Share linear layers over the ranks of the axis tp, which all hold them whole and alike before.

        Args:
            modules: That hold the layers.
            columns: Paths of layers whose output features are shared; their inputs are whole.
            rows: Paths of layers whose input features are shared; their outputs are summed.

        Reference:
            arXiv 1909.08053, section 3.
        """
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        styles = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
        for module in modules:
            parallelize_module(module, self._mesh["tp"], styles)

    def shard(
        self, model: nn.Module, *, blocks: Sequence[nn.Module], num_freed: int, left: Set[nn.Parameter] = frozenset()
    ) -> None:
        """Leave each rank its shard of the parameters (FSDP2), and average gradients over the data-parallel ranks.

        Args:
            model: On this rank's device, alike on all ranks with the same place along pp and tp.
            blocks: Modules whose parameters are brought together and freed for themselves.
            num_freed: Blocks, the first ones, whose parameters the backward pass brings together again (ZeRO-3), as it
                does with those outside the blocks; 0 for none of either.
            left: Parameters that stay as they are, such as experts.
        """
        if self.gradient_ranks == 1:
            return
        from torch.distributed.fsdp import fully_shard

        axes: Any = "dp_shard" if self._sizes["dp_replicate"] == 1 else ("dp_replicate", "dp_shard")
        for number, block in enumerate(blocks):
            fully_shard(
                block, mesh=self._mesh[axes], reshard_after_forward=number < num_freed, ignored_params=set(left)
            )
        fully_shard(model, mesh=self._mesh[axes], reshard_after_forward=num_freed > 0, ignored_params=set(left))

    def average_copies(self, gradient: torch.Tensor) -> None:
        """Take the mean of an expert's gradient over the ranks that hold the same experts, in place."""
        if (copies := dist.get_world_size(self._copies_group)) > 1:
            with named_failures():
                dist.all_reduce(gradient, group=self._copies_group)
            gradient.div_(copies)

    @property
    def gradient_group(self) -> Any:
        """Process group of the ranks that read different sequences or parts of them."""
        return self._data_group

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks that read different sequences or parts of them, in place."""
        with named_failures():
            dist.all_reduce(tensor, group=self._data_group)
        return tensor

    def sum_over_tp(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks that share each layer, in place."""
        with named_failures():
            dist.all_reduce(tensor, group=self._mesh.get_group("tp"))
        return tensor

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks of the replica, in place."""
        if self.stages is not None:
            found = self.stages.together(tensor.flatten)
            return tensor if found is None else tensor.copy_(found.view(tensor.shape))
        with named_failures():
            dist.all_reduce(tensor)
        return tensor

    def pipeline(
        self, chunks: Sequence[nn.Module], *, order: Sequence[Sequence[tuple[bool, int, int]]],
        loss: Callable[[Any, Any], torch.Tensor], code: StageCode | None = None,
    ) -> Any:  # fmt: skip
        """Return torch's runtime of pipelines, which runs this rank's chunks in a given order.

        A rank sends without waiting, and waits for a message just before the pass that needs it.

        Args:
            chunks: Of this rank: chunk `stage + n * pp` of the model each.
            order: Of each rank of the pipeline: whether a pass is forward, the rank's chunk, and the micro-batch.
            loss: Of the last chunk's output and the targets of one micro-batch.
            code: Of messages between stages at different sites; None for none.
        """
        from torch.distributed.pipelining import schedules

        from thinwire.transport.coded_stage import CodedStage

        pp = self._sizes["pp"]
        self.coded_stages = [
            CodedStage(chunk, self.stage + number * pp, pp * len(chunks), self.device, code=code,
                       sites=self._sites * len(chunks), group=self._pipe_group, wire=self._wire, log=self.border)
            for number, chunk in enumerate(chunks)
        ]  # fmt: skip
        runtime, action, kinds = compat.pipeline_runtime(schedules)
        table = {
            rank: [
                action(chunk * pp + rank, kinds.FORWARD if is_forward else kinds.FULL_BACKWARD, micro_batch)
                for is_forward, chunk, micro_batch in passes
            ]
            for rank, passes in enumerate(order)
        }
        num_micro_batches = sum(kind.computation_type is kinds.FORWARD for kind in table[0]) // len(chunks)
        schedule = runtime(self.coded_stages, num_micro_batches, loss_fn=loss, scale_grads=False)
        schedule._prepare_schedule_with_comms(table)
        for rank, actions in schedule.pipeline_order_with_comms.items():
            ordered = _gathered_once(actions, kinds)
            # nccl runs the messages of two ranks in their order: a receive before its time would wait for ever
            is_early = self.device.type == "cpu"
            schedule.pipeline_order_with_comms[rank] = _received_early(ordered, kinds) if is_early else ordered
        return schedule

    def gather_ahead(self, chunks: Sequence[nn.Module]) -> None:
        """Begin to bring the parameters of this rank's chunks together (FSDP2), before the first pass needs them.

        torch's runtime begins when a step does, and the embedding of a tied head may still be under way.
        """
        if self.gradient_ranks == 1:
            return
        from torch.distributed.fsdp import FSDPModule

        with named_failures():
            for module in (one for chunk in chunks for one in chunk.modules()):
                if isinstance(module, FSDPModule):
                    module.unshard(async_op=True)

    def send_to_stage(
        self, tensor: torch.Tensor, stage: int, *, code: StageCode | None = None, is_forward: bool = True
    ) -> None:
        """Send a tensor to the rank at another place along the pipeline; a code is that of activations."""
        if code is not None:
            tensor = code.encode(tensor, is_forward=is_forward, source=f"stage {self.stage}, tied embedding")
        payload = tensor.detach().contiguous()
        if self._is_crossed(stage) and self._wire is not None:
            envelope = self._envelope(payload.nbytes, sender=self.stage, receiver=stage)
            sent = self._wire.send(payload.view(-1).view(torch.uint8).cpu(), to=stage, envelope=envelope)
            sent.wait(deadline_s=ACTIVATIONS.deadline_s(payload.nbytes))
            return
        with named_failures():
            dist.send(payload, group=self._pipe_group, group_dst=stage)
        if self._is_crossed(stage):
            self.border.count("sent", ACTIVATIONS.name, peer=stage, num_bytes=payload.nbytes)

    def receive_from_stage(
        self, tensor: torch.Tensor, stage: int, *, code: StageCode | None = None, is_forward: bool = True
    ) -> torch.Tensor:
        """Fill a tensor with what a rank at another place along the pipeline sends, under the same code."""
        payload = tensor
        if code is not None:
            size = code.payload_bytes(tensor.numel(), is_forward=is_forward)
            payload = torch.zeros(size, dtype=torch.uint8, device=tensor.device)  # a shorter one fills its beginning
        if self._is_crossed(stage) and self._wire is not None:
            is_most = code is not None and not code.has_fixed_size(is_forward=is_forward)
            envelope = self._envelope(payload.nbytes, sender=stage, receiver=self.stage, takes_less=is_most)
            received_later = self._wire.receive(source=stage, envelope=envelope)
            received = received_later.wait(deadline_s=ACTIVATIONS.deadline_s(payload.nbytes))
            assert received is not None, "a receive returns its message"
            payload.view(-1).view(torch.uint8)[: received.payload.numel()].copy_(received.payload)
        else:
            with named_failures():
                dist.recv(payload, group=self._pipe_group, group_src=stage)
            if self._is_crossed(stage):
                self.border.count("received", ACTIVATIONS.name, peer=stage, num_bytes=payload.nbytes)
        if code is not None:
            code.decode(payload, tensor, is_forward=is_forward, source=f"stage {stage}, tied embedding")
        return tensor

    def broadcast_from_stage(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """Fill a tensor with that of the rank at a place along the pipeline, in place."""
        if self._wire is not None and self.stage == stage:
            for other in range(self._sizes["pp"]):
                if other != stage:
                    self.send_to_stage(tensor, other)
        elif self._wire is not None:
            self.receive_from_stage(tensor, stage)
        elif self._sizes["pp"] > 1:
            with named_failures():
                dist.broadcast(tensor, group=self._pipe_group, group_src=stage)
        return tensor

    def num_copies(self, parameter: torch.Tensor) -> int:
        """Return how many ranks of the replica hold the same part of a parameter."""
        sharded: Any = parameter
        distinct = 1
        if is_a("torch.distributed.tensor", "DTensor", parameter):
            for axis, placement in enumerate(sharded.placements):
                distinct *= 1 if placement.is_replicate() else sharded.device_mesh.size(axis)
        return self.size // (self._sizes["pp"] * distinct)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather parameters on every rank, on the CPU; all ranks call it with the same names."""
        found = {}
        with named_failures(), torch.no_grad():
            for name, tensor in tensors.items():
                sharded: Any = tensor
                is_sharded = is_a("torch.distributed.tensor", "DTensor", tensor)
                found[name] = (sharded.full_tensor() if is_sharded else tensor).detach().cpu().clone()
        return found

    def close(self) -> None:
        """End the transport of notes; the groups end with the default group."""
        self.peers.close()

    def _is_crossed(self, stage: int) -> bool:
        """Return whether a border lies between this stage and another."""
        return self._sites[stage] != self._sites[self.stage]

    def _envelope(self, num_bytes: int, *, sender: int, receiver: int, takes_less: bool = False) -> Envelope:
        """Return the address of a message that is no activation of a micro-batch; both ends count alike."""
        # stages that meet again count anew: what one sent last, another may not have received
        link = 0 if self.stages is None else self.stages.number, sender, receiver
        number = self._num_sent[link]
        self._num_sent[link] += 1
        # beyond all steps, and beside every micro-batch in flight
        key = (1 << 63 | 1 << 11 | number % (1 << 11), sender, 0)
        return Envelope(stream=ACTIVATIONS, key=key, payload_bytes=num_bytes, takes_less=takes_less)

    def _group_of(self, *axes: str) -> Any:
        """Make the group of the ranks that differ along the axes alone; all ranks call it."""
        ranks = self._mesh.mesh
        order = [place for place, name in enumerate(_AXES) if name not in axes]
        order += [_AXES.index(name) for name in axes]
        rows = ranks.permute(order).reshape(-1, self._sizes[axes[0]] * self._sizes[axes[1]]).tolist()
        groups = [dist.new_group(row) for row in rows]
        return next(group for group, row in zip(groups, rows, strict=True) if self.rank in row)

    def _group_of_context(self) -> Any:
        """Make the group of the ranks that share each sequence; all ranks call it."""
        cp = self._sizes["cp"]
        if cp == 1:
            return None
        rows = self._mesh.mesh.movedim(2, -1).reshape(-1, cp).tolist()
        groups = [dist.new_group(row) for row in rows]
        return next(group for group, row in zip(groups, rows, strict=True) if self.rank in row)


def _gathered_once(actions: Sequence[Any], kinds: Any) -> list[Any]:
    """Return a rank's actions with all gathers first, then the passes, then sums of gradients.

    torch's order holds three chunks together at a time, and gathers a fourth one again and again; it sums the gradients
    of a chunk before the next stage gets its own.
    """
    last = (kinds.REDUCE_GRAD, kinds.RESHARD)
    first: dict[Any, Any] = {action: None for action in actions if action.computation_type is kinds.UNSHARD}
    ends = {kind: list(dict.fromkeys(one for one in actions if one.computation_type is kind)) for kind in last}
    passes = [action for action in actions if action.computation_type not in (kinds.UNSHARD, *last)]
    return [*first, *passes, *ends[kinds.REDUCE_GRAD], *ends[kinds.RESHARD]]


def _received_early(actions: Sequence[Any], kinds: Any) -> list[Any]:
    """Return a rank's actions with each receive some passes before its time, in the same order.

    gloo announces a receive on the connection that carries what the rank sends, and behind it. On a thin link the peer
    would wait for that before it sends its own message.
    """
    receives = [action for action in actions if action.computation_type in (kinds.RECV_F, kinds.RECV_B)]
    left = iter(receives)
    found = [action for action in actions if action.computation_type is kinds.UNSHARD]
    found += itertools.islice(left, _RECEIVES_AHEAD)
    posted = set(found)
    for action in actions:
        if action.computation_type in (kinds.RECV_F, kinds.RECV_B):
            own: list[Any] = []
            while action not in posted:
                own.append(next(left))
                posted.add(own[-1])
            found += own
        elif action.computation_type is not kinds.UNSHARD:
            found.append(action)
            if action.computation_type in (kinds.FORWARD, kinds.FULL_BACKWARD):
                following = list(itertools.islice(left, 1))
                found += following
                posted.update(following)
    return found
