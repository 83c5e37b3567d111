"""0/1 Adam (arXiv 2202.06009, Algorithm 1): few dense gradients, signs between them, then local steps.

    t <= T0, at the multiples of an interval K:    v = beta2 v + (1 - beta2) g^2, with the mean gradient g in float32
    t <= T0, at the other steps:                   g = two-phase sign exchange of the gradients; v stays
        m = beta1 m + (1 - beta1) g;  p = p - lr m / sqrt(v)
    t > T0, on each replica i:                     v stays for ever
        m_i = beta1 m_i + (1 - beta1) g_i;  p_i = p_i - lr m_i / sqrt(v);  u_i = u_i + lr m_i
        at the multiples of an interval H:
            u = two-phase sign exchange of the u_i;  p_i = p' - u / sqrt(v), p' being the last exchanged value
            m_i = u / (sum of lr);  u_i = 0

K starts at 1 and doubles after every 16 dense exchanges. H starts at 1 and doubles every `local_doubling_steps` steps
up to 16. The sign exchange has errors at senders and owners, as in 1-bit Adam; those of gradients and of u are apart.

The two phases are those of the public code; the paper lets both intervals run from the start, and steps with the
momentum before the step's own gradient is in it. What we do where they differ or are silent:

- Momentum and variance have Adam's bias corrections, each by the number of gradients that it has taken in; so with K
  at 1 the first phase is all-reduced Adam. The public code has none.
- p' is kept in float32, and the new value is computed from it. The public code subtracts the sum of its steps instead,
  and the rounding of that lets replicas drift apart.
- u is kept in units of the momentum, as in the paper, so that weight decay does not leak into the momentum. AdamW's
  decay of the steps between two exchanges multiplies p'; Adam's is added to gradients.
- Elements whose variance is zero, tensors of different magnitudes, gradients that are missing, and checkpoints are
  dealt with as in 1-bit Adam. The first phase ends after exactly `variance_steps` steps.

Between two exchanges replicas differ. `global_parameters()` gives p'; steps after the last exchange are not in it.
"""

from __future__ import annotations

from thinwire.averaging.exchange import TwoPhase, cheapest
from thinwire.averaging.no_exchange import Nothing
from thinwire.averaging.topology import AllReplicas
from thinwire.codecs import Codec, float32, sign
from thinwire.codecs.error_feedback import ErrorFeedback
from thinwire.methods.about import About
from thinwire.sync.method import Method
from thinwire.sync.phases import DoublingIntervals
from thinwire.sync.zero_one import LocalAdam, LocalMomentum

ABOUT = About(
    paper="arXiv 2202.06009",
    exchanged="gradients, whole ever more seldom and in one bit between, then sums of local steps in one bit",
    bits="2 (M - 1) / M and some whole gradients, then 2 (M - 1) / M / H with H up to 16",
    memory="4 + 2 / M (errors of both kinds, the last exchanged value, the sum of steps)",
    restrictions="inner Adam or AdamW; no GradScaler; replicas differ between exchanges",
)


def zero_one_adam(
    *,
    variance_steps: int = 1000,
    variance_updates: int = 16,
    local_doubling_steps: int = 1000,
    max_local_steps: int = 16,
    codec: Codec | None = None,
) -> Method:
    """Update the variance ever less often, send signs between, then take local steps; needs Adam or AdamW.

    Args:
        variance_steps: Steps until the variance is frozen and local steps begin.
        variance_updates: Dense exchanges until the interval between them doubles.
        local_doubling_steps: Steps until the interval between exchanges of local steps doubles.
        max_local_steps: The longest such interval.
        codec: The code of all but the dense exchanges; `sign()` by default.

    Raises:
        ValueError: A number is below 1, or the codec is sparse.

    Example:
        >>> zero_one_adam(variance_steps=100).schedule.variance_interval(40)
        2
    """
    schedule = DoublingIntervals(
        variance_steps=variance_steps, variance_updates=variance_updates, local_doubling_steps=local_doubling_steps,
        max_local_steps=max_local_steps,
    )  # fmt: skip
    coded = TwoPhase(codec=sign() if codec is None else codec, memory=ErrorFeedback(), owner_memory=ErrorFeedback())
    return Method(
        name="zero-one-adam",
        schedule=schedule,
        topology=AllReplicas(),
        view=LocalMomentum(),
        exchange=lambda num_replicas: (cheapest(float32(), num_replicas=num_replicas), coded, coded, Nothing()),
        update=lambda num_replicas: LocalAdam(),
    )
