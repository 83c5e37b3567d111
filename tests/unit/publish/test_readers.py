"""Readers on unlike wires, and readers of several sources: bytes, times and who is named."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from thinwire.carriers.base import Payload, as_bytes, as_tensor
from thinwire.carriers.memory import MemoryCarrier, MemoryStore
from thinwire.errors import NotThere, TransportError
from thinwire.publish.publisher import WeightPublisher
from thinwire.publish.subscriber import WeightSubscriber
from thinwire.training.summary import tensors_sha256


class Timeline(MemoryCarrier):
    """A store whose every state is kept, so that readers on clocks of their own see it as it was."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(is_virtual=True))
        self.history: dict[str, list[tuple[float, bytes | None]]] = {}

    def put(self, name: str, payload: Payload, *, only_new: bool) -> bool:
        self.history.setdefault(name, []).append((self.now(), bytes(as_bytes(payload))))
        return super().put(name, payload, only_new=only_new)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.history[name].append((self.now(), None))

    def at(self, name: str, time_s: float) -> bytes:
        states = self.history.get(name, [])
        data = states[found - 1][1] if (found := bisect.bisect_right(states, time_s, key=lambda s: s[0])) else None
        if data is None:
            raise NotThere(f"there is no blob {name} now")
        return data


class PacedReader(MemoryCarrier):
    """A reader's way to a timeline, whose clock moves by the bytes that it reads."""

    def __init__(self, timeline: Timeline, *, bits_per_s: float) -> None:
        super().__init__(MemoryStore(is_virtual=True, clock_s=timeline.now()))
        self.timeline, self.bits_per_s = timeline, bits_per_s

    def get(self, name: str, *, most_bytes: int, deadline_s: float) -> Tensor:
        self.store.advance(0.02)
        data = self.timeline.at(name, self.now())
        self.store.advance(8 * len(data) / self.bits_per_s)
        return as_tensor(data)


def test_a_slow_reader_skips_versions_and_slows_no_other() -> None:
    """0.2, 1 and 20 Mbit/s, a version a second: verified weights, as fresh as each wire allows."""
    timeline = Timeline()
    generator = torch.Generator().manual_seed(0)
    weights = {"w": 0.02 * torch.randn(150, 1000, generator=generator)}
    publisher = WeightPublisher(weights, to=timeline, anchor_every=8, in_background=False)
    hashes, published_s, num_versions = {}, {}, 40
    for version in range(num_versions):
        weights["w"] += 1e-4 * torch.randn(150, 1000, generator=generator)
        publisher.publish(version)
        hashes[version] = tensors_sha256({"w": weights["w"].to(torch.bfloat16)})
        published_s[version] = timeline.now()
        timeline.store.advance(1.0)
    assert publisher.num_skipped == publisher.num_failed == 0
    received: dict[float, dict[int, float]] = {}
    for bits_per_s in (0.2e6, 1e6, 20e6):
        carrier = PacedReader(timeline, bits_per_s=bits_per_s)
        carrier.store.clock_s = published_s[0]
        subscriber = WeightSubscriber(carrier, parallel=1, clock=carrier.now)
        mine = {"w": torch.zeros(150, 1000)}
        seen = received[bits_per_s] = {}
        while carrier.now() < published_s[num_versions - 1] + 30:
            version = subscriber.update(mine)
            if version not in seen:
                seen[version] = carrier.now() - published_s[version]
                assert tensors_sha256({"w": mine["w"].to(torch.bfloat16)}) == hashes[version]
            carrier.pause(0.05)
        assert subscriber.num_skipped == num_versions - len(seen)
    assert sorted(received[20e6]) == list(range(num_versions))
    assert max(received[20e6].values()) < 0.5
    assert len(received[1e6]) >= num_versions - 4
    assert max(list(received[1e6].values())[8:]) < 2.0
    assert 4 <= len(received[0.2e6]) <= num_versions // 2
    assert max(received[0.2e6]) == num_versions - 1


class Mirror(MemoryCarrier):
    """A source that sends wrong bytes, or dies after some blobs."""

    def __init__(self, store: MemoryStore, spoil: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__(store)
        self.spoil, self.num_chunks, self.num_bytes = spoil, 0, 0

    def get(self, name: str, *, most_bytes: int, deadline_s: float) -> Tensor:
        found = super().get(name, most_bytes=most_bytes, deadline_s=deadline_s)
        if len(found) < 60_000:
            return found
        self.num_chunks += 1
        found = self.spoil(self.num_chunks, found)
        self.num_bytes += len(found)
        return found


def flip(number: int, data: Tensor) -> Tensor:
    data[7] ^= 1
    return data


def die(number: int, data: Tensor) -> Tensor:
    if number > 10:
        raise TransportError("the host is gone")
    return data


def honest(number: int, data: Tensor) -> Tensor:
    return data


class Corrupt(Mirror):
    pass


class Dying(Mirror):
    pass


def test_three_sources_one_corrupt_and_one_that_dies() -> None:
    """Both are named, the weights verify, and at most 1.05 times their bytes travel."""
    store = MemoryStore()
    weights = {"w": torch.randn(2_300_000, generator=torch.Generator().manual_seed(0))}
    publisher = WeightPublisher(weights, to=MemoryCarrier(store), in_background=False)
    publisher.publish(0)
    assert publisher.newest is not None
    size = publisher.newest.anchors[0].size
    mirrors = [Corrupt(store, flip), Dying(store, die), Mirror(store, honest)]
    findings: list[str] = []
    subscriber = WeightSubscriber(mirrors, on_finding=findings.append)
    mine = {"w": torch.zeros(2_300_000)}
    assert subscriber.update(mine) == 0
    assert torch.equal(mine["w"], weights["w"].to(torch.bfloat16).float())
    travelled = sum(mirror.num_bytes for mirror in mirrors)
    assert travelled <= 1.05 * size, travelled / size
    assert any("Corrupt is not asked any more: Corrupt sent wrong bytes for blobs/" in line for line in findings)
    assert mirrors[1].num_chunks > 10
    # by the hash of its manifest, and with no source left
    assert subscriber.held is not None
    assert WeightSubscriber([mirrors[2]]).fetch(subscriber.held.sha256).tensors()["w"].shape == (2_300_000,)
    with pytest.raises(TransportError, match="Corrupt sent wrong bytes"):
        WeightSubscriber([mirrors[0]]).fetch(subscriber.held.sha256)
