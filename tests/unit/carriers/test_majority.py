"""Values on a majority of hosts: never two of a name, in every order of messages and losses of a small case."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from thinwire.carriers.majority import Accepted, Acceptor, AcceptorReply, BallotAttempt, majority_of, settled
from thinwire.errors import PayloadError

HOSTS = 3


@dataclass(frozen=True)
class Host:
    """What `Acceptor` keeps of one name, as a value; a test below holds the two together."""

    promised: tuple[int, str] = (0, "")
    accepted: Accepted | None = None

    def answer(self, attempt: BallotAttempt) -> tuple[Host, AcceptorReply]:
        is_old = attempt.ballot <= self.promised if attempt.phase == "prepare" else attempt.ballot < self.promised
        if is_old:
            return self, AcceptorReply(is_granted=False, promised=self.promised, accepted=self.accepted)
        accepted = self.accepted
        if attempt.phase == "accept":
            assert attempt.value is not None
            accepted = Accepted(ballot=attempt.ballot, value=attempt.value)
        after = Host(promised=attempt.ballot, accepted=accepted)
        return after, AcceptorReply(is_granted=True, promised=attempt.ballot, accepted=accepted)


@dataclass(frozen=True)
class World:
    """Writers with one attempt each under way, hosts, and requests that are under way; a reply comes at once."""

    attempts: tuple[BallotAttempt, ...]
    hosts: tuple[Host, ...] = (Host(),) * HOSTS
    # (writer, ballot number, phase, host) that were delivered, and (ballot, value, host) that were ever accepted
    delivered: frozenset[tuple[int, int, str, int]] = frozenset()
    ever: frozenset[tuple[tuple[int, str], bytes, int]] = frozenset()

    @property
    def chosen(self) -> set[bytes]:
        counts = Counter((ballot, value) for ballot, value, _ in self.ever)
        return {value for (_, value), count in counts.items() if count >= majority_of(HOSTS)}

    def events(self, most_ballots: int) -> list[tuple[str, int, int]]:
        found = []
        for writer, attempt in enumerate(self.attempts):
            if attempt.phase in ("prepare", "accept"):
                for host in range(HOSTS):
                    if (writer, attempt.ballot[0], attempt.phase, host) not in self.delivered:
                        # lost on its way back: the host has taken it, the writer does not know
                        found += [("answered", writer, host), ("unanswered", writer, host)]
            if attempt.phase != "chosen" and attempt.ballot[0] < most_ballots:
                found.append(("again", writer, 0))
        return found

    def do(self, event: tuple[str, int, int]) -> World:
        what, writer, host = event
        attempts, attempt = list(self.attempts), self.attempts[writer]
        if what == "again":
            attempts[writer] = attempt.next()
            return replace(self, attempts=tuple(attempts))
        hosts = list(self.hosts)
        hosts[host], reply = hosts[host].answer(attempt)
        ever = self.ever
        if reply.is_granted and attempt.phase == "accept":
            assert attempt.value is not None
            ever |= {(attempt.ballot, attempt.value, host)}
        if what == "answered":
            attempts[writer] = attempt.take(host, reply, phase=attempt.phase)
        delivered = self.delivered | {(writer, attempt.ballot[0], attempt.phase, host)}
        return World(attempts=tuple(attempts), hosts=tuple(hosts), delivered=delivered, ever=ever)

    def check(self) -> None:
        assert len(self.chosen) <= 1, "two values are chosen"
        for attempt in self.attempts:
            if attempt.phase == "chosen":
                assert self.chosen == {attempt.value}, "a writer believes what is not chosen"


def begun(writer: int, number: int = 1) -> BallotAttempt:
    return BallotAttempt(hosts=HOSTS, ballot=(number, f"w{writer}"), own=f"value {writer}".encode())


def all_states(start: World) -> Iterator[World]:
    """Yield all states that can be reached with one ballot each, checked."""
    todo, seen = [start], {start}
    while todo:
        world = todo.pop()
        for event in world.events(most_ballots=1):
            after = world.do(event)
            after.check()
            if after not in seen:
                seen.add(after)
                todo.append(after)
                yield after


def test_two_writers_never_choose_two_values_in_any_order_of_messages_and_losses() -> None:
    found = list(all_states(World(attempts=(begun(0), begun(1)))))
    ends = {value for world in found for value in world.chosen}
    assert len(found) > 1000 and ends == {b"value 0", b"value 1"}


def test_on_ways_at_random_with_many_ballots_one_value_is_chosen_and_all_come_to_know_it() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        world = World(attempts=tuple(begun(writer) for writer in range(3)))
        for _ in range(60):
            events = world.events(most_ballots=6)
            if not events:
                break
            world = world.do(draw.choice(events))
            world.check()
        for writer in range(3):  # then each alone comes to the end
            while world.attempts[writer].phase != "chosen":
                attempt = world.attempts[writer]
                unanswered = [host for host in range(HOSTS) if host not in attempt.granted]
                if attempt.has_ended or not unanswered:
                    world = world.do(("again", writer, 0))
                    continue
                world = world.do(("answered", writer, unanswered[0]))
                world.check()
        assert len({attempt.value for attempt in world.attempts}) == 1


def test_a_writer_that_forgets_what_was_accepted_is_found() -> None:
    """The check can fail: with values of its own in every phase two of one name would be chosen."""
    hasty = World(attempts=tuple(replace(begun(writer), replaces=True) for writer in (0, 1)))
    with pytest.raises(AssertionError, match=r"two values are chosen|believes"):
        list(all_states(hasty))


def test_an_acceptor_does_as_the_model() -> None:
    draw, acceptor, host = random.Random(1), Acceptor(), Host()
    for _ in range(300):
        attempt = BallotAttempt(hosts=HOSTS, ballot=(draw.randint(1, 9), draw.choice("ab")), own=b"own", value=b"v")
        attempt = replace(attempt, phase=draw.choice(["prepare", "accept"]), value=draw.randbytes(2))
        assert attempt.value is not None
        host, expected = host.answer(attempt)
        if attempt.phase == "prepare":
            assert acceptor.prepare("name", attempt.ballot) == expected
        else:
            assert acceptor.accept("name", attempt.ballot, attempt.value) == expected
        if draw.random() < 0.1:
            acceptor.forget("name")
            host = Host()


def test_what_a_host_has_promised_and_accepted_outlives_its_process(tmp_path: Path) -> None:
    acceptor = Acceptor(tmp_path / "held")
    assert acceptor.prepare("a", (3, "w")).is_granted
    assert acceptor.accept("b", (1, "w"), b"\x00\xff").is_granted
    acceptor.close()
    again = Acceptor(tmp_path / "held")
    assert not again.prepare("a", (2, "z")).is_granted and not again.prepare("a", (3, "w")).is_granted
    assert again.accept("a", (3, "w"), b"").is_granted  # the one promised
    held = again.read("b").accepted
    assert held is not None and held.value == b"\x00\xff"
    assert [name for name, *_ in again.names("", after="", most=9)] == ["a", "b"]
    again.forget("a")
    assert again.read("a") == AcceptorReply(is_granted=True, promised=(0, ""))
    again.close()
    (tmp_path / "bad").write_bytes(b"no data base" * 100)
    with pytest.raises(PayloadError, match="does not hold what a host has promised"):
        Acceptor(tmp_path / "bad")


def test_a_value_is_read_without_a_ballot_where_a_majority_agrees() -> None:
    nothing, acceptor = AcceptorReply(is_granted=True, promised=(0, "")), Acceptor()
    one = acceptor.accept("a", (1, "w"), b"x")
    other = Acceptor().accept("a", (2, "w"), b"x")
    assert settled([one, one], hosts=3) == (True, b"x")
    assert settled([nothing, nothing], hosts=3) == (True, None)
    assert settled([one, nothing], hosts=3) == (False, None), "another host may hold it too"
    assert settled([one, other], hosts=3) == (False, None)
