"""What a process in a modelled run has: its disk, its rounds, and states as the rows of the means that made them."""

import hashlib
from dataclasses import dataclass, field

from thinwire.elastic.round_driver import RoundStateMachine
from thinwire.elastic.rounds import Decision

# The round, and by member the hash of the global state that its part refers to.
Mean = tuple[int, tuple[tuple[int, int], ...]]
Means = tuple[Mean, ...]


@dataclass
class Person:
    """One process's host, with what is on its disk."""

    name: str
    lives: int = 0
    has_left: bool = False
    held: tuple[int, int, Means] | None = None  # step, era, state
    disk: tuple[int, Means] | None = None


@dataclass
class Flight:
    """One round at one replica."""

    launch_step: int
    machine: RoundStateMachine
    reference: int
    parts: dict[int, int] = field(default_factory=dict)
    asked: set[tuple[int, int]] = field(default_factory=set)  # whose part, and from whom
    decision: Decision | None = None


def root_of(step: int, means: Means) -> str:
    return hashlib.sha256(repr((step, means)).encode()).hexdigest()
