"""Sealed blobs: what the store sees, and what it may do to them without being believed."""

from __future__ import annotations

import base64
import re

import msgspec
import pytest
import torch

from thinwire.carriers.base import Carrier, as_bytes
from thinwire.carriers.memory import CarrierFault, MemoryCarrier, MemoryStore
from thinwire.carriers.sealed import SealedCarrier
from thinwire.errors import NotThere, PayloadError, TransportError, WrongSecret
from thinwire.transport.secret import Secret

SECRET = Secret(key=bytes(range(32)))
PART = 1000


def member(store: MemoryStore, *, secret: Secret = SECRET) -> SealedCarrier:
    return SealedCarrier(MemoryCarrier(store), secret, may_create=True, part_bytes=PART)


def read(carrier: Carrier, name: str) -> bytes:
    return bytes(as_bytes(carrier.get(name, most_bytes=1 << 20, deadline_s=30)))


def blob_of(store: MemoryStore, before: set[str]) -> str:
    (added,) = set(store.blobs) - before
    return added


def test_the_store_sees_no_name_no_content_and_no_secret() -> None:
    store = MemoryStore()
    ada = member(store)
    ada.put("rounds/17/member-3", b"plain content", only_new=True)
    ada.put("rounds/17/member-3x", b"plain content", only_new=True)
    seen = repr([(name, blob.data) for name, blob in store.blobs.items()]) + repr(ada)
    assert not re.search("rounds|member|plain|content|17/", seen)
    assert SECRET.key not in b"".join(blob.data for blob in store.blobs.values()) and SECRET.key.hex() not in seen
    first, second = (name for name in store.blobs if name != "v1/run")
    assert len(first) == len(second)  # lengths are padded
    assert first.rpartition("/")[0] == second.rpartition("/")[0] and first[-20:] != second[-20:]


def test_a_torn_changed_moved_or_replayed_blob_does_not_open() -> None:
    store = MemoryStore()
    ada = member(store)
    before = set(store.blobs)
    ada.put("round/1", b"first", only_new=True)
    first = blob_of(store, before)
    before = set(store.blobs)
    ada.put("round/2", b"second", only_new=True)
    second = blob_of(store, before)
    whole = store.blobs[first].data
    changed = [whole[:-1], whole[:20], b"", bytes([1]) + whole[1:], store.blobs[second].data]  # the last is moved
    changed += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(len(whole))]
    for data in changed:
        store.blobs[first].data = data
        with pytest.raises(PayloadError, match="round/1 does not open"):
            read(ada, "round/1")
    store.blobs[first].data = whole
    assert read(ada, "round/1") == b"first"
    # the run begins again under the same prefix and secret, and the store brings back what the old one wrote
    del store.blobs["v1/run"]
    again = member(store)
    before = set(store.blobs)
    again.put("round/1", b"new", only_new=True)
    store.blobs[blob_of(store, before)].data = whole
    with pytest.raises(PayloadError, match="another run"):
        read(again, "round/1")


def test_another_secret_is_one_error_that_says_what_to_do() -> None:
    store = MemoryStore()
    with pytest.raises(NotThere, match="no run"):
        SealedCarrier(MemoryCarrier(store), SECRET, may_create=False)
    member(store)
    for may_create in (True, False):
        with pytest.raises(WrongSecret, match="another prefix for a new run"):
            SealedCarrier(MemoryCarrier(store), Secret(key=bytes(32)), may_create=may_create)
    store.blobs["v1/run"].data = b"short"
    with pytest.raises(WrongSecret):
        member(store)


def test_foreign_blobs_are_passed_over_and_stay() -> None:
    store = MemoryStore()
    ada = member(store)
    before = set(store.blobs)
    ada.put("state/1", b"mine", only_new=True)
    folder = blob_of(store, before).rpartition("/")[0]
    MemoryCarrier(store).put(f"{folder}/README.txt", b"foreign", only_new=True)
    MemoryCarrier(store).put("v1/0000/other-run", b"foreign", only_new=True)
    assert [entry.name for entry in ada.listing("state")] == ["state/1"]
    ada.delete(["state/1", "state/2"])
    assert f"{folder}/README.txt" in store.blobs and "v1/0000/other-run" in store.blobs


def test_a_member_that_lies_in_names_and_indices_is_passed_over_or_named() -> None:
    store = MemoryStore()
    ada, eve = member(store), member(store)
    ada.put("in/a", b"x", only_new=True)
    folder = eve._path("in")

    def forged(padded: bytes) -> str:  # with a nonce of its own, and what no `check_name` lets through
        aead, nonce = eve._aead, bytes(24)
        bound = eve._context + b"in"
        sealed = aead.crypto_aead_xchacha20poly1305_ietf_encrypt(padded, bound, nonce, eve._name_key)
        return base64.urlsafe_b64encode(nonce + sealed).decode().rstrip("=")

    for part in (b"\xff" * 16, b"../key".ljust(16, b"\0"), b"x/y".ljust(16, b"\0"), bytes(16), b"a".ljust(16, b"\0")):
        MemoryCarrier(store).put(f"{folder}/{forged(part)}", b"forged", only_new=True)
    assert [entry.name for entry in ada.listing("in")] == ["in/a"]
    whole = {"num_bytes": 3 * PART, "part_bytes": PART}
    bad: list[object] = [
        ["../x", *whole.values()],
        ["", *whole.values()],
        [b"\xff", 1, 1],
        ["0" * 32, 1 << 39, 1 << 23],
    ]
    for index in bad:
        raw = msgspec.msgpack.encode(index).replace(b"\xc4\x01\xff", b"\xa1\xff")
        MemoryCarrier(store).put(eve._path("big"), eve._seal("big", 1, memoryview(raw)), only_new=False)
        with pytest.raises(PayloadError, match="big"):
            ada.get("big", most_bytes=1 << 62, deadline_s=5)
        ada.delete(["big"])
    for raw in (b'{"name":"\xff"}', b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        ada.put("lead/00000000", raw, only_new=False)
        with pytest.raises(PayloadError, match="no lease"):
            ada.newest_lease("lead")


def test_a_large_blob_travels_in_parts_and_leaves_none_behind() -> None:
    store = MemoryStore()
    ada, bob = member(store), member(store)
    for size in (PART, PART + 1, 7 * PART + 3):
        payload = torch.randint(256, (size,), dtype=torch.uint8)
        assert ada.put("state/x", payload, only_new=False)
        assert torch.equal(bob.get("state/x", most_bytes=size, deadline_s=30), payload)
        with pytest.raises(PayloadError, match="at most"):
            bob.get("state/x", most_bytes=size - 1, deadline_s=30)
    assert len(store.blobs) == 2 + 8  # the run, the index and the newest parts: replaced ones are gone
    assert not bob.put("state/x", bytes(3 * PART), only_new=True) and len(store.blobs) == 10
    broken = MemoryCarrier(store)
    eve = SealedCarrier(broken, SECRET, may_create=False, part_bytes=PART)
    broken.inject(CarrierFault(on="put", kind="failed", below="v1/", times=1))
    with pytest.raises(TransportError):
        eve.put("state/y", bytes(3 * PART), only_new=True)
    assert len(store.blobs) == 10
    part = max(store.blobs, key=lambda name: name.count("/"))  # parts lie deepest
    store.blobs[part].data = store.blobs[part].data[:-1]
    with pytest.raises(PayloadError, match="does not open"):
        bob.get("state/x", most_bytes=1 << 20, deadline_s=30)
    ada.delete(["state/x"])
    assert list(store.blobs) == ["v1/run"]


def test_names_that_are_too_long_when_sealed_are_refused_by_their_plain_limit() -> None:
    ada = member(MemoryStore())
    assert ada.put("a" * 144, b"", only_new=True) and ada.put("/".join(["b" * 32] * 6), b"", only_new=True)
    for name in ("a" * 145, "/".join("abcdefg"), "c" * 100 + "/" + "d" * 100):
        with pytest.raises(ValueError, match="200 characters"):
            ada.put(name, b"", only_new=True)
