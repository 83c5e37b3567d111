"""Attacks of bad replicas, by which robust rules are compared, for tests and benchmarks.

`attack` makes the vectors of `num_bad` attackers from the vectors that they know. `attack_script` lets a replica attack
in a real exchange, through a `FaultyTransport`; it offers the attacks that need nothing but the replica's own payload.

| attack | what is sent | `strength` | where it is from |
| --- | --- | --- | --- |
| `random` | normal noise, `strength` times as long as the own vector | 10 | |
| `reverse` | the own vector, times `-strength` | 10 | |
| `drop` | the own vector, with this share of its elements set to 0 | 0.1 | |
| `little-is-enough` | mean minus `strength` standard deviations of the known vectors | see below | arXiv 1902.06156 |
| `fall-of-empires` | the mean of the known vectors, times `-strength` | 0.1 | arXiv 1903.03936 |

Without a strength, `little-is-enough` takes the largest shift that leaves enough honest values beyond it for a majority
together with the attackers: of M replicas with f attackers, `s = floor(M / 2) + 1 - f` honest ones must lie beyond, so
`z = Phi^-1((M - f - s) / (M - f))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch

from thinwire.codecs.base import Codec
from thinwire.codecs.dense import float32
from thinwire.shared_random import derive_seed
from thinwire.transport.base import Envelope
from thinwire.transport.faulty import Fault
from thinwire.transport.streams import ROUNDS

Attack = Literal["random", "reverse", "drop", "little-is-enough", "fall-of-empires"]
ATTACKS: tuple[Attack, ...] = ("random", "reverse", "drop", "little-is-enough", "fall-of-empires")
# These need to know nothing but what the replica itself would send.
LONE_ATTACKS: tuple[Attack, ...] = ("random", "reverse", "drop")

_STRENGTHS: dict[Attack, float] = {"random": 10.0, "reverse": 10.0, "drop": 0.1, "fall-of-empires": 0.1}


def attack(
    name: Attack, honest: torch.Tensor, *, num_bad: int, strength: float | None = None, seed: int = 0
) -> torch.Tensor:
    """Return the vectors that attackers send.

    Args:
        name: One of `ATTACKS`.
        honest: float32, `(num_honest, numel)`: what the attackers know. Attacker `i` takes row `i`, and starts again
            after the last one, for its own vector.
        num_bad: How many attackers there are.
        strength: How strong the attack is, see the table above.
        seed: Selects the noise and the dropped elements.

    Returns:
        float32, `(num_bad, numel)`, on the device of `honest`.

    Raises:
        ValueError: The name is unknown, the attackers know no vector, or a number is out of its range.

    Example:
        >>> attack("reverse", torch.tensor([[1.0, 2.0]]), num_bad=1, strength=3.0)
        tensor([[-3., -6.]])
    """
    _check(name, strength)
    if honest.dim() != 2 or not honest.shape[0] or num_bad < 0:
        raise ValueError(
            f"honest must hold at least one row and num_bad be at least 0, got the shape {tuple(honest.shape)} and "
            f"num_bad={num_bad}; stack what the honest replicas send"
        )
    known = honest.to(torch.float64)
    if name == "little-is-enough":
        shift = largest_hidden_shift(honest.shape[0] + num_bad, num_bad=num_bad) if strength is None else strength
        mean = known.mean(dim=0)
        lie = mean - shift * (known - mean).square().mean(dim=0).sqrt()
        return lie.to(torch.float32).expand(num_bad, -1).clone()
    if name == "fall-of-empires":
        lie = known.mean(dim=0) * -(_STRENGTHS[name] if strength is None else strength)
        return lie.to(torch.float32).expand(num_bad, -1).clone()
    lies = [
        _single_attack(name, honest[bad % honest.shape[0]], strength=strength, seed=derive_seed(seed, "attacker", bad))
        for bad in range(num_bad)
    ]
    return torch.stack(lies) if lies else honest[:0].to(torch.float32)


def largest_hidden_shift(num_replicas: int, *, num_bad: int) -> float:
    """Return how many standard deviations `little-is-enough` may shift by (arXiv 1902.06156, its `z_max`).

    Raises:
        ValueError: The attackers are none, or so many that they need no disguise.

    Example:
        >>> round(largest_hidden_shift(50, num_bad=24), 2)
        1.43
    """
    num_honest = num_replicas - num_bad
    num_beyond = num_replicas // 2 + 1 - num_bad
    if num_bad < 1 or num_beyond < 1 or num_honest <= num_beyond:
        raise ValueError(
            f"num_bad must be at least 1 and at most half of num_replicas={num_replicas}, beside two honest ones, got "
            f"{num_bad}; give a strength instead"
        )
    return NormalDist().inv_cdf((num_honest - num_beyond) / num_honest)


def attack_script(
    name: Attack, *, replicas: Sequence[int], codec: Codec | None = None, strength: float | None = None, seed: int = 0
) -> tuple[Fault, ...]:
    """Return the faults by which replicas attack in every round, for `FaultyTransport`.

    An attacker sends the same to all its peers but applies its own true vector, so its model drifts away from the
    others', which a comparison of reference hashes shows in the next round.

    Args:
        name: One of `LONE_ATTACKS`.
        replicas: The attackers.
        codec: The code of the payloads, of fixed size; float32 by default. Other payloads pass unchanged.
        strength: How strong the attack is, see the table above.
        seed: Selects the noise and the dropped elements, separately for each round, fragment and attacker.

    Raises:
        ValueError: The attack needs more than the own payload, or a value is out of its range.

    Example:
        >>> script = attack_script("reverse", replicas=[2], strength=4.0)
        >>> script[0].kind, script[0].replica
        ('forge', 2)
    """
    _check(name, strength)
    used = float32() if codec is None else codec
    if name not in LONE_ATTACKS:
        raise ValueError(
            f"name must be one of {', '.join(LONE_ATTACKS)} for a script, got {name!r}, which needs to know what the "
            f"others send; use attack() on their vectors"
        )
    if not used.has_fixed_size:
        raise ValueError(f"codec must have payloads of fixed size, got {used.name}; use float32()")
    lies = {
        replica: PayloadAttack(name=name, codec=used, strength=strength, seed=seed, replica=replica)
        for replica in replicas
    }
    return tuple(
        Fault(kind="forge", replica=replica, direction="sent", forge=lie) for replica, lie in sorted(lies.items())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadAttack:
    """Change a payload before it is sent: decode it, attack, encode the result.

    Attributes:
        name: One of `LONE_ATTACKS`.
        codec: The code of the payloads.
        strength: How strong the attack is.
        seed: Selects the random stream.
        replica: The attacker.
    """

    name: Attack
    codec: Codec
    strength: float | None
    seed: int
    replica: int

    def __call__(self, payload: torch.Tensor, envelope: Envelope) -> torch.Tensor:
        """Return the forged payload; a message of another kind or code passes unchanged."""
        if envelope.stream is not ROUNDS or envelope.codec_id != self.codec.wire_id:
            return payload
        seed = derive_seed(self.seed, "attacker", self.replica, *envelope.address[2:])
        own = self.codec.decode(payload, numel=envelope.numel)
        lie = _single_attack(self.name, own, strength=self.strength, seed=seed)
        return self.codec.encode(lie, seed=derive_seed(seed, "rounding"))


def _check(name: Attack, strength: float | None) -> None:
    if name not in ATTACKS:
        raise ValueError(f"name must be one of {', '.join(ATTACKS)}, got {name!r}")
    most = 1.0 if name == "drop" else float("inf")
    if strength is not None and not 0 <= strength <= most:
        usual = _STRENGTHS.get(name, 1.0)
        raise ValueError(f"strength must be in [0, {most:g}] for {name}, got {strength}; {usual:g} is usual")


def _single_attack(name: Attack, own: torch.Tensor, *, strength: float | None, seed: int) -> torch.Tensor:
    """Attack with nothing but the own vector: float32, `(numel,)`."""
    power = _STRENGTHS[name] if strength is None else strength
    true = own.to(torch.float32)
    if name == "reverse":
        return true * -power
    # drawn on the CPU, so that every device gets the same
    generator = torch.Generator().manual_seed(seed)
    if name == "drop":
        return torch.where((torch.rand(own.numel(), generator=generator) < power).to(own.device), 0.0, true)
    noise = torch.randn(own.numel(), generator=generator).to(own.device)
    return noise * (power * true.to(torch.float64).square().mean().sqrt().nan_to_num()).to(torch.float32)
