"""Streams: what messages belong to, and the limits under which they travel.

A message is addressed by its stream, the number of its owner, and a key of three unsigned integers. A family of
messages registers a stream of its own in its own folder; no transport knows more of it than what stands here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

# Of headers, frames and introductions: both ends of a connection must have the same.
FORMAT_VERSION = 2
MOST_BYTES = 1 << 48
# Bits of a key's parts on the wire, and of an owner's number.
KEY_BITS = (64, 32, 8)
OWNER_BITS = 16
# Numbers below are thinwire's own.
LEAST_NUMBER, MOST_NUMBER = 16, 255
# Bits of a gloo tag that tell apart what one owner has in flight in one stream.
SLOT_BITS = 16
_NAME = re.compile("[a-z][a-z0-9-]{0,31}")
_PARTS = ("number", "part", "phase")


class MessageAddress(NamedTuple):
    """Address by which a message is matched: the numbers of its stream and owner, and its key."""

    stream: int
    owner: int
    number: int
    part: int
    phase: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Kind of messages, and the limits under which they travel; `register` it before use.

    Attributes:
        name: In records and errors.
        number: On the wire, the same on all hosts.
        keys: Names of a key's parts in errors, at least the first.
        in_flight: For each part of a key, how many consecutive values are in flight at once, at most, from one
            replica to another; 1 where the other parts tell messages apart. The largest number of messages in flight
            is their product.
        most_bytes: Of a payload.
        priority: Lower goes first, where messages wait for one connection.
        least_deadline_s: Seconds that every message may take.
        slowest_bytes_per_s: Rate of the slowest link that a message is given time for.

    Raises:
        ValueError: The name, the number or a limit is out of range.

    Example:
        >>> Stream(name="features", number=200, in_flight=(4, 16, 1), most_bytes=1 << 20).most_in_flight
        64
    """

    name: str
    number: int
    keys: tuple[str, ...] = ("number",)
    in_flight: tuple[int, int, int] = (4096, 1, 1)
    most_bytes: int = MOST_BYTES
    priority: int = 1
    least_deadline_s: float = 60.0
    slowest_bytes_per_s: float = 10_000.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a stream's name is a-z, 0-9 and -, at most 32 characters, got {self.name!r}")
        if not 1 <= self.number <= MOST_NUMBER:
            raise ValueError(f"the number of stream {self.name} must be in 1..{MOST_NUMBER}, got {self.number}")
        if not 1 <= len(self.keys) <= len(_PARTS):
            raise ValueError(f"stream {self.name} has 1 to {len(_PARTS)} names of a key's parts, got {self.keys}")
        if len(self.in_flight) != len(KEY_BITS):
            raise ValueError(f"in_flight of stream {self.name} has {len(KEY_BITS)} numbers, got {self.in_flight}")
        if min(self.in_flight) < 1 or self.most_in_flight > 1 << SLOT_BITS:
            raise ValueError(
                f"stream {self.name} may have 1 to {1 << SLOT_BITS} messages in flight, got in_flight="
                f"{self.in_flight}, which are {self.most_in_flight}; name fewer values for a part of the key"
            )
        if not 0 <= self.most_bytes <= MOST_BYTES:
            raise ValueError(f"most_bytes of stream {self.name} must be in 0..{MOST_BYTES}, got {self.most_bytes}")
        if not (self.least_deadline_s > 0 and self.slowest_bytes_per_s > 0):
            raise ValueError(
                f"least_deadline_s and slowest_bytes_per_s of stream {self.name} must be positive, got "
                f"{self.least_deadline_s} and {self.slowest_bytes_per_s}"
            )

    @property
    def most_in_flight(self) -> int:
        """Largest number of one owner's messages in flight from one replica to another."""
        return math.prod(self.in_flight)

    def deadline_s(self, num_bytes: int) -> float:
        """Return the seconds after which a message of this size counts as lost, where nothing was measured."""
        return self.least_deadline_s + num_bytes / self.slowest_bytes_per_s

    def describe(self, key: tuple[int, int, int], *, owner: int = 0) -> str:
        """Name a message in an error's text.

        Example:
            >>> ROUNDS.describe((7, 2, 0)), SETUP.describe((1, 0, 0), owner=1)
            ('round 7 (fragment 2)', 'setup 1 of owner 2')
        """
        more = ", ".join(f"{name} {part}" for name, part in zip(self.keys[1:], key[1:], strict=False))
        return f"{self.name} {key[0]}" + (f" ({more})" if more else "") + (f" of owner {owner + 1}" if owner else "")

    def part_name(self, place: int) -> str:
        return self.keys[place] if place < len(self.keys) else _PARTS[place]

    def slot(self, key: tuple[int, int, int]) -> int:
        """Return a number below `most_in_flight` that differs for all keys that may be in flight at once."""
        slot = 0
        for part, span in zip(key, self.in_flight, strict=True):
            slot = slot * span + part % span
        return slot


_by_number: dict[int, Stream] = {}
_by_name: dict[str, Stream] = {}


def register(stream: Stream) -> Stream:
    """Make a stream known, and return it; the same one may be registered again.

    Raises:
        ValueError: Another stream has its name or number, or the number is one of thinwire's own.
    """
    for known in (_by_number.get(stream.number), _by_name.get(stream.name)):
        if known is not None and known != stream:
            raise ValueError(
                f"stream {stream.name} with number {stream.number} is taken: there is {known.name} with number "
                f"{known.number}; choose another name and a free number in {LEAST_NUMBER}..{MOST_NUMBER}"
            )
    if stream.number < LEAST_NUMBER and stream not in _OWN:
        raise ValueError(
            f"numbers below {LEAST_NUMBER} are thinwire's own, got {stream.number} for stream {stream.name}; choose a "
            f"free number in {LEAST_NUMBER}..{MOST_NUMBER}"
        )
    _by_number[stream.number] = _by_name[stream.name] = stream
    return stream


CONTROL = Stream(name="control", number=4, in_flight=(4096, 4, 1), priority=0)
ROUNDS = Stream(name="round", number=1, keys=("round", "fragment"), in_flight=(4096, 4, 4))
SETUP = Stream(name="setup", number=2, in_flight=(4096, 8, 1))
BUFFERS = Stream(name="buffers", number=3, in_flight=(4096, 1, 4))
BLOBS = Stream(name="blob", number=5, priority=2)
# Between pipeline stages: a message waits for all passes before its own.
ACTIVATIONS = Stream(
    name="activations", number=6, keys=("step and micro-batch", "stage", "direction"), in_flight=(4096, 8, 2),
    priority=0, least_deadline_s=600.0,
)  # fmt: skip
_OWN = (CONTROL, ROUNDS, SETUP, BUFFERS, BLOBS, ACTIVATIONS)
for _stream in _OWN:
    register(_stream)
