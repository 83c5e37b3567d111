"""A publisher and its subscribers: whole versions or none, whatever is lost, late, damaged or foreign."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.carriers.memory import CarrierFault, FaultKind, MemoryCarrier, MemoryStore
from thinwire.errors import StaleWeights, StreamError
from thinwire.publish.manifest import blob_of, head_of, version_name
from thinwire.publish.publisher import WeightPublisher
from thinwire.publish.subscriber import WeightSubscriber
from thinwire.training.summary import tensors_sha256


class Trainer:
    """A model whose weights move at a rate, and its publisher."""

    def __init__(self, carrier: MemoryCarrier, *, rate: float = 3e-6, **options: object) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 33), nn.LayerNorm(33))
        self.rate = rate
        self.hashes: dict[int, str] = {}
        options = {"in_background": False, **options}
        self.problems: list[str] = []
        self.publisher = WeightPublisher(self.model, to=carrier, on_problem=self.problems.append, **options)  # type: ignore[arg-type]

    def publish(self) -> int | None:
        """Take a step, publish, and keep the hash of the full weights as bfloat16."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += self.rate * torch.randn_like(parameter).sign()
        version = self.publisher.publish(step=len(self.hashes) * 10)
        if version is not None:
            self.hashes[version] = bf16_sha256(self.model)
        return version


def bf16_sha256(model: nn.Module) -> str:
    return tensors_sha256({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})


def reader(carrier: MemoryCarrier, **options: object) -> tuple[WeightSubscriber, nn.Module, list[str]]:
    """Return a subscriber, a model of other weights, and the findings."""
    found: list[str] = []
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 33), nn.LayerNorm(33))
    options = {"parallel": 1, "on_finding": found.append, **options}
    return WeightSubscriber(carrier, **options), model, found  # type: ignore[arg-type]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(is_virtual=True)


def test_every_version_has_the_hash_of_the_full_weights(store: MemoryStore) -> None:
    """With patches, an anchor now and then, and readers that join at version 0, before, at and behind an anchor."""
    trainer = Trainer(MemoryCarrier(store), anchor_every=5)
    readers = []
    for version in range(13):
        assert trainer.publish() == version
        if version in (0, 4, 5, 6):
            readers.append(reader(MemoryCarrier(store)))
        for subscriber, model, findings in readers:
            assert subscriber.update(model) == version
            assert bf16_sha256(model) == trainer.hashes[version]
            assert not findings
    manifest = trainer.publisher.newest
    assert manifest is not None
    assert manifest.anchor == 10
    assert sum(part.size for part in manifest.patches) * 10 < 2 * sum(p.numel() for p in trainer.model.parameters())


def test_a_reader_that_was_away_skips_versions_by_the_cheaper_way(store: MemoryStore) -> None:
    """A few patches, or the anchor where they are more bytes; also if all versions in between are deleted."""
    trainer = Trainer(MemoryCarrier(store), anchor_every=4, rate=1e-3)
    for _ in range(3):
        trainer.publish()
    (near, near_model, _), (far, far_model, _) = reader(MemoryCarrier(store)), reader(MemoryCarrier(store))
    assert near.update(near_model) == far.update(far_model) == 2
    trainer.publish()
    before = near.bytes_received
    assert near.update(near_model) == 3
    assert near.bytes_received - before < 0.6 * 2 * 1443
    for _ in range(17):
        trainer.publish()
    assert version_name(3) not in store.blobs
    assert far.update(far_model) == 20
    assert far.num_skipped == 17
    assert bf16_sha256(far_model) == trainer.hashes[20]
    # what was deleted stays bounded: two anchors and what lies behind them
    assert sum(name.startswith("versions/") for name in store.blobs) <= 8


@pytest.mark.parametrize("kind", ["torn", "corrupt"])
def test_damage_on_the_way_is_named_and_fetched_again(store: MemoryStore, kind: FaultKind) -> None:
    """Patches are; no anchor is fetched for it."""
    trainer = Trainer(MemoryCarrier(store))
    trainer.publish()
    carrier = MemoryCarrier(store)
    subscriber, model, findings = reader(carrier)
    subscriber.update(model)
    trainer.publish()
    before = subscriber.bytes_received
    carrier.inject(CarrierFault(on="get", kind=kind, below="head"))
    assert subscriber.update(model) == 0
    assert findings
    findings.clear()
    newest = trainer.publisher.newest
    assert newest is not None
    for name in (store.blobs["head"].data[8:].hex(), newest.patches[0].chunks[0].sha256.hex()):
        carrier.inject(CarrierFault(on="get", kind=kind, below=f"blobs/{name}"))
    assert subscriber.update(model) == 1
    assert ["MemoryCarrier sent wrong bytes" in line for line in findings] == [True, True]
    assert subscriber.num_healed == 0
    assert subscriber.bytes_received - before < 600
    assert bf16_sha256(model) == trainer.hashes[1]


@pytest.mark.parametrize("kind", ["torn", "corrupt", "late"])
def test_objects_that_are_damaged_or_late_leave_the_version_before(store: MemoryStore, kind: FaultKind) -> None:
    """Until the next anchor, or until they are there."""
    carrier = MemoryCarrier(store)
    trainer = Trainer(carrier, anchor_every=2)
    trainer.publish()
    subscriber, model, findings = reader(MemoryCarrier(store))
    subscriber.update(model)
    carrier.inject(CarrierFault(on="put", kind=kind, below="blobs", seconds=50.0))
    trainer.publish()
    assert subscriber.update(model) == 0
    assert bf16_sha256(model) == trainer.hashes[0]
    assert "no version newer than 0" in findings[-1]
    if kind == "late":
        store.advance(60.0)
    else:
        trainer.publish()
    assert subscriber.update(model) == len(trainer.hashes) - 1
    assert bf16_sha256(model) == trainer.hashes[subscriber.version]


def test_patches_that_do_not_verify_are_healed_by_the_anchor(store: MemoryStore) -> None:
    """A reader whose weights are not those it verified, as by faulty memory, fetches the anchor; it reports it."""
    trainer = Trainer(MemoryCarrier(store), anchor_every=3)
    trainer.publish()
    subscriber, model, findings = reader(MemoryCarrier(store))
    subscriber.update(model)
    assert subscriber.held is not None
    subscriber.held.words[0][0][5] ^= 1
    trainer.publish()
    assert subscriber.update(model) == 1
    assert bf16_sha256(model) == trainer.hashes[1]
    assert subscriber.num_healed == 1
    assert "the result has another hash; fetching the anchor" in findings[0]


def test_doubled_reordered_and_replayed_heads_change_nothing(store: MemoryStore) -> None:
    """A reader never goes back."""
    trainer = Trainer(MemoryCarrier(store))
    heads = []
    for _ in range(3):
        trainer.publish()
        heads.append(store.blobs["head"])
    subscriber, model, _ = reader(MemoryCarrier(store))
    for number, expected in ((1, 1), (0, 1), (2, 2), (2, 2), (1, 2)):
        store.blobs["head"] = heads[number]
        assert subscriber.update(model) == expected
        assert bf16_sha256(model) == trainer.hashes[expected]


def test_another_run_in_the_same_place_is_an_error(store: MemoryStore) -> None:
    """Its weights are not taken, and the remedy is named."""
    trainer = Trainer(MemoryCarrier(store))
    trainer.publish()
    subscriber, model, _ = reader(MemoryCarrier(store))
    subscriber.update(model)
    store.blobs.clear()
    other = Trainer(MemoryCarrier(store))
    other.publish()
    other.publish()
    with pytest.raises(StreamError, match="another run's weights now; start a subscriber for it"):
        subscriber.update(model)
    assert bf16_sha256(model) == trainer.hashes[0]


def test_a_publisher_that_starts_again_continues_the_chain(store: MemoryStore) -> None:
    """With an anchor; also if it died between a version and its head. Other weights are refused by the first tensor."""
    first = Trainer(MemoryCarrier(store))
    first.publish()
    head = store.blobs["head"]
    first.publish()
    subscriber, model, findings = reader(MemoryCarrier(store))
    subscriber.update(model)
    store.blobs["head"] = head
    second = Trainer(MemoryCarrier(store))
    assert second.publish() == 2
    assert subscriber.update(model) == 2
    assert bf16_sha256(model) == second.hashes[2]
    assert not findings
    assert subscriber.held is not None
    assert subscriber.held.manifest.anchors
    with pytest.raises(ValueError, match=r"of another model; got '0.weight' bfloat16 of shape \(50, 16\)"):
        WeightPublisher(nn.Linear(2, 2), to=MemoryCarrier(store))


def test_two_publishers_on_one_stream_are_an_error(store: MemoryStore) -> None:
    """The second one stops, and readers follow the first."""
    first, second = Trainer(MemoryCarrier(store)), Trainer(MemoryCarrier(store))
    first.publish()
    assert second.publish() is None
    with pytest.raises(StreamError, match="another publisher wrote version 0"):
        second.publish()
    assert first.publish() == 1


def test_a_full_store_ends_no_training(store: MemoryStore) -> None:
    """It is reported, and the next version is an anchor; one whose answer was lost is not committed twice."""
    carrier = MemoryCarrier(store)
    trainer = Trainer(carrier)
    trainer.publish()
    subscriber, model, _ = reader(MemoryCarrier(store))
    subscriber.update(model)
    carrier.inject(CarrierFault(on="put", kind="failed", times=3))
    assert trainer.publish() is None
    assert "step 10 were not published: put of blob" in trainer.problems[0]
    assert subscriber.update(model) == 0
    assert trainer.publish() == 1
    assert subscriber.update(model) == 1
    assert bf16_sha256(model) == trainer.hashes[1]
    carrier.inject(CarrierFault(on="put", kind="unanswered", below="versions"))
    carrier.inject(CarrierFault(on="put", kind="failed", below="versions", times=2))
    assert trainer.publish() is None
    assert trainer.publish() == 3
    assert subscriber.update(model) == 3
    assert bf16_sha256(model) == trainer.hashes[3]
    # an answer that is lost, and a second try that finds its own
    carrier.inject(CarrierFault(on="put", kind="unanswered", below="versions"))
    assert trainer.publish() == 4
    assert subscriber.update(model) == 4


def test_stale_weights_stop_a_reader_that_sets_a_bound(store: MemoryStore) -> None:
    """It counts versions that are due as well as those that are there; without a bound the reader goes on."""
    now_s = [0.0]
    trainer = Trainer(MemoryCarrier(store))
    subscriber, model, _ = reader(MemoryCarrier(store), max_staleness=2, clock=lambda: now_s[0])
    with pytest.raises(StaleWeights, match=r"there is no version within 60 s at MemoryCarrier; check the URI"):
        subscriber._deadline_s, now_s[0] = 60.0, 0.0
        subscriber._clock = iter(range(0, 1000, 7)).__next__  # type: ignore[assignment]
        subscriber.update(model)
    subscriber._clock = lambda: now_s[0]
    for _ in range(3):
        trainer.publish()
    trainer.publisher._interval_s = 10.0
    trainer.publish()
    assert subscriber.update(model) == 3
    now_s[0] = 29.0
    assert subscriber.update(model) == 3
    now_s[0] = 31.0
    with pytest.raises(StaleWeights, match="version 3 is 3 versions behind, more than the 2 allowed"):
        subscriber.update(model)
    trainer.publish()
    assert subscriber.update(model) == 4


def test_lossy_streams_give_every_reader_the_same_weights(store: MemoryStore) -> None:
    """Of one that joined at the start and one that came by an anchor; they are near the trainer's."""
    trainer = Trainer(MemoryCarrier(store), code="e3m0", rate=0.05, anchor_every=4)
    early, early_model, _ = reader(MemoryCarrier(store))
    for _ in range(7):
        trainer.publish()
        early.update(early_model)
    late, late_model, _ = reader(MemoryCarrier(store))
    late.update(late_model)
    assert bf16_sha256(early_model) == bf16_sha256(late_model) != trainer.hashes[6]
    for mine, its in zip(early_model.parameters(), trainer.model.parameters(), strict=True):
        assert float((mine - its).detach().abs().mean()) < 0.02
    assert any(part.size < 0.6 * 1443 for part in late.held.manifest.patches)  # type: ignore[union-attr]


def test_a_model_that_does_not_fit_keeps_its_weights(store: MemoryStore) -> None:
    """The error names the first tensor."""
    Trainer(MemoryCarrier(store)).publish()
    subscriber, _, _ = reader(MemoryCarrier(store))
    with pytest.raises(ValueError, match=r"first in 0\.weight"):
        subscriber.update(nn.Sequential(nn.Embedding(50, 17)))


def test_uploads_in_the_background_are_skipped_not_queued(store: MemoryStore) -> None:
    """While a version is uploaded the next ones return at once; the model may change meanwhile."""
    import threading

    gate, started = threading.Event(), threading.Event()

    def on_request(operation: str, name: str) -> None:
        if operation == "put":
            started.set()
            assert gate.wait(60)

    trainer = Trainer(MemoryCarrier(store, on_request=on_request), in_background=True)
    assert trainer.publish() == 0
    assert started.wait(60)
    assert trainer.publish() is None
    assert trainer.publish() is None
    assert trainer.publisher.num_skipped == 2
    gate.set()
    assert trainer.publisher.flush(deadline_s=60)
    assert trainer.publish() == 1
    trainer.publisher.flush()
    subscriber, model, _ = reader(MemoryCarrier(store))
    assert subscriber.update(model) == 1
    assert bf16_sha256(model) == trainer.hashes[1]


def test_damaged_heads_and_newer_formats_are_named(store: MemoryStore) -> None:
    """A damaged one is reported, a newer one is an error with the remedy."""
    trainer = Trainer(MemoryCarrier(store))
    trainer.publish()
    subscriber, model, findings = reader(MemoryCarrier(store))
    subscriber.update(model)
    store_as = MemoryCarrier(store)
    for head, finding in (
        (b"short", "MemoryCarrier: head is damaged: 5 bytes"), (bytes(40), "no blob blobs/000000"),
        (head_of(7, blob_of(b"no manifest").sha256), "blobs/"),
    ):  # fmt: skip
        findings.clear()
        store_as.put("head", head, only_new=False)
        assert subscriber.update(model) == 0
        assert any(finding in line for line in findings)
    newer = b"\x81\xa6format\x09"
    store_as.put(blob_of(newer).name, newer, only_new=False)
    store_as.put("head", head_of(7, blob_of(newer).sha256), only_new=False)
    with pytest.raises(StreamError, match="has format 9, and this thinwire reads 1; update thinwire here"):
        subscriber.update(model)
