"""The publisher: encodes a model's weights as a version, and commits it once all its bytes are there.

The training thread pays for the encoding alone. While a version is still uploaded the next ones are skipped, never
queued, so that neither memory nor delay grows on a slow wire. A failed upload ends no training: it is reported, and the
next version is an anchor.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from thinwire.carriers.base import Carrier
from thinwire.errors import NotThere, PayloadError, StreamError, ThinwireError, TransportError, refusal, unknown_name
from thinwire.publish.fetching import get_blob, get_bytes, open_source
from thinwire.publish.manifest import (
    HASH_BYTES,
    HEAD,
    HEAD_BYTES,
    MOST_FILE_BYTES,
    MOST_LAYOUT_BYTES,
    MOST_MANIFEST_BYTES,
    Blob,
    Code,
    Part,
    ShardReport,
    VersionManifest,
    WeightLayout,
    blob_of,
    cut,
    decode,
    encode,
    first_difference,
    head_of,
    read_head,
    result_hash,
    sha256,
    version_name,
)
from thinwire.publish.patch import Words, encode_fragment
from thinwire.publish.weights import Weights, fragment_sizes, fragments_of, shard_of, specs_of, tensors_of

CODES = {
    "exact-bf16": "the bfloat16 copy of the weights, bit for bit",
    "exact": "the weights in their own types, bit for bit; patches of float32 are hardly smaller than the weights",
    "e3m0": "bfloat16; fragments of which much has changed come as lossy differences of 4.1 bits, in a closed loop",
}
ANCHOR_EVERY = 64
_ANCHORS_KEPT = 2
_SHARD_DEADLINE_S = 300.0
_RETRY_S = (0.5, 2.0)
_FAILED = b"failed"


@dataclass(slots=True, kw_only=True, eq=False)
class _Version:
    """A version that is encoded, and not yet committed."""

    step: int
    digest: bytes
    patch: bytearray | None
    anchor: bytearray | None


class WeightPublisher:
    """Publishes the weights of a model for all that follow.

    Args:
        weights: A model, which may be sharded by FSDP2, or tensors by name; read at each `publish`.
        to: Where to: a carrier, or its URI. A stream that is there is continued.
        code: One of `CODES`.
        anchor_every: Versions from one that needs nothing before it to the next such one.
        trainable_only: Whether only trainable parameters are published, as of adapters.
        files: Small files for followers, by name, such as a tokenizer.
        in_background: Whether versions are uploaded in a thread; never with shards, whose ranks must agree.
        on_problem: Called with one line for each version that could not be published.

    Raises:
        ValueError: An argument is out of its range, or the stream holds other weights.
        StreamError: The stream was written by a newer thinwire.

    Attributes:
        num_skipped: Versions that were skipped since the one before was still uploaded.
        num_failed: Versions that could not be uploaded.
        bytes_sent: Bytes of all objects that were put.
        newest: VersionManifest of the newest committed version; None before.
    """

    def __init__(
        self, weights: Weights, *, to: str | Carrier, code: str = "exact-bf16", anchor_every: int = ANCHOR_EVERY,
        trainable_only: bool = False, files: Mapping[str, bytes] | None = None, in_background: bool = True,
        on_problem: Callable[[str], object] = lambda text: None,
    ) -> None:  # fmt: skip
        if code not in CODES:
            raise unknown_name("code", code, CODES)
        if anchor_every < 1:
            raise refusal("anchor_every is too small", got=anchor_every, allowed="1 or more", remedy=str(ANCHOR_EVERY))
        self._source = open_source(to, may_create=True)
        self._weights, self._trainable_only = weights, trainable_only
        self._code, self._anchor_every, self._on_problem = cast(Code, code), anchor_every, on_problem
        tensors = tensors_of(weights, trainable_only=trainable_only)
        self._shard = shard_of(tensors)
        self._specs = specs_of(tensors, is_exact=code == "exact", rank=self._shard.rank)
        self._is_float = [is_float for _, is_float in fragment_sizes(self._specs)]
        self._shadow: list[Words] = []
        self._digests = [b""] * len(self._is_float)
        self._needs_anchor, self._since_anchor, self._attempt = True, 0, 0
        self._files = dict(files or {})
        for name, content in self._files.items():
            if len(content) > MOST_FILE_BYTES:
                raise refusal(f"{name} is too large to lie beside the weights", got=len(content),
                              allowed=f"at most {MOST_FILE_BYTES} bytes", remedy="to leave it out")  # fmt: skip
        self._layout: WeightLayout | None = None
        self._run, self._parent = secrets.token_hex(16), bytes(HASH_BYTES)
        self.newest: VersionManifest | None = None
        self._tried = b""
        self._kept: deque[tuple[VersionManifest, bytes]] = deque()
        self._thread: threading.Thread | None = None
        self._fault: StreamError | None = None
        self._in_background = in_background and self._shard.count == 1
        self._committed_s: float | None = None
        self._interval_s = 0.0
        self.num_skipped = self.num_failed = self.bytes_sent = 0
        self._continue_stream()

    def publish(self, step: int) -> int | None:
        """Publish the weights as they are now.

        With shards every rank must call it, and returns once the version is committed.

        Args:
            step: The publisher's own number, such as an optimizer step; followers see it.

        Returns:
            The version's number once it is committed, without a thread; with one the number that it will have. None if
            it is skipped, or failed.

        Raises:
            StreamError: Another publisher writes to the stream.
        """
        if self._fault is not None:
            raise self._fault
        if self._shard.count == 0:  # a copy of ranks that publish
            return None
        if self._thread is not None and self._thread.is_alive():
            self.num_skipped += 1
            return None
        version = self._encode(step)
        number = self._next
        if not self._in_background:
            return self._upload(version)
        self._thread = threading.Thread(target=self._upload, args=(version,), name="thinwire-publish", daemon=True)
        self._thread.start()
        return number

    def flush(self, *, deadline_s: float | None = None) -> bool:
        """Wait until nothing is being uploaded; return whether that came in time."""
        if self._thread is not None:
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                return False
        if self._fault is not None:
            raise self._fault
        return True

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    @property
    def _next(self) -> int:
        return 0 if self.newest is None else self.newest.version + 1

    def _encode(self, step: int) -> _Version:
        has_patch = not self._needs_anchor
        has_anchor = self._needs_anchor or self._since_anchor + 1 >= self._anchor_every
        patch, anchor = bytearray(), bytearray()
        is_first = not self._shadow
        tensors = tensors_of(self._weights, trainable_only=self._trainable_only)
        if difference := first_difference(
            specs_of(tensors, is_exact=self._code == "exact", rank=self._shard.rank), self._specs
        ):  # fmt: skip
            raise refusal("the weights are not those that this publisher began with", got=difference,
                          allowed="the same tensors at every version", remedy="a publisher of its own")  # fmt: skip
        for index, words in enumerate(fragments_of(tensors, self._specs)):
            if has_patch:
                payload, words = encode_fragment(
                    words, old=self._shadow[index], is_lossy=self._code == "e3m0" and self._is_float[index]
                )
                patch += len(payload).to_bytes(4, "little") + payload
            if has_anchor:
                payload, _ = encode_fragment(words, old=None)
                anchor += len(payload).to_bytes(4, "little") + payload
            if is_first:
                self._shadow.append(words)
            if is_first or words is not self._shadow[index]:
                self._shadow[index], self._digests[index] = words, sha256(words.astype("<u2").tobytes())
        # a patch that is no smaller than the anchor serves no reader
        if has_anchor and len(patch) >= len(anchor) and self._shard.count == 1:
            has_patch = False
        return _Version(
            step=step, digest=sha256(*self._digests), patch=patch if has_patch else None,
            anchor=anchor if has_anchor else None,
        )  # fmt: skip

    def _upload(self, version: _Version) -> int | None:
        self._attempt += 1
        folder = f"shards/{self._shard.nonce}/{self._attempt}"
        try:
            parts = [self._put_part(data) for data in (version.patch, version.anchor)]
            report = ShardReport(self._specs, version.digest, *parts)
            if self._shard.rank:
                self._put(f"{folder}/{self._shard.rank}", encode(report))
                number = self._await_commit(folder)
            else:
                number = self._commit(version.step, [report, *self._other_reports(folder)])
                self._end_attempt(folder, b"%d" % number)
        except (ThinwireError, OSError) as error:
            if isinstance(error, StreamError):
                self._fault = error
            self._fail(version, error, folder)
            return None
        self._needs_anchor = False
        self._since_anchor = 0 if version.anchor is not None else self._since_anchor + 1
        return number

    def _fail(self, version: _Version, error: Exception, folder: str) -> None:
        self._needs_anchor = True  # readers miss this version's patch
        self.num_failed += 1
        self._on_problem(f"the weights of step {version.step} were not published: {error}")
        with contextlib.suppress(ThinwireError, OSError):  # then the other ranks learn it by their deadline
            if self._shard.rank:
                self._put(f"{folder}/{self._shard.rank}", _FAILED)  # no report
            else:
                self._end_attempt(folder, _FAILED)

    def _put_part(self, data: bytearray | None) -> Part | None:
        if data is None:
            return None
        blobs = []
        for chunk in cut(data):
            blobs.append(blob_of(chunk))
            self._put(blobs[-1].name, chunk)
        return Part(tuple(blobs))

    def _commit(self, step: int, reports: list[ShardReport]) -> int:
        layout = WeightLayout(tuple(report.tensors for report in reports))
        layout_data = encode(layout)
        files = {name: blob_of(content) for name, content in self._files.items()}
        if self._layout != layout:
            self._put(blob_of(layout_data).name, layout_data)
            for name, blob in files.items():
                self._put(blob.name, self._files[name])
            self._layout = layout
        patches = tuple(report.patch for report in reports if report.patch is not None)
        anchors = tuple(report.anchor for report in reports if report.anchor is not None)
        patches, anchors = (parts if len(parts) == len(reports) else () for parts in (patches, anchors))
        if not patches and not anchors:
            raise ThinwireError("some ranks sent patches and others anchors, after one of them had failed")
        while True:
            manifest = VersionManifest(
                run=self._run, version=self._next, step=step, code=self._code, layout=blob_of(layout_data),
                parent=self._parent, result=result_hash(blob_of(layout_data), [report.digest for report in reports]),
                anchor=self._next if anchors or self.newest is None else self.newest.anchor,
                patches=() if self.newest is None else patches, anchors=anchors, files=files,
                interval_s=self._interval_s,
            )  # fmt: skip
            data = encode(manifest)
            blob = blob_of(data)
            self._put(blob.name, data)
            tried, self._tried = self._tried, blob.sha256
            if self._put(version_name(manifest.version), blob.sha256, only_new=True):
                break
            owner = get_bytes(self._source, version_name(manifest.version), most_bytes=HASH_BYTES)
            if owner == blob.sha256:
                break
            if owner != tried:
                raise StreamError(
                    f"another publisher wrote version {manifest.version} of {self._source.name}; stop one of the two, "
                    f"or give each a URI of its own"
                )
            self._adopt(self._manifest(owner), owner)  # our own attempt, whose answer was lost
        self._put(HEAD, head_of(manifest.version, blob.sha256))
        self._adopt(manifest, blob.sha256)
        now_s = time.monotonic()
        if self._committed_s is not None:
            took_s = now_s - self._committed_s
            self._interval_s = took_s if not self._interval_s else 0.8 * self._interval_s + 0.2 * took_s
        self._committed_s = now_s
        self._collect()
        return manifest.version

    def _adopt(self, manifest: VersionManifest, digest: bytes) -> None:
        self.newest, self._run, self._parent = manifest, manifest.run, digest
        self._kept.append((manifest, digest))

    def _manifest(self, digest: bytes) -> VersionManifest:
        name = Blob(digest, 0).name
        data = get_bytes(self._source, name, most_bytes=MOST_MANIFEST_BYTES)
        if sha256(data) != digest:
            raise PayloadError(f"{self._source.name} sent wrong bytes for {name}")
        return decode(data, VersionManifest, name=name)

    def _continue_stream(self) -> None:
        """Find the newest version of a stream that an earlier publisher began, and what may be deleted of it."""
        try:
            _, newest = read_head(get_bytes(self._source, HEAD, most_bytes=HEAD_BYTES))
        except NotThere:
            return
        chain = [(self._manifest(newest), newest)]
        with contextlib.suppress(NotThere):  # of versions that were committed just before their publisher died
            while True:
                owner = get_bytes(self._source, version_name(chain[-1][0].version + 1), most_bytes=HASH_BYTES)
                chain.append((self._manifest(owner), owner))
        if self._shard.count == 1:
            layout = decode(get_blob(self._source, chain[-1][0].layout), WeightLayout, name="the layout")
            if difference := first_difference(self._specs, layout.shards[0]) or ("shards" * (len(layout.shards) > 1)):
                raise refusal(f"{self._source.name} holds the weights of another model", got=difference,
                              allowed="the same tensors", remedy="another URI")  # fmt: skip
        with contextlib.suppress(NotThere, PayloadError):  # of versions that were deleted
            oldest = chain[0][0].anchor - 1
            while chain[0][0].version > max(0, oldest):
                parent = chain[0][0].parent
                chain.insert(0, (self._manifest(parent), parent))
        for manifest, digest in chain:
            self._adopt(manifest, digest)

    def _collect(self) -> None:
        """Delete what no reader needs: versions before the last anchor but one."""
        anchors = [manifest.version for manifest, _ in self._kept if manifest.anchors]
        if len(anchors) < _ANCHORS_KEPT:
            return
        old = []
        while self._kept[0][0].version < anchors[-_ANCHORS_KEPT]:
            old.append(self._kept.popleft())
        used = {name for manifest, _ in self._kept for name in _chunks_of(manifest)}
        names = {name for manifest, _ in old for name in _chunks_of(manifest)} - used
        names |= {version_name(manifest.version) for manifest, _ in old} | {Blob(digest, 0).name for _, digest in old}
        if old:
            self._source.carrier.delete(sorted(names))

    def _other_reports(self, folder: str) -> list[ShardReport]:
        reports = []
        for rank in range(1, self._shard.count):
            name = f"{folder}/{rank}"
            data = self._await(name, most_bytes=MOST_LAYOUT_BYTES)
            reports.append(decode(data, ShardReport, name=name))
        return reports

    def _end_attempt(self, folder: str, result: bytes) -> None:
        if self._shard.count > 1:
            self._put(f"{folder}/result", result)
            # all ranks have read the result of the attempt before: each has sent its report of this one
            last = folder.rsplit("/", 1)[0] + f"/{self._attempt - 1}"
            self._source.carrier.delete([f"{last}/{rank}" for rank in ("result", *range(1, self._shard.count))])

    def _await_commit(self, folder: str) -> int:
        result = self._await(f"{folder}/result", most_bytes=64)
        if not result.isdigit():
            raise ThinwireError("another rank could not send its shard, or the first could not commit it")
        return int(result)

    def _await(self, name: str, *, most_bytes: int) -> bytes:
        found = self._source.carrier.fetch(name, most_bytes=most_bytes, deadline_s=_SHARD_DEADLINE_S)
        return found.numpy().tobytes()

    def _put(self, name: str, data: bytes | memoryview, *, only_new: bool = False) -> bool:
        for pause_s in _RETRY_S:
            try:
                return self._put_once(name, data, only_new=only_new)
            except (TransportError, OSError):
                self._source.carrier.pause(pause_s)
        return self._put_once(name, data, only_new=only_new)

    def _put_once(self, name: str, data: bytes | memoryview, *, only_new: bool) -> bool:
        is_new = self._source.carrier.put(name, data, only_new=only_new)
        self.bytes_sent += len(data) * is_new
        return is_new


def _chunks_of(manifest: VersionManifest) -> set[str]:
    return {chunk.name for part in (*manifest.patches, *manifest.anchors) for chunk in part.chunks}
