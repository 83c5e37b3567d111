"""Streamed backward: the exact gradients of long sequences, one chunk of positions at a time.

A layer keeps its input alone. Its backward pass first finds the keys and values of all positions, then runs the chunks
again from the last to the first: the queries of a chunk meet the keys up to its end. Gradients of earlier keys wait for
the chunk that they belong to, whose own backward pass takes them along; so each chunk passes the layer once. The head
and the loss work in chunks too: their gradients are found in the forward pass, kept, and scaled in the backward pass.

Reference:
    StreamBP, arXiv 2506.03077. Ours differs: keys and values of earlier positions are not projected again in every
    chunk, parameters get their gradients from autograd, once a backward pass, and the caller's own `backward` runs all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from thinwire.errors import refusal

# A layer's output for the positions of a slice, from its input there and the keys and values that it hands over.
LayerPass = Callable[[Tensor, slice, "ChunkKeys"], Tensor]
# Sums of the loss and of what is shown of it over some positions, from the stream (batch, seq, dim) and targets there.
HeadPass = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def parts_of(length: int, chunks: int) -> list[slice]:
    """Return the positions of each chunk, none of them empty.

    Example:
        >>> parts_of(5, 2), parts_of(2, 8)
        ([slice(0, 2, None), slice(2, 5, None)], [slice(0, 1, None), slice(1, 2, None)])
    """
    count = min(chunks, length)
    return [slice(length * n // count, length * (n + 1) // count) for n in range(count)]


def leave_graph() -> None:
    """Have torch.compile leave the caller out of its graph: what a backward pass runs again runs as it is."""
    if torch.compiler.is_compiling():
        raise refusal("a streamed backward cannot be one compiled graph", got="torch.compile with fullgraph=True",
                      allowed="fullgraph=False", remedy="to leave torch.compile out")  # fmt: skip


class ChunkKeys:
    """Keys and values of all positions of a layer, as the cache into which the layer writes those of a chunk.

    It has the methods that a layer of thinwire (`extend`) and of transformers (`update`) call on their caches.

    Attributes:
        place: Positions of the chunk that runs.
        num_calls: Calls since the chunk began; a layer that makes none attends to its own chunk alone.
    """

    def __init__(self, num_positions: int) -> None:
        self.place = slice(0, 0)
        self.num_calls = 0
        self._num_positions = num_positions
        self._ends_layer = False
        self._pair: list[Tensor] = []
        self._grads: list[Tensor] = []

    def begin(self, place: slice, *, ends_layer: bool = False) -> None:
        """Begin with the next chunk; the call for its keys ends the layer by `KeysKnown` if wanted."""
        self.place, self.num_calls, self._ends_layer = place, 0, ends_layer

    def extend(self, _: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take the chunk's keys and values, (batch, heads, positions, head_dim); return all up to its end."""
        self.num_calls += 1
        if not self._pair:
            shape = (*key.shape[:2], self._num_positions)
            self._pair = [one.new_empty(*shape, one.shape[-1]) for one in (key, value)]
        for whole, part in zip(self._pair, (key, value), strict=True):
            whole[:, :, self.place].copy_(part.detach())
        if self._ends_layer:
            raise KeysKnown
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            pair: tuple[Tensor, Tensor] = _KeysSoFar.apply(key, value, self)  # type: ignore[no-untyped-call]
            return pair
        return self.so_far()

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """See `extend`; the layer's number and what else it says are not needed."""
        return self.extend(0, key, value)

    def so_far(self) -> tuple[Tensor, Tensor]:
        """Return keys and values up to the end of the chunk."""
        key, value = (whole[:, :, : self.place.stop].detach() for whole in self._pair)
        return key, value

    def take_grads(self, *grads: Tensor) -> list[Tensor]:
        """Keep the gradients of earlier positions for their chunks, and return those of this chunk, complete."""
        if not self._grads:
            exact = torch.promote_types(grads[0].dtype, torch.float32)
            self._grads = [torch.zeros_like(whole, dtype=exact) for whole in self._pair]
        for whole, part in zip(self._grads, grads, strict=True):
            whole[:, :, : self.place.stop] += part
        return [whole[:, :, self.place].to(part.dtype) for whole, part in zip(self._grads, grads, strict=True)]


class KeysKnown(Exception):  # no error: it ends a layer whose keys are all that is wanted
    """Raised out of a layer as soon as it has handed over its keys and values."""


class _KeysSoFar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, keys: ChunkKeys) -> tuple[Tensor, Tensor]:
        ctx.keys = keys
        return keys.so_far()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        key, value = ctx.keys.take_grads(*grads)
        return key, value, None


def stream_layer(run: LayerPass, stream: Tensor, *, chunks: int, parameters: Sequence[Tensor], name: str) -> Tensor:
    """Return a layer's output for a stream (batch, seq, dim), whose backward pass works chunk by chunk.

    Args:
        run: The layer for one chunk.
        stream: Its input.
        chunks: How many.
        parameters: Those of the layer that are trained.
        name: Of the layer, for an error.
    """
    leave_graph()
    found: Tensor = _StreamedLayer.apply(run, chunks, name, stream, *parameters)  # type: ignore[no-untyped-call]
    return found


class _StreamedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: LayerPass, chunks: int, name: str, stream: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(stream, *parameters)
        ctx.run, ctx.setting = run, _Setting(stream.device)
        ctx.parts, ctx.random = parts_of(stream.shape[1], chunks), []
        keys, found, places = ChunkKeys(stream.shape[1]), None, list(ctx.parts)
        with ctx.setting.again():
            while places:
                place, before = places.pop(0), ctx.setting.random_state()
                keys.begin(place)
                part = run(stream[:, place], place, keys)
                if keys.num_calls != 1:
                    raise refusal(f"{name} does not hand its keys and values to its cache, so a streamed backward "
                                  f"cannot cut it", got=f"{keys.num_calls} calls of update", allowed="1 a layer",
                                  remedy="model.gradient_checkpointing_enable()")  # fmt: skip
                if found is None:
                    found = part.new_empty(*stream.shape[:2], *part.shape[2:])
                    if ctx.setting.is_random_state(before):
                        places = _joined(places)  # nothing is dropped at random, so the cut is free
                    else:
                        ctx.random.append(before)
                elif ctx.random:
                    ctx.random.append(before)
                found[:, place] = part
        assert found is not None
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        stream, *parameters = ctx.saved_tensors
        needs_stream, setting = ctx.needs_input_grad[3], ctx.setting
        sums, keys = GradientSums(parameters), ChunkKeys(stream.shape[1])
        grad_stream = torch.empty_like(stream) if needs_stream else None
        random = dict(zip((place.start for place in ctx.parts), ctx.random, strict=False))
        with setting.again(), setting.random_kept():
            for place in ctx.parts[:-1] if random else _joined(ctx.parts[:-1]):
                setting.set_random_state(random.get(place.start))
                keys.begin(place, ends_layer=True)
                with contextlib.suppress(KeysKnown):
                    ctx.run(stream[:, place], place, keys)
            for place in reversed(ctx.parts):
                setting.set_random_state(random.get(place.start))
                keys.begin(place)
                part = stream[:, place].detach().requires_grad_(needs_stream)
                with torch.enable_grad():
                    found = ctx.run(part, place, keys)
                inputs = [part, *parameters] if needs_stream else parameters
                grads = torch.autograd.grad(found, inputs, grad[:, place], allow_unused=True)
                del found, part
                if grad_stream is not None:
                    grad_stream[:, place] = grads[0]
                sums.add(grads[needs_stream:])
        return None, None, None, grad_stream, *sums.take()


# Output for the positions of a slice, from the slices of some tensors; positions are the second axis of all of them.
RowsPass = Callable[..., Tensor]


def stream_rows(run: RowsPass, inputs: Sequence[Tensor], *, chunks: int, parameters: Sequence[Tensor]) -> Tensor:
    """Return what each position becomes by itself, (batch, seq, ...), with a backward pass chunk by chunk.

    Args:
        run: Gets a slice, and of each input its positions; no position may depend on another one, or on chance.
        inputs: (batch, seq, ...) each; they are all that is kept.
        chunks: How many.
        parameters: Those that `run` uses and that are trained.
    """
    leave_graph()
    found: Tensor = _StreamedRows.apply(run, chunks, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return found


class _StreamedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: RowsPass, chunks: int, num_inputs: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        inputs = tensors[:num_inputs]
        ctx.run, ctx.num_inputs, ctx.setting = run, num_inputs, _Setting(inputs[0].device)
        ctx.parts = parts_of(inputs[0].shape[1], chunks)
        with ctx.setting.again():
            return torch.cat([run(place, *(one[:, place] for one in inputs)) for place in _joined(ctx.parts)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, parameters = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
        needed = ctx.needs_input_grad[3 : 3 + ctx.num_inputs]
        sums = GradientSums(parameters)
        found = [torch.empty_like(one) if needs else None for one, needs in zip(inputs, needed, strict=True)]
        wanted = [one for one in found if one is not None]
        with ctx.setting.again():
            for place in ctx.parts:
                parts = [
                    one[:, place].detach().requires_grad_(needs) for one, needs in zip(inputs, needed, strict=True)
                ]
                with torch.enable_grad():
                    output = ctx.run(place, *parts)
                leaves = [*(part for part in parts if part.requires_grad), *parameters]
                grads = torch.autograd.grad(output, leaves, grad[:, place], allow_unused=True)
                del output
                for whole, part in zip(wanted, grads, strict=False):
                    whole[:, place] = part
                sums.add(grads[len(wanted) :])
        return None, None, None, *found, *sums.take()


# Chunks that a pass without gradients takes at once: together they need about the memory of one with gradients.
_CHUNKS_AT_ONCE = 4


def _joined(places: Sequence[slice]) -> list[slice]:
    groups = [places[n : n + _CHUNKS_AT_ONCE] for n in range(0, len(places), _CHUNKS_AT_ONCE)]
    return [slice(group[0].start, group[-1].stop) for group in groups]


class GradientSums:
    """Sums over chunks of the gradients of parameters, in at least float32; owns what it adds to."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._is_own = [False] * len(parameters)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of a chunk."""
        for number, grad in enumerate(grads):
            before = self._sums[number]
            if grad is None:
                continue
            if before is None:  # autograd may give one tensor to two parameters
                self._sums[number] = grad.to(torch.promote_types(grad.dtype, torch.float32))
                self._is_own[number] = self._sums[number] is not grad
            elif self._is_own[number]:
                before += grad
            else:
                self._sums[number], self._is_own[number] = before + grad, True

    def take(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """Return the sums, times a factor, in the parameters' dtypes; they are gone afterwards."""
        found, self._sums = self._sums, []
        if factor is not None:
            found = [
                None if one is None else (one.mul_(factor) if is_own else one * factor)
                for one, is_own in zip(found, self._is_own, strict=True)
            ]
        return [
            None if one is None else one.to(parameter.dtype)
            for one, parameter in zip(found, self._parameters, strict=True)
        ]


class _Setting:
    """Autocast of a forward pass and states of random generators, so that its backward pass computes the same again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_enabled = torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type)

    def again(self) -> Any:
        # without its cache of weights: what it holds from a pass without gradients would lack them in one with
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._is_enabled, cache_enabled=False)

    def random_kept(self) -> Any:
        return torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else [])

    def random_state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return states + ([torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else [])

    def is_random_state(self, states: Sequence[Tensor]) -> bool:
        return all(map(torch.equal, self.random_state(), states))

    def set_random_state(self, states: Sequence[Tensor] | None) -> None:
        if states is None:
            return
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self._device)


def stream_loss(
    head: HeadPass, stream: Tensor, targets: Tensor, *, chunks: int, parameters: Sequence[Tensor],
    num_targets: Tensor | float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return loss and what is shown of it, sums over all targets divided by `num_targets`, from chunks of positions.

    Args:
        head: The last norm, the head and the loss for one chunk.
        stream: (batch, seq, dim), what the last layer returned.
        targets: (batch, seq); chunks without any target that is 0 or more are left out.
        chunks: How many.
        parameters: Those that the head uses and that are trained.
        num_targets: What the sums are divided by.
    """
    leave_graph()
    needs_grad = torch.is_grad_enabled()
    sums: tuple[Tensor, Tensor] = _StreamedLoss.apply(  # type: ignore[no-untyped-call]
        head, targets, chunks, needs_grad, num_targets, stream, *parameters
    )
    return sums


class _StreamedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: HeadPass, targets: Tensor, chunks: int, needs_grad: bool, num_targets: Any, stream: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        needs_grad = needs_grad and any(ctx.needs_input_grad)
        needs_stream = needs_grad and ctx.needs_input_grad[5]
        totals, sums = [], GradientSums(parameters)
        grad_stream = torch.zeros_like(stream) if needs_stream else None
        parts = parts_of(stream.shape[1], chunks)
        counted = torch.stack([(targets[:, place] >= 0).any() for place in parts]).tolist()
        with _Setting(stream.device).again():
            for place in (place for place, is_counted in zip(parts, counted, strict=True) if is_counted):
                part = stream[:, place].detach().requires_grad_(needs_stream)
                with torch.set_grad_enabled(needs_grad):
                    # of the sum, not the mean: in 16 bits a long sequence's share of a mean would round to zero
                    loss, shown = head(part, targets[:, place])
                totals.append(torch.stack([loss.detach(), shown.detach()]))
                if needs_grad:
                    inputs = [part, *parameters] if needs_stream else list(parameters)
                    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
                    if grad_stream is not None:
                        grad_stream[:, place] = grads[0]
                    sums.add(grads[needs_stream:])
                del loss, part
        zero = torch.zeros(2, dtype=torch.promote_types(stream.dtype, torch.float32), device=stream.device)
        total = torch.stack(totals).sum(0) if totals else zero
        ctx.kept, ctx.num_targets = (grad_stream, sums), num_targets
        loss, shown = (total / num_targets).unbind()
        ctx.mark_non_differentiable(shown)
        return loss, shown

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise refusal("a streamed backward gives the gradients of a loss once", got="a second backward of one loss",
                          allowed="1", remedy="to compute the loss again")  # fmt: skip
        (grad_stream, sums), ctx.kept = ctx.kept, None
        factor = grad / ctx.num_targets
        found = None if grad_stream is None else grad_stream.mul_(factor)
        return None, None, None, None, None, found, *sums.take(factor)


def attend_to_end(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Return causal attention of the last positions of a sequence to all of it, without a mask in memory.

    Args:
        query: (batch, heads, positions, head_dim) of the last positions.
        key: (batch, heads or a divisor of them, all positions, head_dim).
        value: As `key`.
        scale: Of the products; None stands for 1 / sqrt(head_dim).
        dropout: Probability that a weight is dropped.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    count, length = query.shape[2], key.shape[2]
    has_groups = key.shape[1] != query.shape[1]
    if count == length:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=has_groups
        )
    if query.device.type == "cpu" and not dropout and value.shape[-1] == query.shape[-1]:
        found: Tensor = _TwoPieces.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
        return found
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: seconds

    mask: Any = causal_lower_right(count, length)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, dropout_p=dropout, enable_gqa=has_groups
    )


class _TwoPieces(torch.autograd.Function):
    """Attention to all earlier positions, without a mask, merged with causal attention among the last ones.

    The operator of the CPU aligns a causal mask at the upper left, where these queries need it at the lower right.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        start = key.shape[2] - query.shape[2]
        before, before_sums = attend(query, key[:, :, :start], value[:, :, :start], scale=scale)
        own, own_sums = attend(query, key[:, :, start:], value[:, :, start:], 0.0, True, scale=scale)
        log_sums = torch.logaddexp(before_sums, own_sums)
        # each piece's share of all weights
        merged = before.mul_((before_sums - log_sums).exp_().unsqueeze(-1).to(before.dtype))
        merged += own.mul_((own_sums - log_sums).exp_().unsqueeze(-1).to(own.dtype))
        ctx.save_for_backward(query, key, value, merged, log_sums)
        ctx.scale = scale
        found: Tensor = merged
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, merged, log_sums = ctx.saved_tensors
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        start = key.shape[2] - query.shape[2]
        grad_query, grad_key, grad_value = torch.zeros_like(query), torch.empty_like(key), torch.empty_like(value)
        for place, is_causal in ((slice(0, start), False), (slice(start, None), True)):
            grads = differentiate(
                grad, query, key[:, :, place], value[:, :, place], merged, log_sums, 0.0, is_causal, scale=ctx.scale
            )
            grad_query += grads[0]
            grad_key[:, :, place], grad_value[:, :, place] = grads[1:]
        return grad_query, grad_key, grad_value, None


def trained(modules: Sequence[nn.Module | None]) -> list[Tensor]:
    """Return the parameters of modules that are trained, each once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for parameter in module.parameters() if module is not None else ():
            if parameter.requires_grad:
                found[id(parameter)] = parameter
    return list(found.values())
