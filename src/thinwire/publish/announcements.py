"""Announcements: which member has which published hash, at which address and rate, as a replicated map.

Each member states what it has; the newest statement of a member about a hash wins, and one that says "no more" stays as
a tombstone. Merging is commutative, associative and idempotent, so that maps that have seen the same statements are
equal, in whatever order and however often those came. A root over all statements shows that two maps are equal.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Annotated

import msgspec
from msgspec import Meta

from thinwire.carriers.base import Carrier
from thinwire.errors import NotThere, PayloadError

FOLDER = "announcements"
MOST_STATEMENTS = 4096
_MOST_BYTES, _GET_S = 4 * 2**20, 60.0
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Text = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[!-~]+\Z")]


class Announcement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statement of a member about one hash.

    Attributes:
        sha256: The hash.
        member: Who states it, by a name that is unique to it.
        address: Where others fetch it; without a secret.
        bytes_per_s: Measured rate at which the member sent last; 0 before a measurement.
        count: Number of the statement among those of this member about this hash; the highest wins.
        is_gone: Whether the member has it no more.
    """

    sha256: _Sha256
    member: _Text
    address: _Text
    bytes_per_s: Annotated[float, Meta(ge=0, lt=1e15)] = 0.0
    count: Annotated[int, Meta(ge=1, lt=1 << 53)] = 1
    is_gone: bool = False

    @property
    def rank(self) -> tuple[int, bool, bytes]:
        """Order of statements with one key: total, so that equal counts of a restarted member differ nowhere."""
        return self.count, self.is_gone, msgspec.json.encode(self)


_DECODER = msgspec.json.Decoder(Annotated[list[Announcement], Meta(max_length=MOST_STATEMENTS)])


class Announcements:
    """A replica of the map. Thread-safe.

    Args:
        member: This member's name.

    Example:
        >>> one, other = Announcements("a"), Announcements("b")
        >>> one.announce(64 * "0", address="file:///a"), other.merge(one.encode())
        (None, 1)
        >>> [found.address for found in other.sources(64 * "0")], one.root == other.root
        (['file:///a'], True)
    """

    def __init__(self, member: str) -> None:
        self._member = member
        self._lock = threading.Lock()
        self._statements: dict[tuple[str, str], Announcement] = {}
        self._merged: set[str] = set()

    def announce(self, sha256: str, *, address: str, bytes_per_s: float = 0.0, is_gone: bool = False) -> None:
        """State that this member has a hash, or has it no more."""
        with self._lock:
            before = self._statements.get((sha256, self._member))
            statement = Announcement(
                sha256=sha256, member=self._member, address=address, bytes_per_s=bytes_per_s, is_gone=is_gone,
                count=1 if before is None else before.count + 1,
            )  # fmt: skip
        self.merge(msgspec.json.encode([statement]))

    def merge(self, payload: bytes) -> int:
        """Take the statements of another replica; return how many were new.

        Raises:
            PayloadError: They are none, or more than a map holds.
        """
        try:
            found = _DECODER.decode(payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise PayloadError(f"announcements that cannot be read: {str(error)[:200]}") from None
        with self._lock:
            new: dict[tuple[str, str], Announcement] = {}
            for one in found:
                key = one.sha256, one.member
                known = new.get(key, self._statements.get(key))
                if known is None or one.rank > known.rank:
                    new[key] = one
            if len(self._statements.keys() | new.keys()) > MOST_STATEMENTS:
                raise PayloadError(f"more than {MOST_STATEMENTS} announcements; remove the carrier's {FOLDER}/ folder")
            self._statements |= new
        return len(new)

    def sources(self, sha256: str) -> list[Announcement]:
        """Return who has a hash, the fastest first."""
        with self._lock:
            found = [one for one in self._statements.values() if one.sha256 == sha256 and not one.is_gone]
        return sorted(found, key=lambda one: (-one.bytes_per_s, one.member))

    def encode(self) -> bytes:
        """Return all statements in an order that is the same for equal maps."""
        with self._lock:
            return msgspec.json.encode([one for _, one in sorted(self._statements.items())])

    @property
    def root(self) -> str:
        """Merkle root of all statements; equal for equal maps."""
        with self._lock:
            level = [hashlib.sha256(b"\0" + msgspec.json.encode(one)).digest()
                     for _, one in sorted(self._statements.items())]  # fmt: skip
        while len(level) > 1:
            pairs = [level[number : number + 2] for number in range(0, len(level), 2)]
            level = [hashlib.sha256(b"\1" + b"".join(pair)).digest() for pair in pairs]
        return level[0].hex() if level else 64 * "0"

    def exchange(self, carrier: Carrier) -> int:
        """Merge what other members left on a carrier, and leave the result there; return how many were new.

        An object is named by its root, so that members with equal maps write one alone.
        """
        num_new, seen = 0, []
        for entry in carrier.listing(FOLDER):
            seen.append(entry.name)
            if entry.name not in self._merged:
                try:
                    payload = carrier.get(entry.name, most_bytes=_MOST_BYTES, deadline_s=_GET_S)
                    num_new += self.merge(payload.numpy().tobytes())
                except (NotThere, PayloadError):  # merged and removed by another member; or not of this format
                    continue
                self._merged.add(entry.name)
        own = f"{FOLDER}/{self.root}"
        carrier.put(own, self.encode(), only_new=True)
        self._merged = {own, *self._merged.intersection(seen)}
        carrier.delete([name for name in seen if name != own and name in self._merged])
        return num_new
