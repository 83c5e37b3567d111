"""Carrier whose store sees sizes and times only: payloads and names are sealed with keys of the run's secret.

XChaCha20-Poly1305 of libsodium, through pynacl. A blob's name and its run are authenticated with it, so a blob that is
moved to another name, torn, changed, or replayed from another run does not open. A part of a name becomes a keyed hash,
which is the nonce, and the sealed part: equal names are equal in the store, and a listing can be read by members alone.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib
import re
import secrets
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from thinwire.carriers.base import (
    Carrier,
    CarrierCost,
    Entry,
    Limits,
    Payload,
    as_bytes,
    as_tensor,
    check_name,
    check_size,
)
from thinwire.carriers.cost import PART_BYTES
from thinwire.errors import DeadlineExceeded, MissingExtra, NotThere, PayloadError, ThinwireError, WrongSecret
from thinwire.transport.secret import Secret

PARTS_AT_ONCE = 4
_NONCE_BYTES, _TAG_BYTES, _RUN_BYTES = 24, 16, 16
_OVERHEAD_BYTES = _NONCE_BYTES + _TAG_BYTES + 1
_PAD = 16  # parts of names are padded to multiples of it
_LIMITS = {"most": 200, "most_part": 144, "depth": 6}  # of names, so that sealed ones are within those of stores
_MOST_PARTS = 1 << 17
_ROOT, _RUN, _PARTS = "v1", "v1/run", "parts"
_WHOLE, _IN_PARTS = 0, 1
_MOST_INDEX_BYTES = 256
_REQUEST_S = 60.0
_GROUP = re.compile(r"[0-9a-f]{32}")


class _Index(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Content of a blob in parts."""

    group: str
    num_bytes: int
    part_bytes: int


class SealedCarrier(Carrier):
    """Another carrier whose blobs are sealed; what it lists and returns is authentic, or an error.

    Args:
        inner: The store. Blobs below it that do not open, such as another run's, are passed over and never deleted.
        secret: The run's.
        may_create: Whether to begin a run if there is none.
        part_bytes: Size of the parts of large payloads.

    Raises:
        NotThere: There is no run, and none may be created.
        WrongSecret: The run has another secret.
        MissingExtra: pynacl is not installed.
    """

    def __init__(self, inner: Carrier, secret: Secret, *, may_create: bool, part_bytes: int = PART_BYTES) -> None:
        self._inner = inner
        self._aead = _sodium()
        self._part_bytes = part_bytes
        run = self._run(secret, may_create=may_create)
        self._root = f"{_ROOT}/{run}"
        self._context = b"thinwire carrier v1 " + run.encode()
        self._key = secret.derive(f"thinwire carrier v1 blobs {run}")
        self._name_key = secret.derive(f"thinwire carrier v1 names {run}")
        self._hash_key = secret.derive(f"thinwire carrier v1 hashes {run}")
        self._seal_part = functools.lru_cache(maxsize=1 << 14)(self._sealed_part)
        self._open_part = functools.lru_cache(maxsize=1 << 14)(self._opened_part)

    def __repr__(self) -> str:
        return f"SealedCarrier({self._inner!r})"

    def close(self) -> None:
        self._inner.close()

    def put(self, name: str, payload: Payload, *, only_new: bool) -> bool:
        data = as_bytes(payload)
        path = self._path(name)
        if len(data) <= self._part_bytes:
            return self._inner.put(path, self._seal(name, _WHOLE, data), only_new=only_new)
        old = None if only_new else self._index(name)
        group = secrets.token_hex(16)
        index = _Index(group=group, num_bytes=len(data), part_bytes=self._part_bytes)
        starts = range(0, len(data), self._part_bytes)

        def put_part(number: int) -> bool:
            part = data[starts[number] : starts[number] + self._part_bytes]
            part_name = f"{_PARTS}/{group}/{number}"
            return self._inner.put(self._path(part_name), self._seal(part_name, _WHOLE, part), only_new=False)

        try:  # the parts first: whoever finds the index finds all of them
            with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
                list(pool.map(put_part, range(len(starts))))
        except ThinwireError:
            with contextlib.suppress(ThinwireError):  # the first error counts
                self._delete_parts(index)
            raise
        sealed = self._seal(name, _IN_PARTS, memoryview(msgspec.msgpack.encode(index)))
        # if this fails, the index may be there, so the parts stay
        if self._inner.put(path, sealed, only_new=only_new) or self._index(name) == index:
            if old is not None:
                self._delete_parts(old)
            return True
        self._delete_parts(index)
        return False

    def get(self, name: str, *, most_bytes: int, deadline_s: float) -> torch.Tensor:
        until_s = time.monotonic() + deadline_s
        bound = max(min(most_bytes, PART_BYTES), _MOST_INDEX_BYTES) + _OVERHEAD_BYTES
        try:
            sealed = self._inner.get(self._path(name), most_bytes=bound, deadline_s=deadline_s)
        except NotThere:
            raise NotThere(f"there is no blob {name} now") from None
        except PayloadError:
            raise PayloadError(f"blob {name} has more bytes than expected; at most {most_bytes} are") from None
        kind, data = self._open(name, sealed)
        if kind == _WHOLE:
            check_size(name, len(data), most_bytes=most_bytes)
            return as_tensor(data)
        index = _index_of(name, data)
        check_size(name, index.num_bytes, most_bytes=most_bytes)
        try:
            return self._whole(name, index, until_s=until_s)
        except NotThere:
            if self._index(name) != index:  # replaced while it was read
                return self.get(name, most_bytes=most_bytes, deadline_s=max(until_s - time.monotonic(), 0.0))
            raise PayloadError(f"a part of blob {name} is missing") from None

    def _whole(self, name: str, index: _Index, *, until_s: float) -> torch.Tensor:
        try:
            whole = torch.empty(index.num_bytes, dtype=torch.uint8)
        except RuntimeError:  # torch has no error of its own for this
            raise PayloadError(
                f"blob {name} says that it has {index.num_bytes} bytes, for which no memory is left"
            ) from None

        def get_part(number: int) -> None:
            part_name, begin = f"{_PARTS}/{index.group}/{number}", number * index.part_bytes
            num_bytes = min(index.part_bytes, index.num_bytes - begin)
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(f"part {number} of blob {name} has not arrived in time")
            found = self._inner.get(self._path(part_name), most_bytes=num_bytes + _OVERHEAD_BYTES, deadline_s=left_s)
            _, part = self._open(part_name, found)
            if len(part) != num_bytes:
                raise PayloadError(f"part {number} of blob {name} has {len(part)} bytes, not {num_bytes}")
            whole[begin : begin + num_bytes] = as_tensor(part)

        with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
            list(pool.map(get_part, range(-(-index.num_bytes // index.part_bytes))))
        return whole

    def listing(self, prefix: str, *, after: str = "") -> list[Entry]:
        found = []
        for entry in self._inner.listing(self._path(prefix)):
            name = self._name(entry.name)
            if name is not None and name > after:
                found.append(Entry(name=name, num_bytes=entry.num_bytes, modified_s=entry.modified_s))
        return sorted(found)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            index = self._index(name)
            self._inner.delete([self._path(name)])
            if index is not None:
                self._delete_parts(index)

    def now(self) -> float:
        return self._inner.now()

    def pause(self, seconds: float) -> None:
        self._inner.pause(seconds)

    def limits(self) -> Limits:
        return self._inner.limits()

    def cost(self) -> CarrierCost:
        return self._inner.cost()

    def _run(self, secret: Secret, *, may_create: bool) -> str:
        """Return the run's number, which is in the clear beside a proof that its secret is this one."""
        key, label = secret.derive("thinwire carrier v1 run"), b"thinwire carrier v1 run"
        size = _RUN_BYTES + _NONCE_BYTES + _TAG_BYTES
        for _ in range(2):
            try:
                found = bytes(as_bytes(self._inner.get(_RUN, most_bytes=size, deadline_s=_REQUEST_S)))
            except NotThere:
                if not may_create:
                    raise NotThere(
                        f"there is no run in {self._inner!r}; start it first, or check the address"
                    ) from None
                run, nonce = secrets.token_bytes(_RUN_BYTES), secrets.token_bytes(_NONCE_BYTES)
                proof = self._aead.crypto_aead_xchacha20poly1305_ietf_encrypt(b"", label + run, nonce, key)
                if self._inner.put(_RUN, run + nonce + proof, only_new=True):
                    return run.hex()
                continue  # another member was faster
            run, nonce, proof = found[:_RUN_BYTES], found[_RUN_BYTES : _RUN_BYTES + _NONCE_BYTES], found[-_TAG_BYTES:]
            try:
                self._aead.crypto_aead_xchacha20poly1305_ietf_decrypt(proof, label + run, nonce, key)
            except (self._aead_error, TypeError, ValueError):
                raise WrongSecret(
                    f"{self._inner!r} holds a run with another secret; take the whole address that its first host "
                    f"printed, or another prefix for a new run"
                ) from None
            return run.hex()
        raise NotThere(f"the run in {self._inner!r} was deleted while it was opened; start it again")

    @functools.cached_property
    def _aead_error(self) -> type[Exception]:
        error: type[Exception] = importlib.import_module("nacl.exceptions").CryptoError
        return error

    def _seal(self, name: str, kind: int, data: memoryview) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        bound = self._context + bytes([kind]) + name.encode()
        sealed: bytes = self._aead.crypto_aead_xchacha20poly1305_ietf_encrypt(bytes(data), bound, nonce, self._key)
        return bytes([kind]) + nonce + sealed

    def _open(self, name: str, blob: torch.Tensor) -> tuple[int, bytes]:
        data = bytes(as_bytes(blob))
        nonce, sealed = data[1 : 1 + _NONCE_BYTES], data[1 + _NONCE_BYTES :]
        bound = self._context + data[:1] + name.encode()
        try:
            opened = self._aead.crypto_aead_xchacha20poly1305_ietf_decrypt(sealed, bound, nonce, self._key)
        except (self._aead_error, TypeError, ValueError):
            raise PayloadError(
                f"blob {name} does not open: it is torn, changed, or was written under another name or by another run"
            ) from None
        return data[0], opened

    def _index(self, name: str) -> _Index | None:
        """Return the index of a blob in parts, None for others, without reading more than an index."""
        try:
            bound = _MOST_INDEX_BYTES + _OVERHEAD_BYTES
            kind, data = self._open(name, self._inner.get(self._path(name), most_bytes=bound, deadline_s=_REQUEST_S))
            return _index_of(name, data) if kind == _IN_PARTS else None
        except (NotThere, PayloadError):
            return None

    def _delete_parts(self, index: _Index) -> None:
        count = -(-index.num_bytes // index.part_bytes)
        self._inner.delete(self._path(f"{_PARTS}/{index.group}/{number}") for number in range(count))

    def _path(self, name: str) -> str:
        """Return where a blob or a folder lies in the store."""
        parts = check_name(name, **_LIMITS).split("/")
        sealed = [self._seal_part("/".join(parts[:depth]), part) for depth, part in enumerate(parts)]
        return "/".join([self._root, *sealed])

    def _name(self, path: str) -> str | None:
        """Return the name of a blob in the store, None if it is not of this run."""
        name = ""
        for part in path.removeprefix(f"{self._root}/").split("/"):
            opened = self._open_part(name, part)
            if opened is None:
                return None
            name = f"{name}/{opened}" if name else opened
        return name

    def _sealed_part(self, folder: str, part: str) -> str:
        padded = part.encode() + bytes(-len(part) % _PAD)
        bound = self._context + folder.encode()
        nonce = hashlib.blake2b(bound + b"\0" + padded, digest_size=_NONCE_BYTES, key=self._hash_key).digest()
        sealed = self._aead.crypto_aead_xchacha20poly1305_ietf_encrypt(padded, bound, nonce, self._name_key)
        return base64.urlsafe_b64encode(nonce + sealed).decode().rstrip("=")

    def _opened_part(self, folder: str, part: str) -> str | None:
        bound = self._context + folder.encode()
        try:
            data = base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
            nonce, sealed = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
            padded: bytes = self._aead.crypto_aead_xchacha20poly1305_ietf_decrypt(sealed, bound, nonce, self._name_key)
            part_name = padded.rstrip(b"\0").decode()
        except (self._aead_error, TypeError, ValueError):
            return None
        return part_name if self._is_own(folder, part_name, part) else None

    def _is_own(self, folder: str, opened: str, part: str) -> bool:
        """Return whether a part is what `_path` makes of a name: any other cannot be read or deleted by it."""
        try:
            check_name(f"{folder}/{opened}" if folder else opened, **_LIMITS)
        except ValueError:
            return False
        return self._seal_part(folder, opened) == part


def _index_of(name: str, data: bytes) -> _Index:
    try:
        index = msgspec.msgpack.decode(data, type=_Index)
    except ValueError:  # all errors of msgspec are ValueErrors
        raise PayloadError(f"the index of blob {name} cannot be read") from None
    is_group = bool(_GROUP.fullmatch(index.group))  # a part of names
    if (
        not is_group
        or not 1 <= index.part_bytes <= PART_BYTES
        or not 1 <= index.num_bytes <= _MOST_PARTS * index.part_bytes
    ):
        raise PayloadError(f"the index of blob {name} is not sound")
    return index


def _sodium() -> Any:
    try:
        return importlib.import_module("nacl.bindings")
    except ModuleNotFoundError:
        raise MissingExtra.of("pynacl", extra="bucket") from None
