"""Training task of a plan: the model, and how much of it is to be trained."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from thinwire.planning.loss_penalty import optimal_batch_tokens
from thinwire.sync.fragments import find_blocks, parameters_by_name

# Bytes of a parameter on the device: itself, its gradient and Adam's two moments, in float32.
BYTES_PER_PARAMETER = 16
# Values of a block that wait for the backward pass, for a token and unit of width: 34 bytes of 16 bits each where
# attention keeps no matrix (arXiv 2205.05198, equation 1, without its second term).
_UNITS_PER_TOKEN = 17
# A streamed backward has keys, values and their gradients of one layer at a time, and the gradients at its two ends.
_STREAMED_UNITS = 6
# A layer whose sequences ranks share keeps its input, and what its attention needs: queries, keys, values and output.
_SHARED_UNITS = 5
# Logits, their gradient and what the loss keeps, in float32.
_BYTES_PER_LOGIT = 3 * 4


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """A model and how much of it is to be trained.

    Raises:
        ValueError: A number is below 1, or both batches are given.
    """

    name: str  # as the command line takes it
    model: nn.Module  # on the meta device: shapes alone
    tokens: float  # the budget, of all replicas together
    seq_len: int  # tokens of a sequence
    batch_size: int | None = None  # sequences of a step of one replica; None where `global_batch` says it
    # tokens of a step of all replicas together. Without both, it is the best published one for the size and the number
    # of replicas; see `optimal_batch_tokens`
    global_batch: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("tokens", "seq_len", "batch_size", "global_batch"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < float("inf"):
                raise ValueError(f"{name} must be at least 1 and finite, got {value}")
        if self.batch_size is not None and self.global_batch is not None:
            raise ValueError(
                f"give batch_size (sequences a replica) or global_batch (tokens of all together), got "
                f"{self.batch_size} and {self.global_batch}"
            )

    @cached_property
    def num_parameters(self) -> int:
        """Elements that are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def sequences(self, num_replicas: int) -> int:
        """Return the sequences of a step of each of so many replicas: at least one.

        Example:
            >>> work = TrainingTask(name="a", model=nn.Linear(2, 2), tokens=1e6, seq_len=128, global_batch=4096)
            >>> work.sequences(4), work.num_steps(4), work.sequences(64)
            (8, 245, 1)
        """
        if self.batch_size is not None:
            return self.batch_size
        together = self.global_batch or optimal_batch_tokens(
            num_parameters=self.num_parameters, num_replicas=num_replicas
        )
        return max(1, round(together / num_replicas / self.seq_len))

    def step_tokens(self, num_replicas: int) -> int:
        """Return the tokens of a step of each of so many replicas."""
        return self.sequences(num_replicas) * self.seq_len

    def num_steps(self, num_replicas: int) -> int:
        """Return the inner steps that so many replicas need for all tokens."""
        return max(1, -(-round(self.tokens) // (num_replicas * self.step_tokens(num_replicas))))

    def memory_bytes(self, *, micro_batch: int, recompute: bool = False) -> float:
        """Return about how much memory of its device a replica needs.

        Parameters, gradients and Adam's moments in float32, and an estimate of the activations of one forward pass.
        The copies that a method keeps beside them are in the host's memory.

        Args:
            micro_batch: Sequences in a forward pass.
            recompute: Whether the backward pass computes a block's activations again.
        """
        activations = activation_bytes(self.model, tokens=micro_batch * self.seq_len, recompute=recompute)
        return BYTES_PER_PARAMETER * self.num_parameters + activations

    def must_recompute(self, *, memory_bytes: float) -> bool:
        """Return whether not even one sequence fits a device's memory while its activations are kept."""
        return self.memory_bytes(micro_batch=1) > memory_bytes

    def micro_batch(self, num_replicas: int, *, memory_bytes: float) -> int:
        """Return how many sequences of a step fit into one forward pass: all, or as often halved as needed.

        Activations are computed again where one sequence would not fit otherwise; see `must_recompute`.

        Args:
            num_replicas: How many share a global batch.
            memory_bytes: Of the device; what does not even fit with one sequence is not refused here.
        """
        sequences, recompute = self.sequences(num_replicas), self.must_recompute(memory_bytes=memory_bytes)
        while sequences > 1 and self.memory_bytes(micro_batch=sequences, recompute=recompute) > memory_bytes:
            sequences = -(-sequences // 2)
        return sequences


def activation_bytes(
    model: nn.Module, *, tokens: int, bytes_per_value: int = 4, recompute: int = 0, chunks: int = 1,
    is_shared: bool = False,
) -> float:  # fmt: skip
    """Estimate the memory of what a forward pass keeps for the backward pass, and of the logits.

    Args:
        model: A language model; shapes alone are enough.
        tokens: In one forward pass.
        bytes_per_value: 4 for float32, 2 under autocast; logits are float32 either way.
        recompute: Values of a token and width that each block keeps, where the rest is there for one block at a time: 1
            for its input, 2 with what attention returned; 0 for a block that keeps all.
        chunks: Of a streamed backward, which recomputes too; 1 for none.
        is_shared: Whether ranks share a sequence; a streamed backward then keeps what its attention needs.
    """
    blocks, by_name = find_blocks(model).blocks, parameters_by_name(model)
    sides = Counter(
        side for names in blocks for name in names if by_name[name].dim() == 2 for side in by_name[name].shape
    )
    width = sides.most_common(1)[0][0] if sides else 0  # the side that most of the blocks' matrices have
    units = recompute * len(blocks) + _UNITS_PER_TOKEN if recompute else len(blocks) * _UNITS_PER_TOKEN
    if chunks > 1:
        units = len(blocks) * (_SHARED_UNITS if is_shared else 1) + _STREAMED_UNITS + -(-_UNITS_PER_TOKEN // chunks)
    logits = tokens / chunks * getattr(model, "vocab_size", 0) * _BYTES_PER_LOGIT
    return units * bytes_per_value * tokens * int(width) + logits
