"""A replica's view of the members and rounds, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.elastic.protocol import Message
from thinwire.elastic.rounds import Decision
from thinwire.elastic.routing import Detour
from thinwire.elastic.site_topology import Sites


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another replica, or this one, as the coordinator describes it.

    Attributes:
        replica: Its number.
        host: As it calls itself.
        address: Where it is reached.
        port: Its port.
        is_active: Whether it takes part in rounds.
    """

    replica: int
    host: str
    address: str
    port: int
    is_active: bool

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Neighbour:
        """Return the replica that a checked description is of."""
        names = ("replica", "host", "address", "port")
        return cls(**{name: described[name] for name in names}, is_active=described["state"] == "active")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A state that a replica may begin from.

    Attributes:
        step: Of the state.
        root: Its hash; `seed` for the first weights, `disk` for the replica's own last checkpoint, `own` for the state
            that it said it holds.
        num_bytes: Its size.
        holders: Who shows it.
        note: What the coordinator adds: which data was used.
        era: How often the run has gone on from a disk, so that other states are of another past.
    """

    step: int
    root: str
    num_bytes: int
    holders: tuple[int, ...]
    note: Mapping[str, Any]
    era: int = 0


@dataclass(slots=True, kw_only=True)
class View:
    """All that is known; read it with `Council.changed` held."""

    neighbours: dict[int, Neighbour] = field(default_factory=dict)
    has_started: bool = False
    roster_number: int = 0
    calls: dict[int, tuple[int, ...]] = field(default_factory=dict)
    decisions: dict[int, Decision] = field(default_factory=dict)
    sites: Sites = ()
    detours: tuple[Detour, ...] = ()
    step: int = 0
    closed_step: int = 0
    floor_step: int = 0
    kept_step: int = 0
    era: int = 0
    captures: set[int] = field(default_factory=set)
    offers: dict[int, Offer] = field(default_factory=dict)
    offer: Offer | None = None
    accounts: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    leases: dict[int, tuple[int, int]] = field(default_factory=dict)
    is_paused: bool = False
    leave_why: str = ""
    expelled_why: str = ""
    is_non_finite: bool = False
    failed_why: str = ""
    refused_why: str = ""
    finish: Message | None = None
    heard_s: float = 0.0
