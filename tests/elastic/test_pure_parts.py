"""The pure parts of an elastic run, by what must hold whatever comes: decisions, rounds, shards, words, times."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.elastic.data_leases import DataLeases
from thinwire.elastic.invitation import Invitation, read_invitation
from thinwire.elastic.journal import Journal
from thinwire.elastic.protocol import MOST_BYTES, MOST_BYTES_HERE, decode, encode, numbers
from thinwire.elastic.roster import MemberState, Roster
from thinwire.elastic.rounds import ElasticRounds, Vote, decide
from thinwire.elastic.snapshots import StateSnapshots
from thinwire.errors import PayloadError
from thinwire.transport.secret import Secret


@st.composite
def ballots(draw: st.DrawFn, most: int = 6) -> dict[int, Vote]:
    voters = draw(st.sets(st.integers(0, most + 2), min_size=1, max_size=most))
    return {
        voter: Vote(
            has=frozenset(draw(st.sets(st.integers(0, most + 2)))) | {voter}, reference_hash=draw(st.integers(0, 1))
        )
        for voter in voters
    }


def are_one(votes: dict[int, Vote], group: tuple[int, ...]) -> bool:
    pairs = itertools.permutations(group, 2)
    hashes = {votes[one].reference_hash for one in group}
    return len(hashes) == 1 and all(other in votes[one].has for one, other in pairs)


@given(ballots(), st.randoms(use_true_random=False))
def test_all_holders_of_a_choice_hold_all_of_it_in_any_order_of_votes(votes: dict[int, Vote], chance: Any) -> None:
    found = decide(votes)
    assert found.holders
    hashes = {votes[holder].reference_hash for holder in found.holders}
    assert len(hashes) == 1
    for voter, vote in votes.items():
        is_alike = vote.reference_hash in hashes
        assert (voter in found.holders) == (is_alike and vote.has.issuperset(found.members))
    order = list(votes)
    chance.shuffle(order)
    assert decide({voter: votes[voter] for voter in order}) == found


@given(ballots(most=5))
def test_a_choice_is_what_a_largest_group_that_sees_each_other_holds_in_common(votes: dict[int, Vote]) -> None:
    found = decide(votes)
    groups = [
        group
        for size in range(1, len(votes) + 1)
        for group in itertools.combinations(votes, size)
        if are_one(votes, group)
    ]
    size = max(map(len, groups))
    common = [frozenset.intersection(*(votes[one].has for one in group)) for group in groups if len(group) == size]
    assert set(found.members) in common


def test_many_voters_are_decided_at_once_and_by_the_same_rules() -> None:
    everyone = frozenset(range(60))
    assert decide({one: Vote(has=everyone) for one in everyone}).holders == tuple(range(60))
    cut_off = {one: Vote(has=everyone - {59} if one != 59 else frozenset({59})) for one in everyone}
    assert decide(cut_off).members == tuple(range(59))
    halves = {one: Vote(has=everyone, reference_hash=int(one >= 25)) for one in everyone}
    assert decide(halves).holders == tuple(range(25, 60))
    with pytest.raises(ValueError, match="at least one vote"):
        decide({})
    with pytest.raises(ValueError, match="must hold its own part"):
        decide({0: Vote(has=frozenset({1}))})


def book() -> ElasticRounds:
    return ElasticRounds(sync_interval=10, overlap_steps=2)


def voted(one: ElasticRounds, *members: int, has: set[int], now_s: float = 0.0) -> None:
    for member in members:
        one.vote(member, Vote(has=frozenset(has)), round_id=0, step=10, now_s=now_s)


def test_a_round_is_called_when_all_are_there_or_the_grace_is_over_and_then_none_waits_for_the_late() -> None:
    one, active = book(), (0, 1, 2)
    for member in (0, 1):
        one.launch(member, round_id=0, launch_step=10, now_s=0.0)
    grace_s = one.grace_s(step_s=0.1)
    assert one.calls(active, step_s=0.1, now_s=grace_s - 0.01) == {}
    assert one.calls(active, step_s=0.1, now_s=grace_s) == {0: (0, 1)} and one.late == {2}
    assert one.calls(active, step_s=0.1, now_s=99.0) == {}, "a round is called once"
    for member in (0, 1):
        one.launch(member, round_id=1, launch_step=20, now_s=100.0)
    assert one.calls(active, step_s=0.1, now_s=100.0) == {1: (0, 1)}


def test_in_every_fourth_round_the_late_are_waited_for_again() -> None:
    one, waits = book(), []
    for number in range(12):
        now_s = 100.0 * number
        for member in (0, 1):
            one.launch(member, round_id=number, launch_step=10 * number + 10, now_s=now_s)
        waits.append(not one.calls((0, 1, 2), step_s=0.1, now_s=now_s))
        one.calls((0, 1, 2), step_s=0.1, now_s=now_s + 50)
    assert [number for number, is_waiting in enumerate(waits) if is_waiting] == [0, 3, 6, 9]


def test_a_round_is_decided_when_all_called_have_voted_or_the_time_for_votes_is_over_and_never_again() -> None:
    one, active = book(), (0, 1, 2)
    for member in active:
        one.launch(member, round_id=0, launch_step=10, now_s=0.0)
    voted(one, 0, has={0})
    assert one.decided(active, steps={}, now_s=0.0) == [], "a vote before the call waits"
    one.calls(active, step_s=0.1, now_s=0.0)
    voted(one, 0, 1, has={0, 1, 2})
    assert one.decided(active, steps={}, now_s=1.0) == []
    (found,) = one.decided(active, steps={}, now_s=one.vote_s + 1)
    assert found.members == (0, 1, 2) and found.holders == (0, 1)
    voted(one, 2, has={2})
    assert one.decided(active, steps={}, now_s=999.0) == []
    assert one.launch(2, round_id=0, launch_step=10, now_s=999.0) is found


def test_the_dead_are_not_waited_for_and_rounds_without_launchers_are_forgotten() -> None:
    one = book()
    for member in (0, 1):
        one.launch(member, round_id=0, launch_step=10, now_s=0.0)
    one.calls((0, 1), step_s=0.1, now_s=0.0)
    voted(one, 0, has={0, 1})
    one.forget(1)
    (found,) = one.decided((0,), steps={}, now_s=0.0)
    assert found.members == (0, 1) and found.holders == (0,), "its part counts all the same"
    one.launch(0, round_id=1, launch_step=20, now_s=0.0)
    one.forget(0)
    one.drop_empty()
    assert not one.open_rounds and one.closed_step == 10


Play = list[tuple[str, int, int, int]]
PLAYS = st.lists(
    st.tuples(
        st.sampled_from(["lend", "use", "count", "release", "save"]), st.integers(0, 2), *(st.integers(0, 12),) * 2
    ),
    max_size=60,
)


class Account:
    """Keeps books of every window by itself, beside the ledger."""

    def __init__(self) -> None:
        self.ledger = DataLeases(shard_windows=5)
        self.num_trained = self.repeated = 0
        self.counted: set[tuple[int, int]] = set()
        self.lent: dict[int, dict[int, tuple[int, int]]] = {0: {}, 1: {}, 2: {}}  # by shard, windows used and counted

    def lend(self, replica: int, shard: int, window: int) -> None:
        lease = self.ledger.lend(replica)
        assert not any(lease.shard in held for held in self.lent.values()), "nobody else has it"
        self.lent[replica][lease.shard] = lease.start, lease.start

    def use(self, replica: int, shard: int, window: int) -> None:
        self.ledger.use(replica, {shard: window})
        self._train(replica, shard, window)

    def count(self, replica: int, shard: int, window: int) -> None:
        self.ledger.count(replica, {shard: window})
        self._train(replica, shard, window)
        if shard in self.lent[replica]:
            used, done = self.lent[replica][shard]
            until = max(done, min(window, 5))
            fresh = {(shard, one) for one in range(done, until)}
            assert not fresh & self.counted, "a window counts once"
            self.counted |= fresh
            self.lent[replica][shard] = used, until
            if until == 5:
                del self.lent[replica][shard]

    def _train(self, replica: int, shard: int, window: int) -> None:
        if shard in self.lent[replica]:
            used, done = self.lent[replica][shard]
            until = max(used, min(window, 5))
            self.num_trained += until - used
            self.lent[replica][shard] = until, done

    def release(self, replica: int, shard: int, window: int) -> None:
        self.ledger.release(replica)
        self.repeated += sum(used - done for used, done in self.lent[replica].values())
        self.lent[replica].clear()

    def save(self, replica: int, shard: int, window: int) -> None:
        again = DataLeases(shard_windows=1)
        again.load_state_dict(json.loads(json.dumps(self.ledger.state_dict())))
        assert again.state_dict() == self.ledger.state_dict()
        self.ledger = again


@given(PLAYS)
def test_every_window_is_counted_once_or_repeated_and_said_so(plays: Play) -> None:
    account = Account()
    for what, *numbers_of in plays:
        getattr(account, what)(*numbers_of)
        in_use = sum(used - done for held in account.lent.values() for used, done in held.values())
        assert account.ledger.counted == len(account.counted) and account.ledger.repeated == account.repeated
        assert account.num_trained == len(account.counted) + account.repeated + in_use


def test_all_windows_come_in_the_end_whoever_leaves() -> None:
    ledger, seen = DataLeases(shard_windows=5), []
    for replica in range(20):
        lease = ledger.lend(replica)
        until = min(5, lease.start + 1 + replica % 3)
        ledger.count(replica, {lease.shard: until})
        seen += [(lease.shard, window) for window in range(lease.start, until)]
        ledger.release(replica)
    assert len(seen) == len(set(seen)) == ledger.counted and ledger.repeated == 0
    assert sorted(seen) == [divmod(number, 5) for number in range(len(seen))]
    with pytest.raises(ValueError, match="at least 1"):
        DataLeases(shard_windows=0)


def test_a_journal_cut_at_any_byte_gives_back_all_whole_lines_and_takes_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for number in range(3):
        journal.write("line", {"number": number, "text": "ü"})
    journal.close()
    raw = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(raw) if byte == 10]
    for cut in range(len(raw) + 1):
        path.write_bytes(raw[:cut])
        after = Journal(path)
        whole = sum(end - 1 <= cut for end in ends)  # a line that lacks its end alone is whole
        assert [line["number"] for line in after.lines] == list(range(whole))
        after.write("line", {"number": 99})
        after.close()
        again = Journal(path)
        again.close()
        assert [line["number"] for line in again.lines] == [*range(whole), 99]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
KINDS = st.sampled_from(
    ["join", "here", "beat", "launch", "vote", "lease", "captured", "done", "decision", "state", "x"]
)
FIELDS = (
    "round",
    "step",
    "has",
    "hash",
    "used",
    "step_s",
    "address",
    "port",
    "corpus",
    "windows",
    "root",
    "bytes",
    "note",
)


@given(
    st.binary(max_size=200)
    | st.builds(
        lambda kind, fields: json.dumps({"kind": kind, **fields}).encode(),
        KINDS, st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5),
    )
    | JSON.map(lambda value: json.dumps(value).encode()),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_bytes_are_a_message_or_a_payload_error(raw: bytes, to_member: bool) -> None:
    try:
        message = decode(raw, to_member=to_member)
    except PayloadError:
        return
    assert isinstance(message["kind"], str)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kind":"beat","step":' + b"[" * 5000 + b"]" * 5000 + b',"step_s":0}',
        b'{"kind":"beat","step":' + b"[" * 700 + b"]" * 700 + b',"step_s":0}',
        b'{"kind":"beat","step":' + b"9" * 5000 + b',"step_s":0}',
        b'{"kind":"beat","step":true,"step_s":0}',
        b'{"kind":"beat","step":-1,"step_s":0}',
        b'{"kind":"beat","step":1,"step_s":NaN}',
        b'{"kind":"beat","step":1,"step_s":Infinity}',
        b'{"kind":"beat","step":1,"step_s":1e-310}',
        b'{"kind":"here","address":"a b","port":1,"corpus":"","windows":1,"held":0,"era":0,"disk":0}',
        b'{"kind":"here","address":"a","port":0,"corpus":"","windows":1,"held":0,"era":0,"disk":0}',
        b'{"kind":"captured","step":1,"root":"zz","bytes":1}',
        b'{"kind":"done","note":' + b'{"a":' * 20 + b"1" + b"}" * 20 + b"}",
        b'{"kind":"leave","why":"' + b"x" * MOST_BYTES_HERE + b'"}',
        b'"\xff"',
    ],
)
def test_what_others_would_stumble_over_is_refused_in_few_words(raw: bytes) -> None:
    with pytest.raises(PayloadError) as caught:
        decode(raw, to_member=False)
    assert len(str(caught.value)) < 500


def test_bounds_of_words() -> None:
    with pytest.raises(PayloadError, match="is larger than"):
        encode("leave", why="x" * MOST_BYTES)
    for wrong in ([-1], [True], [1 << 32], ["1"], {}, None):
        with pytest.raises(PayloadError, match="must be a list of replicas"):
            numbers(wrong, what="members")
    for wrong in ({"a": 1}, {"1": -1}, {"1": True}, {"9" * 19: 1}, {str(n): 1 for n in range(65)}, []):
        with pytest.raises(PayloadError):
            decode(encode("launch", round=0, step=0, used=wrong), to_member=False)
    assert decode(encode("launch", round=0, step=0, used={"3": 4}), to_member=False)["used"] == {3: 4}


KEYS = st.binary(min_size=32, max_size=32)


@given(KEYS, st.integers(1, 65535), st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True), st.one_of(st.just(b""), KEYS))
def test_an_invitation_is_read_as_it_was_written(key: bytes, port: int, host: str, coordinator_key: bytes) -> None:
    invitation = Invitation(host=host, port=port, secret=Secret(key=key), coordinator_key=coordinator_key)
    assert read_invitation(f"  {invitation.text()}\n") == invitation
    without = dataclasses.replace(invitation, secret=None)
    assert read_invitation(without.text().removeprefix("thinwire://")) == without
    with pytest.raises(ValueError, match="the coordinator's key before the address is cut or changed; got 3 letters"):
        read_invitation(f"thinwire://abc@{host}:{port}")
    assert "secret" not in repr(invitation)


@given(st.text(max_size=80))
def test_other_words_are_no_invitation_but_one_error(text: str) -> None:
    try:
        read_invitation(text)
    except ValueError as error:
        assert type(error) is ValueError and len(str(error)) < 400


def test_numbers_are_never_used_twice_and_a_suspect_has_less_time() -> None:
    roster = Roster()
    first, second = (roster.add(token, host="h", now_s=0.0) for token in (b"a", b"b"))
    roster.remove(first.replica)
    assert roster.by_token(b"a") is None and roster.add(b"a", host="h", now_s=0.0).replica == 2
    second.is_suspect = True
    roster.hear(roster.get(2), now_s=3.9, is_beat=False)
    assert [one.replica for one in roster.silent(now_s=4.0)] == [1]
    roster.hear(second, now_s=4.0, is_beat=False)
    assert not roster.silent(now_s=5.0) and not second.is_suspect
    second.state = MemberState.ACTIVE
    assert roster.active == (1,)


def test_a_cut_that_nobody_reached_in_time_is_chosen_anew_and_later() -> None:
    cuts = StateSnapshots()
    cuts.waiting.add(9)
    cut = cuts.schedule(active=(0, 1), step=10, step_s=0.1)
    cuts.miss(cut.step, 0)
    assert cuts.waiting == frozenset()
    cuts.forget(1)
    assert cuts.waiting == {9} and cuts.of(9) is None
    later = cuts.schedule(active=(0,), step=10, step_s=0.1)
    assert later.step > cut.step and cuts.of(9) is later and cuts.needed_step() == later.step
    cuts.loaded(9)
    assert cuts.needed_step() is None


def test_holders_of_another_state_are_named_and_old_cuts_forgotten() -> None:
    cuts = StateSnapshots()
    for replica, root in ((0, "aa"), (1, "bb"), (2, "bb")):
        cut = cuts.hold(5, replica, root=root, num_bytes=1)
    assert cut.agreed == ("bb", 1) and cut.agreeing() == (1, 2) and cut.odd() == (0,)
    for step in range(100):
        cuts.hold(100 + step, 0, root="aa", num_bytes=1)
    assert len(cuts._snapshots) <= 4
