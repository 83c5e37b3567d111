"""Fetching a state from whoever holds it: from several at once, each chunk checked before it is used.

A holder that sends wrong bytes is named and asked no more; one whose connection breaks is asked again when it may be
back; one that is slow has its chunks asked for elsewhere. What has come stays, whoever it came from.
"""

from __future__ import annotations

import hashlib
import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thinwire.elastic.state_chunks import (
    CHUNK_BYTES,
    HASH_BYTES,
    chunk_name,
    hashes_name,
    num_chunks_of,
    root_of,
)
from thinwire.elastic.state_transfer_plan import TransferPlan
from thinwire.errors import DeadlineExceeded, NotThere, PayloadError, TransportError
from thinwire.transport.blob_store import Library, Loan

_TICK_S = 0.1
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptChunk:
    """A finding: a replica sent what is not the state.

    Attributes:
        holder: The replica.
        name: Of the blob.
        problem: What is wrong with it.
    """

    holder: int
    name: bytes
    problem: str

    def describe(self) -> str:
        """Say it in one line."""
        return f"replica {self.holder} sent wrong bytes for {ascii(self.name)[1:]}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Phase:
    """One of the two parts of a fetch: the list of hashes, and the chunks."""

    plan: TransferPlan
    name_of: Callable[[int], bytes]
    bytes_of: Callable[[int], int]
    problem_of: Callable[[int, torch.Tensor], str]
    keep: Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Finished:
    holder: int
    chunk: int
    loan: Loan


@dataclass(frozen=True, slots=True, kw_only=True)
class _HolderChange:
    holder: int
    holds: bool


class StateTransfer:
    """The fetch of one state, which holders may join and leave as it runs; a `run` that failed can be run again.

    Args:
        library: Of this replica; its transport is connected to the holders, or soon will be.
        name: Of the state, as in `publish_state`.
        num_bytes: Of the state.
        chunk_bytes: As it was published.
        root: As `publish_state` returned it, from somebody who is trusted.
        on_progress: Called with the bytes that are here and the state's, in the thread that runs, for each chunk.
        on_finding: Called with each finding, in the thread that runs.

    Raises:
        ValueError: The sizes, the name or the root cannot be.
    """

    def __init__(
        self,
        library: Library,
        name: bytes,
        *,
        num_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        root: bytes,
        on_progress: Callable[[int, int], None] | None = None,
        on_finding: Callable[[CorruptChunk], None] | None = None,
    ) -> None:
        if len(root) != HASH_BYTES:
            raise ValueError(f"a root has {HASH_BYTES} bytes, got {len(root)}")
        self._num_chunks = num_chunks_of(num_bytes, chunk_bytes=chunk_bytes)
        self._library, self._name, self._root = library, name, root
        self._num_bytes, self._chunk_bytes = num_bytes, chunk_bytes
        self._on_progress, self._on_finding = on_progress, on_finding
        self._hashes = b""
        self._vector: torch.Tensor | None = None
        self._holders: dict[int, None] = {}
        self._findings: dict[int, CorruptChunk] = {}
        self._problems: dict[int, str] = {}
        self._loans: dict[tuple[int, int], Loan] = {}
        self._events: queue.SimpleQueue[_Finished | _HolderChange] = queue.SimpleQueue()
        self._bytes_here = 0
        self._num_first_bytes = 0
        self._progressed_s = 0.0
        hashes_of = hashes_name(name)
        self._phases = (
            _Phase(
                plan=TransferPlan(1),
                name_of=lambda index: hashes_of,
                bytes_of=lambda index: HASH_BYTES * self._num_chunks,
                problem_of=self._problem_of_hashes,
                keep=self._keep_hashes,
            ),
            _Phase(
                plan=TransferPlan(self._num_chunks),
                name_of=lambda index: chunk_name(name, index),
                bytes_of=lambda index: min(chunk_bytes, num_bytes - index * chunk_bytes),
                problem_of=self._problem_of_chunk,
                keep=self._keep_chunk,
            ),
        )

    @property
    def findings(self) -> tuple[CorruptChunk, ...]:
        """Who sent wrong bytes; none of them is asked again."""
        return tuple(self._findings.values())

    @property
    def bytes_here(self) -> int:
        """Bytes of the state that have come and are right."""
        return self._bytes_here

    @property
    def first_bytes(self) -> torch.Tensor:
        """The state's first bytes, as far as they have come without a gap and are right; uint8, a view; any thread."""
        if self._vector is None:
            return torch.empty(0, dtype=torch.uint8)
        return self._vector[: self._num_first_bytes]

    def add_holder(self, holder: int) -> None:
        """Ask one more replica, or again one that was lost; from any thread."""
        self._events.put(_HolderChange(holder=holder, holds=True))

    def remove_holder(self, holder: int) -> None:
        """Ask a replica no longer; from any thread."""
        self._events.put(_HolderChange(holder=holder, holds=False))

    def forget(self) -> None:
        """Let the bytes go, once a run has returned them and they are used."""
        self._vector, self._num_first_bytes = None, 0

    def run(self, *, deadline_s: float, stall_s: float = math.inf, may_wait: bool = True) -> torch.Tensor:
        """Fetch what is missing, in the calling thread; one at a time.

        Args:
            deadline_s: Seconds from now.
            stall_s: Seconds without one right chunk after which to give up earlier.
            may_wait: Whether holders may still be added where there are none.

        Returns:
            The state: uint8, `(num_bytes,)`, on the CPU.

        Raises:
            DeadlineExceeded: It is not all here in time; it can be run again, and keeps what is here.
            NotThere: No holder is left, and none may be waited for.
        """
        if self._vector is None:
            self._vector = torch.empty(self._num_bytes, dtype=torch.uint8)
        self._progressed_s = time.monotonic()
        end_s = self._progressed_s + deadline_s
        if not self._num_chunks:
            self._check_nothing()
            return self._vector
        for phase in self._phases:
            try:
                self._run_phase(phase, end_s=end_s, stall_s=stall_s, may_wait=may_wait)
            finally:
                self._cancel_all(phase)
        return self._vector

    def _run_phase(self, phase: _Phase, *, end_s: float, stall_s: float, may_wait: bool) -> None:
        for holder in self._holders:
            phase.plan.add_holder(holder)
        while not phase.plan.is_complete:
            now_s = time.monotonic()
            for holder, chunk in phase.plan.requests(now_s=now_s):
                self._request(phase, holder, chunk)
            if now_s >= end_s or now_s - self._progressed_s > stall_s:
                raise DeadlineExceeded(f"{self._missing(phase)} in time; {self._why()}")
            if not phase.plan.holders and not may_wait and self._events.empty():
                raise NotThere(f"{self._missing(phase)}: no replica is left that has it; {self._why()}")
            self._wait(phase, for_s=min(_TICK_S, end_s - now_s))

    def _wait(self, phase: _Phase, *, for_s: float) -> None:
        try:
            event = self._events.get(timeout=max(0.0, for_s))
            while True:
                if isinstance(event, _HolderChange):
                    self._on_holder_change(phase, event)
                else:
                    self._on_finished(phase, event)
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _request(self, phase: _Phase, holder: int, chunk: int) -> None:
        loan = self._library.get(holder, phase.name_of(chunk), most_bytes=phase.bytes_of(chunk))
        self._loans[(holder, chunk)] = loan
        loan.on_finish(lambda: self._events.put(_Finished(holder=holder, chunk=chunk, loan=loan)))

    def _on_holder_change(self, phase: _Phase, change: _HolderChange) -> None:
        if change.holds:
            if change.holder not in self._findings:
                self._holders[change.holder] = None
                phase.plan.add_holder(change.holder)
        else:
            self._drop(phase, change.holder, "was taken from the list")

    def _on_finished(self, phase: _Phase, finished: _Finished) -> None:
        holder, chunk = finished.holder, finished.chunk
        if self._loans.get((holder, chunk)) is not finished.loan:  # cancelled, or of the phase before
            return
        del self._loans[(holder, chunk)]
        try:
            payload = finished.loan.wait(deadline_s=0.0)
            problem = phase.problem_of(chunk, payload)
        except PayloadError as error:
            problem = str(error)
        except NotThere as error:
            self._drop(phase, holder, str(error))
            return
        except TransportError as error:
            self._problems[holder] = str(error)
            phase.plan.on_failure(holder, chunk, now_s=time.monotonic())
            return
        if problem:
            self._accuse(phase, CorruptChunk(holder=holder, name=phase.name_of(chunk), problem=problem))
        elif phase.plan.on_chunk(holder, chunk, now_s=time.monotonic()):
            self._progressed_s = time.monotonic()
            for other in phase.plan.superseded(chunk):
                self._loans.pop((other, chunk)).cancel()
            phase.keep(chunk, payload)

    def _accuse(self, phase: _Phase, finding: CorruptChunk) -> None:
        self._findings[finding.holder] = finding
        self._drop(phase, finding.holder, finding.describe())
        if self._on_finding is not None:
            self._on_finding(finding)

    def _drop(self, phase: _Phase, holder: int, problem: str) -> None:
        self._problems[holder] = problem
        self._holders.pop(holder, None)
        for chunk in phase.plan.remove_holder(holder):
            loan = self._loans.pop((holder, chunk), None)
            if loan is not None:
                loan.cancel()

    def _cancel_all(self, phase: _Phase) -> None:
        loans, self._loans = self._loans, {}
        for (holder, chunk), loan in loans.items():
            loan.cancel()
            phase.plan.on_failure(holder, chunk, now_s=time.monotonic())

    def _problem_of_hashes(self, index: int, payload: torch.Tensor) -> str:
        hashes = bytes(payload.numpy().data)
        found = root_of(hashes, num_bytes=self._num_bytes, chunk_bytes=self._chunk_bytes)
        if len(hashes) == HASH_BYTES * self._num_chunks and found == self._root:
            return ""
        return f"{len(hashes)} bytes of hashes with the root {found.hex()[:12]}, expected {self._root.hex()[:12]}"

    def _keep_hashes(self, index: int, payload: torch.Tensor) -> None:
        self._hashes = bytes(payload.numpy().data)

    def _problem_of_chunk(self, index: int, payload: torch.Tensor) -> str:
        found = hashlib.sha256(payload.numpy().data).digest()
        expected = self._hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        if found == expected:  # which also says that it has the right size
            return ""
        return f"{payload.numel()} bytes with the hash {found.hex()[:12]}, expected {expected.hex()[:12]}"

    def _keep_chunk(self, index: int, payload: torch.Tensor) -> None:
        assert self._vector is not None, "a run has begun"
        start = index * self._chunk_bytes
        self._vector[start : start + payload.numel()] = payload
        self._bytes_here += payload.numel()
        self._num_first_bytes = min(self._num_bytes, self._phases[1].plan.num_first * self._chunk_bytes)
        if self._on_progress is not None:
            self._on_progress(self._bytes_here, self._num_bytes)

    def _check_nothing(self) -> None:
        found = root_of(b"", num_bytes=0, chunk_bytes=self._chunk_bytes)
        if found != self._root:
            raise ValueError(f"an empty state has the root {found.hex()[:12]}, got {self._root.hex()[:12]}")

    def _missing(self, phase: _Phase) -> str:
        state = f"state {ascii(self._name)[1:]}"
        if phase is self._phases[0]:
            return f"the list of the hashes of {state} did not come"
        missing = phase.plan.missing
        named = ", ".join(str(index) for index in missing[:_MOST_NAMED]) + (", ..." * (len(missing) > _MOST_NAMED))
        return f"{len(missing)} of {self._num_chunks} chunks of {state} did not come ({named})"

    def _why(self) -> str:
        asked = ", ".join(str(holder) for holder in self._holders) or "none"
        problems = "; ".join(self._problems.values()) or "none of them said why"
        return f"replicas asked last: {asked}; {problems}"


def fetch_state(
    library: Library,
    holders: Sequence[int],
    name: bytes,
    *,
    num_bytes: int,
    chunk_bytes: int = CHUNK_BYTES,
    root: bytes,
    deadline_s: float,
    stall_s: float = math.inf,
    on_progress: Callable[[int, int], None] | None = None,
    on_finding: Callable[[CorruptChunk], None] | None = None,
) -> torch.Tensor:
    """Fetch a state from replicas that hold it.

    Args:
        library: Of this replica.
        holders: Replicas that have published it.
        name: Of the state.
        num_bytes: Of the state.
        chunk_bytes: As it was published.
        root: As `publish_state` returned it, from somebody who is trusted.
        deadline_s: Seconds from now.
        stall_s: Seconds without one right chunk after which to give up earlier.
        on_progress: Called with the bytes that are here and the state's, for each chunk.
        on_finding: Called with who sent wrong bytes, and what.

    Returns:
        The state: uint8, `(num_bytes,)`, on the CPU.

    Raises:
        ValueError: The sizes, the name or the root cannot be.
        DeadlineExceeded: It is not all here in time.
        NotThere: No holder is left.
    """
    fetch = StateTransfer(
        library,
        name,
        num_bytes=num_bytes,
        chunk_bytes=chunk_bytes,
        root=root,
        on_progress=on_progress,
        on_finding=on_finding,
    )
    for holder in holders:
        fetch.add_holder(holder)
    return fetch.run(deadline_s=deadline_s, stall_s=stall_s, may_wait=False)
