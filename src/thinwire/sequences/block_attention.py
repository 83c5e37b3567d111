"""Executor of block tables: attention whose queries, keys and values lie on several ranks, forward and backward.

Partial results of a row are merged by their log-sum-exp. Keys and values travel as wide as they are, in one message.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire import compat
from thinwire.errors import ThinwireError
from thinwire.sequences.block_tables import AttentionBlock, BlockMessage, BlockTable, SequencePlan
from thinwire.sequences.peers import to_heads, to_positions
from thinwire.transport.group_peers import RankPeers, Wait

# Rows of scores that are in memory at once: (batch, heads, rows, keys).
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMask:
    """Keys that the queries of a block may meet.

    Attributes:
        is_causal: Both are the same part: no key after its query.
        rows: Number of each query's document, (batch, rows); None where a sequence is one document.
        columns: Number of each key's document, (batch, columns).
    """

    is_causal: bool
    rows: Tensor | None = None
    columns: Tensor | None = None

    def apply(self, scores: Tensor, first: int) -> Tensor:
        """Put minus infinity where a key is not met; scores are (batch, kv heads, groups, rows, columns)."""
        if self.is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first + 1)
            scores = scores.masked_fill(hidden, -math.inf)
        if self.rows is not None and self.columns is not None:
            rows, columns = self.rows[:, first : first + scores.shape[-2]], self.columns[:, : scores.shape[-1]]
            others = rows[:, None, None, :, None] != columns[:, None, None, None, :]
            scores = scores.masked_fill(others, -math.inf)
        return scores


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Return the output (batch, heads, rows, head_dim) and log-sum-exp (batch, heads, rows) of a block.

    They are float32, or float64 where the inputs are. A row without keys has output 0 and log-sum-exp minus infinity.
    """
    if _is_for_flash(query, mask):
        return compat.flash_attention(query, key, value, scale=scale, is_causal=mask.is_causal)
    key, value = (one.to(_exact(one)) for one in (key, value))
    outputs, log_sums = [], []
    for first, rows in _row_chunks(query, key.shape[1]):
        width = first + rows.shape[3] if mask.is_causal else key.shape[2]
        scores = _scores(rows, key[:, :, :width], scale=scale, mask=mask, first=first)
        peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        weights = (scores - peak).exp_()
        total = weights.sum(-1, keepdim=True)
        found = _by_group(weights, value[:, :, :width]) / total.clamp(min=torch.finfo(scores.dtype).tiny)
        outputs.append(found.flatten(1, 2))
        log_sums.append((peak + total.log()).squeeze(-1).flatten(1, 2))
    return torch.cat(outputs, 2), torch.cat(log_sums, 2)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sums: Tensor, *, scale: float,
    mask: BlockMask,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of a block's query, key and value; output and log-sum-exp are those of whole rows."""
    if _is_for_flash(query, mask):
        return compat.flash_attention_backward(
            grad, query, key, value, output, log_sums, scale=scale, is_causal=mask.is_causal
        )
    exact, heads = _exact(key), key.shape[1]
    key, value = key.to(exact), value.to(exact)
    grad_key, grad_value, grad_queries = torch.zeros_like(key), torch.zeros_like(value), []
    along = (grad.to(exact) * output.to(exact)).sum(-1, keepdim=True)
    chunks = zip(*(_row_chunks(one, heads) for one in (query, grad, log_sums.unsqueeze(-1), along)), strict=True)
    for (first, rows), (_, grads), (_, sums), (_, delta) in chunks:
        width = first + rows.shape[3] if mask.is_causal else key.shape[2]
        keys, values = key[:, :, :width], value[:, :, :width]
        weights = (_scores(rows, keys, scale=scale, mask=mask, first=first) - sums).exp_()
        grad_scores = (_by_group(grads, values.mT) - delta).mul_(weights).mul_(scale)
        grad_queries.append(_by_group(grad_scores, keys).flatten(1, 2))
        grad_value[:, :, :width] += weights.flatten(2, 3).mT @ grads.flatten(2, 3)
        grad_key[:, :, :width] += grad_scores.flatten(2, 3).mT @ rows.flatten(2, 3)
    return torch.cat(grad_queries, 2), grad_key, grad_value


def _is_for_flash(query: Tensor, mask: BlockMask) -> bool:
    """Return whether torch's flash operator takes a block; others are computed as on a CPU."""
    is_short = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_short and mask.rows is None and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _row_chunks(tensor: Tensor, kv_heads: int) -> list[tuple[int, Tensor]]:
    """Return rows (batch, heads, rows, width) as (batch, kv heads, groups, some rows, width), with their first one."""
    batch, heads, count, width = tensor.shape
    grouped = tensor.to(_exact(tensor)).reshape(batch, kv_heads, heads // kv_heads, count, width)
    return [(n * _ROWS_AT_ONCE, chunk) for n, chunk in enumerate(torch.split(grouped, _ROWS_AT_ONCE, 3))]


def _by_group(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply rows (batch, kv heads, groups, rows, n) by a matrix (batch, kv heads, n, m)."""
    product = rows.flatten(2, 3) @ matrix
    return product.view(*rows.shape[:4], product.shape[-1])


def _scores(rows: Tensor, keys: Tensor, *, scale: float, mask: BlockMask, first: int) -> Tensor:
    return mask.apply(_by_group(rows * scale, keys.mT), first)


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two outputs and log-sum-exps of the same rows over other keys."""
    total = torch.logaddexp(one[1], other[1])
    base = total.clamp(min=torch.finfo(total.dtype).min)  # rows that have met no key yet
    first, second = ((part[1] - base).exp().unsqueeze(-1) for part in (one, other))
    return one[0] * first + other[0] * second, total


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCall:
    """Setting of a call of shared attention, beside its tensors.

    Attributes:
        plan: Who computes what.
        table: That of the plan, without blocks that no query needs.
        peers: The ranks of the plan.
        scale: Of the scores.
        documents: Number of each position's document, (batch, all positions), or None.
        layer: Of the model, for errors; None where unknown.
    """

    plan: SequencePlan
    table: BlockTable
    peers: RankPeers
    scale: float
    documents: Tensor | None = None
    layer: int | None = None

    @property
    def group(self) -> int:
        """Rank of the table that this rank stands for."""
        return self.peers.rank // self.plan.group_size

    @property
    def own_parts(self) -> list[int]:
        """Parts of the table that this rank's group holds."""
        return [part for part, owner in enumerate(self.table.owners) if owner == self.group]

    @property
    def members(self) -> range:
        """Ranks with which this one exchanges heads, itself included."""
        first = self.group * self.plan.group_size
        return range(first, first + self.plan.group_size)

    def mask(self, block: AttentionBlock) -> BlockMask:
        """Return the mask of a block."""
        is_causal = block.row == block.column
        if self.documents is None:
            return BlockMask(is_causal=is_causal)
        parts = self.documents.chunk(len(self.table.owners), 1)
        return BlockMask(is_causal=is_causal, rows=parts[block.row], columns=parts[block.column])

    def check(self, log_sums: Tensor) -> None:
        """Raise where a log-sum-exp is no number."""
        if torch.isnan(log_sums).any():
            where = "" if self.layer is None else f", layer {self.layer}"
            raise ThinwireError(
                f"attention's log-sum-exp is NaN on rank {self.peers.rank} of {self.plan.num_ranks}{where}; queries or "
                "keys were NaN before; try a lower learning rate, or --autocast none"
            )


class SharedAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys and values of all ranks of a call."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: SharedCall) -> Tensor:
        if call.plan.group_size > 1:
            query, key, value = to_heads((query, key, value), call.plan, call.peers, call.members)
        work = _ForwardPass(call, query, key, value)
        _run_steps(call, call.table.forward, work)
        output = torch.cat([work.found[part][0] for part in call.own_parts], 2).to(query.dtype)
        log_sums = torch.cat([work.found[part][1] for part in call.own_parts], 2)
        call.check(log_sums)
        ctx.call, ctx.kept = call, sorted(work.kept)
        ctx.save_for_backward(query, output, log_sums, *(work.pairs[part] for part in ctx.kept))
        if call.plan.group_size > 1:
            (output,) = to_positions((output,), call.plan, call.peers, call.members)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call: SharedCall = ctx.call
        query, output, log_sums, *kept = ctx.saved_tensors
        if call.plan.group_size > 1:
            (grad,) = to_heads((grad,), call.plan, call.peers, call.members)
        work = _BackwardPass(call, (query, output, grad, log_sums), dict(zip(ctx.kept, kept, strict=True)))
        _run_steps(call, call.table.backward, work)
        grad_query = torch.cat([work.grad_rows[part] for part in call.own_parts], 2)
        grad_pairs = torch.cat([work.grad_pairs[part] for part in call.own_parts], 3)
        found: tuple[Tensor, ...] = tuple(one.to(query.dtype) for one in (grad_query, *grad_pairs))
        if call.plan.group_size > 1:
            found = to_positions(found, call.plan, call.peers, call.members)
        return (*found, None)


class _Pass(Protocol):
    """Tensors of a pass on one rank: what messages carry, and what blocks are computed from."""

    def outgoing(self, message: BlockMessage) -> Sequence[Tensor]: ...

    def buffers(self, message: BlockMessage) -> Sequence[Tensor]: ...

    def incoming(self, message: BlockMessage, tensors: Sequence[Tensor]) -> None: ...

    def compute(self, block: AttentionBlock) -> None: ...

    def drop(self, part: int) -> None: ...


class _ForwardPass:
    def __init__(self, call: SharedCall, query: Tensor, key: Tensor, value: Tensor) -> None:
        parts, count = call.own_parts, len(call.own_parts)
        self.call, self.dtype = call, query.dtype
        self.queries = dict(zip(parts, query.chunk(count, 2), strict=True))
        # keys and values of each part here, (2, batch, kv heads, positions, head_dim)
        self.pairs = dict(zip(parts, torch.stack((key, value)).chunk(count, 3), strict=True))
        self.kept = {one.part for one in call.table.forward if one.target == call.group and call.table.is_kept(one)}
        self.kept |= set(parts)
        self.found: dict[int, tuple[Tensor, Tensor]] = {}  # merged output and log-sum-exp of rows
        self._like = self.queries[parts[0]], self.pairs[parts[0]]

    def outgoing(self, message: BlockMessage) -> Sequence[Tensor]:
        if message.kind == "result":
            output, log_sums = self.found.pop(message.part)
            return output.to(self.dtype), log_sums
        return ((self.pairs if message.kind == "keys" else self.queries)[message.part].contiguous(),)

    def buffers(self, message: BlockMessage) -> Sequence[Tensor]:
        rows, pair = self._like
        if message.kind == "keys":
            return (pair.new_empty(pair.shape),)
        if message.kind == "queries":
            return (rows.new_empty(rows.shape),)
        return rows.new_empty(rows.shape), rows.new_empty(rows.shape[:3], dtype=_exact(rows))

    def incoming(self, message: BlockMessage, tensors: Sequence[Tensor]) -> None:
        if message.kind == "result":
            self._add(message.part, (tensors[0].to(tensors[1].dtype), tensors[1]))
        else:
            (self.pairs if message.kind == "keys" else self.queries)[message.part] = tensors[0]

    def compute(self, block: AttentionBlock) -> None:
        key, value = self.pairs[block.column]
        mask = self.call.mask(block)
        self._add(block.row, attend(self.queries[block.row], key, value, scale=self.call.scale, mask=mask))

    def drop(self, part: int) -> None:
        if part not in self.kept:
            del self.pairs[part]

    def _add(self, part: int, partial: tuple[Tensor, Tensor]) -> None:
        self.found[part] = merged(self.found[part], partial) if part in self.found else partial


class _BackwardPass:
    def __init__(self, call: SharedCall, rows: Sequence[Tensor], pairs: dict[int, Tensor]) -> None:
        parts = call.own_parts
        self.call, self.pairs, self.dtype = call, pairs, rows[0].dtype
        # query, output, gradient of the output and log-sum-exp of each part here
        cut = zip(*(one.chunk(len(parts), 2) for one in rows), strict=True)
        self.rows: dict[int, Sequence[Tensor]] = dict(zip(parts, cut, strict=True))
        self.grad_rows: dict[int, Tensor] = {}
        self.grad_pairs: dict[int, Tensor] = {}
        self._like = self.rows[parts[0]], pairs[parts[0]]

    def outgoing(self, message: BlockMessage) -> Sequence[Tensor]:
        if message.kind == "keys":
            return (self.pairs[message.part].contiguous(),)
        if message.kind == "rows":
            return [one.contiguous() for one in self.rows[message.part]]
        gradients = self.grad_rows if message.kind == "row-gradient" else self.grad_pairs
        return (gradients.pop(message.part).to(self.dtype),)

    def buffers(self, message: BlockMessage) -> Sequence[Tensor]:
        rows, pair = self._like
        like = {"rows": rows, "row-gradient": rows[:1]}.get(message.kind, (pair,))
        return [one.new_empty(one.shape) for one in like]

    def incoming(self, message: BlockMessage, tensors: Sequence[Tensor]) -> None:
        if message.kind == "keys":
            self.pairs[message.part] = tensors[0]
        elif message.kind == "rows":
            self.rows[message.part] = tensors
        else:
            into = self.grad_rows if message.kind == "row-gradient" else self.grad_pairs
            _accumulate(into, message.part, tensors[0].to(_exact(tensors[0])))

    def compute(self, block: AttentionBlock) -> None:
        query, output, grad, log_sums = self.rows[block.row]
        key, value = self.pairs[block.column]
        mask = self.call.mask(block)
        grads = attend_backward(grad, query, key, value, output, log_sums, scale=self.call.scale, mask=mask)
        _accumulate(self.grad_rows, block.row, grads[0])
        _accumulate(self.grad_pairs, block.column, torch.stack(grads[1:]))

    def drop(self, part: int) -> None:
        if part not in self.call.own_parts:
            del self.pairs[part]


def _accumulate(into: dict[int, Tensor], part: int, added: Tensor) -> None:
    into[part] = into[part] + added if part in into else added


def _run_steps(call: SharedCall, messages: Sequence[BlockMessage], work: _Pass) -> None:
    """Run this rank's blocks step by step, while messages of the next steps are under way.

    Messages that are posted and needed at the same steps are one batch, on both sides: nccl matches batches.
    """
    batches, waiting = defaultdict(list), defaultdict[int, list[Any]](list)
    for message in (one for one in messages if call.group in (one.source, one.target)):
        batches[message.posted, message.step].append(message)
    last_use = _last_uses(call, messages)
    sends = []
    for step in range(1 + max([call.table.num_steps, *(needed for _, needed in batches)])):
        for wait, arrived in waiting.pop(step, ()):
            wait()
            for message, tensors in arrived:
                work.incoming(message, tensors)
        for posted, needed in sorted(key for key in batches if key[0] == step + 1):
            received, sent, arriving = _post(call, batches[posted, needed], work)
            waiting[needed].append((received, arriving))
            sends.append(sent)
        for block in (one for one in call.table.blocks if (one.rank, one.step) == (call.group, step)):
            work.compute(block)
        for part in (part for part, last in last_use.items() if last == step):
            work.drop(part)
    for wait in sends:
        wait()


def _last_uses(call: SharedCall, messages: Sequence[BlockMessage]) -> dict[int, int]:
    """Return the last step in which this rank uses or hands on the keys of each part."""
    uses = [(block.column, block.step) for block in call.table.blocks if block.rank == call.group]
    uses += [(one.part, one.posted) for one in messages if one.kind == "keys" and one.source == call.group]
    found: dict[int, int] = {}
    for part, step in uses:
        found[part] = max(step, found.get(part, 0))
    return found


def _post(call: SharedCall, messages: Sequence[BlockMessage], work: _Pass) -> tuple[Wait, Wait, list[Any]]:
    """Start a batch of messages; return waits for arrivals and for sends, and the arriving messages' tensors."""
    size, place = call.plan.group_size, call.peers.rank % call.plan.group_size
    arriving = [(message, work.buffers(message)) for message in messages if message.target == call.group]
    sends = [
        (message.target * size + place, tensor)
        for message in messages if message.source == call.group
        for tensor in work.outgoing(message)
    ]  # fmt: skip
    receives = [(message.source * size + place, tensor) for message, tensors in arriving for tensor in tensors]
    return *call.peers.exchange(sends, receives), arriving
