"""Carrier in the memory of one process, with a virtual clock and injected faults: for tests and model checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

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
from thinwire.errors import AccessRefused, NotThere, Throttled, TransportError

FaultKind: TypeAlias = Literal["late", "torn", "corrupt", "unanswered", "failed", "refused", "throttled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierFault:
    """A fault of the next requests of one kind.

    Attributes:
        on: The request that fails.
        kind: "late": the blob appears `seconds` later; "torn": half of it arrives; "corrupt": one bit flips;
            "unanswered": it is done, and its answer is lost; "failed": it is not done; "refused": the credentials have
            expired; "throttled": try again in `seconds`.
        below: Beginning of the names that it concerns.
        times: Number of requests.
        seconds: Of a late blob, or of throttling.
    """

    on: Operation
    kind: FaultKind
    below: str = ""
    times: int = 1
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Blob:
    data: bytes
    modified_s: float
    visible_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class MemoryStore:
    """Store that the members of one process share: blobs and a clock.

    Attributes:
        is_virtual: Whether the clock moves only by `advance` and by the pauses of members; pauses return at once.
    """

    is_virtual: bool = False
    clock_s: float = 1e9
    blobs: dict[str, _Blob] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def now(self) -> float:
        return self.clock_s if self.is_virtual else time.time()

    def advance(self, seconds: float) -> None:
        """Move a virtual clock."""
        with self.changed:
            self.clock_s += seconds
            self.changed.notify_all()


class MemoryCarrier(Carrier):
    """One member's access to a store in memory.

    Args:
        store: Shared by the members.
        on_request: Called with each request's kind and name before it is done; what it raises ends the member there.

    Example:
        >>> store = MemoryStore(is_virtual=True)
        >>> ada, bob = MemoryCarrier(store), MemoryCarrier(store)
        >>> ada.put("hello", b"all", only_new=True), bob.put("hello", b"you", only_new=True)
        (True, False)
        >>> bytes(bob.get("hello", most_bytes=9, deadline_s=1).numpy())
        b'all'
    """

    def __init__(self, store: MemoryStore, *, on_request: Callable[[Operation, str], None] | None = None) -> None:
        self.store = store
        self._on_request = on_request
        self._faults: list[CarrierFault] = []
        self._meter = CostMeter()

    def inject(self, fault: CarrierFault) -> None:
        """Let the next `times` requests that it concerns fail."""
        self._faults.extend([fault] * fault.times)

    def __repr__(self) -> str:
        return "memory://"

    def put(self, name: str, payload: Payload, *, only_new: bool) -> bool:
        data = bytes(as_bytes(payload))
        fault = self._begin("put", check_name(name))
        self._meter.count("put", sent_bytes=len(data))
        with self.store.changed:
            if only_new and name in self.store.blobs:
                return False
            now_s = self.store.now()
            late_s = fault.seconds if fault is not None and fault.kind == "late" else 0.0
            stored = _damaged(data, fault)
            self.store.blobs[name] = _Blob(data=stored, modified_s=now_s, visible_s=now_s + late_s)
            self.store.changed.notify_all()
        _end("put", name, fault)
        return True

    def get(self, name: str, *, most_bytes: int, deadline_s: float) -> torch.Tensor:
        fault = self._begin("get", check_name(name))
        with self.store.changed:
            blob = self.store.blobs.get(name)
            if blob is None or blob.visible_s > self.store.now():
                self._meter.count("get")
                raise NotThere(f"there is no blob {name} now")
        check_size(name, len(blob.data), most_bytes=most_bytes)
        self._meter.count("get", received_bytes=len(blob.data))
        _end("get", name, fault)
        return as_tensor(_damaged(blob.data, fault))

    def listing(self, prefix: str, *, after: str = "") -> list[Entry]:
        fault = self._begin("list", check_name(prefix))
        self._meter.count("list")
        with self.store.changed:
            now_s, late_s = self.store.now(), fault.seconds if fault is not None and fault.kind == "late" else 0.0
            found = [
                Entry(name=name, num_bytes=len(blob.data), modified_s=blob.modified_s)
                for name, blob in self.store.blobs.items()
                if name.startswith(f"{prefix}/") and name > after and blob.visible_s <= now_s - late_s
            ]
        _end("list", prefix, fault)
        return sorted(found)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            fault = self._begin("delete", check_name(name))
            self._meter.count("delete")
            with self.store.changed:
                self.store.blobs.pop(name, None)
            _end("delete", name, fault)

    def now(self) -> float:
        return self.store.now()

    def pause(self, seconds: float) -> None:
        if self.store.is_virtual:
            self.store.advance(seconds)
            return
        with self.store.changed:
            self.store.changed.wait(seconds)

    def limits(self) -> Limits:
        return Limits() if self.store.is_virtual else Limits(least_poll_s=0.05, most_poll_s=1.0)

    def cost(self) -> CarrierCost:
        return self._meter.total()

    def _begin(self, operation: Operation, name: str) -> CarrierFault | None:
        if self._on_request is not None:
            self._on_request(operation, name)
        fault = next((one for one in self._faults if one.on == operation and name.startswith(one.below)), None)
        if fault is None:
            return None
        self._faults.remove(fault)
        if fault.kind == "failed":
            raise TransportError(f"{operation} of blob {name} failed")
        if fault.kind == "refused":
            raise AccessRefused.of("memory", operation=operation)
        if fault.kind == "throttled":
            raise Throttled.of("memory", retry_after_s=fault.seconds)
        return fault


def _damaged(data: bytes, fault: CarrierFault | None) -> bytes:
    if fault is None or not data:
        return data
    if fault.kind == "torn":
        return data[: len(data) // 2]
    if fault.kind == "corrupt":
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return data


def _end(operation: str, name: str, fault: CarrierFault | None) -> None:
    if fault is not None and fault.kind == "unanswered":
        raise TransportError(f"no answer to {operation} of blob {name}; it may be done")
