"""Replica of several ranks with fixed replicas: the degrees of `ParallelConfig` on a model, and the passes on it.

All ranks run the same loop on the same batches, and each takes its own rows. Other replicas are met shard by shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire import experts, sequences
from thinwire.codecs.activation_code import ActivationCode
from thinwire.errors import refusal
from thinwire.events import Direction
from thinwire.shared_random import derive_seed
from thinwire.site.pipeline import chunk_layers, order_of
from thinwire.training.config import TrainConfig
from thinwire.training.loop import Passes
from thinwire.training.skip_passes import SkippingPipeline
from thinwire.transport.base import Transport
from thinwire.transport.group_peers import GroupPeers
from thinwire.transport.path_group import PathGroup
from thinwire.transport.replica_mesh import ReplicaMesh
from thinwire.transport.shards import drop_gathered, local_shard, named_failures, own_part
from thinwire.transport.streams import ACTIVATIONS
from thinwire.workloads.language.lengths import assign_sequences, cost_of, padded_groups
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import (
    Transformer,
    TransformerStage,
    build_transformer,
    join_heads,
    next_token_loss,
    split_heads,
)
from thinwire.workloads.language.workload import num_targets
from thinwire.workloads.sampler import PADDING, Sampler

# Layers of a block whose output or input features the ranks of tp share.
_COLUMNS, _ROWS = ("attention.query_key_value", "up"), ("attention.out", "down")
# Gains that each rank of tp applies to its own heads: their gradients are parts of a sum.
_GAINS_OF_HEADS = "query_key_norm.gain"


def make_mesh(config: TrainConfig, *, device: torch.device, wire: Transport | None = None) -> ReplicaMesh:
    """Return the mesh of this replica's ranks, which the default group holds; see `ReplicaMesh` for `wire`."""
    own = config.parallel
    if own.skip:
        stages = PathGroup(num_stages=own.pp, deadline_s=config.run.join_deadline_s, interface=config.run.interface,
                           address=config.run.address)  # fmt: skip
        return ReplicaMesh(device=device, pp=own.pp, stages=stages)
    # without a code nothing says that stages lie apart
    sites = own.sites if own.activation_code is not None or wire is not None else (0,) * own.pp
    return ReplicaMesh(
        device=device, dp_replicate=own.dp_replicate, dp_shard=own.dp_shard, cp=own.cp, tp=own.tp, pp=own.pp,
        ep=own.ep, sites=sites, wire=wire,
    )  # fmt: skip


class PipelineChunks(nn.Module):
    """Chunks of a model that one rank of a pipeline holds.

    Args:
        chunks: In the order in which a micro-batch passes them.
        config: Shape of the whole model.
        skips: Whether micro-batches skip chunks; the first one has the head then.
    """

    def __init__(self, chunks: Sequence[TransformerStage], config: TransformerConfig, *, skips: bool = False) -> None:
        super().__init__()
        self.config, self.skips = config, skips
        self.num_chunks = len(chunks)
        # no ModuleList: the blocks in the chunks are what repeats
        for number, chunk in enumerate(chunks):
            self.add_module(f"chunk_{number}", chunk)

    @property
    def chunks(self) -> list[TransformerStage]:
        """The chunks, in order."""
        return [cast(TransformerStage, self.get_submodule(f"chunk_{n}")) for n in range(self.num_chunks)]


def cut_model(model: nn.Module, config: TrainConfig, mesh: ReplicaMesh) -> nn.Module:
    """Leave each rank its part of a model that all ranks hold whole and alike before.

    Args:
        model: One of thinwire's own.
        config: Resolved options.
        mesh: The replica's ranks.

    Returns:
        The model, or this rank's chunks of it where there is a pipeline.

    Raises:
        ValueError: The model's shape is not divided by a degree.
    """
    if not isinstance(model, Transformer):
        raise refusal("replicas of several ranks shard thinwire's own models", got=type(model).__name__,
                      allowed="a preset or a size", remedy="--model 35m")  # fmt: skip
    own, layers = config.parallel, model.config.layers
    _check_cut(config, layers=layers)
    if own.tp > 1:
        split_heads(model, own.tp)
    if own.cp > 1:
        _share_sequences(model, config, mesh)
    if own.tp > 1:
        mesh.split_layers(list(model.blocks), columns=_COLUMNS, rows=_ROWS)
    if own.pp == 1:
        model.recomputed_blocks = own.recompute_layers
        left = _share_experts(model, config, mesh) if model.config.num_experts else frozenset()
        mesh.shard(model, blocks=list(model.blocks), num_freed=_num_freed(config, layers), left=left)
        found: nn.Module = model
    else:
        chunks = _chunks(model, config, stage=mesh.stage)
        for chunk in chunks:
            mesh.shard(chunk, blocks=list(chunk.blocks.values()), num_freed=0)
        found = PipelineChunks(chunks, model.config, skips=own.skip > 0)
    if mesh.data_rank:  # ranks see other rows, and drop out other numbers
        torch.manual_seed(derive_seed(config.run.seed, "rank", mesh.data_rank))
    return found


def _share_experts(model: Transformer, config: TrainConfig, mesh: ReplicaMesh) -> frozenset[nn.Parameter]:
    """Leave each rank its experts; return their parameters, of which FSDP2 makes no shards."""
    model.balance_ranks = mesh.gradient_group
    if mesh.expert_mesh is None:
        return frozenset()
    own = config.parallel
    code = None if own.expert_code == "none" else ActivationCode.parse(own.expert_code)
    streamed = own.stream_experts
    dispatch = experts.weights(most_streamed=streamed, code=code) if streamed else experts.tokens(code=code)
    experts.parallelize(model, mesh.expert_mesh, dispatch=dispatch)
    return frozenset(expert_parameters(model))


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that the ranks of ep share."""
    for layer in model.modules():
        if isinstance(layer, experts.ExpertLayer):
            yield from (layer.up, layer.down)


def _share_sequences(model: Transformer, config: TrainConfig, mesh: ReplicaMesh) -> None:
    own = config.parallel
    policy = "ring" if model.config.is_linear else own.cp_policy  # a state goes from one rank to the next
    sites = own.sites_of_cp or (0,) * own.cp

    def count(direction: Direction, peer: int, num_bytes: int) -> None:
        if sites[peer] != sites[peers.rank]:
            mesh.border.count(direction, ACTIVATIONS.name, peer=peer, num_bytes=num_bytes)

    peers = GroupPeers(mesh.context_group, on_message=count)
    sequences.share(
        model,
        sequences.attention(
            peers, heads=model.config.heads // own.tp, policy=policy,
            sites=sites, head_dim=model.config.head_dim,
        ),
    )  # fmt: skip


def _check_cut(config: TrainConfig, *, layers: int) -> None:
    """Check the degrees against the model."""
    own = config.parallel
    num_chunks, most_chunks = own.pp * own.interleave, layers + 2 * (own.interleave > 1)  # an end may have no layer
    if num_chunks > most_chunks:
        raise refusal(
            "the pipeline has more chunks than the model has layers for", got=f"{own.pp} x {own.interleave}",
            allowed=f"1 to {most_chunks} chunks of {layers} layers", remedy="--interleave 1, or a smaller --pp",
        )  # fmt: skip
    most = max(sum(chunk_layers(layers, num_chunks)[rank :: own.pp]) for rank in range(own.pp))
    if own.recompute_layers > most:
        raise refusal("--recompute-layers is more than the layers of a stage", got=own.recompute_layers,
                      allowed=f"0 to {most}", remedy="--recompute")  # fmt: skip
    if own.unsharded_layers >= layers:
        raise refusal("--unsharded-layers leaves no layer to shard", got=own.unsharded_layers,
                      allowed=f"0 to {layers - 1}", remedy="--zero-stage 2")  # fmt: skip


def _num_freed(config: TrainConfig, layers: int) -> int:
    """Return how many blocks, the first ones, are in shards again after each pass (ZeRO-3)."""
    own = config.parallel
    return layers - own.unsharded_layers if own.zero_stage == 3 else 0


def _chunks(model: Transformer, config: TrainConfig, *, stage: int) -> list[TransformerStage]:
    own, layers = config.parallel, model.config.layers
    sizes = chunk_layers(layers, own.pp * own.interleave)
    left = layers if config.model.recompute else own.recompute_layers
    found = []
    for number in range(stage, len(sizes), own.pp):
        first, recomputed = sum(sizes[:number]), min(left, sizes[number])
        found.append(
            TransformerStage(
                model,
                range(first, first + sizes[number]),
                has_embedding=number == 0,
                has_head=number == (0 if own.skip else len(sizes) - 1),
                num_recomputed=recomputed,
            )
        )
        left -= recomputed
    return found


def whole_parameters(model: nn.Module, mesh: ReplicaMesh) -> dict[str, Tensor]:
    """Return all parameters as an uncut model has them, on the CPU of every rank; all ranks call it."""
    found = mesh.whole(dict(model.named_parameters()))
    if isinstance(model, PipelineChunks):
        found = _of_all_stages({name.partition(".")[2]: tensor for name, tensor in found.items()}, model, mesh)
    return {name: join_heads(name, tensor, parts=mesh.size_of("tp")) for name, tensor in found.items()}


def _of_all_stages(own: dict[str, Tensor], model: PipelineChunks, mesh: ReplicaMesh) -> dict[str, Tensor]:
    dtype = next(iter(own.values())).dtype
    pp = mesh.size_of("pp")
    sizes = chunk_layers(model.config.layers, pp * model.num_chunks)
    chunk_of = [chunk for chunk, size in enumerate(sizes) for _ in range(size)]
    found = {}
    for name, sketch in build_transformer(model.config, device="meta").named_parameters():
        parts = name.split(".")
        end = 0 if parts[0] == "embedding" or model.skips else len(sizes) - 1
        chunk = chunk_of[int(parts[1])] if parts[0] == "blocks" else end
        value = own[name] if name in own else torch.empty(sketch.shape, dtype=dtype)
        found[name] = mesh.broadcast_from_stage(value.to(mesh.device), chunk % pp).cpu()
    return found


class ParallelPasses:
    """Passes of a model that the ranks of a replica share; see `ModelPasses`.

    Args:
        config: Resolved options.
        model: As `cut_model` leaves it.
        mesh: The replica's ranks.
        step: Inner steps done before.
        windows: Batches that `backward` gets, with `--activation-memory`.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, mesh: ReplicaMesh, *, step: int = 0, windows: Sampler | None = None
    ) -> None:  # fmt: skip
        self.timing = Passes(mesh.device)
        self._config, self._mesh = config, mesh
        self._model: Any = model
        self._is_padded = config.data.sequences == "documents"
        sharing: Any = model.chunks[0] if isinstance(model, PipelineChunks) else model
        self._shared: sequences.SequenceAttention | None = sharing.shared
        self._pipeline: _Pipeline | None = None
        self._skipping: SkippingPipeline | None = None
        if isinstance(model, PipelineChunks) and model.skips:
            self._skipping = SkippingPipeline(config, model.chunks[0], mesh, shape=model.config, step=step)
        elif isinstance(model, PipelineChunks):
            self._pipeline = _Pipeline(config, model, mesh, windows=windows)

    def backward(self, tokens: Tensor, targets: Tensor, *, factor: float) -> tuple[Tensor, Tensor]:
        """See `ModelPasses`; every rank gets the whole batch, and the mean over it."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        passes = list(self._own_passes(tokens, targets))
        if self._skipping is not None:
            shown = self._skipping.backward(passes).float()
            return shown[0], shown[1:]
        with named_failures():
            if self._pipeline is None:
                with experts.step(self._model):
                    for number, (rows, row_targets, share) in enumerate(passes):
                        self._prepare_pass(is_last=number == len(passes) - 1)
                        with self.timing.forward(), self._autocast():
                            loss, nll = self._loss(rows, row_targets)
                        # FSDP2 averages over the data-parallel ranks, so each weighs its own by its share of the batch
                        with self.timing.backward():
                            (loss * (share * self._mesh.data_ranks)).backward()  # type: ignore[no-untyped-call]
                        sums += share / self._mesh.size_of("cp") * torch.stack([loss.detach(), nll.detach()])
            else:
                sums = self._pipeline.backward(passes, num_rows=len(tokens))
        self._sum_gains()
        self._average_experts()
        summed = self._of_batch(sums)
        return summed[0], summed[1:]

    def clip(self) -> None:
        """Shorten the gradient of all ranks' parts together to `clip_norm`."""
        limit = self._config.optimizer.clip_norm
        if limit <= 0:
            return
        squares = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        gradients = []
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                gradients.append(local_shard(parameter.grad))
                squares += gradients[-1].double().square().sum() / self._mesh.num_copies(parameter)
        norm = self._mesh.sum(squares).sqrt()
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Return what borders remember of samples, by chunk of this rank; nothing without a memory."""
        return {} if self._pipeline is None else self._pipeline.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take such a state; all ranks call it before the first step."""
        if self._pipeline is not None:
            self._pipeline.saved = state

    def held_out(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See `ModelPasses`; a batch of any number of rows."""
        if self._skipping is not None:
            return self._skipping.held_out(list(self._own_passes(tokens, targets))).float()
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        with named_failures():
            if self._pipeline is not None:
                self._pipeline.fetch_embedding()
            for rows, row_targets, share in self._own_passes(tokens, targets):
                with self._autocast():
                    if self._pipeline is None:
                        nll = self._loss(rows, row_targets)[1]
                    else:
                        nll = self._pipeline.nll(rows, row_targets)
                    total += share / self._mesh.size_of("cp") * nll
            # the next pass gathers what an outer step has changed meanwhile
            drop_gathered(self._model)
        return self._of_batch(total)[None]

    def _of_batch(self, own: Tensor) -> Tensor:
        """Return the sum of what the ranks add up for their rows, from the stage of a pipeline that has the loss."""
        summed = self._mesh.sum_over_data(own)
        return self._mesh.broadcast_from_stage(summed, self._mesh.size_of("pp") - 1).float()

    def _loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        is_padded = self._is_padded or bool((targets < 0).all())  # a rank without rows, whose tokens balance no expert
        found: tuple[Tensor, Tensor] = self._model.loss(tokens, targets, is_padded=is_padded)
        return found

    def _own(self, tokens: Tensor) -> Tensor:
        """Return this rank's positions of whole sequences (batch, seq)."""
        return tokens if self._shared is None else self._shared.own_tokens(tokens)

    def _own_documents(self, tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield as `_own_passes`: rows go to the rank that is free first, and each pass holds rows of like lengths."""
        lengths, ranks, parts = num_targets(targets), self._mesh.data_ranks, self._mesh.size_of("cp")
        per_rank = -(-len(tokens) // ranks)
        shape = self._model.config
        weights = 12 * shape.layers * shape.dim**2 + 2 * shape.vocab_size * shape.dim
        cost = cost_of(layers=shape.layers, width=shape.dim, num_parameters=weights, flops_per_s=1.0)
        found = assign_sequences(lengths, num_devices=ranks, cost=cost, max_tokens=max(lengths), may_share=False)
        most = (self._config.data.micro_batch or per_rank) * (self._config.model.seq_len or tokens.shape[1])
        unit = 1 if self._shared is None else self._shared.plan.num_parts  # ranks of cp share equal parts
        passes = []
        for rank in range(ranks):
            rows = found.of_device(rank)
            groups = padded_groups([lengths[row] for row in rows], max_tokens=most)
            passes.append([[rows[place] for place in group] for group in groups])
        own = passes[self._mesh.data_rank]
        for number in range(max(map(len, passes))):
            rows = own[number] if number < len(own) else []
            places = torch.tensor(rows or [lengths.index(min(lengths))], device=tokens.device)
            width = -(-max(lengths[place] for place in places.tolist()) // unit) * unit
            own_tokens = self._own(_as_wide(tokens[places], width, 0))
            own_targets = self._own(_as_wide(targets[places], width, PADDING))
            # each rank of cp takes the mean over its own positions
            counted = int((own_targets >= 0).sum()) if rows else 0
            yield own_tokens, own_targets, counted * parts / found.num_tokens

    def _own_passes(self, tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield this rank's parts of a batch, equally many on all ranks, each with its rows' share of the batch.

        A rank without rows takes the first one with weight 0: a model cannot run on an empty batch.
        """
        if self._is_padded:
            yield from self._own_documents(tokens, targets)
            return
        count, ranks, rank = len(tokens), self._mesh.data_ranks, self._mesh.data_rank
        per_rank = -(-count // ranks)
        size = min(self._config.data.micro_batch or per_rank, per_rank)
        for start in range(0, per_rank, size):
            first, end = rank * per_rank + start, min(count, rank * per_rank + min(start + size, per_rank))
            rows = slice(first, end) if first < end else slice(0, 1)
            wanted = targets[rows] if first < end else torch.full_like(targets[:1], PADDING)
            yield self._own(tokens[rows]), self._own(wanted), max(0, end - first) / count

    def _prepare_pass(self, *, is_last: bool) -> None:
        """Set what FSDP2 does after this pass: whether gradients are summed, and parameters freed."""
        if self._mesh.gradient_ranks == 1:
            return
        stage = self._config.parallel.zero_stage
        # ZeRO-1 keeps whole gradients and sums them once a step; the others sum into shards at every pass
        self._model.set_requires_gradient_sync(is_last or stage > 1)
        self._model.set_requires_all_reduce(is_last)  # copies of shards meet once a step
        self._model.set_is_last_backward(is_last)
        if stage < 3:
            self._model.set_reshard_after_backward(is_last)
        blocks = list(self._model.blocks) if self._config.parallel.unsharded_layers else []
        for block in blocks[_num_freed(self._config, len(blocks)) :]:
            block.set_reshard_after_backward(is_last)

    def _sum_gains(self) -> None:
        if self._mesh.size_of("tp") == 1:
            return
        for name, parameter in self._model.named_parameters():
            if name.endswith(_GAINS_OF_HEADS) and parameter.grad is not None:
                self._mesh.sum_over_tp(local_shard(parameter.grad))

    def _average_experts(self) -> None:
        if self._mesh.expert_mesh is not None:
            for parameter in expert_parameters(self._model):
                assert parameter.grad is not None, "every rank takes part in every pass"
                self._mesh.average_copies(local_shard(parameter.grad))

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self._config.model.autocast == "bf16"
        return torch.autocast(self._mesh.device.type, dtype=torch.bfloat16, enabled=enabled)


def _as_wide(rows: Tensor, width: int, value: int) -> Tensor:
    """Return rows (batch, seq) cut or padded with a value to a width."""
    return nn.functional.pad(rows[:, :width], (0, max(0, width - rows.shape[1])), value=value)


def _filled(tokens: Tensor, targets: Tensor, share: float, *, size: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets with so many rows; those added, and all of a pass without a share, count nothing."""
    missing = (0, 0, 0, size - len(tokens))
    if not share:
        targets = torch.full_like(targets, PADDING)
    return nn.functional.pad(tokens, missing), nn.functional.pad(targets, missing, value=PADDING)


class _Pipeline:
    """Passes of the chunks of this rank; a tied head works on a copy of the embedding, fetched at every step.

    Args:
        config: Resolved options.
        model: This rank's chunks.
        mesh: The replica's ranks.
        windows: Batches of the replica, where borders remember them.

    Attributes:
        saved: What borders remembered, to be taken as soon as there are stages.
    """

    def __init__(
        self, config: TrainConfig, model: PipelineChunks, mesh: ReplicaMesh, *, windows: Sampler | None
    ) -> None:  # fmt: skip
        self._mesh, self._shape, self._windows = mesh, model.config, windows
        self.saved: dict[str, Any] = {}
        self._chunks = model.chunks
        self._last_stage = config.parallel.pp - 1
        self._parallel = own = config.parallel
        self._code = None if own.activation_code is None else ActivationCode.parse(own.activation_code)
        # a tied head's copy and its gradient cross as activations do
        is_far = self._code is not None and (own.sites is None or own.sites[0] != own.sites[-1])
        self._head_code = self._code if is_far else None
        self._schedule: Any = None
        self._key: tuple[int, ...] = ()
        self._num_rows, self._is_padded = 1, False
        self._losses: list[Tensor] = []

    def backward(self, passes: Sequence[tuple[Tensor, Tensor, float]], *, num_rows: int) -> Tensor:
        """Put the gradients of a step into this rank's chunks.

        Args:
            passes: Rows of each micro-batch, and their share of the batch; those with fewer rows are padded.
            num_rows: Of the replica's batch.

        Returns:
            Loss and nll, (2,), this rank's part of the batch; zero before the last stage.
        """
        self._mesh.gather_ahead(self._chunks)
        self.fetch_embedding()
        size = max(len(tokens) for tokens, _, _ in passes)
        self._num_rows = num_rows
        self._is_padded = any(len(tokens) < size or not share for tokens, _, share in passes)
        filled = [_filled(*one, size=size) for one in passes]
        key = (len(filled), *filled[0][0].shape)
        if key != self._key:  # torch's stages keep the shapes of their first step
            own = self._parallel
            order = order_of(
                num_stages=own.pp, num_micro_batches=len(filled), interleave=own.interleave, eagerness=own.eagerness
            )  # fmt: skip
            code = self._code
            if code is not None and self._windows is not None:
                # a window that a batch has twice, where an epoch ends in it, counts as another the second time
                code = replace(code, memory="delta", samples=self._windows.num_windows + num_rows,
                               most_memory_bytes=own.most_memory_bytes)  # fmt: skip
            self._schedule = self._mesh.pipeline(self._chunks, order=order, loss=self._loss, code=code)
            self._key = key
            for place, stage in enumerate(self._mesh.coded_stages):
                if self.saved:
                    found = self.saved[str(place)]
                    stage.load_state_dict({**found, "memories": {int(n): one for n, one in found["memories"].items()}})
        if self._windows is not None:
            self._name_samples(self._windows, rows=len(filled[0][0]))
        self._losses.clear()
        tokens, targets = (torch.cat([one[place] for one in filled]) for place in (0, 1))
        arguments = (tokens,) if self._mesh.stage == 0 else ()
        if self._mesh.stage == self._last_stage:
            self._schedule.step(*arguments, target=targets, losses=[])
        else:
            self._schedule.step(*arguments)
        self._return_gradient()
        # torch's first step asks for the shape of a loss as well
        losses = self._losses[-len(passes) :]
        zero = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        return torch.stack([zero, *losses]).sum(0) / self._mesh.size_of("cp")

    def _name_samples(self, windows: Sampler, *, rows: int) -> None:
        """Name the windows in the rows of this rank's micro-batches, so many each."""
        numbers = [
            windows.num_windows + place if number in windows.numbers[:place] else number
            for place, number in enumerate(windows.numbers)
        ]
        per_rank = len(numbers) // self._mesh.data_ranks
        first = self._mesh.data_rank * per_rank
        for stage in self._mesh.coded_stages:
            stage.samples([numbers[place : place + rows] for place in range(first, first + per_rank, rows)])

    def state_dict(self) -> dict[str, Any]:
        """See `ParallelPasses`."""
        if self._windows is None or not self._mesh.coded_stages:
            return self.saved
        found = {str(place): stage.state_dict() for place, stage in enumerate(self._mesh.coded_stages)}
        return {
            place: {**one, "memories": {str(number): memory for number, memory in one["memories"].items()}}
            for place, one in found.items()
        }

    def nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean nll of rows at the last stage, zero at the others; chunk after chunk."""
        pp = self._last_stage + 1
        values = tokens
        for number in range(pp * len(self._chunks)):
            stage = number % pp
            if stage == self._mesh.stage:
                if number:
                    like = self._stream(tokens)
                    values = self._mesh.receive_from_stage(like, (stage - 1) % pp)
                values = self._chunks[number // pp](values)
                if number < pp * len(self._chunks) - 1:
                    self._mesh.send_to_stage(values, (stage + 1) % pp)
        if self._mesh.stage != self._last_stage:
            return torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        return next_token_loss(values, targets, z_loss=0.0)[1].double()

    def fetch_embedding(self) -> None:
        """Give the last stage the embedding that its tied head works with."""
        if not self._shape.tied_head:
            return
        if self._mesh.stage == 0:
            whole = self._mesh.whole({"": self._embedding})[""].to(self._mesh.device)
            self._mesh.send_to_stage(whole, self._last_stage, code=self._head_code, is_forward=True)
        elif self._mesh.stage == self._last_stage:
            weight = torch.empty(
                self._shape.vocab_size, self._shape.dim, dtype=self._dtype, device=self._mesh.device
            )  # fmt: skip
            weight = self._mesh.receive_from_stage(weight, 0, code=self._head_code, is_forward=True)
            self._chunks[-1].tied_weight = weight.requires_grad_()

    def _return_gradient(self) -> None:
        """Add the gradient of a tied head to that of the embedding."""
        if not self._shape.tied_head:
            return
        if self._mesh.stage == self._last_stage:
            weight = self._chunks[-1].tied_weight
            assert weight is not None and weight.grad is not None
            # as FSDP2 does with the gradients of parameters
            mean = self._mesh.sum_over_data(weight.grad) / self._mesh.gradient_ranks
            self._mesh.send_to_stage(mean, 0, code=self._head_code, is_forward=False)
        elif self._mesh.stage == 0:
            gradient: Any = self._embedding.grad
            part = torch.empty(self._embedding.shape, dtype=self._dtype, device=self._mesh.device)
            self._mesh.receive_from_stage(part, self._last_stage, code=self._head_code, is_forward=False)
            is_sharded = hasattr(self._embedding, "placements")
            local_shard(gradient).add_(own_part(part, like=self._embedding) if is_sharded else part)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss, nll = next_token_loss(logits, targets, z_loss=self._shape.z_loss, is_padded=self._is_padded)
        share = (targets >= 0).any(1).sum() / self._num_rows  # of the rows that are there
        self._losses.append(share * torch.stack([loss.detach(), nll.detach()]).double())
        return loss * (share * self._mesh.data_ranks)

    @property
    def _embedding(self) -> nn.Parameter:
        embedding = self._chunks[0].embedding
        assert embedding is not None
        return cast(nn.Parameter, embedding.weight)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._chunks[0].parameters()).dtype

    def _stream(self, tokens: Tensor) -> Tensor:
        return torch.empty(*tokens.shape, self._shape.dim, dtype=self._dtype, device=self._mesh.device)
