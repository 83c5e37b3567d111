"""Memory of one device of a site: states under ZeRO, activations, and a margin for fragmentation."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import refusal

# Mixed precision with Adam, bytes a parameter (arXiv 1910.02054, section 3.1): a 16-bit weight and gradient; a 32-bit
# copy and two moments, which make K = 12.
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 2, 12
# Bytes a layer, token and unit of width that wait for the backward pass; of these, what stands outside the products
# that tensor parallelism shares; and bytes a token, head and key of the attention matrices (arXiv 2205.05198,
# equations 1 and 2).
UNIT_BYTES, _OUTSIDE_BYTES, _MATRIX_BYTES = 34, 10, 5
# A recomputed layer keeps its 16-bit input alone.
_INPUT_BYTES = 2
# Logits, their gradient and what the loss keeps, in float32.
_LOGIT_BYTES = 12
# ZeRO-3 holds the layer at work and the next one, which is fetched meanwhile.
_GATHERED_LAYERS = 2
# Share of the tensors' bytes that the allocator holds without using. Assumed: not measured for any device.
FRAGMENTATION = 0.1


def state_bytes(num_parameters: float, *, zero_stage: int, shards: int) -> float:
    """Return the bytes of weights, gradients and Adam's states on one device.

    Args:
        num_parameters: Of the part of the model on this device before data-parallel sharding.
        zero_stage: 0: all whole; 1: optimizer states in shards; 2: gradients too; 3: weights too.
        shards: Devices that share the states.

    Raises:
        ValueError: There is no such stage, or a number is below 1.

    Example:
        >>> [round(state_bytes(7.5e9, zero_stage=stage, shards=64) / 1e9, 1) for stage in range(4)]
        [120.0, 31.4, 16.6, 1.9]
    """
    if zero_stage not in (0, 1, 2, 3):
        raise refusal("there is no such ZeRO stage", got=zero_stage, allowed="0 to 3", remedy="3")
    if shards < 1:
        raise refusal("shards is too small", got=shards, allowed="1 or more", remedy="1")
    parts = (OPTIMIZER_BYTES, GRADIENT_BYTES, WEIGHT_BYTES)
    sharded = sum(parts[:zero_stage])
    return num_parameters * (sum(parts) - sharded + sharded / shards)


def layer_activation_bytes(
    *, tokens: int, seq_len: int, width: int, heads: int, tensor_parallel: int = 1, context_parallel: int = 1,
    flash_attention: bool = True, is_recomputed: bool = False, sequence_parallel: bool = False,
    unit_bytes: float = UNIT_BYTES,
) -> float:  # fmt: skip
    """Return what one layer keeps of one micro-batch for the backward pass: (10 + 24/t) s b h + 5 a s^2 b / t.

    With sequence parallelism it is (34 s b h + 5 a s^2 b) / t (arXiv 2205.05198, equations 2 and 4).

    Args:
        tokens: Of the micro-batch: s b.
        seq_len: Tokens of a sequence: s.
        width: Of the residual stream: h.
        heads: Attention heads: a.
        tensor_parallel: Devices that share each layer: t.
        context_parallel: Devices that share each sequence.
        flash_attention: Whether attention keeps no matrix, which removes the second term.
        is_recomputed: Whether the layer keeps its input alone: 2 s b h.
        sequence_parallel: Whether tensor-parallel devices share what stands outside their products too.
        unit_bytes: The 34 of the formula, which holds for a GPT block with dropout.

    Example:
        >>> layer_activation_bytes(tokens=2048, seq_len=2048, width=12288, heads=96, tensor_parallel=8,
        ...                        flash_attention=False, sequence_parallel=True) / 2**20
        342.0
    """
    own = tokens / context_parallel
    outside = tensor_parallel if sequence_parallel else 1
    if is_recomputed:
        return _INPUT_BYTES * own * width / outside
    matrices = 0.0 if flash_attention else _MATRIX_BYTES * heads * own * seq_len
    shared = ((unit_bytes - _OUTSIDE_BYTES) * own * width + matrices) / tensor_parallel
    return shared + _OUTSIDE_BYTES * own * width / outside


def streamed_bytes(*, tokens: int, width: int, layers: int, chunks: int, unit_bytes: float = UNIT_BYTES) -> float:
    """Return what a streamed backward keeps: each layer's input, and of one layer keys, values and all gradients.

    Example:
        >>> usual = 32 * layer_activation_bytes(tokens=65536, seq_len=65536, width=4096, heads=32, is_recomputed=True)
        >>> round(streamed_bytes(tokens=65536, width=4096, layers=32, chunks=8) / usual, 2)
        1.25
    """
    # keys and values with their gradients, and the gradients at both ends of the layer
    return tokens * width * (_INPUT_BYTES * (layers + 6) + unit_bytes / chunks)


def logit_bytes(*, tokens: int, vocab_size: int, tensor_parallel: int = 1, context_parallel: int = 1) -> float:
    """Return the bytes of one micro-batch's logits on a device of the last stage."""
    return _LOGIT_BYTES * tokens * vocab_size / (tensor_parallel * context_parallel)


def one_f_one_b_in_flight(rank: int, *, num_stages: int, num_micro_batches: int) -> int:
    """Return how many micro-batches a rank of a 1F1B pipeline holds at most: min(m, p - r).

    Example:
        >>> [one_f_one_b_in_flight(rank, num_stages=4, num_micro_batches=32) for rank in range(4)]
        [4, 3, 2, 1]
    """
    return min(num_micro_batches, num_stages - rank)


def interleaved_in_flight(rank: int, *, num_stages: int, num_micro_batches: int, interleave: int) -> int:
    """Return how many pairs of a micro-batch and a chunk a rank of an interleaved pipeline holds at most."""
    warm_up = 2 * (num_stages - rank - 1) + (interleave - 1) * num_stages
    return min(interleave * num_micro_batches, warm_up + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one device, by kind."""

    states_bytes: float  # weights, gradients and optimizer states
    gathered_bytes: float  # layers that ZeRO-3 has fetched
    activations_bytes: float  # what all micro-batches in flight keep
    logits_bytes: float  # of one micro-batch; 0 before the last stage

    @property
    def peak_bytes(self) -> float:
        """All of them, and the margin for fragmentation."""
        tensors = self.states_bytes + self.gathered_bytes + self.activations_bytes + self.logits_bytes
        return tensors * (1 + FRAGMENTATION)


def gathered_bytes(layer_parameters: float, *, zero_stage: int) -> float:
    """Return what ZeRO-3 holds of whole layers: weights and gradients of the layer at work and of the next one."""
    return _GATHERED_LAYERS * (WEIGHT_BYTES + GRADIENT_BYTES) * layer_parameters if zero_stage == 3 else 0.0
