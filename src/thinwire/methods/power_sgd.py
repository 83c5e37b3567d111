"""PowerSGD (arXiv 1905.13727, Algorithms 1 and 2): gradients as products of two thin matrices, with error feedback.

    M = g + e                            for every matrix, on each replica
    P = mean M Q;  orthonormalise P      first exchange
    Q = mean M^T P                       second exchange; the next step starts from this Q
    g = P Q^T;  e = M - P Q^T

The mean g goes to the inner optimizer, as an all-reduced gradient would. Biases and norms travel whole. What we
changed: the paper's optimizer is SGD with momentum after the mean; here it is whatever the inner optimizer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.averaging.exchange import BoundExchange, Shapes, cheapest
from thinwire.averaging.message_pattern import RoundTraffic, TwoPhaseMessages
from thinwire.averaging.round_context import Average, RoundContext, Steps
from thinwire.codecs import float32
from thinwire.methods.registry import About, register
from thinwire.shared_random import derive_seed
from thinwire.sync.method import Method
from thinwire.sync.schedule import EveryStep
from thinwire.sync.updates import InnerStep
from thinwire.sync.views import Gradient
from thinwire.tagged_state import own, same

ABOUT = About(
    paper="arXiv 1905.13727",
    exchanged="two thin factors of each gradient matrix, at every step",
    bits="64 r (rows + columns) / (rows columns) (M - 1) / M",
    memory="1 (residual), and the thin factors",
    restrictions="replicas with the same kind of processor; no GradScaler",
)


@register(ABOUT)
def power_sgd(*, rank: int = 4, seed: int = 0) -> Method:
    """Average gradients at every step as matrices of low rank.

    Args:
        rank: r, of the factors.
        seed: Of the first factors.

    Raises:
        ValueError: The rank is below 1.

    Example:
        >>> power_sgd(rank=2).exchanges(2)[0].rank
        2
    """
    factors = LowRank(rank=rank, seed=seed)
    return Method(
        name="power-sgd",
        schedule=EveryStep(num_channels=2),
        view=Gradient(is_split=True),
        exchange=lambda num_replicas: (factors, cheapest(float32(), num_replicas=num_replicas)),
        update=lambda num_replicas: InnerStep(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Average matrices as products of thin ones, with error feedback and a warm start.

    Args:
        rank: r, columns of the thin matrices, at least 1.
        seed: Of the first Q.

    Raises:
        ValueError: The rank is below 1.
    """

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}; 1 to 4 is usual")

    def bind(self, shapes: Sequence[Shapes], *, replica: int, num_replicas: int) -> BoundExchange:
        stages = []
        for fragment, tensors in enumerate(shapes):
            matrices = _matrices(tensors, rank=self.rank)
            seeds = [derive_seed(self.seed, "right", fragment, number) for number, _ in enumerate(_thin(matrices))]
            right = [
                torch.randn(matrix.num_columns, self.rank, generator=torch.Generator().manual_seed(seed))
                for matrix, seed in zip(_thin(matrices), seeds, strict=True)
            ]
            state = ThinFactors(torch.zeros(sum(shape.numel() for shape in tensors)), right)
            stages.append({"factors": _Stage(matrices, state)})
        return BoundExchange(self, stages)

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """Return the upper bound, the bytes of sending everything dense; the actual bytes depend on the shapes."""
        return cheapest(float32(), num_replicas=num_replicas).sent_bytes(numel, num_replicas=num_replicas)

    def round(self, stages: Mapping[str, _Stage], tensor: torch.Tensor, context: RoundContext) -> Steps:
        matrices, state = stages["factors"].matrices, stages["factors"].state
        inner = cheapest(float32(), num_replicas=context.transport.num_replicas)
        thin, dense = _thin(matrices), [matrix for matrix in matrices if not matrix.is_thin]
        whole = state.residual.to(tensor.device).add_(tensor)
        # P = M Q of this replica; tensors that a product would not make smaller travel beside it, whole
        own = [m.of(whole) @ q.to(whole.device) for m, q in zip(thin, state.right, strict=True)]
        first = yield from inner.steps(_joined([*own, *(m.of(whole) for m in dense)], like=whole), context)
        *left, last = _cut(first.mean, [part.shape for part in own])
        # every replica orthonormalises the same mean, so P agrees without being sent again
        left = [orthonormal(p) for p in left]
        own = [m.of(whole).T @ p for m, p in zip(thin, left, strict=True)]
        # phases 0 and 1 belong to the first exchange; the reference hash went with it
        second = replace(context, first_phase=2, reference_hash=0, seed=derive_seed(context.seed, "second"))
        found = yield from inner.steps(_joined(own, like=whole), second)
        *right, _ = _cut(found.mean, [part.shape for part in own])
        mean = torch.empty_like(whole)
        for matrix, p, q in zip(thin, left, right, strict=True):
            matrix.of(mean).copy_(p @ q.T)
        for matrix, part in zip(dense, _cut(last, [m.of(whole).shape for m in dense]), strict=False):
            matrix.of(mean).copy_(part)
            matrix.of(whole).copy_(part)  # nothing was left behind
        # warm start: the next power iteration begins with this Q; the residual is E = M - P Q^T (Algorithm 1)
        state.right = [q.clone() for q in right]
        state.residual = whole.sub_(mean)
        return Average(mean=mean, reference_hashes=first.reference_hashes)

    def sent_bytes_of(self, shapes: Shapes, *, num_replicas: int) -> int:
        """Return the payload bytes that one replica sends for tensors of these shapes.

        Example:
            >>> LowRank(rank=2).sent_bytes_of([torch.Size([100, 50]), torch.Size([7])], num_replicas=2)
            1228
        """
        inner = cheapest(float32(), num_replicas=num_replicas)
        matrices = _matrices(shapes, rank=self.rank)
        left = sum(m.num_rows * (self.rank if m.is_thin else m.num_columns) for m in matrices)
        right = sum(m.num_columns * self.rank for m in _thin(matrices))
        return sum(inner.sent_bytes(numel, num_replicas=num_replicas) for numel in (left, right))

    def traffic(self, shapes: Shapes, *, num_members: int) -> RoundTraffic:
        """Return what both factors are, each as the cheaper exchange sends it.

        Among more than two replicas the factors take four stages; the pattern has two, so it leaves out two latencies.
        """
        inner = cheapest(float32(), num_replicas=num_members).traffic(shapes, num_members=num_members)
        return RoundTraffic(
            pattern=TwoPhaseMessages(),
            sent_bytes=self.sent_bytes_of(shapes, num_replicas=num_members),
            num_messages=2 * inner.num_messages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """Position of one tensor in its vector, and its shape as a matrix."""

    start: int
    num_rows: int
    num_columns: int
    is_thin: bool

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        stop = self.start + self.num_rows * self.num_columns
        return flat[self.start : stop].view(self.num_rows, self.num_columns)


@dataclass(slots=True)
class ThinFactors:
    """Memory of a fragment's rounds.

    Attributes:
        residual: What this replica has not sent yet. Another's is still in its own next round: taken over, it would
            count twice.
        right: The Q of each thin matrix, the same on all replicas: each starts the next round from it.
    """

    residual: torch.Tensor = own("what was not sent yet")
    right: list[torch.Tensor] = same("thin matrix, as wide as the method's rank, number")

    @property
    def shared(self) -> list[torch.Tensor]:
        return self.right


@dataclass(frozen=True, slots=True)
class _Stage:
    matrices: list[_Matrix]
    state: ThinFactors


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Make a matrix's columns orthonormal, one after the other (modified Gram-Schmidt, in float64).

    Args:
        matrix: float32, `(rows, columns)`; a column without anything of its own becomes zero.

    Example:
        >>> orthonormal(torch.tensor([[3.0, 1.0], [4.0, 1.0]])).tolist()
        [[0.6000000238418579, 0.800000011920929], [0.800000011920929, -0.6000000238418579]]
    """
    found = matrix.double()  # in float32, the columns of a nearly singular matrix would not come out orthogonal
    for number in range(found.shape[1]):
        column = found[:, number]
        before = column.norm()
        for earlier in range(number):
            column -= (found[:, earlier] @ column) * found[:, earlier]
        length = column.norm()
        # what is left of a dependent column is rounding error, and normalising it would make noise a direction
        is_own = bool(length > 1e-6 * before)
        column.copy_(column / length if is_own else torch.zeros_like(column))
    return found.float()


def _matrices(shapes: Shapes, *, rank: int) -> list[_Matrix]:
    found, start = [], 0
    for shape in shapes:
        num_rows = shape[0] if len(shape) else 1
        num_columns = shape.numel() // num_rows if num_rows else 0
        # elements of both factors against those of the matrix
        is_thin = rank * (num_rows + num_columns) < num_rows * num_columns
        found.append(_Matrix(start=start, num_rows=num_rows, num_columns=num_columns, is_thin=is_thin))
        start += shape.numel()
    return found


def _thin(matrices: Sequence[_Matrix]) -> list[_Matrix]:
    return [matrix for matrix in matrices if matrix.is_thin]


def _joined(parts: Sequence[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)


def _cut(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Cut a vector into tensors of these shapes, and what is left."""
    sizes = [shape.numel() for shape in shapes]
    *parts, rest = torch.split(flat, [*sizes, flat.numel() - sum(sizes)])
    return [*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)), rest]
