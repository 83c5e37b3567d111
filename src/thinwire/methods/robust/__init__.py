"""Robust training: gradients at every step, combined by a rule that a few bad replicas cannot steer.

    g_m = gradient of replica m;   g = rule(g_1, ..., g_M);   every replica steps its inner optimizer with g

Rules, each with the paper it is from: the Flag Aggregator (arXiv 2302.05865: the projection on the subspace that
reconstructs most of the gradients), the coordinate-wise median and trimmed mean (arXiv 1803.01498), Krum and Multi-Krum
(NeurIPS 2017), and the mean, which one replica can send anywhere. What a rule withstands: see the page on robust rules.

What we changed: the papers have a server that applies the rule; here every replica gathers all gradients and applies it
itself, to the same bits, so that there is no server to trust. Replicas do not compare hashes of their parameters, which
a bad replica could end a run by. It still can with a malformed message: that is an error which names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from thinwire.averaging.aggregation_rules import Aggregate, CoordinateMedian, Mean, TrimmedMean
from thinwire.averaging.exchange import AllGather
from thinwire.averaging.topology import AllReplicas
from thinwire.codecs import Codec, float32
from thinwire.methods.registry import About, register
from thinwire.methods.robust.flag import FlagAggregator
from thinwire.methods.robust.krum import Krum, MultiKrum
from thinwire.sync.method import Method
from thinwire.sync.schedule import EveryStep
from thinwire.sync.updates import InnerStep
from thinwire.sync.views import Gradient

Rule = Literal["flag", "mean", "median", "trimmed-mean", "krum", "multi-krum"]
_RULES: dict[str, Callable[[int], Aggregate]] = {
    "flag": lambda num_bad: FlagAggregator(),
    "mean": lambda num_bad: Mean(),
    "median": lambda num_bad: CoordinateMedian(),
    "trimmed-mean": lambda num_bad: TrimmedMean(num_bad=num_bad),
    "krum": lambda num_bad: Krum(num_bad=num_bad),
    "multi-krum": lambda num_bad: MultiKrum(num_bad=num_bad),
}

ABOUT = About(
    paper="arXiv 2302.05865",
    exchanged="gradients, at every step, joined by a robust rule",
    bits="32 (M - 1)",
    memory="M (everyone's gradients)",
    restrictions="rules need M large enough for num_bad; bytes grow with M",
)


@register(ABOUT)
def robust(*, rule: Rule = "flag", num_bad: int = 0, codec: Codec | None = None) -> Method:
    """Join gradients at every step by a rule that withstands bad replicas.

    Args:
        rule: Which one.
        num_bad: How many replicas may be bad; `flag` and `median` need no number.
        codec: The gradients' code; float32 by default.

    Raises:
        ValueError: The rule is unknown or a number out of its range; when training starts, also where there are too few
            replicas for `num_bad`.

    Example:
        >>> robust(rule="krum", num_bad=1).exchanges(5)[0].aggregate.name
        'krum'
    """
    if rule not in _RULES:
        raise ValueError(f"rule must be one of {', '.join(_RULES)}, got {rule!r}")
    exchange = AllGather(codec=float32() if codec is None else codec, aggregate=_RULES[rule](num_bad))
    return Method(
        name="robust",
        schedule=EveryStep(),
        topology=AllReplicas(),
        view=Gradient(hash_interval=0),
        exchange=lambda num_replicas: exchange,
        update=lambda num_replicas: InnerStep(),
    )
