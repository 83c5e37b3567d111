"""Every field of every message as a member may send it that lies: the others of a run of three finish, and agree."""

import contextlib
import random
from typing import Any

import pytest
from model import World

from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.protocol import _TO_COORDINATOR, _TO_MEMBER, VERSION, decode, encode
from thinwire.errors import PayloadError
from thinwire.events import FIRST_LAST_ROUND
from thinwire.version import __version__

LIAR, ROUNDS, TURNS = 2, 12, 6000
# What a message holds that is right or nearly so; a lie replaces one field of it.
TO_COORDINATOR: dict[str, dict[str, Any]] = {
    "join": {"version": VERSION, "thinwire": __version__, "host": "x", "role": "replica"},
    "here": {
        "address": "127.0.0.1", "port": 1, "corpus": "c", "windows": 1, "held": 0, "era": 0, "disk": 0,
        "first_values": "",
    },
    "active": {"step": 10}, "beat": {"step": 10, "step_s": 0.01, "roster": 0, "relayed": []},
    "work": {"steps_per_interval": 10.0, "tokens_s": 1.0, "loss": 1.0},
    "rates": {"rates": {"0": 9}, "latest": {"1": 9}, "probes": {"1": [1, 9]}},
    "launch": {"round": 1, "step": 20, "used": {}}, "withhold": {"round": 1, "step": 20, "used": {}, "parts": 2},
    "reject": {"round": 0, "member": 0, "parts": 2, "since": 0, "fault": "non_finite", "why": "", "sha256": 64 * "e"},
    "verdict": {"round": 0, "member": 0, "verdict": "bad", "sha256": 64 * "e"},
    "vote": {"round": 1, "step": 20, "has": [2], "hash": 0}, "lease": {"number": 0},
    "captured": {"step": 20, "root": 64 * "e", "bytes": 9}, "account": {"step": 10}, "missed": {"step": 20},
    "lost": {"replica": 0}, "stuck": {"round": 1, "why": ""}, "note": {"level": "warning", "text": "", "about": ""},
    "records": {"number": 0, "text": ""}, "done": {"note": {}}, "leave": {"why": ""},
    "command": {"verb": "x", "target": "0"},
}  # fmt: skip
TO_MEMBER: dict[str, dict[str, Any]] = {
    "roster": {"members": [], "started": True, "number": 1}, "call": {"round": 1, "members": [0, 1]},
    "decision": {"round": 1, "launch_step": 10, "members": [0], "holders": [0], "step": 10, "closed": 5},
    "progress": {"step": 10, "closed": 5, "floor": 0, "kept": 0, "generation": "g"},
    "pace": {"step_s": 0.1, "sites": [[0, 1]], "detours": []}, "capture": {"step": 10},
    "verify": {"round": 1, "member": 0},
    "state": {"step": 10, "root": 64 * "a", "bytes": 5, "holders": [0], "note": {}, "era": 0},
    "account": {"step": 10, "note": {}}, "anew": {}, "recorded": {"number": 1},
    "leased": {"number": 0, "shard": 0, "start": 0}, "pause": {"paused": False}, "leave": {"why": ""},
    "expelled": {"why": "", "has_bad_parts": False}, "failed": {"why": ""}, "refused": {"why": ""},
    "finish": {"writer": 0, "notes": [], "note": {}}, "unknown": {"generation": "g"},
    "welcome": {"replica": 0, "generation": "g", "job": {}, "secret": ""},
    "answer": {"ok": True, "text": "", "status": {}},
}  # fmt: skip


def hostile(choice: random.Random, *, now: int) -> Any:
    """Return a value that is huge, negative, foreign, stale, of another kind, or only just right."""
    near = [now + delta for delta in (-2, -1, 0, 1, 2, 10, 20, 30)]
    far = [-1, 0, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 64, 1e30, -0.5, 1e-6, FIRST_LAST_ROUND, FIRST_LAST_ROUND + 30]
    kinds = ["", "x" * 70_000, "non_finite", "huge", None, True, [0, 1], [0, 1, 2], [1 << 31], {}, {"0": 1 << 62}, []]
    return choice.choice(choice.choice([near, near, far, kinds]))


class LyingWorld(World):
    """Three replicas, the last of which says anything and delivers nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__(replicas=3, rounds=ROUNDS)
        self.choice = random.Random(seed)
        del self.replicas[LIAR]

    def _is_served(self, replica: Any, round_id: int, member: int, asked: int) -> bool | None:
        return False if asked not in self.replicas else super()._is_served(replica, round_id, member, asked)

    def lie(self) -> None:
        self.down[LIAR].clear()
        if self.coordinator.state.roster.by_token(b"%d" % LIAR) is None:
            for kind in ("join", "here", "active"):
                self.say(kind, TO_COORDINATOR[kind] | ({"step": 0} if kind == "active" else {}))
        kind = self.choice.choice([*TO_COORDINATOR, "launch", "vote", "beat", "captured"])
        fields = dict(TO_COORDINATOR[kind])
        now = max((len(one.machines) for one in self.replicas.values()), default=0)
        for name in fields if kind in ("launch", "vote") else ():
            fields[name] = {"round": now, "step": 10 * now + 10}.get(name, fields[name])
        name = self.choice.choice(list(fields))
        at = now if name in ("round", "since", "member", "replica", "number") else 10 * now
        fields[name] = hostile(self.choice, now=at)
        self.say(kind, fields)

    def say(self, kind: str, fields: dict[str, Any]) -> None:
        with contextlib.suppress(
            PayloadError, OverflowError
        ):  # the port reports the first, and the second never leaves
            self._arrive(LIAR, encode(kind, **fields))

    def turn(self) -> None:
        if self.choice.random() < 0.4:
            self.lie()
        events = [event for event in self.events() if event[:2] not in (("time", "long"), ("up", LIAR))]
        work = [event for event in events if event[0] != "time"]
        if work or events:
            self.do(self.choice.choice(work or events))


def test_lies_reach_every_field_of_every_message() -> None:
    for told, known in ((TO_COORDINATOR, _TO_COORDINATOR), (TO_MEMBER, _TO_MEMBER)):
        assert {kind: set(fields) for kind, fields in told.items()} == {kind: set(one) for kind, one in known.items()}


@pytest.mark.parametrize("seed", range(60))
def test_whatever_a_member_says_the_others_finish_and_agree(seed: int) -> None:
    world = LyingWorld(seed)
    for _ in range(TURNS):
        if world.is_over():
            break
        world.turn()
    honest = list(world.replicas.values())
    gone = [(one.number, one.session.view.expelled_why) for one in honest if not one.is_here]
    assert not gone, gone
    assert [len(one.applied) for one in honest] == [ROUNDS, ROUNDS], "they finish"
    # the same members, whose parts each of them held: so the same parameters
    assert honest[0].applied == honest[1].applied
    assert all(set(members) <= {0, 1} for members in honest[0].applied.values()), honest[0].applied
    assert not world.coordinator.state.failure and not world.coordinator.state.has_finished


@pytest.mark.parametrize("kind", TO_MEMBER)
def test_whatever_a_coordinator_says_a_member_takes_it_or_refuses_it(kind: str) -> None:
    choice = random.Random(kind)
    for _ in range(200 if TO_MEMBER[kind] else 1):
        session = CoordinatorSession(replica=0, interval_steps=10, send=lambda kind, **fields: None)
        fields = dict(TO_MEMBER[kind])
        for name in choice.sample(list(fields), min(2, len(fields))):
            fields[name] = hostile(choice, now=10)
        with contextlib.suppress(PayloadError, OverflowError):
            session.receive(decode(encode(kind, **fields), to_member=True))
        session.tick()
