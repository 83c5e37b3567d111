"""Decoupled DiLoCo: Streaming DiLoCo that does not wait for a slow replica (arXiv 2604.21428).

Fragments p = 1 .. P are exchanged in turn, as in Streaming DiLoCo, with interval H and overlap tau. Replica 0 is the
syncer. For each round of a fragment, launched after step t:

    replica m sends Delta_m = theta_p - theta_mp(t), and the tokens c_m and inner steps s_m since it was last counted
    the syncer closes the round with the replicas S that have come: all of them; or, once its own grace steps since the
        launch are over, any K
    w_m = c_m (c_m / s_m)                                                     token weight
    Delta = sum_S w_m Delta_m / sum_S w_m
    theta_p' = OuterOpt(theta_p, Delta)                                       Nesterov
    theta_mp = alpha theta_mp + (1 - alpha) theta_p'        for m in S        blend, as in Streaming DiLoCo
    theta_mp = (theta_mp - theta_p) + theta_p'              for the others    their work is kept, and counted once

A replica that hears that a round was closed without it passes over the steps up to where the syncer is, taking in the
means on the way, and goes on from there. One that is slower all the time sends its parts of the rounds ahead that the
syncer will close during its next step. So one that is half as fast does half of the inner steps, and its parts, of
fewer steps, are counted. `optimizer.steps_done` counts what it passed over: train until that is reached.

What was read where: the paper itself was not at hand. Summaries of it give the syncer, the minimum quorum, the grace
window, the token weights, the radial-directional average and P = 24, H = 24, tau = 2. That average, which keeps the
length of a single part, lowered no loss here (docs/experiments/candidates.md), so the mean is a plain one with weights.
How a late replica goes on, how it catches up, that the grace is measured in the syncer's own steps (so that it follows
the time that they take) and the defaults of K (all but one) and of the grace (half of tau) are ours. In the paper the
syncer is a process of its own; here it is one of the replicas, and all wait for it: put it on a machine that is not
slow. The paper packs fragments to equal sizes; here a fragment is a group of blocks, which are alike, and the embedding
with the rest is one fragment. Replicas do not join or leave.
"""

from __future__ import annotations

from typing import Literal

from thinwire.averaging.exchange import Exchange, cheapest
from thinwire.averaging.quorum import Quorum
from thinwire.codecs import Codec, e3m0
from thinwire.methods.diloco import default_outer_lr
from thinwire.methods.registry import About, register
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import Nesterov
from thinwire.sync.schedule import Staggered
from thinwire.sync.updates import LateOuterStep
from thinwire.sync.views import PseudoGradient

ABOUT = About(
    paper="arXiv 2604.21428",
    exchanged="pseudo-gradients in E3M0, a fragment at a time; a round closes when enough replicas are there",
    bits="4.13 / H; replica 0 4.13 (M - 1) / H",
    memory="2 (global value, outer momentum); replica 0 also coded means for replicas that are late",
    restrictions="replica 0 must not be the slow one; a replica is one rank",
)
_MOST_FRAGMENTS = 24


@register(ABOUT)
def decoupled_diloco(
    *,
    sync_interval: int = 24,
    overlap_steps: int = 2,
    quorum: int | None = None,
    grace_steps: int | None = None,
    most_behind: int = 4,
    blend: float = 0.5,
    codec: Codec | None = None,
    server_codec: Codec | None = None,
    fragment_order: Literal["strided", "sequential"] = "strided",
    num_fragments: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float = 0.9,
) -> Method:
    """Exchange one fragment at a time while training goes on, and close a round without those that are late.

    Args:
        sync_interval: H: inner steps between two exchanges of the same fragment, at least 1.
        overlap_steps: tau: inner steps from launch to apply, 1 <= tau < H.
        quorum: K: how many replicas' parts are enough, replica 0's among them; all but one by default.
        grace_steps: For how many of its own steps after the launch replica 0 waits for the others too, at most tau; by
            default half of tau, rounded up, so that the mean has the other half to travel.
        most_behind: How many intervals a replica may fall behind before the others wait for it, at least 1.
        blend: alpha: weight of the local value at apply, in [0, 1).
        codec: The pseudo-gradients' code; E3M0 by default.
        server_codec: The mean's code; as `codec` by default.
        fragment_order: How blocks are dealt out.
        num_fragments: P, the fragment of embedding and rest among them; 24 by default, or as many as the model has
            blocks and the rest.
        outer_lr: Nesterov's learning rate; by default `default_outer_lr` of the number of replicas.
        outer_momentum: Nesterov's momentum.

    Raises:
        ValueError: An argument is out of its range; names the value, the limit and the remedy.

    Example:
        >>> method = decoupled_diloco()
        >>> method.schedule.sync_interval, method.exchanges(8)[0].quorum
        (24, 7)
    """
    grace = _checked_grace(grace_steps, overlap_steps=overlap_steps, sync_interval=sync_interval)
    payload_codec = e3m0() if codec is None else codec

    def update(num_replicas: int) -> LateOuterStep:
        lr = default_outer_lr(num_replicas) if outer_lr is None else outer_lr
        return LateOuterStep(optimizer=Nesterov(lr=lr, momentum=outer_momentum), blend=blend)

    def exchange(num_replicas: int) -> Exchange:
        found = Quorum(
            codec=payload_codec,
            server_codec=payload_codec if server_codec is None else server_codec,
            quorum=max(1, num_replicas - 1) if quorum is None else quorum,
            grace_steps=grace,
            most_behind=most_behind,
        )
        found.check(num_replicas)
        return found

    update(1)  # a bad argument is refused here, not when training starts
    exchange(quorum or 1)
    if num_fragments is None:
        pattern = Pattern(order=fragment_order, layers_per_fragment=1, most_fragments=_MOST_FRAGMENTS)
    else:
        pattern = Pattern(order=fragment_order, num_fragments=num_fragments)
    return Method(
        name="decoupled-diloco",
        schedule=Staggered(sync_interval=sync_interval, overlap_steps=overlap_steps),
        view=PseudoGradient(fragments=pattern),
        exchange=exchange,
        update=update,
        last_exchange=lambda num_replicas: cheapest(payload_codec, num_replicas=num_replicas),
        drift_intervals=most_behind + 2,
    )


def _checked_grace(grace_steps: int | None, *, overlap_steps: int, sync_interval: int) -> int:
    if not isinstance(overlap_steps, int):
        raise ValueError(
            f"overlap_steps must be one number here, got {overlap_steps}; a replica that is slower need not be named, "
            f"the others do not wait for it"
        )
    if sync_interval >= 1 and not 1 <= overlap_steps < sync_interval:
        raise ValueError(
            f"overlap_steps must be at least 1 and below sync_interval ({sync_interval}), got {overlap_steps}; "
            f"without overlap there is no time to wait for those that are a little later, and a fragment's exchange "
            f"must be applied before its next one starts"
        )
    if grace_steps is not None and not 0 <= grace_steps <= overlap_steps:
        raise ValueError(
            f"grace_steps must be at least 0 and at most overlap_steps ({overlap_steps}), got {grace_steps}; a longer "
            f"grace would keep those waiting that are in time"
        )
    return (overlap_steps + 1) // 2 if grace_steps is None else grace_steps
