"""The subscriber: fetches the newest version, verifies it whole, and only then changes a model.

From the version that it holds it goes on by patches, or by the newest anchor and the patches behind it where that is
fewer bytes. So a slow subscriber skips versions, and waits for none. Weights that do not verify are never used: the
anchor is fetched instead, and the report names the source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.carriers.base import Carrier
from thinwire.errors import NonFiniteError, NotThere, PayloadError, StaleWeights, StreamError, ThinwireError
from thinwire.publish.fetching import fetch_blobs, get_bytes, open_source
from thinwire.publish.manifest import (
    HEAD,
    HEAD_BYTES,
    MOST_MANIFEST_BYTES,
    Blob,
    VersionManifest,
    WeightLayout,
    decode,
    read_head,
    result_hash,
    sha256,
)
from thinwire.publish.patch import Words, decode_fragment, max_payload_bytes
from thinwire.publish.weights import Weights, fragment_sizes, join_tensors, load_weights

# Objects may be deleted, and a new version come, while a slow subscriber fetches; then it begins again.
_TRIES = 4
_MOST_CHAIN = 1 << 12
_MOST_SEEN = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Version:
    """Verified weights.

    Attributes:
        manifest: The version's, `sha256` its hash, by which `thinwire fetch` finds it.
        words: Fragments of each shard.
    """

    manifest: VersionManifest
    sha256: bytes
    layout: WeightLayout
    words: tuple[tuple[Words, ...], ...]

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole tensors by name; tied ones are one tensor."""
        return join_tensors(self.layout, self.words)


class WeightSubscriber:
    """Follows published weights.

    Args:
        sources: A carrier or its URI, or several that hold the same stream, which are read at once.
        max_staleness: Versions behind after which `update` raises; None for no bound.
        deadline_s: Seconds to wait for the first version.
        on_finding: Called with one line for each source that sent wrong bytes or is gone.
        parallel: Requests in flight at each source.
        clock: Seconds, for waits and staleness.

    Raises:
        ValueError: A URI is wrong.

    Attributes:
        held: The newest verified version; None before.
        num_skipped: Versions since the first held one that were never held.
        num_healed: Times that patches did not verify and an anchor was fetched instead.
        bytes_received: Bytes of verified objects.
    """

    def __init__(
        self, sources: str | Carrier | Sequence[str | Carrier], *, max_staleness: int | None = None,
        deadline_s: float = 60.0, on_finding: Callable[[str], object] = lambda text: None, parallel: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        several = sources if isinstance(sources, Sequence) and not isinstance(sources, str) else [sources]
        self._sources = [open_source(source, may_create=False) for source in several]
        self._max_staleness, self._deadline_s, self._on_finding = max_staleness, deadline_s, on_finding
        self._parallel, self._clock = parallel, clock
        self._newest: VersionManifest | None = None
        self._newest_s = clock()
        self.held: Version | None = None
        self._seen: dict[bytes, None] = {}  # hashes of older versions, which a source may show again
        self._loaded: tuple[Weights | None, int] = (None, -1)
        self.num_skipped = self.num_healed = self.bytes_received = 0

    @property
    def version(self) -> int:
        """The held version's number; -1 before the first."""
        return -1 if self.held is None else self.held.manifest.version

    @property
    def staleness(self) -> float:
        """Versions between the held one and the newest, and those that are due since it came by the usual interval."""
        if self.held is None or self._newest is None:
            return 0.0
        usual_s = self._newest.interval_s
        overdue = int((self._clock() - self._newest_s) / usual_s) if usual_s else 0
        return self._newest.version - self.version + overdue

    def update(self, weights: Weights) -> int:
        """Bring a model to the newest version, and return its number; the first call waits for the first version.

        Where no newer one can be had, the model keeps what it has.

        Args:
            weights: A model or tensors by name, into which is written once the whole version is verified.

        Raises:
            StaleWeights: The weights are more than `max_staleness` versions behind, or `deadline_s` passed without any.
            StreamError: The stream is another one than before.
            ValueError: The weights do not fit; names the first tensor that differs, and nothing is changed.
        """
        if self.held is None:
            self.wait(self._deadline_s)
        else:
            self._try_poll()
        if self.held is None:
            raise StaleWeights(
                f"there is no version within {self._deadline_s:g} s at {self._names}; check the URI, or start the "
                f"publisher"
            )
        if self._max_staleness is not None and self.staleness > self._max_staleness:
            raise StaleWeights(
                f"version {self.version} is {self.staleness:g} versions behind, more than the {self._max_staleness} "
                f"allowed; check the publisher and the link, or raise max_staleness"
            )
        if self._loaded[0] is not weights or self._loaded[1] != self.version:
            load_weights(weights, self.held.tensors(), self.held.layout)
            self._loaded = (weights, self.version)
        return self.version

    def wait(self, deadline_s: float) -> bool:
        """Wait for a version newer than the held one; return whether one came in time."""
        carrier = self._sources[0].carrier
        until_s = self._clock() + deadline_s
        for pause_s in carrier.limits().polls():
            if self._try_poll():
                return True
            if self._clock() + pause_s > until_s:
                return False
            carrier.pause(pause_s)
        return False

    def _try_poll(self) -> bool:
        try:
            return self.poll()
        except StreamError:
            raise
        except (ThinwireError, OSError) as error:  # a later version may be whole
            self._on_finding(f"no version newer than {self.version}: {error}")
            return False

    def poll(self) -> bool:
        """Fetch the newest version if it is newer than the held one; return whether it was.

        Raises:
            StreamError: The stream is another one than before.
            ThinwireError: The version does not verify, or as the carriers raise it; the held version stays.
        """
        for attempt in range(_TRIES):
            found = self._newest_head()
            if found is None:
                return False
            try:
                version = self._fetch(*found)
            except NotThere:  # it was deleted meanwhile, because newer versions have come
                if attempt + 1 == _TRIES:
                    raise
                continue
            if self.held is not None:
                self.num_skipped += version.manifest.version - self.version - 1
            self.held = version
            return True
        return False

    def fetch(self, digest: bytes) -> Version:
        """Return the version whose manifest has this hash, from all sources at once.

        Raises:
            ThinwireError: No source has it, or all of it.
        """
        return self._fetch(self._manifest(digest), digest)

    @property
    def _names(self) -> str:
        return ", ".join(source.name for source in self._sources)

    def _heads(self) -> list[tuple[int, bytes]]:
        """Return version and hash that each source shows."""
        found: list[tuple[int, bytes]] = []
        error: Exception | None = None
        for source in self._sources:
            try:
                found.append(read_head(get_bytes(source, HEAD, most_bytes=HEAD_BYTES)))
            except NotThere:
                continue
            except (PayloadError, OSError) as failure:
                error = type(failure)(f"{source.name}: {failure}")
                self._on_finding(str(error))
        if not found and error is not None:
            raise error
        return found

    def _newest_head(self) -> tuple[VersionManifest, bytes] | None:
        """Return the newest version that a source shows, if it is newer than the held one."""
        heads = self._heads()
        if not heads:
            return None
        number, digest = max(heads)
        if self.held is not None and (digest in self._seen or digest == self.held.sha256):
            return None
        manifest = self._manifest(digest)
        if manifest.version != number:
            raise PayloadError(f"the head of {self._names} says version {number}, its manifest {manifest.version}")
        if self.held is not None and manifest.run != self.held.manifest.run:
            raise StreamError(f"{self._names} holds another run's weights now; start a subscriber for it")
        if manifest.version == self.version:
            raise StreamError(f"{self._names} has another version {self.version} than before; start a new subscriber")
        if self._newest is None or manifest.version > self._newest.version:
            self._newest, self._newest_s = manifest, self._clock()
        if manifest.version < self.version:  # replayed, or seen by a source that is behind
            self._seen[digest] = None
            while len(self._seen) > _MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            return None
        return manifest, digest

    def _fetch(self, target: VersionManifest, digest: bytes) -> Version:
        chains = self._chains(target, digest)
        for chain, base in chains:
            try:
                return self._apply(chain, base, digest)
            except (PayloadError, NonFiniteError) as error:
                if base is None:
                    raise PayloadError(f"version {target.version} does not verify: {error}; it is not used") from error
                self.num_healed += 1
                self._on_finding(f"patches to version {target.version} do not verify: {error}; fetching the anchor")
        raise PayloadError(f"version {target.version} of {self._names} has no anchor before it")

    def _chains(self, target: VersionManifest, digest: bytes) -> Iterator[tuple[list[VersionManifest], Version | None]]:
        """Yield the ways to a version, the one of fewer bytes first: manifests in order, and the version before them.

        The last way begins with an anchor.
        """
        chain, size, anchored, anchored_size = [target], 0, None, 0
        while True:
            first = chain[0]
            if first.anchors and anchored is None:
                anchored = list(chain)
                anchored_size = size + sum(part.size for part in first.anchors)
            size += sum(part.size for part in first.patches)
            is_linked = self.held is not None and first.patches and first.parent == self.held.sha256
            if is_linked and (anchored is None or size < anchored_size):
                yield chain, self.held
            if anchored is not None and (
                is_linked or self.held is None or not first.patches or size >= anchored_size
                or first.version <= self.version + 1
            ):  # fmt: skip
                yield anchored, None
                return
            if first.version == 0 or len(chain) == _MOST_CHAIN:
                return
            parent = self._manifest(first.parent)
            if parent.version != first.version - 1 or parent.run != first.run:
                raise StreamError(f"version {first.version} of {self._names} does not follow the one before it")
            chain.insert(0, parent)

    def _apply(self, chain: list[VersionManifest], base: Version | None, digest: bytes) -> Version:
        target = chain[-1]
        if any(manifest.layout != target.layout for manifest in chain):
            raise PayloadError("the tensors change within the chain of patches")
        if base is not None and base.manifest.layout == target.layout:
            layout = base.layout
        else:
            base = None if chain[0].anchors else base
            layout = decode(self._get([target.layout])[target.layout.sha256], WeightLayout, name=target.layout.name)
        shards, digests = [], []
        for shard, specs in enumerate(layout.shards):
            sizes = [size for size, _ in fragment_sizes(specs)]
            most = sum(4 + max_payload_bytes(size) for size in sizes)
            parts = [
                (manifest.anchors if base is None and manifest is chain[0] else manifest.patches)
                for manifest in chain
            ]  # fmt: skip
            if any(len(part) != len(layout.shards) or part[shard].size > most for part in parts):
                raise PayloadError("the parts of a version are not those of its tensors")
            data = self._get([chunk for part in parts for chunk in part[shard].chunks])
            words: list[Words | None] = list(base.words[shard]) if base is not None else [None] * len(sizes)
            for part in parts:
                payload = memoryview(b"".join(data[chunk.sha256] for chunk in part[shard].chunks))
                words = list(_decode_part(payload, words, sizes))
            done = [fragment for fragment in words if fragment is not None]
            digests.append(sha256(*(sha256(fragment.astype("<u2").tobytes()) for fragment in done)))
            shards.append(tuple(done))
        if result_hash(target.layout, digests) != target.result:
            raise PayloadError("the result has another hash")
        return Version(manifest=target, sha256=digest, layout=layout, words=tuple(shards))

    def _get(self, blobs: Sequence[Blob]) -> dict[bytes, bytes]:
        try:
            found = fetch_blobs(self._sources, blobs, on_finding=self._on_finding, parallel=self._parallel)
        except PayloadError as error:  # once more: an anchor, the other remedy, is far more bytes
            self._on_finding(f"{error}; asking again")
            found = fetch_blobs(self._sources, blobs, on_finding=self._on_finding, parallel=self._parallel)
        self.bytes_received += sum(map(len, found.values()))
        return found

    def files(self) -> dict[str, bytes]:
        """Return the files beside the held version, such as a tokenizer."""
        if self.held is None:
            return {}
        wanted = self.held.manifest.files
        found = self._get(list(wanted.values())) if wanted else {}
        return {name: found[blob.sha256] for name, blob in wanted.items()}

    def _manifest(self, digest: bytes) -> VersionManifest:
        """Return a manifest by its hash, from the first source that has it; each is asked twice."""
        name = Blob(digest, 0).name
        last: Exception = NotThere(f"{self._names} has no {name}")
        for source in (*self._sources, *self._sources):
            try:
                data = get_bytes(source, name, most_bytes=MOST_MANIFEST_BYTES)
            except (ThinwireError, OSError) as error:
                last = error
                continue
            if sha256(data) == digest:
                self.bytes_received += len(data)
                return decode(data, VersionManifest, name=name)
            last = PayloadError(f"{source.name} sent wrong bytes for {name}")
            self._on_finding(f"{last}; asking again")
        raise last


def _decode_part(payload: memoryview, words: Sequence[Words | None], sizes: Sequence[int]) -> Iterator[Words]:
    for old, count in zip(words, sizes, strict=True):
        size = int.from_bytes(payload[:4], "little")
        if len(payload) < 4 + size:
            raise PayloadError("a version's part is cut off")
        yield decode_fragment(payload[4 : 4 + size], count=count, old=old)
        payload = payload[4 + size :]
    if payload:
        raise PayloadError("bytes follow a version's last fragment")
