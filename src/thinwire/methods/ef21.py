"""EF21, error feedback with a state that both ends hold (arXiv 2106.05203), with what came after it.

    g_i = C(grad f_i(x))                       at the start; C is contractive: |C(v) - v|^2 <= (1 - alpha) |v|^2
    loop:   x = x - gamma (1/M) sum_i g_i
            c_i = C(grad f_i(x) - g_i)         all that is sent
            g_i = g_i + c_i                    at the sender; the receivers add mean(c_i) to the mean of all g_i

- Step size: `ef21_step_size`. EF21-W (arXiv 2402.10774) weighs replicas by their smoothness, and proves for plain EF21
  the step size that needs the arithmetic mean of the L_i only. For codes with C(a v) = a C(v), a > 0 (top-k among
  them), EF21-W computes the same points as EF21, so that there is nothing more to implement.
- Stochastic gradients: the same code with mini-batches. With `momentum`, v_i = m v_i + (1 - m) grad_i is what is
  compressed (EF21-SGDM, arXiv 2305.15155; its eta is 1 - m), which does not need large batches.
- Partial participation (arXiv 2110.03294, 2402.10774): each replica sends with a probability, by a coin that all
  replicas toss alike. One that sends nothing keeps its g_i; no other waits for it, and all step with the mean of all g.

What we changed: there is no server. Every replica sends its c_i to all others and keeps the mean of all g itself. Only
matrices are compressed; vectors (biases, norms) go dense. The mean is handed to any inner optimizer; the paper's is
torch.optim.SGD without momentum.

A lost message fails the round with an error, and nothing of the round is applied or noted there. Others may have got it
whole, so that a replica whose round failed refuses to go on before it is resumed from a checkpoint, as all must be.
Replicas also compare their parameters and their means of g now and then, and name who differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from thinwire.averaging.exchange import AllGather, Exchange, cheapest
from thinwire.averaging.topology import AllReplicas, Participation, Topology
from thinwire.codecs import Codec, float32, top_k
from thinwire.codecs.error_feedback import Shift
from thinwire.methods.registry import About, register
from thinwire.sync.method import Method
from thinwire.sync.schedule import EveryStep
from thinwire.sync.updates import InnerStep
from thinwire.sync.views import Gradient

ABOUT = About(
    paper="arXiv 2106.05203",
    exchanged="the change of the gradients, compressed, at every step",
    bits="the codec's, about 0.24 (M - 1) for top-k at 1 %",
    memory="2 (own state, mean state)",
    restrictions="contractive codecs; no GradScaler; bytes grow with M",
)


@register(ABOUT)
def ef21(
    *, codec: Codec | None = None, momentum: float = 0.0, participation: float = 1.0, seed: int = 0
) -> Method:  # fmt: skip
    """Exchange what has changed in the gradients at every step, compressed; both ends hold the same state.

    Args:
        codec: The code of the differences, contractive; `top_k()` by default.
        momentum: m of EF21-SGDM, in [0, 1); 0.9 is usual with mini-batches. Then the inner optimizer must have none.
        participation: The probability with which a replica sends in a step, in (0, 1].
        seed: Selects the coins of `participation`.

    Raises:
        ValueError: A number is out of its range, or the codec is not contractive.

    Example:
        >>> ef21(participation=0.5).topology.probability
        0.5
    """
    differences = top_k() if codec is None else codec
    check_contractive(differences)
    memory = Shift(momentum=momentum)
    topology: Topology = AllReplicas()
    if participation != 1:
        topology = Participation(probability=participation, seed=seed, rounds_per_coin=2)
    # a replica that sends nothing counts with what it sent last, so vectors need their memory too
    vectors_memory = memory if participation != 1 or momentum else None

    def exchange(num_replicas: int) -> tuple[Exchange, Exchange]:
        vectors: Exchange = cheapest(float32(), num_replicas=num_replicas)
        if vectors_memory is not None:
            vectors = AllGather(codec=float32(), memory=vectors_memory)
        return AllGather(codec=differences, memory=memory), vectors

    return Method(
        name="ef21",
        schedule=EveryStep(num_channels=2),
        topology=topology,
        view=Gradient(is_split=True),
        exchange=exchange,
        update=lambda num_replicas: InnerStep(has_momentum_already=momentum > 0),
    )


def ef21_step_size(
    smoothness: Sequence[float], contraction: float, *, mean: Literal["arithmetic", "quadratic"] = "arithmetic",
    joint_smoothness: float | None = None,
) -> float:  # fmt: skip
    """Return the largest step size that the theory allows: 1 / (L + L_mean xi(alpha)).

    Here xi(alpha) = sqrt(1 - alpha) / (1 - sqrt(1 - alpha)). The arithmetic mean of the L_i is in the bound of arXiv
    2402.10774, the quadratic one, which is never smaller, in that of arXiv 2106.05203.

    Args:
        smoothness: L_i: the Lipschitz constant of each replica's gradient, positive.
        contraction: alpha of the code, in (0, 1]; k / d for top-k of d elements. 1 is no compression.
        mean: Which mean of the L_i.
        joint_smoothness: L of the mean of all losses; the arithmetic mean of the L_i, which bounds it, by default.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> [round(1 / ef21_step_size([1, 1, 1, 100], 0.5, mean=m)) for m in ("arithmetic", "quadratic")]
        [88, 146]
    """
    if not smoothness or not all(value > 0 for value in smoothness):
        raise ValueError(f"smoothness must be positive numbers, one a replica, got {list(smoothness)}")
    if not 0 < contraction <= 1:
        raise ValueError(f"contraction must be in (0, 1], got {contraction}; it is k / d for top-k of d elements")
    if mean not in ("arithmetic", "quadratic"):
        raise ValueError(f"mean must be 'arithmetic' or 'quadratic', got {mean!r}")
    if joint_smoothness is not None and not joint_smoothness > 0:
        raise ValueError(f"joint_smoothness must be positive, got {joint_smoothness}")
    arithmetic = sum(smoothness) / len(smoothness)
    quadratic = math.sqrt(sum(value**2 for value in smoothness) / len(smoothness))
    root = math.sqrt(1 - contraction)
    rest = (arithmetic if mean == "arithmetic" else quadratic) * root / (1 - root)
    return 1 / ((arithmetic if joint_smoothness is None else joint_smoothness) + rest)


def check_contractive(codec: Codec) -> None:
    """Refuse a code that may enlarge what it codes.

    Raises:
        ValueError: It multiplies what it keeps.
    """
    if getattr(codec, "scale", False):
        raise ValueError(
            f"{codec.name} with scale=True multiplies what it keeps, so its error may be larger than what it codes, "
            f"and error feedback would grow without end; take scale=False, or top_k()"
        )
