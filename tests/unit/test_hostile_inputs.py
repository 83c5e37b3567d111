"""Parsers read or refuse mutations of valid bytes, some thousand of each kind with fixed seeds, and do nothing else."""

import json
import random
from collections.abc import Iterator

import pytest

from tests import hostile_inputs
from tests.hostile_inputs import TARGETS

ROUNDS = {"replicas": 150, "coordinator": 150, "journal": 60}


def mutations(raw: bytes, chance: random.Random, *, count: int) -> Iterator[bytes]:
    """Yield what a wire, a disk or an enemy may make of bytes."""
    for _ in range(count):
        changed = bytearray(raw)
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(len(changed) + 1)
            match chance.randrange(6):
                case 0:
                    del changed[at : at + chance.choice((1, 4, 64))]
                case 1:
                    changed[at:at] = bytes(chance.randrange(256) for _ in range(chance.choice((1, 4, 16))))
                case 2 if at < len(changed):
                    changed[at] ^= 1 << chance.randrange(8)
                case 3:
                    changed[at:at] = chance.choice((b"-1", b"1e400", b"99999999999999999999", b"null", b"[]", b"{}"))
                case 4:
                    changed[at:at] = changed[chance.randrange(len(changed) + 1) :][:64]
                case _ if at < len(changed):
                    changed[at] = chance.choice((0, 255, 127, 128, 10, 34))
        yield bytes(changed)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_is_almost_right_is_read_or_refused(name: str) -> None:
    target, seeds = TARGETS[name]
    chance = random.Random(name)
    for raw in (b"", b"\n", bytes(3), *seeds):
        target(raw)
    for raw in seeds:
        for changed in mutations(raw, chance, count=ROUNDS.get(name, 2000 // len(seeds))):
            target(changed)


_NOTE = {"rank": 1, "replica": 1, "hostname": "h", "host": "k", "address": "10.0.0.2", "port": 9, "secret": ""}
_LONG_NUMBER = b"1" + bytes(400).replace(b"\0", b"0")
# Inputs that a parser neither read nor refused when it was first fuzzed: an exception that nobody catches, or a value
# that passed unchecked.
FOUND = {
    "a rank's note nested deeper than Python recurses": ("rank-note", b"[" * 3000),
    "a rank's address that is a number": ("rank-note", json.dumps({**_NOTE, "address": 167772162}).encode()),
    "a host's name that a terminal obeys": ("rank-note", json.dumps({**_NOTE, "hostname": "h\x1b[2J"}).encode()),
    "a rank's note with an unknown field that a terminal obeys": ("rank-note", b'{"\\u001b[2J": 1}'),
    "a list of ranks without the one that wrote it": (
        "board", b"1 2\n\n" + json.dumps({**_NOTE, "rank": 2}).encode() + b"\n\n",
    ),
    "a list of ranks of thousands of digits": ("board", b"9" * 5000),
    "a flow's seconds beyond a float": ("active-test", b'{"seconds": ' + _LONG_NUMBER + b"}"),
    "a fault's detail that a terminal obeys": (
        "active-test", b'{"rate": 1, "overhead_s": 0, "latency_s": 0, "detail": "\\u001b[2J"}',
    ),
    "a probe without a transfer": ("wire-note", b'{"latency_s": 1, "transfers": []}'),
    "a probe's bytes beyond a float": ("wire-note", b'{"latency_s": 1, "transfers": [[' + _LONG_NUMBER + b", 1]]}"),
    "a probe's rate beyond a float": ("wire-note", b'{"latency_s": 1, "transfers": [[1e308, 1e-308]]}'),
    "a fingerprint nested deeper than Python recurses": ("fingerprint", b"[" * 2048),
    "an address with a scope": ("rank-place", b"h\nc\n9\nd00::1%0.0.0.1"),
    "an address with a scope longer than a name": ("rank-place", b"h\nc\n9\n::1%" + b"a" * 100),
    "a request with more fields than are read": (
        "dashboard", b"GET /?a=1&b=2&c=3&d=4&e=5 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FOUND)
def test_what_the_fuzzer_found_is_read_or_refused(what: str) -> None:
    name, raw = FOUND[what]
    TARGETS[name][0](raw)


def test_every_target_says_who_sends_it_and_whether_the_sender_is_authenticated() -> None:
    assert set(hostile_inputs.SENDERS) == set(TARGETS)


def test_the_signed_seeds_are_read_and_not_only_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    for module, name in ((hostile_inputs, "pack"), (hostile_inputs.message, "Received")):
        inner = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *words, inner=inner, **more: (read.append(1), inner(*words, **more))[1]
        )
    for name in ("signed-message", "signed-state"):
        target, seeds = TARGETS[name]
        before = len(read)
        target(seeds[0])
        assert len(read) > before, f"{name} was refused"
