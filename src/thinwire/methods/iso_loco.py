"""IsoLoCo: Streaming DiLoCo with an isotropic outer step on the hidden matrices (arXiv 2607.03011).

Rounds are those of Streaming DiLoCo (`thinwire.methods.streaming_diloco`): fragments, overlap, blend, 4-bit payloads.
The outer step differs. With Delta the mean pseudo-gradient of one matrix of r rows and c columns,

    Delta = U S V^T                                            singular values S = diag(s_1 .. s_min(r,c))
    Delta' = mean(s) U V^T                                     all singular values become their mean
    theta = theta - OuterOpt(Delta')                           Nesterov, lr 1.8 or 2.4, momentum 0.7

Averaging over replicas shrinks the directions in which they disagree; the flat spectrum restores them. Embeddings, the
head, norms and biases take the outer step of DiLoCo.

The orthogonal factor U V^T comes from a Newton-Schulz iteration in place of a singular value decomposition, and
mean(s) = <Delta, U V^T> / min(r, c). Replicas must agree bit for bit, while the order of a matrix product's additions
differs between processors and numbers of threads. So the iteration runs in fixed point inside float64: entries are
multiples of 2^-24, norms stay below 8, and every sum of products fits the 53 bits of the mantissa. All sums are
exact, in any order. GPUs whose float64 is slow take the same sums from products of 8-bit integers.

What we changed: the paper's program flattens every matrix, and takes one rate and momentum for all parameters; here
the embedding and the head keep DiLoCo's step, and the momentum is 0.7 instead of 0.8: our measurements prefer both
(docs/benchmarks.md). Singular values below
about 1/3000 of the Frobenius norm are raised, but not to the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from thinwire.codecs import Codec
from thinwire.methods.diloco import default_outer_lr
from thinwire.methods.registry import About, register
from thinwire.methods.streaming_diloco import streaming_diloco
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import Nesterov, OuterOptimizer, PlainSGD
from thinwire.sync.updates import OuterStep
from thinwire.sync.views import MatrixSpan

ABOUT = About(
    paper="arXiv 2607.03011",
    exchanged="pseudo-gradients in E3M0, a fragment at a time, while training goes on",
    bits="4.13 (M - 1) / H; above 4 replicas 8.25 (M - 1) / M / H",
    memory="2 (global value, outer momentum)",
    plan_codecs=("bfloat16", "e3m0"),
)

# Bits behind the binary point. Sums of products of two such numbers need 48 bits and what the row norms take: 3 bits.
_FRACTION_BITS = 24
# Muon's quintic (arXiv 2505.23725, section 2) on multiples of 2^-10, so that products with coefficients are exact too.
# Its slope of 3.44 at zero raises small singular values fast; it ends between 0.68 and 1.13.
_FAST = (3527 / 1024, -4890 / 1024, 2080 / 1024)
# Taylor's quintic for 1/sqrt: it converges to 1 from there, with the cube of the distance in each step.
_EXACT = (15 / 8, -10 / 8, 3 / 8)
_ITERATION = (_FAST,) * 6 + (_EXACT,) * 3
# CUDA devices with float64 at a half or a third of the float32 rate; all others have a 32nd or 64th.
_FULL_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
_LEAST_WITH_INT8 = (7, 5)  # tensor cores for 8-bit integers
_LIMBS = 4  # of 8 bits: all multiples of 2^-24 below 127
_TILE = 32  # the products of 8-bit integers take sides that are multiples of 8, at least 24
_NORM_BITS = 15  # of the entries that the Frobenius norm is taken of: row sums of their squares are exact
# Elements up to which matrices of one shape are flattened together: each operation on a small one costs its call alone.
_MOST_TOGETHER = 2**18


@register(ABOUT)
def iso_loco(
    *,
    sync_interval: int = 30,
    overlap_steps: int | Sequence[int] = 1,
    blend: float = 0.0,
    codec: Codec | None = None,
    error_feedback: float | None = None,
    exchange: Literal["auto", "all-gather", "two-phase"] = "auto",
    fragment_order: Literal["strided", "sequential"] = "strided",
    layers_per_fragment: int = 3,
    num_fragments: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float = 0.7,
    rest_lr: float | None = None,
    rest_momentum: float = 0.9,
) -> Method:
    """Exchange one fragment at a time and flatten the spectrum of each hidden matrix's outer step.

    Args:
        sync_interval: H: inner steps between two exchanges of the same fragment, at least 1.
        overlap_steps: tau: inner steps from launch to apply, 0 <= tau < H; one number, or one a replica.
        blend: alpha: weight of the local value at apply, in [0, 1).
        codec: The pseudo-gradients' code; E3M0 by default.
        error_feedback: Share of what the code dropped that the next round adds, at most 1; None for no residual.
        exchange: How payloads travel; `"auto"` takes the cheaper one for the number of replicas.
        fragment_order: How blocks are dealt out.
        layers_per_fragment: Blocks a fragment.
        num_fragments: P, the fragment of embedding and rest among them; overrides `layers_per_fragment`.
        outer_lr: Nesterov's learning rate of the hidden matrices; by default `default_hidden_lr`.
        outer_momentum: Their momentum; 0 for none.
        rest_lr: Nesterov's learning rate of all other parameters; by default `default_outer_lr`.
        rest_momentum: Their momentum; 0 for none.

    Raises:
        ValueError: An argument is out of its range; names the value, the limit and the remedy.

    Example:
        >>> method = iso_loco(overlap_steps=3)
        >>> method.name, method.update(2).blend
        ('iso-loco', 0.0)
    """
    streaming = streaming_diloco(
        sync_interval=sync_interval, overlap_steps=overlap_steps, blend=blend, codec=codec,
        error_feedback=error_feedback, exchange=exchange, fragment_order=fragment_order,
        layers_per_fragment=layers_per_fragment, num_fragments=num_fragments,
    )  # fmt: skip

    def update(num_replicas: int) -> OuterStep:
        plain = streaming.update(num_replicas)
        assert isinstance(plain, OuterStep)
        rest = default_outer_lr(num_replicas) if rest_lr is None else rest_lr
        hidden = default_hidden_lr(num_replicas) if outer_lr is None else outer_lr
        optimizer = Isotropic(hidden=_step_of(hidden, outer_momentum), rest=_step_of(rest, rest_momentum))
        return replace(plain, optimizer=optimizer)

    update(1)  # a bad argument is refused here, not when training starts
    return replace(streaming, name="iso-loco", update=update)


def default_hidden_lr(num_replicas: int) -> float:
    """Return the outer learning rate of the hidden matrices, at momentum 0.7.

    The paper's 1.8, and 2.4 from 8 replicas on: measured on 0.49 million parameters (docs/benchmarks.md).

    Example:
        >>> default_hidden_lr(4), default_hidden_lr(8)
        (1.8, 2.4)
    """
    return 1.8 if num_replicas < 8 else 2.4


def _step_of(lr: float, momentum: float) -> OuterOptimizer:
    return PlainSGD(lr=lr) if momentum == 0 else Nesterov(lr=lr, momentum=momentum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Isotropic:
    """Outer step that flattens the spectrum of each hidden matrix's pseudo-gradient.

    Args:
        hidden: Steps with the flattened pseudo-gradients of the hidden matrices.
        rest: Steps with all other pseudo-gradients as they are.
        matrices: Places of the hidden matrices in a fragment's vector, in their order; see `with_matrices`.
    """

    hidden: OuterOptimizer
    rest: OuterOptimizer
    matrices: tuple[MatrixSpan, ...] = ()

    @property
    def has_momentum(self) -> bool:
        return self.hidden.has_momentum or self.rest.has_momentum

    def with_matrices(self, matrices: Sequence[MatrixSpan]) -> Isotropic:
        return replace(self, matrices=tuple(matrices))

    def matrix_operations(self, matrices: Sequence[MatrixSpan]) -> float:
        """Return the float64 operations of the matrix products of a step on these matrices.

        Example:
            >>> weight = torch.empty(100, 10)
            >>> span = MatrixSpan(start=0, shape=weight.shape, parameter=weight)
            >>> Isotropic(hidden=PlainSGD(), rest=PlainSGD()).matrix_operations([span])
            378000.0
        """
        # an iteration multiplies (r, c) by (c, r), (r, r) by (r, r) and (r, r) by (r, c), where r is the smaller side
        sides = [sorted(matrix.parameter.shape) for matrix in matrices]
        return float(len(_ITERATION) * sum(4 * r * r * c + 2 * r**3 for r, c in sides))

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        groups: list[list[MatrixSpan]] = []
        latest: dict[torch.Size, list[MatrixSpan]] = {}  # by shape
        for matrix in self.matrices:
            shape, group = matrix.shape, latest.get(matrix.shape, [])
            # a shard is gathered from all ranks, in one order, and only one whole matrix is held at a time
            is_whole = shape == matrix.parameter.shape
            if group and is_whole and (len(group) + 1) * shape.numel() <= _MOST_TOGETHER:
                group.append(matrix)
                continue
            groups.append([matrix])
            if is_whole:
                latest[shape] = groups[-1]
        for group in groups:
            flattened = flatten_spectra([matrix.gather(pseudo_gradient) for matrix in group])
            for matrix, flat in zip(group, flattened, strict=True):
                matrix.scatter(flat, pseudo_gradient)
        end = 0
        for matrix in self.matrices:
            _step_on(self.rest, slice(end, matrix.start), value, pseudo_gradient, momentum)
            _step_on(self.hidden, slice(matrix.start, matrix.end), value, pseudo_gradient, momentum)
            end = matrix.end
        _step_on(self.rest, slice(end, value.numel()), value, pseudo_gradient, momentum)


def _step_on(
    optimizer: OuterOptimizer, span: slice, value: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor | None
) -> None:
    if span.stop > span.start:
        optimizer.step(value[span], gradient[span], None if momentum is None else momentum[span])


def flatten_spectrum(matrix: torch.Tensor) -> torch.Tensor:
    """Set all singular values of a matrix to their mean.

    Args:
        matrix: float32, (r, c).

    Returns:
        float32, (r, c): `U V^T mean(s)`, the same bits on every processor; zeros for a matrix of zeros.

    Example:
        >>> flatten_spectrum(torch.diag(torch.tensor([3.0, 1.0]))).round(decimals=4)
        tensor([[2., 0.],
                [0., 2.]])
    """
    return flatten_spectra([matrix])[0]


def flatten_spectra(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Set all singular values of each matrix to their mean; see `flatten_spectrum`.

    Args:
        matrices: float32, (r, c), of one shape, on one device; at least one.
    """
    device, (rows, columns) = matrices[0].device, matrices[0].shape
    # MPS has no float64
    exact = torch.stack([matrix.to("cpu" if device.type == "mps" else device, torch.float64) for matrix in matrices])
    norms = _norm_bounds(exact)
    if not all(norm != 0 and math.isfinite(norm) for norm in norms):
        if len(matrices) > 1:  # each by itself, since some are left as they are
            return [flatten_spectrum(matrix) for matrix in matrices]
        return [matrices[0].clone()]
    inverses = torch.tensor([1 / norm for norm in norms], dtype=torch.float64, device=exact.device).view(-1, 1, 1)
    is_tall = rows > columns
    # From here on, entries count units of 2^-24: rounding to multiples of that is rounding to whole numbers.
    start = (exact.mT if is_tall else exact).mul(inverses).mul_(2.0**_FRACTION_BITS).round_()
    factor = start
    product = _rounded_product_of_integers if _has_slow_float64(device) else _rounded_product
    for linear, cubic, quintic in _ITERATION:
        square = product(factor, factor.mT)
        polynomial = product(square, square).mul_(quintic).round_().add_(square.mul(cubic).round_())
        factor = product(polynomial, factor).add_(factor.mul(linear).round_())
    means = [
        norm * (total * 2.0 ** (-2 * _FRACTION_BITS)) / min(rows, columns)
        for norm, total in zip(norms, _exact_sums(start * factor), strict=True)
    ]
    scales = torch.tensor(means, dtype=torch.float64, device=exact.device).view(-1, 1, 1) * 2.0**-_FRACTION_BITS
    flat = factor * scales
    flat = (flat.mT if is_tall else flat).to(device, torch.float32, memory_format=torch.contiguous_format)
    return list(flat.unbind())


def _rounded_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.matmul(left, right).mul_(2.0**-_FRACTION_BITS).round_()


def _rounded_product_of_integers(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    unit = 2.0**-_FRACTION_BITS
    products = [product_of_integers(one * unit, other * unit) for one, other in zip(left, right, strict=True)]
    return torch.stack(products).mul_(2.0**_FRACTION_BITS).round_()


def product_of_integers(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices of multiples of 2^-24 by way of 8-bit integers: the bits of an exact float64 product.

    Each factor is a sum of four matrices of 8-bit integers (as in arXiv 2306.11975, with a fixed point). The products
    of these have 32-bit sums, exact for less than 131,072 terms. GPUs with slow float64 are fast at them.

    Args:
        left: float64, (r, k), entries below 127.
        right: float64, (k, c), entries below 127.

    Returns:
        float64, (r, c); entries below 2^15.
    """
    rows, columns = left.shape[0], right.shape[1]
    lefts, rights = _limbs(left), _limbs(right)
    total = torch.zeros(lefts[0].shape[0], rights[0].shape[1], dtype=torch.int64, device=left.device)
    for i, one in enumerate(lefts):
        for j, other in enumerate(rights):
            total += torch._int_mm(one, other).to(torch.int64) << 8 * (i + j)
    return total[:rows, :columns].to(torch.float64).mul_(2.0 ** (-2 * _FRACTION_BITS))


def _limbs(matrix: torch.Tensor) -> list[torch.Tensor]:
    """Return int8 matrices, padded to whole tiles, whose sum with weights 1, 256, 256^2, ... is 2^24 times a matrix."""
    padding = [-side % _TILE for side in matrix.shape]
    rest = torch.nn.functional.pad(matrix, (0, padding[1], 0, padding[0])).mul(2.0**_FRACTION_BITS).to(torch.int64)
    limbs = []
    for _ in range(_LIMBS):
        limb = ((rest + 128) & 255) - 128
        limbs.append(limb.to(torch.int8))
        rest = (rest - limb) >> 8
    return limbs


def _has_slow_float64(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= _LEAST_WITH_INT8 and capability not in _FULL_FLOAT64


def _norm_bounds(matrices: torch.Tensor) -> list[float]:
    """Return the Frobenius norm of each matrix, at most 1 % too large: the same bits on every processor."""
    if not matrices.numel():
        return [0.0] * len(matrices)
    peaks: list[float] = matrices.abs().amax(dim=(1, 2)).tolist()
    # entries become whole numbers of 15 bits
    units = [2.0 ** (math.frexp(peak)[1] - _NORM_BITS) if 0 < peak < math.inf else 1.0 for peak in peaks]
    scales = torch.tensor(units, dtype=torch.float64, device=matrices.device).view(-1, 1, 1)
    entries = matrices.div(scales).abs_().ceil_()
    found = zip(peaks, units, _exact_sums(entries.square_()), strict=True)
    return [unit * math.sqrt(total) if 0 < peak < math.inf else peak for peak, unit, total in found]


def _exact_sums(matrices: torch.Tensor) -> list[float]:
    """Add whole numbers whose row sums are below 2^53: rows in float64, their sum in Python's integers."""
    return [
        float(sum(int(row) for row in rows)) if all(map(math.isfinite, rows)) else math.nan
        for rows in matrices.sum(dim=2).tolist()
    ]
