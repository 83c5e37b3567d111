"""Cost model inside a site: memory of each device and time of a step, for one layout on one placement.

A layout cuts a decoder and its batch by five degrees of parallelism. Devices with the same place in the pipeline run
the same chunk of layers; the time of its passes is computing and collectives, in closed form on the real links. The
pipeline between them is simulated.

Assumptions:
    - Tensor-parallel all-reduces and the ring of context parallelism are not hidden behind computing.
    - Data-parallel messages of a layer overlap with the work of the next one, and not with those of other layers.
    - Messages that leave a node at once share its network card; collectives are rings that visit node after node.
    - Tokens are spread evenly over experts; their messages are not hidden, and the devices first exchange counts.
    - Attention is causal and keeps no matrix. The optimizer's own update takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from thinwire.codec_specs import activation_bytes
from thinwire.sequences.block_tables import sequence_plan
from thinwire.site import memory
from thinwire.site.device_grid import Degrees, SitePlacement
from thinwire.site.expert_costs import ExpertShape, activation_unit_bytes
from thinwire.site.pipeline import StageLink, StageTimes, chunk_layers, layers_in_flight, lower_bound_s, step_s

# Activations, weights and gradients are sent in 16 bits, but for activations that a code carries between sites.
_MESSAGE_BITS = 16
# Products of attention's backward pass beside the two of its forward pass: scores again, and four for gradients.
ATTENTION_BACKWARD = 2.5
# Computing of a step whose backward pass is streamed, of that with all layers recomputed: measured with 32,768 and
# 65,536 tokens on a GPU, which is more than on CPUs.
_STREAMED = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers of a decoder that its cost follows from."""

    layers: int  # equal blocks
    width: int  # of the residual stream
    heads: int  # attention heads
    vocab_size: int  # different tokens
    seq_len: int  # tokens of a sequence
    layer_parameters: float  # of one block
    embedding_parameters: float  # of the first stage, besides its blocks
    head_parameters: float  # of the last stage, besides its blocks
    is_head_tied: bool = False  # whether one device that holds both ends holds these weights once
    # that a block keeps a token and unit of width for its backward pass, before anything is shared
    unit_bytes: float = memory.UNIT_BYTES
    # whether tensor-parallel devices share the stream between their products too (arXiv 2205.05198), as torchtitan's
    # models do and thinwire's do not; pipeline stages then send one part each
    is_sequence_parallel: bool = False
    experts: ExpertShape | None = None  # of its blocks; layer_parameters is the mean then
    can_stream: bool = True  # whether what trains it can stream the backward pass

    @property
    def expert_parameters(self) -> float:
        """Parameters of the experts of a block, on average."""
        return 0.0 if self.experts is None else self.experts.layer_parameters * self.experts.layers / self.layers

    @property
    def active_parameters(self) -> float:
        """Parameters of a block that a token visits, on average."""
        idle = 0.0 if self.experts is None else self.experts.idle_parameters * self.experts.layers / self.layers
        return self.layer_parameters - idle

    @property
    def num_parameters(self) -> float:
        """Parameters of the whole model."""
        head = 0.0 if self.is_head_tied else self.head_parameters
        return self.layers * self.layer_parameters + self.embedding_parameters + head


def decoder_shape(
    *, layers: int, width: int, heads: int, vocab_size: int, seq_len: int, is_head_tied: bool = False
) -> ModelShape:
    """Return the shape of a decoder with blocks of 12 h^2 weights and a head as large as its embedding.

    Example:
        >>> round(decoder_shape(layers=96, width=12288, heads=96, vocab_size=51200, seq_len=2048,
        ...                     is_head_tied=True).num_parameters / 1e9, 1)
        174.6
    """
    return ModelShape(
        layers=layers, width=width, heads=heads, vocab_size=vocab_size, seq_len=seq_len,
        layer_parameters=12 * width**2, embedding_parameters=vocab_size * width, head_parameters=vocab_size * width,
        is_head_tied=is_head_tied,
    )  # fmt: skip


def with_experts(shape: ModelShape, experts: ExpertShape) -> ModelShape:
    """Return the shape of a model with experts, which its blocks' parameters hold already."""
    unit_bytes = activation_unit_bytes(experts, width=shape.width, layers=shape.layers, unit_bytes=shape.unit_bytes)
    return replace(shape, experts=experts, unit_bytes=unit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Cut of a model and its batch."""

    degrees: Degrees  # of parallelism
    global_batch: int  # sequences of a step of the whole site
    micro_batch: int = 1  # sequences of one pass of a data-parallel replica
    zero_stage: int = 0  # ZeRO's stage of the shards: 0 where there is one
    interleave: int = 1  # chunks of layers on each pipeline rank
    recomputed_layers: int = 0  # the first ones of each pipeline rank, which may have fewer
    # under ZeRO-3 without stages, the last ones, whose weights stay together all through a step
    unsharded_layers: int = 0
    streamed_chunks: int = 0  # of each sequence in a streamed backward pass, without stages; 0 where it is not streamed
    eagerness: int = 1  # of 1F1B, see `one_f_one_b`
    cp_policy: str = "auto"  # sharing of attention over the ranks of cp

    @property
    def num_micro_batches(self) -> int:
        """Passes of a step: accumulation, or the micro-batches of a pipeline; the last ones may be padded."""
        sequences = -(-self.global_batch // (self.degrees.dp_replicate * self.degrees.dp_shard))
        return -(-sequences // self.micro_batch)

    @property
    def padded_batch(self) -> int:
        """Sequences of a step with the empty ones that fill up the passes of all replicas."""
        return self.degrees.dp_replicate * self.degrees.dp_shard * self.micro_batch * self.num_micro_batches

    @property
    def schedule(self) -> str:
        """Name of the pipeline's schedule."""
        if self.degrees.pp == 1:
            return "none"
        if self.interleave > 1:
            return "interleaved-1f1b"
        return "1f1b" if self.eagerness == 1 else "eager-1f1b"

    def describe(self) -> str:
        """Return the layout in a line."""
        rest = [f"micro-batch {self.micro_batch}", f"ZeRO-{self.zero_stage}"]
        if self.interleave > 1:
            rest.append(f"interleave {self.interleave}")
        if self.eagerness > 1:
            rest.append(f"eagerness {self.eagerness}")
        if self.recomputed_layers:
            rest.append(f"recompute {self.recomputed_layers * self.degrees.pp} layers")
        if self.unsharded_layers:
            rest.append(f"{self.unsharded_layers} layers unsharded")
        if self.streamed_chunks:
            rest.append(f"backward pass streamed in {self.streamed_chunks} chunks")
        return f"{self.degrees.describe()}, {', '.join(rest)}"


def rank_chunks(model: ModelShape, layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the layers of each chunk of a pipeline rank."""
    pp = layout.degrees.pp
    return chunk_layers(model.layers, pp * layout.interleave)[rank::pp]


def most_rank_layers(model: ModelShape, layout: Layout) -> int:
    """Return the layers of the pipeline rank that has most."""
    return max(sum(rank_chunks(model, layout, rank)) for rank in range(layout.degrees.pp))


def device_memory(model: ModelShape, layout: Layout, *, stage: int) -> memory.DeviceMemory:
    """Return the memory of a device of one pipeline rank."""
    degrees, own_chunks = layout.degrees, rank_chunks(model, layout, stage)
    own_layers = sum(own_chunks)
    outer = _outer_parameters(model, stage, degrees.pp)
    in_flight = layers_in_flight(
        stage,
        num_stages=degrees.pp,
        num_micro_batches=layout.num_micro_batches,
        own_chunks=own_chunks,
        eagerness=layout.eagerness,
    )
    tokens = layout.micro_batch * model.seq_len

    def layer_bytes(*, is_recomputed: bool) -> float:
        return memory.layer_activation_bytes(
            tokens=tokens, seq_len=model.seq_len, width=model.width, heads=model.heads, tensor_parallel=degrees.tp,
            context_parallel=degrees.cp, is_recomputed=is_recomputed, sequence_parallel=model.is_sequence_parallel,
            unit_bytes=model.unit_bytes,
        )  # fmt: skip

    recomputed = min(layout.recomputed_layers, own_layers)
    kept = (own_layers - recomputed) * layer_bytes(is_recomputed=False) + recomputed * layer_bytes(is_recomputed=True)
    # the layer that is being recomputed holds all of its values once
    again = layer_bytes(is_recomputed=False) if recomputed else 0.0
    logits = 0.0
    if stage == degrees.pp - 1:
        logits = memory.logit_bytes(
            tokens=tokens, vocab_size=model.vocab_size, tensor_parallel=degrees.tp, context_parallel=degrees.cp
        )
    activations = in_flight * kept / max(1, own_layers) + again
    if layout.streamed_chunks:
        logits /= layout.streamed_chunks
        activations = memory.streamed_bytes(
            tokens=tokens, width=model.width, layers=model.layers, chunks=layout.streamed_chunks,
            unit_bytes=model.unit_bytes,
        )  # fmt: skip
    whole = sum(number * (1 - 1 / shards) for number, shards in _held(model, degrees, layout.unsharded_layers))
    states = sum(
        memory.state_bytes(number, zero_stage=layout.zero_stage, shards=shards)
        for number, shards in _held(model, degrees, own_layers, outer)
    )
    a_layer = sum(number for number, _ in _held(model, degrees, 1))
    return memory.DeviceMemory(
        states_bytes=states + memory.WEIGHT_BYTES * whole,
        gathered_bytes=memory.gathered_bytes(a_layer, zero_stage=layout.zero_stage),
        activations_bytes=activations, logits_bytes=logits,
    )  # fmt: skip


def _held(model: ModelShape, degrees: Degrees, layers: float, outer: float = 0.0) -> tuple[tuple[float, int], ...]:
    """Return the parameters of some layers that a device has a share of, and how many share them: dense, experts."""
    dense = layers * (model.layer_parameters - model.expert_parameters) + outer
    experts = layers * model.expert_parameters / degrees.ep
    return (dense / degrees.tp, degrees.shards), (experts / degrees.tp, degrees.shards // degrees.ep)


def peak_bytes(model: ModelShape, layout: Layout) -> tuple[float, ...]:
    """Return the peak memory of a device of each pipeline rank."""
    return tuple(device_memory(model, layout, stage=stage).peak_bytes for stage in range(layout.degrees.pp))


def sent_numbers(model: ModelShape, layout: Layout, *, stage: int, part: int = 0) -> dict[str, float]:
    """Return how many numbers a device of a pipeline rank sends in a step, as `thinwire train --plan` sends them.

    Rings are assumed: of n numbers, each of N members sends n (N - 1) / N in a gather, and twice that in an all-reduce.
    Sequences are shared by the layout's policy, under which ranks of cp send different numbers.

    Args:
        model: The model.
        layout: Its cut.
        stage: The device's pipeline rank.
        part: Its rank of cp.

    Returns:
        Numbers sent between the data-parallel ranks ("data"), and along "cp", "tp", "pp" and "ep".
    """
    degrees, count, chunks = layout.degrees, layout.num_micro_batches, layout.degrees.pp * layout.interleave
    own_layers, last = sum(rank_chunks(model, layout, stage)), degrees.pp - 1
    recomputed = min(layout.recomputed_layers, own_layers)
    head = 0.0 if model.is_head_tied else model.head_parameters
    outer = (model.embedding_parameters if stage == 0 else 0.0) + (head if stage == last else 0.0)
    # ZeRO-3 gathers before both passes of each micro-batch, ZeRO-2 reduces after each backward pass
    gathers, reduces = 2 * count if layout.zero_stage == 3 else 1, count if layout.zero_stage >= 2 else 1
    held, once = _held(model, degrees, own_layers, outer), _held(model, degrees, layout.unsharded_layers)
    data = sum(
        ((gathers + reduces) * number - (gathers - 1) * whole) * (1 - 1 / shards)
        + 2 * number / shards * (1 - 1 / degrees.dp_replicate)
        for (number, shards), (whole, _) in zip(held, once, strict=True)
    )
    activations = layout.micro_batch * model.seq_len * model.width
    # every chunk but the last sends its output on, and every chunk but the first its input's gradient back
    messages = sum((chunk < chunks - 1) + (chunk > 0) for chunk in range(stage, chunks, degrees.pp))
    stages = count * messages * activations / degrees.cp / (degrees.tp if model.is_sequence_parallel else 1)
    if model.is_head_tied and last and stage in (0, last):
        # the last stage fetches the embedding, and returns its gradient
        embedding = model.vocab_size * model.width
        stages += embedding
        around = 1 - 1 / degrees.shards if stage == 0 else 2 - 2 / (degrees.dp_replicate * degrees.shards)
        data += embedding * around
    # recompute stops before a layer's last all-reduce, whose result no gradient needs
    all_reduces = count * (4 * own_layers + recomputed)
    # recomputed layers attend again
    forward, backward = _shared_numbers(model, layout, part)
    visits = _visiting_numbers(model, layout) * (1 - 1 / degrees.ep)
    return {
        "data": data, "cp": count * ((own_layers + recomputed) * forward + own_layers * backward),
        "tp": all_reduces * 2 * activations / degrees.cp * (1 - 1 / degrees.tp), "pp": stages,
        "ep": count * (4 * own_layers + 2 * recomputed) * visits,
    }  # fmt: skip


def _visiting_numbers(model: ModelShape, layout: Layout) -> float:
    """Return the numbers of the tokens of a pass that a device sends to a layer's experts, on average."""
    experts, degrees = model.experts, layout.degrees
    if experts is None:
        return 0.0
    tokens = layout.micro_batch * model.seq_len / degrees.cp / (degrees.tp if model.is_sequence_parallel else 1)
    return tokens * experts.per_token * experts.width * experts.layers / model.layers


def _shared_numbers(model: ModelShape, layout: Layout, part: int) -> tuple[float, float]:
    """Return the numbers that a rank of cp sends in the forward and in the backward pass of a layer."""
    degrees, head_dim = layout.degrees, model.width // model.heads
    heads = max(1, model.heads // degrees.tp)
    plan = sequence_plan(layout.cp_policy, sites=(0,) * degrees.cp, heads=heads, head_dim=head_dim)
    forward, backward = (
        plan.sent_bytes(
            batch=layout.micro_batch, seq_len=model.seq_len, head_dim=head_dim, item_bytes=1, log_sum_bytes=1,
            backward=is_backward,
        )
        for is_backward in (False, True)
    )  # fmt: skip
    sums = [float(sum(n for way, n in sent.items() if way[0] == part)) for sent in (forward, backward)]
    return sums[0], sums[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerTimes:
    """Seconds of a layer: of work, and of messages that overlap with the work of its neighbours."""

    forward_s: float  # work of a forward pass
    backward_s: float  # work of a backward pass
    again_s: float  # work of computing its activations again
    gather_s: float  # its weights, before each pass
    reduce_s: float  # its gradients, after each backward pass
    first_gather_s: float  # its weights, at the start of a step
    last_reduce_s: float  # its gradients, after the last one


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Time of a step of one layout on one placement."""

    model: ModelShape
    layout: Layout  # how it is cut
    placement: SitePlacement  # the devices of its grid
    # codecs of activations and of their gradients between sites; None for 16 bits
    code: tuple[str, str] | None = None

    @cached_property
    def stages(self) -> tuple[StageTimes, ...]:
        """Times of each chunk, in the order in which a micro-batch passes them."""
        pp = self.layout.degrees.pp
        count = pp * self.layout.interleave
        # chunks between the ends are alike on devices that are alike
        known: dict[tuple[bool, bool, float, int, float], tuple[StageTimes, float]] = {}
        found: list[StageTimes] = []
        gathered_s = [0.0] * pp  # weights of earlier chunks of each rank, which come first
        for chunk in range(count):
            share = self._recomputed_share(chunk % pp)
            key = chunk == 0, chunk == count - 1, self.placement.speeds[chunk % pp], self._chunk_layers[chunk], share
            if key not in known:
                gather_s = max(1, self._chunk_layers[chunk]) * self._layer_times(chunk).first_gather_s
                known[key] = self._stage_times(chunk), gather_s
            rank, (own, gather_s) = chunk % pp, known[key]
            found.append(replace(own, ready_s=own.ready_s + gathered_s[rank]) if gathered_s[rank] else own)
            gathered_s[rank] += gather_s
        if (head := self._tied_link) is not None:
            # the copy comes first on its link; its gradient follows that of the last activations
            found[0] = replace(
                found[0],
                ready_s=found[0].ready_s + head.message_s,
                reduce_s=found[0].reduce_s + max(0.0, head.back.message_s - found[0].backward_s),
            )
            found[-1] = replace(found[-1], ready_s=found[-1].ready_s + head.total_s)  # fmt: skip
        return tuple(found)

    @cached_property
    def _tied_link(self) -> StageLink | None:
        """Link between both ends for a tied head's copy and its gradient; None where they do not cross a border."""
        if not self.model.is_head_tied or self.placement.num_borders[-1] == 0:
            return None
        one, back = self._tied_bytes
        return max((links[-1] for links in self.placement.stage_links(0.0, (8 * one, 8 * back))),
                   key=lambda link: link.message_s)  # fmt: skip

    @property
    def _tied_bytes(self) -> tuple[float, float]:
        """Bytes of a tied head's copy and of its gradient."""
        # parameters are in 32 bits
        one, back = self.code or ("float32", "float32")
        numel = self.model.vocab_size * self.model.width
        return activation_bytes(one, numel), activation_bytes(back, numel)

    @cached_property
    def stage_links(self) -> tuple[tuple[StageLink, ...], ...]:
        """Links between the stages of each different pipeline."""
        degrees = self.layout.degrees
        if degrees.pp == 1:
            return ((StageLink(),),)
        coded = None if self.code is None else self._coded_bytes
        return self.placement.stage_links(
            self._stage_numbers * _MESSAGE_BITS,
            None if coded is None else (8 * coded[0], 8 * coded[1]),
            is_interleaved=self.layout.interleave > 1,
        )

    @property
    def border_bytes(self) -> tuple[float, float]:
        """Bytes that cross between sites in a step, forward and backward: activations, and a tied head's copy."""
        borders, chunks = self.placement.num_borders, self.layout.degrees.pp * self.layout.interleave
        messages = self.layout.num_micro_batches * sum(borders[one % len(borders)] for one in range(chunks - 1))
        copies = borders[-1] if self.model.is_head_tied else 0
        (one, back), (copy, copy_back) = self._coded_bytes, self._tied_bytes
        return messages * one + copies * copy, messages * back + copies * copy_back

    @property
    def _coded_bytes(self) -> tuple[float, float]:
        """Bytes of a message of a device between sites, forward and backward."""
        forward, backward = self.code or ("bfloat16", "bfloat16")
        return activation_bytes(forward, self._stage_numbers), activation_bytes(backward, self._stage_numbers)

    @property
    def _stage_numbers(self) -> float:
        # each tensor-parallel rank sends the whole stream, or its part of it
        degrees = self.layout.degrees
        return self._tokens * self.model.width / degrees.cp / (degrees.tp if self.model.is_sequence_parallel else 1)

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step, simulated; that of the slowest pipeline."""
        return max(step_s(self.stages, stage_links, **self._about) for stage_links in self.stage_links)

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds that no simulation of this layout on this placement can go below."""
        return max(lower_bound_s(self.stages, stage_links, **self._about) for stage_links in self.stage_links)

    @cached_property
    def pipette_s(self) -> float:
        """Seconds of a step after Pipette's formula, on the real links: the objective of the placement."""
        slowest = max(self.stages, key=lambda stage: stage.forward_s + stage.backward_s)
        count, interleave = self.layout.num_micro_batches, self.layout.interleave
        extra = max(stage.ready_s + stage.reduce_s for stage in self.stages)
        return extra + max(
            pipette_s(
                forward_s=slowest.forward_s * interleave, backward_s=slowest.backward_s * interleave,
                links_s=[stage_link.total_s for stage_link in stage_links[:-1]], num_micro_batches=count,
            )
            for stage_links in self.stage_links
        )  # fmt: skip

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Seconds of a step by cause, of the pipeline rank that works longest; "waiting" is bubbles and messages."""
        degrees, count = self.layout.degrees, self.layout.num_micro_batches

        def work(rank: int) -> float:
            own = self.stages[rank :: degrees.pp]
            passes = sum(count * (stage.forward_s + stage.backward_s) + stage.reduce_s for stage in own)
            # later ranks gather while the first micro-batch is under way to them
            return passes + (own[0].ready_s if rank == 0 else 0.0)

        rank = max(range(degrees.pp), key=work)
        chunks = range(rank, len(self.stages), degrees.pp)
        compute = count * sum(self._compute_s(chunk) + self._backward_s(chunk) for chunk in chunks)
        share = self._recomputed_share(rank)
        own_layers = sum(rank_chunks(self.model, self.layout, rank))
        tensor, context = self._tensor_s * own_layers * count, self._context_s * own_layers * count
        home = self._home_s * own_layers * count
        found = {
            "compute": compute,
            "recompute": share * (count * sum(map(self._again_s, chunks)) + tensor / 2 + context
                                  + self._experts_s[0] * own_layers * count),
            "tensor": 2 * tensor, "context": 2 * context + home,
            "experts": (self._experts_s[0] + self._experts_s[1]) * own_layers * count,
        }  # fmt: skip
        head, head_s = self._tied_link, 0.0
        if head is not None and rank == 0:
            head_s = head.message_s + max(0.0, head.back.message_s - self.stages[0].backward_s)
        found["data"] = max(0.0, work(rank) - head_s - sum(found.values()))
        found["waiting"] = max(0.0, self.step_s - sum(found.values()))
        return found

    @property
    def _about(self) -> dict[str, int]:
        layout = self.layout
        return {
            "num_micro_batches": layout.num_micro_batches, "interleave": layout.interleave,
            "eagerness": layout.eagerness,
        }  # fmt: skip

    @property
    def _tokens(self) -> int:
        return self.layout.micro_batch * self.model.seq_len

    @cached_property
    def _chunk_layers(self) -> tuple[int, ...]:
        return chunk_layers(self.model.layers, self.layout.degrees.pp * self.layout.interleave)

    def _recomputed_share(self, rank: int) -> float:
        """Return the share of its layers that a pipeline rank computes again."""
        if self.layout.streamed_chunks:
            return 1.0
        own_layers = sum(rank_chunks(self.model, self.layout, rank))
        return min(1.0, self.layout.recomputed_layers / own_layers) if own_layers else 0.0

    def _layers_s(self, chunk: int) -> float:
        """Return the seconds that the blocks of a chunk compute in a forward pass."""
        degrees = self.layout.degrees
        speed = self.placement.speeds[chunk % degrees.pp] * degrees.cp * degrees.tp
        products = 2 * self.model.active_parameters * self._tokens / speed  # 2 a parameter and token
        return self._chunk_layers[chunk] * products + self._attention_s(chunk)

    def _attention_s(self, chunk: int) -> float:
        """Return the seconds of them for scores and values: causal, 4 s h a token, half of it masked."""
        model, degrees = self.model, self.layout.degrees
        speed = self.placement.attention_speeds[chunk % degrees.pp] * degrees.cp * degrees.tp
        return self._chunk_layers[chunk] * 2 * model.seq_len * model.width * self._tokens / speed

    def _backward_s(self, chunk: int) -> float:
        """Return the seconds of computing of a backward pass: twice its products, and more for attention."""
        return 2 * self._compute_s(chunk) + (ATTENTION_BACKWARD - 2) * self._attention_s(chunk)

    def _again_s(self, chunk: int) -> float:
        """Return the seconds of computing the blocks of a chunk again, and what streaming them adds to both passes."""
        again = self._layers_s(chunk)
        if self.layout.streamed_chunks:
            again += (_STREAMED - 1) * (self._compute_s(chunk) + self._backward_s(chunk) + again)
        return again

    def _compute_s(self, chunk: int) -> float:
        """Return the seconds of computing of a forward pass, with the head in the last chunk."""
        degrees = self.layout.degrees
        if chunk < degrees.pp * self.layout.interleave - 1:
            return self._layers_s(chunk)
        speed = self.placement.speeds[-1] * degrees.cp * degrees.tp
        return self._layers_s(chunk) + 2 * self.model.vocab_size * self.model.width * self._tokens / speed

    @cached_property
    def _tensor_s(self) -> float:
        """Seconds of the two all-reduces of a layer's forward pass; its backward pass has two more."""
        bits = self._tokens / self.layout.degrees.cp * self.model.width * _MESSAGE_BITS
        return 2 * self.placement.tensor_links.all_reduce_s(bits)

    @cached_property
    def _context_s(self) -> float:
        """Seconds in which keys and values go round in a pass of a layer."""
        bits = 2 * self._tokens * self.model.width * _MESSAGE_BITS / self.layout.degrees.tp
        return self.placement.context_links.scatter_s(bits)

    @cached_property
    def _experts_s(self) -> tuple[float, float]:
        """Seconds of a layer's two all-to-alls of tokens: forward, after one of their counts, and backward."""
        if self.layout.degrees.ep == 1 or self.model.experts is None:
            return 0.0, 0.0
        once_s, latency_s = self.placement.experts_s(
            _visiting_numbers(self.model, self.layout) * self.model.experts.bits
        )
        latency_s *= self.model.experts.layers / self.model.layers
        return 2 * once_s + 3 * latency_s, 2 * once_s + 2 * latency_s

    @property
    def _home_s(self) -> float:
        """Seconds in which the gradients of keys and values go round in a backward pass, and one more hop home."""
        ranks = self.layout.degrees.cp
        return self._context_s * ranks / (ranks - 1) if ranks > 1 else 0.0

    def _stage_times(self, chunk: int) -> StageTimes:
        layout, own = self.layout, self._layer_times(chunk)
        layers = max(1, self._chunk_layers[chunk])  # a chunk of the embedding or the head alone counts as a layer
        freed = layers - layout.unsharded_layers
        # recomputed layers are the first ones, shared out evenly among the chunks of a rank
        recomputed = self._recomputed_share(chunk % layout.degrees.pp) * self._chunk_layers[chunk]
        gathers = [own.gather_s * (number < freed) for number in range(layers)]
        works = [own.backward_s + own.again_s * min(1.0, max(0.0, recomputed - number)) for number in range(layers)]

        first_s = _overlapped([(own.forward_s, own.first_gather_s)] * layers)
        if layout.degrees.pp > 1:
            # messages of a pass overlap with the next pass of the rank too; the last sum is for itself
            forward_s = max(layers * own.forward_s, sum(gathers))
            backward_s = max(sum(works), sum(gathers) + layers * own.reduce_s)
            return StageTimes(
                forward_s=forward_s, backward_s=backward_s, ready_s=max(0.0, first_s - forward_s),
                reduce_s=layers * own.last_reduce_s,
            )  # fmt: skip

        def backward(messages_s: float) -> float:
            return _overlapped([(work, messages_s + gather) for work, gather in zip(works, gathers, strict=True)])

        forward_s, backward_s = _overlapped([(own.forward_s, gather) for gather in gathers]), backward(own.reduce_s)
        return StageTimes(
            forward_s=forward_s, backward_s=backward_s, ready_s=first_s - forward_s,
            reduce_s=backward(own.last_reduce_s) - backward_s,
        )  # fmt: skip

    def _layer_times(self, chunk: int) -> _LayerTimes:
        has_layers, layout = self._chunk_layers[chunk] > 0, self.layout
        layers = max(1, self._chunk_layers[chunk])
        compute = self._compute_s(chunk) / layers
        tensor, context = self._tensor_s * has_layers, self._context_s * has_layers
        bits = self._chunk_parameters(chunk) * _MESSAGE_BITS / layers
        experts_s = tuple(has_layers * seconds for seconds in self._experts_s)
        expert_bits = has_layers * self.model.expert_parameters / layout.degrees.tp * _MESSAGE_BITS
        shard = self.placement.shard_links.scatter_s(bits - expert_bits)
        if expert_bits:
            shard += self.placement.expert_shard_links.scatter_s(expert_bits / layout.degrees.ep)
        replicate = self.placement.replicate_links.all_reduce_s(bits / layout.degrees.shards)
        return _LayerTimes(
            forward_s=compute + tensor + context + experts_s[0],
            backward_s=self._backward_s(chunk) / layers + tensor + context + self._home_s * has_layers + experts_s[1],
            again_s=self._again_s(chunk) / layers + tensor / 2 + context + experts_s[0],
            gather_s=shard if layout.zero_stage == 3 else 0.0, reduce_s=shard if layout.zero_stage >= 2 else 0.0,
            first_gather_s=shard if layout.zero_stage else 0.0,
            last_reduce_s=(2 if layout.zero_stage == 0 else 1) * shard + replicate,
        )  # fmt: skip

    def layer_s(self, *, is_unsharded: bool, is_recomputed: bool) -> float:
        """Return the seconds that a layer adds to both passes of a micro-batch, without pipeline."""
        own = self._layer_times(0)
        gather = 0.0 if is_unsharded else own.gather_s
        backward = own.backward_s + (own.again_s if is_recomputed else 0.0)
        return max(own.forward_s, gather) + max(backward, gather + own.reduce_s)

    def _chunk_parameters(self, chunk: int) -> float:
        stages = self.layout.degrees.pp * self.layout.interleave
        own = self._chunk_layers[chunk] * self.model.layer_parameters + _outer_parameters(self.model, chunk, stages)
        return own / self.layout.degrees.tp


def _outer_parameters(model: ModelShape, stage: int, num_stages: int) -> float:
    """Return the parameters of the embedding and the head that a stage holds; tied ones are in both end stages."""
    if num_stages == 1:
        return model.embedding_parameters + (0.0 if model.is_head_tied else model.head_parameters)
    if stage == 0:
        return model.embedding_parameters
    return model.head_parameters if stage == num_stages - 1 else 0.0


def _overlapped(parts: Sequence[tuple[float, float]]) -> float:
    """Return the time of layers, each with work and messages; messages overlap with the work of a neighbour."""
    return parts[0][1] + sum(max(one[0], other[1]) for one, other in pairwise(parts)) + parts[-1][0]


def pipette_s(*, forward_s: float, backward_s: float, links_s: Sequence[float], num_micro_batches: int) -> float:
    """Return the step time of a 1F1B pipeline after Pipette, which sees that few micro-batches are in flight.

    Every p micro-batches take a round trip through the whole pipeline, links included.

    Args:
        forward_s: Of one micro-batch in one stage.
        backward_s: Of one micro-batch in one stage.
        links_s: Link time between neighbouring stages, one entry a pair.
        num_micro_batches: Of one step.

    Reference:
        arXiv 2405.18093: (m / p) (C + p (f + b)) + (p - 1) (f + b).

    Example:
        >>> pipette_s(forward_s=1, backward_s=2, links_s=[2, 2, 2], num_micro_batches=32)
        201.0
    """
    stages = len(links_s) + 1
    both = forward_s + backward_s
    return num_micro_batches / stages * (2 * sum(links_s) + stages * both) + (stages - 1) * both
