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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from thinwire.errors import CheckpointError


class BoundSenderMemory(Protocol):
    """A memory with its state, for vectors of one fixed size."""

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the vector to encode for this round's `x`: float32, `(numel,)`, a new tensor."""
        ...

    def after(self, sent: torch.Tensor) -> None:
        """Record what the receivers decode: float32, `(numel,)`."""
        ...

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        """Return the vector to apply, from the mean of what all members sent: float32, `(numel,)`."""
        ...

    @property
    def shared(self) -> torch.Tensor | None:
        """The vector that all members of the exchange must hold alike: float32, `(numel,)`; None for none."""
        ...

    def forget(self) -> None:
        """Reset every vector to its value before the first round."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the vectors by name."""
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the vectors of `state_dict`.

        Raises:
            CheckpointError: Names or sizes differ.
        """
        ...


class SenderMemory(Protocol):
    """A memory as a value; `bind` makes its vectors."""

    def bind(self, numel: int) -> BoundSenderMemory:
        """Return an empty memory for vectors of `numel` elements."""
        ...


class MemoryVectors:
    """Named float32 vectors that start at zero and follow the device of their inputs: the state of a memory.

    Args:
        numel: Elements of each.
        names: Their names in the state.
    """

    def __init__(self, numel: int, *names: str) -> None:
        self._numel = numel
        self._vectors = {name: torch.zeros(numel) for name in names}

    @property
    def shared(self) -> torch.Tensor | None:
        return None

    def forget(self) -> None:
        for vector in self._vectors.values():
            vector.zero_()

    def there(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a vector by its name, to read and to write, on the device that `like` is on."""
        self._vectors[name] = found = self._vectors[name].to(like.device)
        return found

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._vectors)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        if set(state) != set(self._vectors):
            raise CheckpointError(
                f"the checkpoint holds the vectors {sorted(state)} of a memory, this run has {sorted(self._vectors)}; "
                f"resume with its method and codec"
            )
        for name, vector in self._vectors.items():
            if state[name].shape != vector.shape:
                raise CheckpointError(
                    f"the checkpoint's {name} has {state[name].numel()} elements, this run's {vector.numel()}; resume "
                    f"with its model, and as many ranks a replica"
                )
            self._vectors[name] = state[name].to(vector.device, torch.float32).clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback:
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
        """Check the range."""
        if not 0 < self.decay <= 1:
            raise ValueError(f"error feedback's decay must be in (0, 1], got {self.decay}; 1 forgets nothing")

    def bind(self, numel: int) -> BoundSenderMemory:
        return _BoundErrorFeedback(self, numel)


class _BoundErrorFeedback(MemoryVectors):
    def __init__(self, spec: ErrorFeedback, numel: int) -> None:
        super().__init__(numel, "residual")
        self._decay = spec.decay

    def before(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.there("residual", x).mul_(self._decay).add_(x)
        return residual.clone()

    def after(self, sent: torch.Tensor) -> None:
        self.there("residual", sent).sub_(sent)  # before() left x + decay * e here

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        return mean


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumCorrection:
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
        """Check the ranges."""
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}; 0.9 is usual")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, got {self.clip_norm}; None clips nothing")

    def bind(self, numel: int) -> BoundSenderMemory:
        return _BoundMomentumCorrection(self, numel)


class _BoundMomentumCorrection(MemoryVectors):
    def __init__(self, spec: MomentumCorrection, numel: int) -> None:
        super().__init__(numel, "momentum", "velocity")
        self._spec = spec

    def before(self, x: torch.Tensor) -> torch.Tensor:
        gradient, m = self._clipped(x), self._spec.momentum
        u, v = self.there("momentum", x), self.there("velocity", x)
        if self._spec.nesterov:
            u.add_(gradient).mul_(m)  # u = m (u + g)
            v.add_(u).add_(gradient)  # v = v + u + g
        else:
            u.mul_(m).add_(gradient)  # u = m u + g
            v.add_(u)  # v = v + u
        return v.clone()

    def after(self, sent: torch.Tensor) -> None:
        u, v = self.there("momentum", sent), self.there("velocity", sent)
        stays = sent == 0  # a sparse code decodes what it did not send to 0
        v.mul_(stays)
        if self._spec.masks:
            u.mul_(stays)

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        return mean

    def _clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._spec.clip_norm is None:
            return gradient
        # in float64, or the last bit would depend on where the vector lies in memory
        factor = self._spec.clip_norm / max(self._spec.clip_norm, float(gradient.double().norm()))
        return gradient * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum:
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
        """Check the range."""
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}; 0.9 is usual")

    def bind(self, numel: int) -> BoundSenderMemory:
        return _BoundMomentum(self, numel)


class _BoundMomentum(MemoryVectors):
    def __init__(self, spec: Momentum, numel: int) -> None:
        super().__init__(numel, "momentum")
        self._spec = spec

    def before(self, x: torch.Tensor) -> torch.Tensor:
        momentum = self.there("momentum", x).mul_(self._spec.momentum).add_(x)
        return x + self._spec.momentum * momentum if self._spec.nesterov else momentum.clone()

    def after(self, sent: torch.Tensor) -> None:
        pass

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        return mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
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
        """Check the range."""
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}; 0.9 is usual, 0 is plain EF21")

    def bind(self, numel: int) -> BoundSenderMemory:
        return _BoundShift(numel) if self.momentum == 0 else _BoundShiftOfMomentum(self, numel)


class _BoundShift(MemoryVectors):
    def __init__(self, numel: int, *names: str) -> None:
        super().__init__(numel, "own", "mean", *names)
        self._sent: torch.Tensor | None = None

    @property
    def shared(self) -> torch.Tensor | None:
        return self._vectors["mean"]

    def forget(self) -> None:
        super().forget()
        self._sent = None

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.there("own", x)

    def after(self, sent: torch.Tensor) -> None:
        self._sent = sent

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        if self._sent is not None:  # a member that sends nothing in a round keeps its state
            self.there("own", self._sent).add_(self._sent)
            self._sent = None
        # mean_i(g_i) grows by mean_i(c_i), so the receivers track it without ever receiving a whole g_i
        return self.there("mean", mean).add_(mean).clone()


class _BoundShiftOfMomentum(_BoundShift):
    def __init__(self, spec: Shift, numel: int) -> None:
        super().__init__(numel, "velocity")
        self._vectors["has_started"] = torch.zeros(1)
        self._momentum = spec.momentum
        self._velocity: torch.Tensor | None = None

    def forget(self) -> None:
        super().forget()
        self._velocity = None

    def before(self, x: torch.Tensor) -> torch.Tensor:
        if self._vectors["has_started"].item():
            self._velocity = self._momentum * self.there("velocity", x) + (1 - self._momentum) * x
        else:
            self._velocity = x.to(torch.float32).clone()
        return super().before(self._velocity)

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        if self._velocity is not None:
            self._vectors["velocity"], self._velocity = self._velocity, None
            self._vectors["has_started"].fill_(1)
        return super().received(mean)
