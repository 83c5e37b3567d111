"""Carrier in an object store: S3, GCS, Azure through obstore; other URLs through fsspec, which every host dials out to.

An error of a store's client is never shown: it may hold an address with a signature in it. Its status and code are.
"""

from __future__ import annotations

import importlib
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from thinwire.carriers.base import (
    Carrier,
    CarrierCost,
    CostMeter,
    Entry,
    Limits,
    Operation,
    Payload,
    as_bytes,
    as_tensor,
    check_name,
    check_size,
)
from thinwire.carriers.cost import RequestBudget
from thinwire.errors import (
    AccessRefused,
    ConnectError,
    DeadlineExceeded,
    MissingExtra,
    NotThere,
    Throttled,
    TransportError,
    refusal,
)

OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
_MOST_BYTES = 5 * 2**30  # of one write to S3
_TRIES = 4
_PAUSE_S = 1.0  # after the first throttled try; each later one is twice as long
_PAGE = 1000  # blobs that one LIST or DELETE request covers
_CLOCK_S = 600.0  # in which a steady clock drifts by 0.05 s at most
_CHUNK_BYTES = 1 << 20
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,40})</Region>")
# A conflict says that another write of the name is under way, not that it succeeded: only a second look decides.
_CONFLICT = "409"
T = TypeVar("T")


class _Exists(Exception):
    """A blob that must be new exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    """Meaning of a client's error: "refused", "throttled", "transient", "region", "bucket" or "unsupported"."""

    kind: str
    code: str


class _Client(Protocol):
    """Requests of one kind of store; a missing blob is a `FileNotFoundError`, one that must be new `_Exists`."""

    def write(self, path: str, data: memoryview, *, only_new: bool) -> None: ...

    def read(self, path: str, *, check: Callable[[int], None], until_s: float) -> bytearray: ...

    def entries(self, prefix: str, after: str) -> Iterable[Entry]: ...

    def remove(self, paths: list[str]) -> None: ...

    def modified_s(self, path: str) -> float: ...

    def trouble(self, error: Exception) -> _Trouble: ...


class BucketCarrier(Carrier):
    """Blobs as objects below a prefix of a store.

    Args:
        url: `s3://bucket/prefix` and others, without credentials, which the client takes from its own variables.
        options: Settings of the client, such as `region` and `endpoint`; they are never shown.
        requests_per_hour: Budget. Polls wait for it, and so do all requests beyond 5 percent more.
        sleep: Replaces `time.sleep` in tests.

    Raises:
        MissingExtra: obstore is not installed, or the package that fsspec names.
        ValueError: The address is not one of a store.
    """

    def __init__(
        self, url: str, *, options: Mapping[str, Any] | None = None, requests_per_hour: float = float("inf"),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._url = url
        is_object_store = url.partition("://")[0] in OBSTORE_SCHEMES
        self._client: _Client = _obstore_client(url, options) if is_object_store else _fsspec_client(url, options)
        self._limits = Limits(most_bytes=_MOST_BYTES, requests_per_hour=requests_per_hour)
        self._budget = RequestBudget(requests_per_hour)
        self._sleep = sleep
        self._lock = threading.Lock()
        self._meter = CostMeter()
        self._clock: tuple[float, float] | None = None  # steady clock then, and the store's minus it

    def __repr__(self) -> str:
        return self._url

    def put(self, name: str, payload: Payload, *, only_new: bool) -> bool:
        data, path = as_bytes(payload), check_name(name)
        check_size(name, len(data), most_bytes=_MOST_BYTES)
        try:
            self._request("put", name, lambda: self._client.write(path, data, only_new=only_new), data)
        except _Exists:
            return False
        return True

    def get(self, name: str, *, most_bytes: int, deadline_s: float) -> torch.Tensor:
        until_s, path = time.monotonic() + deadline_s, check_name(name)

        def check(num_bytes: int) -> None:
            check_size(name, num_bytes, most_bytes=most_bytes)

        data = self._request("get", name, lambda: self._client.read(path, check=check, until_s=until_s))
        self._meter.add(CarrierCost(received_bytes=len(data)))
        return as_tensor(data)

    def listing(self, prefix: str, *, after: str = "") -> list[Entry]:
        path = check_name(prefix)
        found = self._request("list", prefix, lambda: list(self._client.entries(path, after)))
        self._meter.add(CarrierCost(lists=max(0, len(found) - 1) // _PAGE))  # later pages
        return sorted(entry for entry in found if entry.name > after)

    def delete(self, names: Iterable[str]) -> None:
        paths = [check_name(name) for name in names]
        for begin in range(0, len(paths), _PAGE):
            page = paths[begin : begin + _PAGE]
            with suppress(NotThere):
                self._request("delete", page[0], lambda page=page: self._client.remove(page))  # type: ignore[misc]

    def now(self) -> float:
        steady_s = time.monotonic()
        with self._lock:
            if self._clock is None or steady_s - self._clock[0] > _CLOCK_S:
                self._request("put", "clock", lambda: self._client.write("clock", memoryview(b""), only_new=False))
                written_s = time.monotonic()
                modified_s = self._request("get", "clock", lambda: self._client.modified_s("clock"))
                self._clock = written_s, modified_s - written_s
            return time.monotonic() + self._clock[1]

    def pause(self, seconds: float) -> None:
        self._sleep(max(seconds, self._budget.poll_wait_s(now_s=time.monotonic())))

    def limits(self) -> Limits:
        return self._limits

    def cost(self) -> CarrierCost:
        return self._meter.total()

    def check_create_only(self) -> None:
        """Prove that the store refuses to create a blob twice, on which lease and journal rest.

        Raises:
            ValueError: It does not.
        """
        probe = f"probe/{secrets.token_hex(8)}"
        try:
            is_sound = self.put(probe, b"first", only_new=True) and not self.put(probe, b"second", only_new=True)
        finally:
            with suppress(TransportError):
                self.delete([probe])
        if not is_sound:
            raise self._unsupported("wrote a blob twice that was to be new")

    def _unsupported(self, found: str) -> ValueError:
        return refusal(
            f"the store {self._url} has no create-only writes (If-None-Match: *)", got=found,
            allowed="a store that refuses the second write",
            remedy="S3, R2, GCS, Azure, or a newer version of the store",
        )  # fmt: skip

    def _request(self, operation: Operation, name: str, send: Callable[[], T], data: memoryview | None = None) -> T:
        """Send a request, again after faults that pass, and translate those that do not."""
        trouble = _Trouble(kind="transient", code="")
        for turn in range(_TRIES):
            wait_s = self._budget.take(now_s=time.monotonic())
            if wait_s:
                self._sleep(wait_s)
            self._meter.count(operation, sent_bytes=0 if data is None else len(data))
            try:
                return send()
            except (_Exists, TransportError):
                raise
            except Exception as error:  # each client has its own
                trouble = self._client.trouble(error)
                is_missing = isinstance(error, FileNotFoundError) and trouble.kind != "bucket"
            if is_missing:
                raise NotThere(f"there is no blob {name} in {self._url} now")
            self._raise_lasting(trouble, operation)
            if turn < _TRIES - 1:
                # several members were throttled at once, and shall not come back at once
                self._sleep(_PAUSE_S * 2**turn * random.uniform(0.5, 1.0))
        if trouble.kind == "throttled":
            raise Throttled.of(self._url, retry_after_s=_PAUSE_S * 2**_TRIES)
        raise TransportError(
            f"{operation} of blob {name} in {self._url} failed {_TRIES} times{_shown(trouble)}; it may be done"
        )

    def _raise_lasting(self, trouble: _Trouble, operation: Operation) -> None:
        if trouble.kind == "refused":
            raise AccessRefused.of(f"{self._url}{_shown(trouble)}", operation=operation)
        if trouble.kind == "region":
            raise ConnectError(f"{self._url} lies in another region{_shown(trouble)}; set AWS_REGION to it")
        if trouble.kind == "bucket":
            raise ConnectError(f"there is no bucket for {self._url}; make it first, or correct the address")
        if trouble.kind == "unsupported":
            raise self._unsupported(trouble.code or "not implemented")


def _shown(trouble: _Trouble) -> str:
    return f" ({trouble.code})" if trouble.code else ""


class _ObstoreClient:
    def __init__(self, module: Any, store: Any) -> None:
        self._obs = module
        self._store = store
        self._errors = module.exceptions

    def write(self, path: str, data: memoryview, *, only_new: bool) -> None:
        mode = "create" if only_new else "overwrite"
        try:
            self._obs.put(self._store, path, data, mode=mode, use_multipart=False)
        except self._errors.AlreadyExistsError as error:
            if _status(error) != _CONFLICT:
                raise _Exists from None
            raise

    def read(self, path: str, *, check: Callable[[int], None], until_s: float) -> bytearray:
        found = self._obs.get(self._store, path)
        num_bytes = found.meta["size"]
        check(num_bytes)
        data = bytearray()
        for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
            if time.monotonic() > until_s:
                raise DeadlineExceeded(f"blob {path} has not arrived in time: {len(data)} of {num_bytes} bytes")
            data += chunk
        if len(data) != num_bytes:
            raise OSError("the answer is cut")
        return data

    def entries(self, prefix: str, after: str) -> Iterable[Entry]:
        for page in self._obs.list(self._store, prefix, offset=after or None, chunk_size=_PAGE):
            for meta in page:
                modified_s = meta["last_modified"].timestamp()
                yield Entry(name=meta["path"], num_bytes=meta["size"], modified_s=modified_s)

    def remove(self, paths: list[str]) -> None:
        self._obs.delete(self._store, paths)

    def modified_s(self, path: str) -> float:
        modified_s: float = self._obs.head(self._store, path)["last_modified"].timestamp()
        return modified_s

    def trouble(self, error: Exception) -> _Trouble:
        text, status = str(error), _status(error)
        code = found[1] if (found := _CODE.search(text)) else status
        region = found[1] if (found := _REGION.search(text)) else ""
        # a listing reports all errors as generic ones
        if isinstance(error, self._errors.PermissionDeniedError | self._errors.UnauthenticatedError) or status in (
            "401",
            "403",
        ):
            kind = "refused"
        elif status in ("429", "503"):
            kind = "throttled"
        elif status in ("301", "307", "308") or "redirect" in text or region:
            kind, code = "region", region
        elif code in ("NoSuchBucket", "ContainerNotFound"):
            kind = "bucket"
        elif isinstance(error, self._errors.NotSupportedError | NotImplementedError) or status == "501":
            kind = "unsupported"
        else:
            kind = "transient"
        return _Trouble(kind=kind, code=code)


def _status(error: Exception) -> str:
    found = _STATUS.search(str(error))
    return found[1] if found else ""


def _obstore_client(url: str, options: Mapping[str, Any] | None) -> _Client:
    try:
        module, stores = importlib.import_module("obstore"), importlib.import_module("obstore.store")
        importlib.import_module("obstore.exceptions")
    except ModuleNotFoundError:
        raise MissingExtra.of("obstore", extra="bucket") from None
    # A part takes its time on a slow link. Plain HTTP is used only with an endpoint that asks for it.
    client_options = {"timeout": "600s", "connect_timeout": "20s", "allow_http": True}
    try:
        store = stores.from_url(
            url, config=dict(options or {}), client_options=client_options, retry_config={"max_retries": 0}
        )
    except Exception:  # its text may hold options
        raise refusal(
            "the store's address or its settings cannot be read", got=url, allowed="s3://BUCKET/PREFIX, gs://, az://",
            remedy="to check the client's variables, such as AWS_REGION or AZURE_STORAGE_ACCOUNT_NAME",
        ) from None  # fmt: skip
    return _ObstoreClient(module, store)


class _FsspecClient:
    def __init__(self, filesystem: Any, root: str) -> None:
        self._files = filesystem
        self._root = root.rstrip("/")

    def write(self, path: str, data: memoryview, *, only_new: bool) -> None:
        whole = f"{self._root}/{path}"
        with suppress(Exception):  # stores without folders
            self._files.makedirs(whole.rpartition("/")[0], exist_ok=True)
        try:
            self._files.pipe_file(whole, bytes(data), mode="create" if only_new else "overwrite")
        except FileExistsError:
            raise _Exists from None

    def read(self, path: str, *, check: Callable[[int], None], until_s: float) -> bytearray:
        num_bytes = self._files.info(f"{self._root}/{path}")["size"]
        check(num_bytes)
        return bytearray(self._files.cat_file(f"{self._root}/{path}", start=0, end=num_bytes))

    def entries(self, prefix: str, after: str) -> Iterable[Entry]:
        self._files.invalidate_cache()
        for path, info in self._files.find(f"{self._root}/{prefix}", detail=True).items():
            name = self._files._strip_protocol(path).removeprefix(f"{self._root}/")
            yield Entry(name=name, num_bytes=info["size"], modified_s=_time_of(info))

    def remove(self, paths: list[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{self._root}/{path}")

    def modified_s(self, path: str) -> float:
        return _time_of(self._files.info(f"{self._root}/{path}"))

    def trouble(self, error: Exception) -> _Trouble:
        if isinstance(error, PermissionError):
            return _Trouble(kind="refused", code="")
        if isinstance(error, NotImplementedError):
            return _Trouble(kind="unsupported", code="")
        return _Trouble(kind="transient", code=type(error).__name__)


def _time_of(info: Mapping[str, Any]) -> float:
    keys = ("mtime", "modified", "LastModified", "last_modified", "updated", "created")
    stamp = next((info[key] for key in keys if info.get(key) is not None), 0.0)
    return float(stamp.timestamp() if hasattr(stamp, "timestamp") else stamp)


def _fsspec_client(url: str, options: Mapping[str, Any] | None) -> _Client:
    fsspec = importlib.import_module("fsspec")
    scheme = url.partition("://")[0]
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **(options or {}))
    except ImportError as error:
        raise MissingExtra(f"{scheme}:// needs a package that is not installed: {error}") from None
    except ValueError:
        allowed = ", ".join([*OBSTORE_SCHEMES, "file", "memory"])
        raise refusal("no store has this kind of address", got=f"{scheme}://", allowed=f"{allowed}, fsspec's",
                      remedy="s3://BUCKET/PREFIX") from None  # fmt: skip
    return _FsspecClient(filesystem, root)
