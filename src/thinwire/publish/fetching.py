"""Blobs by their hashes from several sources at once; a source that sends other bytes is named and not asked again."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from thinwire.carriers.base import Carrier
from thinwire.carriers.open import open_carrier, read_address
from thinwire.elastic.state_transfer import MOST_UNDER_WAY, TransferPlan
from thinwire.errors import NotThere, PayloadError, StreamError, ThinwireError
from thinwire.publish.manifest import Blob, sha256

GET_DEADLINE_S = 300.0
_TICK_S = 0.1
_MOST_FAILURES = 4  # in a row, each with a rest, after which a source counts as gone


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamSource:
    """A carrier that holds a stream, by the name that reports give it."""

    name: str
    carrier: Carrier


def open_source(where: str | Carrier, *, may_create: bool) -> StreamSource:
    """Return a carrier, or open the one of an address; its secret is no part of the name."""
    if isinstance(where, str):
        return StreamSource(name=read_address(where).place, carrier=open_carrier(where, may_create=may_create))
    return StreamSource(name=type(where).__name__, carrier=where)


def get_bytes(source: StreamSource, name: str, *, most_bytes: int, deadline_s: float = GET_DEADLINE_S) -> bytes:
    """Return an object's bytes; raises what the carrier raises, `NotThere` among it."""
    data = source.carrier.get(name, most_bytes=most_bytes, deadline_s=deadline_s).numpy().tobytes()
    if len(data) > most_bytes:
        raise PayloadError(f"{name} has {len(data)} bytes, more than {most_bytes}; it was never sent so")
    return data


def get_blob(source: StreamSource, blob: Blob) -> bytes:
    """Return a verified blob.

    Raises:
        PayloadError: The source sent other bytes.
        NotThere: The source does not have it.
    """
    data = get_bytes(source, blob.name, most_bytes=blob.size)
    if len(data) != blob.size or sha256(data) != blob.sha256:
        raise PayloadError(f"{source.name} sent wrong bytes for {blob.name}")
    return data


def fetch_blobs(
    sources: Sequence[StreamSource], blobs: Sequence[Blob], *, on_finding: Callable[[str], object], parallel: int = 4
) -> dict[bytes, bytes]:
    """Fetch blobs, each from the source that is first free, and again from another one if that one fails.

    Args:
        sources: One or more.
        blobs: In the order in which they are wanted.
        on_finding: Called with one line for a source that sent wrong bytes, or is not asked any more.
        parallel: Requests in flight at each source; with 1 and one source all is done in this thread.

    Returns:
        The verified bytes by hash.

    Raises:
        ThinwireError: No source is left that could be asked; as the last one failed.
    """
    wanted = list({blob.sha256: blob for blob in blobs}.values())
    if len(sources) == 1 and (parallel == 1 or len(wanted) == 1):
        return {blob.sha256: get_blob(sources[0], blob) for blob in wanted}
    plan = TransferPlan(len(wanted))
    for holder in range(len(sources)):
        plan.add_holder(holder)
    found: dict[bytes, bytes] = {}
    failures = [0] * len(sources)
    arrived: queue.SimpleQueue[tuple[int, int, bytes | Exception]] = queue.SimpleQueue()

    def get(holder: int, number: int) -> None:
        try:
            arrived.put((holder, number, get_blob(sources[holder], wanted[number])))
        except Exception as error:
            arrived.put((holder, number, error))

    pool = ThreadPoolExecutor(min(MOST_UNDER_WAY, parallel * len(sources)), thread_name_prefix="thinwire-fetch")
    try:
        while not plan.is_complete:
            for holder, number in plan.requests(now_s=time.monotonic()):
                pool.submit(get, holder, number)
            try:
                holder, number, result = arrived.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if isinstance(result, bytes):
                failures[holder] = 0
                plan.on_chunk(holder, number, now_s=time.monotonic())
                found[wanted[number].sha256] = result
                continue
            failures[holder] += 1
            plan.on_failure(holder, number, now_s=time.monotonic())
            if holder in plan.holders and not _may_recover(result, failures[holder]):
                _drop(plan, holder, sources[holder], result, on_finding=on_finding)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return found


def _may_recover(error: Exception, failures: int) -> bool:
    return not isinstance(error, PayloadError | NotThere) and failures < _MOST_FAILURES


def _drop(
    plan: TransferPlan, holder: int, source: StreamSource, error: Exception, *, on_finding: Callable[[str], object]
) -> None:  # fmt: skip
    plan.remove_holder(holder)
    on_finding(f"{source.name} is not asked any more: {error}")
    if not plan.holders:
        if isinstance(error, ThinwireError):
            raise error
        raise StreamError(f"no source is left: {source.name}: {error}") from error
