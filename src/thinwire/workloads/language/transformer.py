"""A Chinchilla-style decoder, as the DiLoCo papers train it: pre-norm, rotary positions, QK norm, z-loss, no biases.

The repeated blocks are in `Transformer.blocks`; the embedding, the last norm and an untied head are outside.
The gradients of the norm and the loss are written out, since autograd keeps a copy of every intermediate value: on a
CPU that costs more than the arithmetic. The tests compare them with autograd's.

Reference:
    Architecture: arXiv 2203.15556, with QK norm and z-loss as in arXiv 2501.18512, section 3. Rotary positions:
    arXiv 2104.09864, equation 34. The MLP is GELU with four times the width, so a block has 12 * dim**2 weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from thinwire.errors import excluded, refusal
from thinwire.experts.balance import balance_loss
from thinwire.experts.layer import ExpertLayer, Over
from thinwire.experts.narrow_rows import low_rank
from thinwire.sequences.linear_attention import LEAST_LOG_GATE, gated_attention
from thinwire.shared_random import derive_seed
from thinwire.workloads.language.chunked_backward import (
    ChunkKeys,
    attend_to_end,
    stream_layer,
    stream_loss,
    stream_rows,
    trained,
)
from thinwire.workloads.language.presets import GATE_RANK, TransformerConfig

if TYPE_CHECKING:
    from thinwire.sequences.sharing import SequenceAttention

RMS_EPSILON = 1e-6


def rms_norm(values: Tensor, gain: Tensor) -> Tensor:
    """Divide each row by its root mean square, then multiply by a learned gain.

    Args:
        values: (..., width), any floating dtype.
        gain: A shape that broadcasts to `values` from the right: (width,), or (2, 1, width) for a gain that differs
            along an axis.

    Returns:
        Same shape and dtype as `values`.

    Example:
        >>> rms_norm(torch.tensor([[3.0, -3.0]]), torch.ones(2))
        tensor([[ 1., -1.]])

    Reference:
        arXiv 1910.07467, equation 4.
    """
    # torch.compile fuses the plain formula better than anything written by hand.
    if torch.compiler.is_compiling() or values.device.type != "cpu":
        return torch.nn.functional.rms_norm(values, values.shape[-1:], eps=RMS_EPSILON) * gain.to(values.dtype)
    normed: Tensor = _RmsNorm.apply(values, gain.to(values.dtype))  # type: ignore[no-untyped-call]
    return normed


def next_token_loss(
    logits: Tensor, targets: Tensor, *, z_loss: float, is_padded: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the mean of `nll + z_loss * log(Z)**2` over all positions, and the mean nll alone.

    The z-loss holds the normaliser log Z near zero, so that logits do not drift in long runs.

    Args:
        logits: (..., vocab_size), any floating dtype; computed in float32, or in float64 where they are.
        targets: (...), int64, each in [0, vocab_size).
        z_loss: Weight of the second term, 1e-4 in the papers.
        is_padded: Whether positions with negative targets are left out; without any position left both are 0.

    Returns:
        Two scalars in that dtype; only the first carries a gradient.

    Reference:
        arXiv 2309.14322, section 3.1.2; weight as in arXiv 2501.18512, section 3.
    """
    flat = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    wanted, weights = targets.reshape(-1), None
    if is_padded:
        weights = (wanted >= 0).to(flat.dtype)
        weights /= weights.sum().clamp(min=1)
        wanted = wanted.clamp(min=0)
    if torch.compiler.is_compiling():
        log_z = flat.logsumexp(-1)
        nll = _mean(log_z - flat.gather(1, wanted.unsqueeze(1)).squeeze(1), weights)
        return nll + z_loss * _mean(log_z.square(), weights), nll.detach()
    both: tuple[Tensor, Tensor] = _NextTokenLoss.apply(flat, wanted, z_loss, weights)  # type: ignore[no-untyped-call]
    return both


def next_token_sums(logits: Tensor, targets: Tensor, *, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return what `next_token_loss` does, times the targets that count."""
    is_padded = bool((targets < 0).any())
    loss, nll = next_token_loss(logits, targets, z_loss=z_loss, is_padded=is_padded)
    count = (targets >= 0).sum() if is_padded else targets.numel()
    return loss * count, nll * count


def _mean(values: Tensor, weights: Tensor | None) -> Tensor:
    return values.mean() if weights is None else values @ weights


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gain: Tensor) -> Tensor:
        exact = torch.promote_types(values.dtype, torch.float32)
        norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=exact)
        scale: Tensor = norm.square_().div_(values.shape[-1]).add_(RMS_EPSILON).rsqrt_().to(values.dtype)
        unit: Tensor = values * scale
        ctx.save_for_backward(unit, scale, gain)
        return unit * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        unit, scale, gain = ctx.saved_tensors
        product = grad * unit
        grad_gain: Tensor = product.sum_to_size(gain.shape)
        along = product.mul_(gain).mean(-1, keepdim=True)
        grad_values: Tensor = (grad * gain).addcmul_(unit, along, value=-1).mul_(scale)
        return grad_values, grad_gain


class _NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, z_loss: float, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        log_z = logits.logsumexp(-1)
        nll = _mean(log_z - logits.gather(1, targets.unsqueeze(1)).squeeze(1), weights)
        ctx.save_for_backward(logits, targets, log_z, weights)
        ctx.z_loss = z_loss
        total = nll + z_loss * _mean(log_z.square(), weights)
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, log_z, weights = ctx.saved_tensors
        share = (grad / len(targets)).expand(len(targets)) if weights is None else grad * weights
        # d log Z / d logits is the softmax; it is made once and turned into the gradient in place.
        softmax = (logits - log_z.unsqueeze(1)).exp_()
        grad_logits = softmax.mul_((share * (1 + 2 * ctx.z_loss * log_z)).unsqueeze(1))
        grad_logits.scatter_add_(1, targets.unsqueeze(1), -share.unsqueeze(1))
        return grad_logits, None, None, None


ROTARY_BASE = 10_000.0
# Causal attention of queries to keys and values, (batch, heads, seq, head_dim) each.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RmsNorm(nn.Module):
    """A norm over the last axis with a learned gain (see `rms_norm`).

    The gain is a vector also where it has several parts, so that optimizers know it from a matrix. It then differs
    along the third axis from the right.
    """

    def __init__(self, width: int, *, parts: int = 1) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(parts * width))
        self._shape = (width,) if parts == 1 else (parts, 1, width)

    def forward(self, values: Tensor) -> Tensor:
        """Normalise `values` (..., width), or (..., parts, any, width)."""
        return rms_norm(values, self.gain.view(self._shape))


class KeyValueCache:
    """Keys and values of the tokens that a decoder has read, by block, so that one more token costs one position.

    Attributes:
        num_tokens: Tokens read so far.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.states: dict[int, Tensor] = {}  # of linear attention, (batch, heads, d_k, d_v)
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def extend(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a block's new keys and values, (batch, heads, seq, head_dim) each; return all of them."""
        if block == len(self._pairs):
            self._pairs.append((key, value))
        else:
            earlier_key, earlier_value = self._pairs[block]
            self._pairs[block] = torch.cat((earlier_key, key), dim=2), torch.cat((earlier_value, value), dim=2)
        return self._pairs[block]


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return what each query attends to, (batch, heads, seq, head_dim); earlier keys of a cache may come first."""
    if 1 < query.shape[2] < key.shape[2]:
        return attend_to_end(query, key, value)
    # a single new token may attend to all earlier ones, so it needs no mask
    return F.scaled_dot_product_attention(query, key, value, is_causal=key.shape[2] == query.shape[2])


# Fused attention of each device; what it returns starts with the output and the log-sum-exp.
_ATTENTION_OPERATORS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
}


def _attention_policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operator in _ATTENTION_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_contexts(*, keeps_attention: bool) -> Callable[[], Any]:
    """Return the `context_fn` of a checkpoint: one that keeps attention's output and log-sum-exp, or nothing.

    Attention that is put together from other operators, such as eager attention, is computed again either way.

    Reference:
        arXiv 2310.03294, section 3.3: attention's own backward pass needs both, and its forward pass grows with the
        square of the length.
    """
    return partial(create_selective_checkpoint_contexts, _attention_policy) if keeps_attention else noop_context_fn


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        # One product for queries, keys and values: a third of the launches, and a matrix wide enough to fill a core.
        self.query_key_value = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.query_key_norm = RmsNorm(config.head_dim, parts=2)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.attend: Attend = causal_attention

    def forward(
        self, stream: Tensor, rotation: tuple[Tensor, Tensor],
        cache: tuple[KeyValueCache | ChunkKeys, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend within a stream (batch, seq, dim), and to what a cache holds under this block's number.

        The rotation has cosines and sines, (seq, 1, 1, head_dim / 2) each.
        """
        query, key, value = self.project(stream, rotation)
        if cache is not None:
            key, value = cache[0].extend(cache[1], key, value)
        attended = self.attend(query, key, value)
        merged: Tensor = self.out(attended.transpose(1, 2).reshape(*stream.shape[:2], -1))
        return merged

    def project(self, stream: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a stream, (batch, heads, seq, head_dim) each."""
        mixed = self.query_key_value(stream).view(*stream.shape[:2], 3, self.heads, -1)
        # Split, not indexed: the gradient of an index is a full tensor of zeros with a part written in.
        query_key, value = mixed.split((2, 1), dim=2)
        query, key = rotate(self.query_key_norm(query_key), rotation).transpose(1, 3).unbind(2)
        return query, key, value.squeeze(2).transpose(1, 2)


# Divides the gates' logarithms, so that a state first forgets slowly; arXiv 2312.06635, section 4.4.
_GATE_TEMPERATURE = 16


class LinearAttention(Attention):
    """Gated linear attention: a state (d_k, d_v) a head in place of all earlier keys; its output is normalised."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.gate_down = nn.Linear(config.dim, GATE_RANK, bias=False)
        self.gate_up = nn.Linear(GATE_RANK, config.dim, bias=False)
        self.output_norm = RmsNorm(config.head_dim)
        self.scan: Callable[..., Tensor] | None = None  # where ranks share sequences

    def forward(
        self, stream: Tensor, rotation: tuple[Tensor, Tensor],
        cache: tuple[KeyValueCache | ChunkKeys, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """See `Attention`; a cache holds a state."""
        rows = [*self.project(stream, rotation), self.gate_up(self.gate_down(stream))]
        # quotients of products of gates: never in 16 bits
        query, key, value, gates = (one.to(torch.promote_types(one.dtype, torch.float32)) for one in rows)
        logs = F.logsigmoid(gates).div(_GATE_TEMPERATURE).clamp(min=LEAST_LOG_GATE)
        logs = logs.view(*stream.shape[:2], self.heads, -1).transpose(1, 2)
        query = query / math.sqrt(query.shape[-1])
        with torch.autocast(stream.device.type, enabled=False):
            if self.scan is None:
                attended, state, sums = gated_attention(query, key, value, logs)
                if isinstance(cache, tuple) and isinstance(cache[0], KeyValueCache):
                    states, block = cache[0].states, cache[1]
                    if block in states:
                        attended = attended + (query * sums.exp()) @ states[block]
                        state = state + sums[:, :, -1].exp().unsqueeze(-1) * states[block]
                    states[block] = state
            else:
                attended = self.scan(query, key, value, logs)
        merged: Tensor = self.out(self.output_norm(attended).transpose(1, 2).flatten(2).to(stream.dtype))
        return merged


def _check_softmax(config: TransformerConfig, what: str) -> None:
    """Refuse what linear attention was not made for."""
    if config.is_linear:
        raise excluded("linear attention", what, why="it is made for keys, not for a state",
                       remedy="a model without linear- in its name")  # fmt: skip


class Block(nn.Module):
    """One layer: attention, then the MLP, each behind a norm and added to the residual stream.

    Attributes:
        chunks: Parts of the sequence in which the backward pass works (see `streamed`); 0 for the usual one.
        is_shared: Whether other ranks hold other positions of the sequence.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.chunks = 0
        self.is_shared = False
        self.attention_norm = RmsNorm(config.dim)
        self.attention = LinearAttention(config) if config.is_linear else Attention(config)
        self.mlp_norm = RmsNorm(config.dim)
        self.experts: ExpertLayer | None = None
        if config.num_experts:
            shape = low_rank(ratio=config.expert_dim / config.dim) if config.expert_dim else None
            self.experts = ExpertLayer(config.dim, config.mlp_dim, config.num_experts, config.top_k, dispatch=shape)
        else:
            self.up = nn.Linear(config.dim, config.mlp_dim, bias=False)
            self.down = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(
        self, stream: Tensor, rotation: tuple[Tensor, Tensor], cache: tuple[KeyValueCache, int] | None = None
    ) -> Tensor:
        """Add this layer's part to the stream (batch, seq, dim); `cache` as for `Attention`."""
        if self.chunks and cache is None and torch.is_grad_enabled():
            if self.is_shared:
                return self._stream_shared(stream, rotation)

            def run(part: Tensor, place: slice, keys: ChunkKeys) -> Tensor:
                return self._add(part, (rotation[0][place], rotation[1][place]), (keys, 0))

            return stream_layer(run, stream, chunks=self.chunks, parameters=trained([self]), name="a block")
        return self._add(stream, rotation, cache)

    def _add(
        self, stream: Tensor, rotation: tuple[Tensor, Tensor], cache: tuple[KeyValueCache | ChunkKeys, int] | None
    ) -> Tensor:
        return self._add_mlp(stream + self.attention(self.attention_norm(stream), rotation, cache))

    def _stream_shared(self, stream: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Work in chunks before and after the attention, which runs once: no key crosses again for the backward pass.

        Kept are the stream, and what the attention keeps of this rank's queries, keys, values and output.
        """
        own = self.attention

        def before(place: slice, part: Tensor) -> Tensor:
            rows = own.project(self.attention_norm(part), (rotation[0][place], rotation[1][place]))
            return torch.stack([one.transpose(1, 2) for one in rows], 2)

        def after(_: slice, part: Tensor, attended: Tensor) -> Tensor:
            return self._add_mlp(part + own.out(attended.flatten(2)))

        parameters = trained([self.attention_norm, own.query_key_value, own.query_key_norm])
        rows = stream_rows(before, [stream], chunks=self.chunks, parameters=parameters)
        query, key, value = (one.transpose(1, 2) for one in rows.unbind(2))
        # copied, so that the attention does not keep keys and values with it once more
        attended = own.attend(query.contiguous(), key, value).transpose(1, 2)
        parameters = trained([own.out, self.mlp_norm, self.up, self.down])
        return stream_rows(after, [stream, attended], chunks=self.chunks, parameters=parameters)

    def _add_mlp(self, stream: Tensor) -> Tensor:
        normed = self.mlp_norm(stream)
        added: Tensor = self.down(F.gelu(self.up(normed))) if self.experts is None else self.experts(normed)
        return stream + added


class Transformer(nn.Module):
    """The decoder; build it with `build_transformer`, which starts it from a seed.

    Attributes:
        config: Its shape.
        blocks: The repeated layers.
        recompute: Whether the backward pass computes a block's activations again in place of keeping them.
        recomputed_blocks: How many blocks, from the first on, are computed again where not all are.
        keeps_attention: Whether blocks that are computed again keep what attention returned.
        balance_over: Whose choices balance experts in the loss, see `experts.balance_loss`.
        balance_ranks: Ranks of `balance_over`; None for those that share the experts.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = self.keeps_attention = False
        self.recomputed_blocks = 0
        self.shared: SequenceAttention | None = None  # where the model works on some positions of each sequence
        self._chunks = 0
        self.balance_over: Over = "ranks"
        self.balance_ranks: Any = None
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RmsNorm(config.dim)
        self.head = None if config.tied_head else nn.Linear(config.dim, config.vocab_size, bias=False)
        for name in ("cosines", "sines"):
            self.register_buffer(name, torch.empty(config.max_seq_len, 1, 1, config.head_dim // 2), persistent=False)
        if not self.embedding.weight.is_meta:
            self._fill_rotation()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self.config.max_seq_len

    def stream_backward(self, chunks: int) -> None:
        """Compute the backward pass in chunks of positions; see `streamed`."""
        _check_softmax(self.config, "a streamed backward")
        if self.config.num_experts:
            raise excluded("a mixture of experts", "a streamed backward", why="it was not tried",
                           remedy="to leave --stream-backward out")  # fmt: skip
        self._chunks = chunks
        for block in self.blocks:
            block.chunks = chunks  # type: ignore[assignment]

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, is_padded: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits of every next token, (batch, seq, vocab_size), in the dtype of the weights, or of autocast.

        With targets it returns what `loss` does.

        Raises:
            ValueError: The sequence of tokens, (batch, seq) int64, is longer than `max_seq_len`.
        """
        if targets is None:
            return self._logits(self._stream(tokens, None))
        if not self._chunks:
            loss, nll = next_token_loss(
                self._logits(self._stream(tokens, None)), targets, z_loss=self.config.z_loss, is_padded=is_padded
            )
            if self.config.num_experts and torch.is_grad_enabled():
                own = targets >= 0 if is_padded else None
                balance = balance_loss(self, over=self.balance_over, group=self.balance_ranks, counted=own)
                loss = loss + self.config.balance * balance.to(loss.dtype)
            return loss, nll
        counted = (targets >= 0).sum().clamp(min=1) if is_padded else targets.numel()

        def head(part: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
            return next_token_sums(self._logits(part), wanted, z_loss=self.config.z_loss)

        return stream_loss(
            head, self._stream(tokens, None), targets, chunks=self._chunks, num_targets=counted,
            parameters=trained([self.norm, self.embedding if self.head is None else self.head]),
        )  # fmt: skip

    def decode(self, tokens: Tensor, cache: KeyValueCache | None = None) -> tuple[Tensor, KeyValueCache]:
        """Read more tokens of a text, and return the logits of the one that follows, (batch, vocab_size).

        Tokens are (batch, seq) int64: any number of first ones, then one at a time with the cache of the call before.

        Raises:
            ValueError: The text is too long, or several tokens follow a cache.

        Example:
            >>> model = build_transformer(TransformerConfig(vocab_size=16, dim=8, layers=2, heads=2), seed=1)
            >>> logits, cache = model.decode(torch.tensor([[3, 1, 4]]))
            >>> logits, cache = model.decode(torch.tensor([[1]]), cache)
            >>> logits.shape, cache.num_tokens
            (torch.Size([1, 16]), 4)
        """
        cache = KeyValueCache() if cache is None else cache
        if cache.num_tokens and tokens.shape[1] != 1:
            raise ValueError(f"after the first call, tokens are read one at a time; got {tokens.shape[1]}")
        logits = self._logits(self._stream(tokens, cache))[:, -1]
        cache.num_tokens += tokens.shape[1]
        return logits, cache

    def _stream(self, tokens: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Return what the last block does."""
        stream: Tensor
        begin = 0 if cache is None else cache.num_tokens
        end = begin + tokens.shape[1] * (1 if self.shared is None else self.shared.plan.num_ranks)
        if end > self.config.max_seq_len:
            raise ValueError(f"a sequence holds at most {self.config.max_seq_len} tokens (max_seq_len), got {end}")
        stream = self.embedding(tokens)
        positions = _own_positions(self.shared, range(begin, end))
        rotation = (self.cosines[positions].to(stream.dtype), self.sines[positions].to(stream.dtype))
        contexts = recompute_contexts(keeps_attention=self.keeps_attention)
        for number, block in enumerate(self.blocks):
            is_again = self.recompute or number < self.recomputed_blocks
            if is_again and cache is None and torch.is_grad_enabled():
                stream = checkpoint(block, stream, rotation, None, use_reentrant=False, context_fn=contexts)
            else:
                stream = block(stream, rotation, None if cache is None else (cache, number))
        return stream

    def _logits(self, stream: Tensor) -> Tensor:
        head = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(self.norm(stream), head)

    def loss(self, tokens: Tensor, targets: Tensor, *, is_padded: bool = False) -> tuple[Tensor, Tensor]:
        """Return the loss to train on (with z-loss) and the mean negative log-likelihood in nats, both float32.

        Tokens and the targets that follow each are (batch, seq) int64; with `is_padded` negative targets count nothing.
        """
        found: tuple[Tensor, Tensor] = self(tokens, targets, is_padded=is_padded)
        return found

    def share_sequences(self, attend: SequenceAttention) -> None:
        """Prepare the decoder, before it is cut, to work on this rank's positions of each sequence.

        Raises:
            ValueError: The attention was made for other heads, or it gives ranks parts that a state does not pass.
        """
        if self.config.is_linear and attend.plan.policy != "ring":
            raise excluded("linear attention", f"the policy {attend.plan.policy}",
                           why="a state goes from one rank to the next", remedy='policy="ring"')  # fmt: skip
        if attend.plan.heads != self.blocks[0].attention.heads:  # type: ignore[union-attr]
            raise refusal("shared attention was made for another model", got=f"{attend.plan.heads} heads",
                          allowed=f"{self.config.heads}", remedy=f"heads={self.config.heads}")  # fmt: skip
        self.shared = attend
        for number, block in enumerate(self.blocks):
            if isinstance(block.attention, LinearAttention):
                block.attention.scan = attend.scan
            block.attention.attend = partial(attend, layer=number)  # type: ignore[union-attr]
            block.is_shared = True  # type: ignore[assignment]

    def _fill_rotation(self) -> None:
        device = self.embedding.weight.device
        pairs = self.config.head_dim // 2
        # Angles are rounded to float32, as in transformers: in float64, logits after 1,024 positions differ by 4e-5.
        rates = 1.0 / ROTARY_BASE ** (torch.arange(pairs, device=device, dtype=torch.float32) / pairs)
        angles = torch.outer(torch.arange(self.config.max_seq_len, device=device, dtype=torch.float32), rates)
        self.cosines = angles.cos()[:, None, None, :]
        self.sines = angles.sin()[:, None, None, :]


class TransformerStage(nn.Module):
    """Neighbouring layers of a decoder, as a chunk of a pipeline; parameters keep the names that they have there.

    The first chunk has the embedding, the last one the last norm and the head; one that holds an end alone has no
    layers. The backward pass computes the first `num_recomputed` blocks again.

    Attributes:
        tied_weight: In the last chunk of a decoder with a tied head, the embedding of the first chunk, which is no
            parameter here; its gradient belongs to the embedding.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(
        self, model: Transformer, layers: range, *, has_embedding: bool, has_head: bool, num_recomputed: int = 0
    ) -> None:
        super().__init__()
        self.num_recomputed = num_recomputed
        self._contexts = recompute_contexts(keeps_attention=model.keeps_attention)
        self.embedding = model.embedding if has_embedding else None
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in layers})
        self.norm = model.norm if has_head else None
        self.head = model.head if has_head else None
        self.tied_weight: Tensor | None = None
        self.shared = model.shared
        self.register_buffer("cosines", model.cosines, persistent=False)
        self.register_buffer("sines", model.sines, persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Return what the next chunk takes, (batch, seq, dim), or the logits, from that or (batch, seq) tokens."""
        stream = self.hidden(values)
        return stream if self.norm is None else self.logits(stream)

    def hidden(self, values: Tensor) -> Tensor:
        """Return what leaves the chunk's layers."""
        seq = values.shape[1] * (1 if self.shared is None else self.shared.plan.num_ranks)
        stream = values if self.embedding is None else self.embedding(values)
        positions = _own_positions(self.shared, range(seq))
        rotation = (self.cosines[positions].to(stream.dtype), self.sines[positions].to(stream.dtype))
        for number, block in enumerate(self.blocks.values()):
            if number < self.num_recomputed and torch.is_grad_enabled():
                stream = checkpoint(block, stream, rotation, None, use_reentrant=False, context_fn=self._contexts)
            else:
                stream = block(stream, rotation, None)
        return stream

    def logits(self, stream: Tensor) -> Tensor:
        """Return the logits from what leaves the last layer; a chunk with both ends ties its own embedding."""
        assert self.norm is not None, "the chunk has the head"
        tied = self.tied_weight if self.embedding is None else self.embedding.weight
        weight = tied if self.head is None else self.head.weight
        assert weight is not None, "the embedding comes before a pass"
        return F.linear(self.norm(stream), weight)


def _own_positions(shared: SequenceAttention | None, positions: range) -> slice | Tensor:
    """Return which of the positions a decoder works on."""
    return slice(positions.start, positions.stop) if shared is None else shared.own_positions(len(positions))


def split_heads(model: Transformer, parts: int) -> None:
    """Prepare each layer for tensor parallelism: a rank's rows of the first product become those of its own heads.

    The rows of queries, keys and values are sorted by part, so that each part of `query_key_value.weight` is what a
    layer with so many heads fewer has. `join_heads` sorts them back. Afterwards the layers work on their part only.
    """
    config = model.config
    _check_softmax(config, "tensor parallelism")
    if config.num_experts:
        raise excluded("a mixture of experts", "tensor parallelism", why="ranks share whole experts",
                       remedy="--ep in place of --tp")  # fmt: skip
    if config.heads % parts or config.mlp_dim % parts:
        raise refusal(
            "heads or MLP of the model are not divided by --tp", got=f"tp {parts}",
            allowed=f"divisors of {math.gcd(config.heads, config.mlp_dim)}", remedy=f"--tp {math.gcd(config.heads, 2)}",
        )  # fmt: skip
    for block in model.blocks:
        attention = block.attention
        attention.heads = config.heads // parts  # type: ignore[union-attr]
        weight: Any = attention.query_key_value.weight  # type: ignore[union-attr]
        with torch.no_grad():
            weight.copy_(_sorted_rows(weight, 3, parts).clone())


def join_heads(name: str, weight: Tensor, *, parts: int) -> Tensor:
    """Return a whole parameter by its name as an unsplit model has it; see `split_heads`."""
    return _sorted_rows(weight, parts, 3) if name.endswith("query_key_value.weight") else weight


def _sorted_rows(weight: Tensor, outer: int, inner: int) -> Tensor:
    """Exchange the two slowest of three indices of the rows."""
    rows = weight.shape[0]
    cut = weight.reshape(outer, inner, rows // (outer * inner), -1)
    return cut.transpose(0, 1).reshape(weight.shape)


def rotate(values: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + width / 2) of the last axis by the angle of its position.

    Args:
        values: (batch, seq, 2, heads, width).
        rotation: Cosines and sines, (seq, 1, 1, width / 2) each.

    Returns:
        Same shape.
    """
    cosines, sines = rotation
    first, second = values.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def build_transformer(
    config: TransformerConfig, *, seed: int = 0, device: torch.device | str = "cpu",
    weights: Mapping[str, Tensor] | None = None,
) -> Transformer:  # fmt: skip
    """Build a decoder whose weights follow from the seed alone.

    Every matrix is normal with deviation 1 / sqrt(fan-in), those that write into the residual stream smaller by
    1 / sqrt(2 * layers); the embedding has deviation 1 / sqrt(dim). Each tensor has a random stream of its own, drawn
    on the CPU in float32, so a GPU starts from the same bits, and torch's global generator is left as it was.

    Args:
        config: The shape.
        seed: Any integer.
        device: Where the weights are put; `meta` gives shapes without memory.
        weights: Weights by name, instead of those of the seed.

    Raises:
        ValueError: A weight is missing, too many, or of another shape; names it.

    Example:
        >>> config = TransformerConfig(vocab_size=16, dim=8, layers=2, heads=2, max_seq_len=4)
        >>> model = build_transformer(config, seed=1)
        >>> model(torch.zeros(3, 4, dtype=torch.int64)).shape
        torch.Size([3, 4, 16])
    """
    with torch.device("meta"), _Unfilled():
        model = Transformer(config)
    if torch.device(device).type == "meta":
        return model
    # `to_empty` asks the meta device for tensors alike, and torch imports its compiler's symbols to answer: a second
    model._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    )
    model._fill_rotation()
    if weights is not None:
        own = {name: parameter.shape for name, parameter in model.named_parameters()}
        for name in sorted(own.keys() | weights.keys()):
            there = weights[name].shape if name in weights else None
            if there != own.get(name):
                raise ValueError(f"{name} has the shape {there and tuple(there)}, this model's {own.get(name)}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = (
                _initial_value(name, parameter.shape, config=config, seed=seed) if weights is None else weights[name]
            )
            parameter.copy_(value)
    return model


class _Unfilled(TorchFunctionMode):
    """Leaves new tensors as they are; on the meta device, torch would import its compiler to fill one: seconds."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "__module__", None) == nn.init.__name__:
            return named["tensor"]
        return func(*args, **named)


def _initial_value(name: str, shape: torch.Size, *, config: TransformerConfig, seed: int) -> Tensor:
    if name.endswith("gain"):
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(derive_seed(seed, "weights", name))
    deviation = 1 / math.sqrt(shape[-1])
    if name.endswith((".out.weight", ".down.weight", ".experts.down")):
        deviation /= math.sqrt(2 * config.layers)
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)
