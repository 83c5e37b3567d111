"""Who loses a place among connections that have not authenticated yet."""

from __future__ import annotations

import random

import pytest

from thinwire.transport.admission import PendingConnections


def made(**more: int) -> PendingConnections:
    return PendingConnections(**{"most_each": 4, "most": 16, **more}, rng=random.Random(0))


def test_a_flooding_address_only_takes_places_from_itself() -> None:
    pending = made()
    assert pending.add(0, "user") is None
    ended = [pending.add(number, "flood") for number in range(1, 1000)]
    assert ended[:4] == [None] * 4 and ended[4:] == [*range(1, 996)], "its own oldest, in order"
    assert len(pending) == 5


def test_beyond_the_bound_for_all_the_address_with_the_most_loses_its_oldest() -> None:
    pending = made()
    pending.add(0, "user")
    numbers = iter(range(1, 100_000))
    for _ in range(1000):
        for address in ("a", "b", "c", "d", "e", "f"):
            assert pending.add(next(numbers), address) != 0
    assert len(pending) == 16
    pending.remove(0)
    assert len(pending) == 15


def test_among_equals_a_random_one_goes_so_that_a_handshake_has_a_chance_at_any_rate() -> None:
    # a new address each time, and a user whose handshake takes as long as half the places need to be filled anew
    survived = 0
    for trial in range(200):
        pending = PendingConnections(most_each=4, most=64, rng=random.Random(trial))
        for number in range(64):
            pending.add(number, f"address {number}")
        pending.add(1000, "user")
        ended = {pending.add(2000 + number, f"new {number}") for number in range(32)}
        survived += 1000 not in ended
    assert 80 < survived < 160, "about (63 / 64) ** 32 = 0.6; the oldest would have gone within 64 for certain"


def test_an_address_that_has_authenticated_before_is_chosen_last() -> None:
    pending = made()
    pending.trust("member")
    pending.add(0, "member")
    for number in range(1, 5000):
        assert pending.add(number, f"address {number}") != 0


@pytest.mark.parametrize("count", [3000])
def test_what_is_remembered_of_addresses_is_bounded(count: int) -> None:
    pending = made()
    for number in range(count):
        pending.trust(f"address {number}")
        pending.add(number, f"address {number}")
    assert len(pending._trusted) == 1024 and len(pending._held) == 16
    for number in range(count):
        pending.remove(number)
    assert len(pending) == 0 and not pending._held
