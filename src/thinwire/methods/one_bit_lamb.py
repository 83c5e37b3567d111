"""1-bit LAMB (arXiv 2104.06069, Algorithm 1): LAMB's momentum in one bit an element, with layers' coefficients frozen.

For every layer (tensor) p, with m and v as in Adam and without bias correction:

    for t = 1 .. T0, the warm-up, with the mean gradient g in float32:
        u = m / (sqrt(v) + eps) + decay p;   c = clip(|p| / |u|, 0.01, 10)
        C = 0.9 C + 0.1 c;   p = p - lr c u
    for t = T0+1 .. T, on each replica i:
        m_i = beta1 m + (1 - beta1) g_i;   m' = two-phase sign exchange of all m_i, scaled by layer
        w = beta2 w + (1 - beta2) ((m' - beta1 m) / (1 - beta1))^2,  from w = v at T0;   m = m'
        r = max((sqrt(v) + eps) / (sqrt(w) + eps)), less for the share that decay has in u,
            clipped to [0.5, 4], and by at most 10 % from the last step's
        p = p - lr C r u

Momenta of all layers travel as one vector with one scale a part, so each layer is multiplied by a factor that brings it
to the others' magnitude, found at the end of the warm-up. Errors are kept at senders and owners, as in 1-bit Adam.

torch has no LAMB: the inner optimizer is a torch.optim.AdamW that holds learning rate, betas, eps, decay and the
moments, and never steps. What we do where the public code differs or is silent:

- The factors of layers are powers of two, which round nothing.
- A layer is a tensor. Elements whose variance is zero after the warm-up get no gradient and do not count in the
  maximum; a layer whose coefficient was 1 at every step of the warm-up keeps 1, where the code would keep 0.
- `warmup_steps` below 1 / (1 - coeff_beta) are refused: C would be too small.
- Both errors, the coefficients and w are kept in checkpoints; the public code drops the errors.
"""

from __future__ import annotations

from thinwire.averaging.exchange import TwoPhase, cheapest
from thinwire.averaging.topology import AllReplicas
from thinwire.codecs import Codec, float32, sign
from thinwire.codecs.error_feedback import ErrorFeedback
from thinwire.methods.about import About
from thinwire.sync.lamb import FrozenLamb
from thinwire.sync.method import Method
from thinwire.sync.momenta import Momentum
from thinwire.sync.phases import WarmUp

ABOUT = About(
    paper="arXiv 2104.06069",
    exchanged="gradients in a warm-up, then momenta in one bit, at every step",
    bits="64 (M - 1) / M in the warm-up, then 2 (M - 1) / M",
    memory="2 + 1 / M (errors of sender and owner, the fresh variance)",
    restrictions="inner AdamW as the holder of its numbers; no GradScaler",
)


def one_bit_lamb(
    *,
    warmup_steps: int = 100,
    coeff_beta: float = 0.9,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    factor_min: float = 0.5,
    factor_max: float = 4.0,
    factor_threshold: float = 0.1,
    codec: Codec | None = None,
) -> Method:
    """Step as LAMB in a warm-up, then average momenta in 1 bit an element with frozen coefficients; needs AdamW.

    Args:
        warmup_steps: Steps until variance and coefficients are frozen, at least `1 / (1 - coeff_beta)`. Give 15 to 25 %
            of all steps; the default suits runs of about 500.
        coeff_beta: Decay of the average of a layer's coefficient.
        min_coeff: The least coefficient.
        max_coeff: The largest one.
        factor_min: The least factor on the frozen coefficient.
        factor_max: The largest one.
        factor_threshold: By which share the factor may change in a step.
        codec: The momenta's code; `sign()` by default.

    Raises:
        ValueError: A number is out of its range, or the codec is sparse.

    Example:
        >>> one_bit_lamb(warmup_steps=200).schedule.warmup_steps
        200
    """
    update = FrozenLamb(
        coeff_beta=coeff_beta, coeff_range=(min_coeff, max_coeff), factor_range=(factor_min, factor_max),
        factor_threshold=factor_threshold,
    )  # fmt: skip
    schedule = WarmUp(warmup_steps=warmup_steps)
    least = round(1 / (1 - coeff_beta))
    if warmup_steps < least:
        raise ValueError(
            f"warmup_steps must be at least 1 / (1 - coeff_beta) = {least}, got {warmup_steps}; the average of the "
            f"coefficients starts at 0 and would be frozen too small"
        )
    momenta = TwoPhase(codec=sign() if codec is None else codec, memory=ErrorFeedback(), owner_memory=ErrorFeedback())
    return Method(
        name="one-bit-lamb",
        schedule=schedule,
        topology=AllReplicas(),
        view=Momentum(),
        exchange=lambda num_replicas: (cheapest(float32(), num_replicas=num_replicas), momenta),
        update=lambda num_replicas: update,
    )
