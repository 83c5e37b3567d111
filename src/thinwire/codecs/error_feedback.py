"""Error feedback and related sender memories: what a lossy code dropped is kept and sent in a later round.

A memory precedes a codec. `before` turns a vector into the one that is encoded, `after` receives what the peers will
decode from it, and `received` turns the mean over the senders into the vector that is applied. Each encode stage has
its own memory: a method that codes a mean a second time has a second one there.

| memory | encoded | kept |
| --- | --- | --- |
| `ErrorFeedback()` | `x + decay * e` | `e`: what the code dropped (EF-SGD, arXiv 1901.09847) |
| `MomentumCorrection()` | `v = v + u`, `u = m u + g` | `u`, `v`, both cleared where sent (arXiv 1712.01887) |
| `Shift()` | `x - g` | `g`, which the receivers keep too (EF21, arXiv 2106.05203) |
| `Shift(momentum=m)` | `v - g`, `v = m v + (1 - m) x` | `g`, and `v` (EF21-SGDM, arXiv 2305.15155) |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from thinwire.tagged_state import own, owner


class SenderMemory(Protocol):
    """A memory as a value; its state is a dataclass of float32 vectors of one fixed size, `(numel,)`."""

    __slots__ = ()

    def init(self, numel: int) -> Any:
        """Return the state before the first round, for vectors of `numel` elements; its fields are tagged."""

    def before(self, state: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the vector to encode for this round's `x`: float32, `(numel,)`, a new tensor."""

    def after(self, state: Any, sent: torch.Tensor) -> None:
        """Record what the receivers decode: float32, `(numel,)`."""

    def received(self, state: Any, mean: torch.Tensor) -> torch.Tensor:
        """Return the vector to apply, from the mean of what all members sent: float32, `(numel,)`; by default that."""
        return mean


def there(state: Any, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return a vector of a state, to read and to write, on the device that `like` is on."""
    found: torch.Tensor = getattr(state, name).to(like.device)
    setattr(state, name, found)
    return found


@dataclass(slots=True)
class Residual:
    """Values that a sender's code has dropped."""

    residual: torch.Tensor = own("what was not sent yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback(SenderMemory):
    """Add what was dropped before, and keep what is dropped now: `w = x + decay * e; e = w - sent`.

    With `decay` 1 all that was ever dropped is sent in the end: the sum of what was sent and the residual is the sum
    of what came in. A smaller one forgets, and makes the residual a momentum (SparseLoCo, DeMo).

    Args:
        decay: Share of the residual that is kept, in (0, 1].

    Raises:
        ValueError: It is out of its range.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"error feedback's decay must be in (0, 1], got {self.decay}; 1 forgets nothing")

    def init(self, numel: int) -> Residual:
        return Residual(torch.zeros(numel))

    def before(self, state: Residual, x: torch.Tensor) -> torch.Tensor:
        residual = there(state, "residual", x).mul_(self.decay).add_(x)
        return residual.clone()

    def after(self, state: Residual, sent: torch.Tensor) -> None:
        there(state, "residual", sent).sub_(sent)  # before() left x + decay * e here


@dataclass(slots=True)
class Velocity:
    """Memory of a sender whose elements grow until they are sent, and its momentum."""

    momentum: torch.Tensor = own("momentum")
    velocity: torch.Tensor = own("what was not sent yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumCorrection(SenderMemory):
    """Let the momentum grow where nothing is sent (Deep Gradient Compression, arXiv 1712.01887, section 3).

    Heavy ball: `u = m u + g; v = v + u`. Nesterov: `u = m (u + g); v = v + u + g`. `v` is encoded; where an element was
    sent, `v` is cleared, and with `masks` also `u` (momentum factor masking). What is applied must not have momentum
    again.

    Args:
        momentum: m, in [0, 1).
        nesterov: Which of the two.
        masks: Whether sending an element clears its momentum.
        clip_norm: Longest gradient that is taken in (local clipping); longer ones are scaled down. None clips nothing.

    Raises:
        ValueError: A number is out of its range.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masks: bool = True
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}; 0.9 is usual")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, got {self.clip_norm}; None clips nothing")

    def init(self, numel: int) -> Velocity:
        return Velocity(torch.zeros(numel), torch.zeros(numel))

    def before(self, state: Velocity, x: torch.Tensor) -> torch.Tensor:
        gradient, m = self._clipped(x), self.momentum
        u, v = there(state, "momentum", x), there(state, "velocity", x)
        if self.nesterov:
            u.add_(gradient).mul_(m)  # u = m (u + g)
            v.add_(u).add_(gradient)  # v = v + u + g
        else:
            u.mul_(m).add_(gradient)  # u = m u + g
            v.add_(u)  # v = v + u
        return v.clone()

    def after(self, state: Velocity, sent: torch.Tensor) -> None:
        u, v = there(state, "momentum", sent), there(state, "velocity", sent)
        stays = sent == 0  # a sparse code decodes what it did not send to 0
        v.mul_(stays)
        if self.masks:
            u.mul_(stays)

    def _clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.clip_norm is None:
            return gradient
        # in float64, or the last bit would depend on where the vector lies in memory
        factor = self.clip_norm / max(self.clip_norm, float(gradient.double().norm()))
        return gradient * factor


@dataclass(slots=True)
class Inertia:
    """A momentum that is sent whole."""

    momentum: torch.Tensor = own("momentum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum(SenderMemory):
    """Send the momentum instead of the gradient: `u = m u + g`, and `u`, or `g + m u` with Nesterov.

    For what is sent whole beside a channel of `MomentumCorrection`: the mean of momenta is the momentum of the mean.

    Args:
        momentum: m, in [0, 1).
        nesterov: Which of the two.

    Raises:
        ValueError: It is out of its range.
    """

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}; 0.9 is usual")

    def init(self, numel: int) -> Inertia:
        return Inertia(torch.zeros(numel))

    def before(self, state: Inertia, x: torch.Tensor) -> torch.Tensor:
        momentum = there(state, "momentum", x).mul_(self.momentum).add_(x)
        return x + self.momentum * momentum if self.nesterov else momentum.clone()

    def after(self, state: Inertia, sent: torch.Tensor) -> None:
        pass


@dataclass(slots=True)
class Mirrored:
    """Values that the sender and its receivers hold alike; another set of replicas has another mean.

    Attributes:
        own: g: what was sent in all.
        shared: The mean of all members' g; all hold the same.
        velocity: v; empty without momentum.
        has_started: 1 once v is the mean of some gradients; empty without momentum.
        sent: What was sent in the round that is under way.
        next_velocity: v after that round.
    """

    own: torch.Tensor = owner("what both ends hold")
    shared: torch.Tensor = owner("what both ends hold")
    velocity: torch.Tensor = owner("momentum")
    has_started: torch.Tensor = owner("momentum")
    sent: torch.Tensor | None = None
    next_velocity: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift(SenderMemory):
    """Send the difference to a state that both ends hold (EF21, arXiv 2106.05203).

    `c = C(x - g); g = g + c` at the sender, and the receivers add the mean of all `c` to the mean of all `g`, which is
    what is applied. `g` starts at zero, so that the first round makes it `C(x)`, as the paper starts. Unlike a
    residual, a state that differs between the two ends would stay wrong for ever: so nothing is noted before the whole
    round has come, and `shared` lets replicas compare what they hold.

    Args:
        momentum: m of `v = m v + (1 - m) x`, which is then sent in the place of `x`, in [0, 1); the paper's eta is
            1 - m. `v` starts as the first `x` (EF21-SGDM, arXiv 2305.15155).

    Raises:
        ValueError: `momentum` is out of its range.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}; 0.9 is usual, 0 is plain EF21")

    def init(self, numel: int) -> Mirrored:
        with_momentum = self.momentum > 0
        return Mirrored(
            torch.zeros(numel), torch.zeros(numel), torch.zeros(numel * with_momentum), torch.zeros(1 * with_momentum)
        )

    def before(self, state: Mirrored, x: torch.Tensor) -> torch.Tensor:
        if self.momentum > 0:
            if state.has_started.item():
                x = self.momentum * there(state, "velocity", x) + (1 - self.momentum) * x
            else:
                x = x.to(torch.float32).clone()
            state.next_velocity = x
        return x - there(state, "own", x)

    def after(self, state: Mirrored, sent: torch.Tensor) -> None:
        state.sent = sent

    def received(self, state: Mirrored, mean: torch.Tensor) -> torch.Tensor:
        if state.next_velocity is not None:
            state.velocity, state.next_velocity = state.next_velocity, None
            state.has_started.fill_(1)
        if state.sent is not None:  # a member that sends nothing in a round keeps its state
            there(state, "own", state.sent).add_(state.sent)
            state.sent = None
        # mean_i(g_i) grows by mean_i(c_i), so the receivers track it without ever receiving a whole g_i
        return there(state, "shared", mean).add_(mean).clone()
