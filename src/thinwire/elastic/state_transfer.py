"""State transfer to a joining replica: chunks with hashes, requested from several holders at once.

A holder publishes its state as chunks. The root is SHA-256 over a header (magic, version, state bytes, chunk bytes) and
the SHA-256 of every chunk. A joiner that knows root and sizes verifies the list of hashes, then each chunk by itself,
whichever holder sent it. A holder that sends wrong bytes is reported and not asked again. A holder whose connection
breaks is retried. Chunks of a slow holder are also requested elsewhere. Verified chunks survive a failed run.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import queue
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from thinwire.errors import DeadlineExceeded, NotThere, PayloadError, TransportError
from thinwire.transport.blob_store import BlobFetch, BlobStore
from thinwire.transport.wire.framing import MOST_NAME_BYTES

HASH_BYTES = 32
# Over wires of 2 and 10 Mbit/s this takes 1.07 to 1.13 of the ideal time, a quarter of it up to 1.55, and four times as
# much gains nothing (benchmarks/transport/state_chunks.py).
CHUNK_BYTES = 1 << 18
MOST_CHUNKS = 1 << 20
_HEADER = struct.Struct("<4sIQQ")
_MAGIC = b"TWST"
_VERSION = 1


def num_chunks_of(num_bytes: int, *, chunk_bytes: int) -> int:
    """Return how many chunks a state has.

    Raises:
        ValueError: A size is out of range.

    Example:
        >>> num_chunks_of(1_000_001, chunk_bytes=1000), num_chunks_of(0, chunk_bytes=1000)
        (1001, 0)
    """
    if num_bytes < 0 or chunk_bytes < 1:
        raise ValueError(
            f"a state has at least 0 bytes and its chunks at least 1, got {num_bytes} in chunks of {chunk_bytes}"
        )
    num_chunks = -(-num_bytes // chunk_bytes)
    if num_chunks > MOST_CHUNKS:
        raise ValueError(f"a state has at most {MOST_CHUNKS} chunks, got {num_chunks}; take larger chunks")
    return num_chunks


def chunk_name(name: bytes, index: int) -> bytes:
    """Return the name of the blob with a chunk, counted from 0.

    Raises:
        ValueError: The state's name is empty, or too long.

    Example:
        >>> chunk_name(b"state/12", 7), hashes_name(b"state/12")
        (b'state/12/7', b'state/12/hashes')
    """
    most = MOST_NAME_BYTES - 1 - max(len(str(MOST_CHUNKS)), len(b"hashes"))
    if not 1 <= len(name) <= most:
        raise ValueError(f"the name of a state has 1 to {most} bytes, got {len(name)}")
    return b"%s/%d" % (name, index)


def hashes_name(name: bytes) -> bytes:
    """Return the name of the blob with a state's hashes; raises as `chunk_name`."""
    return chunk_name(name, 0)[:-1] + b"hashes"


def root_of(hashes: bytes, *, num_bytes: int, chunk_bytes: int) -> bytes:
    """Return the hash that identifies a state, 32 bytes.

    Args:
        hashes: Of the chunks, 32 bytes each.
        num_bytes: Of the state.
        chunk_bytes: Of each chunk but the last, which may be smaller.
    """
    header = _HEADER.pack(_MAGIC, _VERSION, num_bytes, chunk_bytes)
    return hashlib.sha256(header + hashes).digest()


def publish_state(library: BlobStore, name: bytes, vector: torch.Tensor, *, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Publish a state; its bytes are not copied, so they must not change until it is withdrawn.

    Args:
        library: Of this replica.
        name: Of the state: it never stands for another one.
        vector: uint8, `(num_bytes,)`, contiguous, on the CPU.
        chunk_bytes: Of a chunk. All bytes are read for checksum and hash before this returns.

    Returns:
        The root: 32 bytes that a joiner must get from a trusted source, the coordinator.

    Raises:
        ValueError: The vector is of another kind, the name is too long, or something is published under it already.
    """
    num_chunks = num_chunks_of(vector.numel(), chunk_bytes=chunk_bytes)
    hashes = bytearray()
    published: list[bytes] = []
    try:
        for index in range(num_chunks):
            chunk = vector[index * chunk_bytes : (index + 1) * chunk_bytes]
            library.publish(chunk_name(name, index), chunk, is_bulk=True)
            published.append(chunk_name(name, index))
            hashes += hashlib.sha256(chunk.numpy().data).digest()
        listed = torch.frombuffer(hashes, dtype=torch.uint8) if hashes else torch.empty(0, dtype=torch.uint8)
        library.publish(hashes_name(name), listed)
    except BaseException:
        for blob in published:
            library.withdraw(blob)
        raise
    return root_of(bytes(hashes), num_bytes=vector.numel(), chunk_bytes=chunk_bytes)


def withdraw_state(library: BlobStore, name: bytes, *, num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Withdraw a state; later requests for it are refused. Sizes are those with which it was published."""
    library.withdraw(hashes_name(name))
    for index in range(num_chunks_of(num_bytes, chunk_bytes=chunk_bytes)):
        library.withdraw(chunk_name(name, index))


# Requests in flight per holder: what it delivers in `_AHEAD_S` seconds, within these bounds.
LEAST_WINDOW, WINDOW = 4, 12
_AHEAD_S = 1.0
# The same for a holder that has delivered nothing yet: it may be slow, or send wrong bytes.
FIRST_WINDOW = 2
# Requests in flight over all holders, which bounds memory.
MOST_UNDER_WAY = 32
LEAST_LIMIT_S, MOST_LIMIT_S = 2.0, 60.0
# Seconds; used until times are measured.
FIRST_LIMIT_S = 10.0
# Seconds until a holder whose connection broke is asked again.
REST_S = 1.0
_DEVIATIONS = 8
_LEAST_SAMPLES = 3
# Share of all chunks that may be requested twice because a holder is slow.
_TWICE_SHARE = 0.03


@dataclass(slots=True, eq=False)
class _Holder:
    under_way: dict[int, float] = field(default_factory=dict)
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    slow: set[int] = field(default_factory=set)
    lost_until_s: float = 0.0
    rests_until_s: float = 0.0
    strikes: int = 0
    width: int = FIRST_WINDOW

    @property
    def window(self) -> int:
        return 1 if self.strikes else self.width

    def observe(self, took_s: float) -> None:
        """Record the time of a chunk, and adapt the window."""
        self.times_s.append(took_s)
        per_s = self.width / max(1e-3, statistics.median(self.times_s))
        self.width = min(max(LEAST_WINDOW, 2 + round(per_s * _AHEAD_S)), WINDOW)

    def limit_s(self) -> float | None:
        """Return the time limit of a chunk, None while too few were measured."""
        return _limit_s(self.times_s) if len(self.times_s) >= _LEAST_SAMPLES else None


class TransferPlan:
    """Plan of a transfer without I/O: chunks here, in flight, and next.

    A holder has as many chunks in flight as it delivers in a second, so a faster one delivers more. Chunks of a holder
    that exceeds its own usual times are requested elsewhere too, and the holder rests. At the end the times of the
    fastest other holder count.

    Attributes:
        num_here: Number of chunks that have arrived.
        num_first: Number of chunks before the first missing one.

    Example:
        >>> plan = TransferPlan(3)
        >>> plan.add_holder(7)
        >>> list(plan.requests(now_s=0.0))
        [(7, 0), (7, 1)]
        >>> plan.on_chunk(7, 0, now_s=0.5), plan.on_chunk(7, 1, now_s=0.6)
        (True, True)
        >>> plan.missing, plan.num_first
        ([2], 2)
    """

    def __init__(self, num_chunks: int) -> None:
        self._is_here = bytearray(num_chunks)
        self.num_here = 0
        self.num_first = 0
        self._left = deque(range(num_chunks))
        self._again: deque[int] = deque()
        self._holders: dict[int, _Holder] = {}
        self._asked_of: dict[int, set[int]] = {}
        self._num_twice = 0
        self._most_holders = 0
        self._all_times_s: deque[float] = deque(maxlen=128)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks have arrived."""
        return self.num_here == len(self._is_here)

    @property
    def missing(self) -> list[int]:
        """Chunks that are missing."""
        return [chunk for chunk, is_here in enumerate(self._is_here) if not is_here]

    @property
    def holders(self) -> tuple[int, ...]:
        """Holders that may be asked."""
        return tuple(self._holders)

    def add_holder(self, holder: int) -> None:
        """Add a holder, or retry one at once whose connection broke."""
        self._holders.setdefault(holder, _Holder()).lost_until_s = 0.0
        self._most_holders = max(self._most_holders, len(self._holders))

    def remove_holder(self, holder: int) -> list[int]:
        """Remove a holder; return the chunks that were under way from it."""
        found = self._holders.pop(holder, None)
        if found is None:
            return []
        for chunk in reversed(found.under_way):
            self._give_up(holder, chunk)
        return list(found.under_way)

    def requests(self, *, now_s: float) -> Iterator[tuple[int, int]]:
        """Yield the requests due now, as holder and chunk; each counts as in flight at once."""
        self._find_slow(now_s)
        while (found := self._next(now_s)) is not None:
            holder, chunk = found
            self._holders[holder].under_way[chunk] = now_s
            self._asked_of.setdefault(chunk, set()).add(holder)
            yield found

    def on_chunk(self, holder: int, chunk: int, *, now_s: float) -> bool:
        """Record a verified chunk; return whether it is the first copy."""
        found = self._holders.get(holder)
        if found is not None and chunk in found.under_way:
            took_s = now_s - found.under_way.pop(chunk)
            found.observe(took_s)
            self._all_times_s.append(took_s)
            found.slow.discard(chunk)
            found.strikes, found.rests_until_s = 0, 0.0
        self._forget(holder, chunk)
        if self._is_here[chunk]:
            return False
        self._is_here[chunk] = 1
        self.num_here += 1
        while self.num_first < len(self._is_here) and self._is_here[self.num_first]:
            self.num_first += 1
        return True

    def superseded(self, chunk: int) -> list[int]:
        """Forget the other requests for a chunk that is here; return the holders whose requests can be cancelled."""
        holders = sorted(self._asked_of.pop(chunk, ()))
        for holder in holders:
            self._holders[holder].under_way.pop(chunk, None)
            self._holders[holder].slow.discard(chunk)
        return holders

    def on_failure(self, holder: int, chunk: int, *, now_s: float) -> None:
        """Record that a holder's connection broke; it is asked again after `REST_S`."""
        found = self._holders.get(holder)
        if found is None or chunk not in found.under_way:
            return
        del found.under_way[chunk]
        found.slow.discard(chunk)
        found.lost_until_s = now_s + REST_S
        self._give_up(holder, chunk)

    def limit_s(self, holder: int) -> float:
        """Return the time that a chunk may take before it is requested from another holder too."""
        own = self._holders[holder].limit_s()
        if own is None:
            own = _limit_s(self._all_times_s) if len(self._all_times_s) >= _LEAST_SAMPLES else FIRST_LIMIT_S
        if self._left:
            return own
        others = (found.limit_s() for other, found in self._holders.items() if other != holder and not found.strikes)
        return min((limit_s for limit_s in others if limit_s is not None), default=own)

    def _next(self, now_s: float) -> tuple[int, int] | None:
        if sum(len(found.under_way) for found in self._holders.values()) >= MOST_UNDER_WAY:
            return None
        there = [(holder, found) for holder, found in self._holders.items() if found.lost_until_s <= now_s]
        # if all reachable holders were slow, use them anyway
        ready = [(holder, found) for holder, found in there if found.rests_until_s <= now_s] or there
        for holder, found in sorted(ready, key=lambda item: len(item[1].under_way)):
            if len(found.under_way) < found.window and (chunk := self._take_left(holder)) is not None:
                return holder, chunk
        return None

    def _take_left(self, holder: int) -> int | None:
        for chunks in (self._left, self._again):
            for _ in range(len(chunks)):
                chunk = chunks.popleft()
                if self._is_here[chunk]:
                    continue
                if holder not in self._asked_of.get(chunk, ()):
                    return chunk
                chunks.append(chunk)
        return None

    def _find_slow(self, now_s: float) -> None:
        there = {holder for holder, found in self._holders.items() if found.lost_until_s <= now_s}
        for holder, found in self._holders.items():
            if there <= {holder}:  # no other holder to ask
                continue
            limit_s = self.limit_s(holder)
            late = {chunk for chunk, since_s in found.under_way.items() if now_s - since_s > limit_s} - found.slow
            if late:
                found.slow |= late
                found.strikes += 1
                found.rests_until_s = now_s + min(MOST_LIMIT_S, limit_s * 2**found.strikes)
        for chunk in {chunk for found in self._holders.values() for chunk in found.slow}:
            if self._may_ask_again(chunk, there, now_s):
                self._num_twice += 1
                self._again.append(chunk)

    def _may_ask_again(self, chunk: int, there: set[int], now_s: float) -> bool:
        asked = [self._holders[holder] for holder in self._asked_of[chunk]]
        if chunk in self._again or chunk in self._left or any(chunk not in found.slow for found in asked):
            return False
        if there <= self._asked_of[chunk]:
            return False
        # the guess may be wrong and duplicate bytes are wasted, so duplicates are bounded; but no chunk waits forever
        most = WINDOW * self._most_holders + _TWICE_SHARE * len(self._is_here)
        latest_s = max(found.under_way[chunk] for found in asked)
        return self._num_twice < most or now_s - latest_s > MOST_LIMIT_S

    def _give_up(self, holder: int, chunk: int) -> None:
        self._forget(holder, chunk)
        if not self._is_here[chunk] and chunk not in self._asked_of and chunk not in self._again:
            self._left.appendleft(chunk)  # the start of the state is needed first

    def _forget(self, holder: int, chunk: int) -> None:
        holders = self._asked_of.get(chunk, set())
        holders.discard(holder)
        if not holders:
            self._asked_of.pop(chunk, None)


def _limit_s(times_s: deque[float]) -> float:
    median = statistics.median(times_s)
    deviation = statistics.median(abs(took_s - median) for took_s in times_s)
    return min(max(LEAST_LIMIT_S, 2 * median + _DEVIATIONS * deviation), MOST_LIMIT_S)


_TICK_S = 0.1
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptChunk:
    """Finding: a replica sent bytes that are not the state."""

    holder: int  # the replica
    name: bytes  # of the blob
    problem: str  # what is wrong with it

    def describe(self) -> str:
        """Return a description in one line."""
        return f"replica {self.holder} sent wrong bytes for {ascii(self.name)[1:]}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Phase:
    """One of the two phases of a transfer: the list of hashes, then the chunks."""

    plan: TransferPlan
    name_of: Callable[[int], bytes]
    bytes_of: Callable[[int], int]
    problem_of: Callable[[int, torch.Tensor], str]
    keep: Callable[[int, torch.Tensor], None]


class StateTransfer:
    """Transfer of one state; holders may join and leave while it runs, and a failed `run` can be repeated.

    Args:
        library: Blob store of this replica.
        name: Of the state, as in `publish_state`.
        num_bytes: Of the state.
        chunk_bytes: As it was published.
        root: As `publish_state` returned it, from a trusted source.
        on_progress: Called with the bytes that are here and the state's, in the thread that runs, for each chunk.
        on_finding: Called with each finding, in the thread that runs.

    Raises:
        ValueError: The sizes, the name or the root cannot be.

    Attributes:
        bytes_here: Verified bytes of the state.
    """

    def __init__(
        self, library: BlobStore, name: bytes, *, num_bytes: int, chunk_bytes: int = CHUNK_BYTES, root: bytes,
        on_progress: Callable[[int, int], None] = lambda here, total: None,
        on_finding: Callable[[CorruptChunk], None] = lambda finding: None,
    ) -> None:  # fmt: skip
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
        self._loans: dict[tuple[int, int], BlobFetch] = {}
        # what other threads have to tell the one that runs, as what it does in the phase that it is in
        self._events: queue.SimpleQueue[Callable[[_Phase], None]] = queue.SimpleQueue()
        self.bytes_here = 0
        self._num_first_bytes = 0
        self._progressed_s = 0.0
        hashes_of = hashes_name(name)
        self._phases = (
            _Phase(
                plan=TransferPlan(1), name_of=lambda index: hashes_of,
                bytes_of=lambda index: HASH_BYTES * self._num_chunks, problem_of=self._problem_of_hashes,
                keep=self._keep_hashes,
            ),
            _Phase(
                plan=TransferPlan(self._num_chunks), name_of=lambda index: chunk_name(name, index),
                bytes_of=lambda index: min(chunk_bytes, num_bytes - index * chunk_bytes),
                problem_of=self._problem_of_chunk, keep=self._keep_chunk,
            ),
        )  # fmt: skip

    @property
    def findings(self) -> tuple[CorruptChunk, ...]:
        """Replicas that sent wrong bytes; none of them is asked again."""
        return tuple(self._findings.values())

    @property
    def first_bytes(self) -> torch.Tensor:
        """The state's first bytes, as far as they have come without a gap and are right; uint8, a view; any thread."""
        if self._vector is None:
            return torch.empty(0, dtype=torch.uint8)
        return self._vector[: self._num_first_bytes]

    def add_holder(self, holder: int) -> None:
        """Add a holder, or retry a lost one; from any thread."""

        def add(phase: _Phase) -> None:
            if holder not in self._findings:
                self._holders[holder] = None
                phase.plan.add_holder(holder)

        self._events.put(add)

    def remove_holder(self, holder: int) -> None:
        """Remove a holder; from any thread."""
        self._events.put(lambda phase: self._drop(phase, holder, "was taken from the list"))

    def forget(self) -> None:
        """Release the bytes after use."""
        self._vector, self._num_first_bytes = None, 0

    def run(self, *, deadline_s: float, stall_s: float = math.inf, may_wait: bool = True) -> torch.Tensor:
        """Fetch the missing chunks in the calling thread; one run at a time.

        Args:
            deadline_s: Seconds from now.
            stall_s: Seconds without one right chunk after which to give up earlier.
            may_wait: Whether holders may still be added where there are none.

        Returns:
            The state: uint8, `(num_bytes,)`, on the CPU.

        Raises:
            DeadlineExceeded: Chunks are missing; the next run continues from those that are here.
            NotThere: No holder is left, and none may be waited for.
        """
        if self._vector is None:
            self._vector = torch.empty(self._num_bytes, dtype=torch.uint8)
        self._progressed_s = time.monotonic()
        end_s = self._progressed_s + deadline_s
        if not self._num_chunks:
            found = root_of(b"", num_bytes=0, chunk_bytes=self._chunk_bytes)
            if found != self._root:
                raise ValueError(f"an empty state has the root {found.hex()[:12]}, got {self._root.hex()[:12]}")
            return self._vector
        for phase in self._phases:
            try:
                self._run_phase(phase, end_s=end_s, stall_s=stall_s, may_wait=may_wait)
            finally:
                loans, self._loans = self._loans, {}
                for (holder, chunk), loan in loans.items():
                    loan.cancel()
                    phase.plan.on_failure(holder, chunk, now_s=time.monotonic())
        return self._vector

    def _run_phase(self, phase: _Phase, *, end_s: float, stall_s: float, may_wait: bool) -> None:
        for holder in self._holders:
            phase.plan.add_holder(holder)
        while not phase.plan.is_complete:
            now_s = time.monotonic()
            for holder, chunk in phase.plan.requests(now_s=now_s):
                loan = self._library.get(holder, phase.name_of(chunk), most_bytes=phase.bytes_of(chunk))
                self._loans[holder, chunk] = loan
                loan.on_finish(partial(self._events.put, partial(self._on_finished, holder, chunk, loan)))
            if now_s >= end_s or now_s - self._progressed_s > stall_s:
                raise DeadlineExceeded(f"{self._missing(phase)} in time; {self._why()}")
            if not phase.plan.holders and not may_wait and self._events.empty():
                raise NotThere(f"{self._missing(phase)}: no replica is left that has it; {self._why()}")
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=max(0.0, min(_TICK_S, end_s - now_s)))(phase)
                while True:
                    self._events.get_nowait()(phase)

    def _on_finished(self, holder: int, chunk: int, loan: BlobFetch, phase: _Phase) -> None:
        if self._loans.get((holder, chunk)) is not loan:  # cancelled, or of the phase before
            return
        del self._loans[holder, chunk]
        try:
            payload = loan.wait(deadline_s=0.0)
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
            finding = self._findings[holder] = CorruptChunk(holder=holder, name=phase.name_of(chunk), problem=problem)
            self._drop(phase, holder, finding.describe())
            self._on_finding(finding)
        elif phase.plan.on_chunk(holder, chunk, now_s=time.monotonic()):
            self._progressed_s = time.monotonic()
            for other in phase.plan.superseded(chunk):
                self._loans.pop((other, chunk)).cancel()
            phase.keep(chunk, payload)

    def _drop(self, phase: _Phase, holder: int, problem: str) -> None:
        self._problems[holder] = problem
        self._holders.pop(holder, None)
        for chunk in phase.plan.remove_holder(holder):
            loan = self._loans.pop((holder, chunk), None)
            if loan is not None:
                loan.cancel()

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
        self.bytes_here += payload.numel()
        self._num_first_bytes = min(self._num_bytes, self._phases[1].plan.num_first * self._chunk_bytes)
        self._on_progress(self.bytes_here, self._num_bytes)

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
