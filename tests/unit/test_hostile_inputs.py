"""Bytes that are almost right are read or refused, never more: some thousand mutations of each kind, seeds fixed."""

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
