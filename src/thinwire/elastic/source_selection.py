"""Source selection: the peer to ask first for each part of a round, and probes of the other links.

All is worked out from what the coordinator told everyone, so that replicas choose alike without a word. Where words
are late and they do not, a part comes later and nothing hangs: parts are the same bytes wherever they come from, and an
origin is asked itself where the one that was asked in its place does not have the part in time.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Collection, Mapping

from thinwire.elastic.routing import Detour
from thinwire.elastic.site_topology import Sites, site_of

_CHOICE = struct.Struct("<QII")


@functools.lru_cache(maxsize=64)
def relays(
    sites: Sites, *, replica: int, round_id: int, active: tuple[int, ...], detours: tuple[Detour, ...] = ()
) -> Mapping[int, int]:
    """Return whom to ask first for which part of a round, where that is not whose part it is.

    For a far part that is the replica of the own site whose hash with the part is the highest (rendezvous hashing), so
    all of a site choose the same one without a word, and when one goes only its parts change hands. One that has a slow
    wire to the part's origin is chosen only where all have. For other parts over a slow wire it is one of those that
    the way leads over, chosen alike. Whoever is asked in an origin's place asks that origin itself, or a relay that
    does.

    Args:
        sites: All sites.
        replica: Who asks.
        round_id: The round.
        active: The replicas that take part.
        detours: All detours.

    Example:
        >>> found = relays(((0, 1), (2, 3)), replica=0, round_id=7, active=(0, 1, 2, 3))
        >>> other = relays(((0, 1), (2, 3)), replica=1, round_id=7, active=(0, 1, 2, 3))
        >>> sorted([*found, *other])  # each far part has one relay, which asks for it itself
        [2, 3]
        >>> slow = Detour(source=0, replica=2, over=(1,), every=16)
        >>> relays((), replica=2, round_id=7, active=(0, 1, 2), detours=(slow,))
        {0: 1}
    """
    here = [one for one in site_of(replica, sites) if one in active]
    slow = {(one.source, one.replica): one.over for one in detours}
    chosen = {}
    for member in active:
        if member == replica:
            continue
        relay = _fetcher(member, replica, sites=sites, slow=slow, round_id=round_id, active=active)
        if relay != replica:
            free = [relay]
            if (relay, replica) in slow:  # from another one of the site that has it from the relay
                free = [one for one in here if one not in (relay, replica)]
                free = [one for one in free if (relay, one) not in slow and (one, replica) not in slow]
        else:
            free = [
                one for one in slow.get((member, replica), ())
                if one in active and (member, one) not in slow
                and _fetcher(member, one, sites=sites, slow=slow, round_id=round_id, active=active) == one
            ]  # fmt: skip
        if free:
            chosen[member] = max(free, key=lambda one: _draw(round_id, member, one))
    return chosen


def _fetcher(
    member: int, replica: int, *, sites: Sites, slow: Collection[tuple[int, int]], round_id: int,
    active: Collection[int],
) -> int:  # fmt: skip
    """Return who of a replica's site fetches a part from elsewhere; the replica itself where it is from the site."""
    site = site_of(replica, sites)
    here = [one for one in site if one in active]
    if member in site or len(here) < 2:
        return replica
    free = [one for one in here if (member, one) not in slow] or here
    return max(free, key=lambda one: _draw(round_id, member, one))


def probed_sources(detours: Collection[Detour], *, replica: int, round_id: int) -> frozenset[int]:
    """Return whose parts are also asked for over their slow wires in a round, only to see how fast these are now.

    A hash picks one round out of `every`, so that fragments exchanged in turn are all probed.

    Example:
        >>> slow = Detour(source=0, replica=2, over=(1,), every=4)
        >>> sum(len(probed_sources([slow], replica=2, round_id=number)) for number in range(400))
        100
    """
    mine = [one for one in detours if one.replica == replica]
    return frozenset(one.source for one in mine if _is_tried(one, round_id))


def slow_sources(detours: Collection[Detour], *, replica: int) -> frozenset[int]:
    """Return from whom a wire to a replica is slow."""
    return frozenset(one.source for one in detours if one.replica == replica)


def _is_tried(detour: Detour, round_id: int) -> bool:
    window, turn = divmod(round_id, detour.every)
    return int.from_bytes(_draw(window, detour.source, detour.replica), "little") % detour.every == turn


def _draw(round_id: int, member: int, relay: int) -> bytes:
    return hashlib.blake2b(_CHOICE.pack(round_id, member, relay), digest_size=8).digest()
