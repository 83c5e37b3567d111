"""Updates of named arrays as one row of bytes: what a client sends of its model, and a server of the global one.

A message is the header of `thinwire.transport.message` (codec, elements, version of the model that it refers to, a hash
of names and shapes as its note, checksum), and then:

| bytes | content |
| --- | --- |
| 1 | 1 where the sender dropped an old residual, plus twice the number of its tier, 0 for none |
| 1 | type of all coded arrays (0 float16, 1 float32, 2 float64), or 255 and then one such byte for each |
| the rest | arrays that are not coded (counters, flags), as they are; then the codec's payload |

Floating arrays are coded together, as one vector in the order of their names in the model. A lossy codec carries the
difference to the base, with error feedback; a lossless one carries the values: base + (value - base) is not always the
value. What arrives is untrusted: sizes are known from the receiver's own arrays before a byte is decoded.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import numpy.typing as npt
import torch

from thinwire import codecs
from thinwire.codec_specs import CODEC_SPECS, codec_key
from thinwire.codecs import Codec, NeedsLayout
from thinwire.codecs.error_feedback import ErrorFeedback, Residual
from thinwire.errors import NonFiniteError, PayloadError, refusal
from thinwire.transport.base import Envelope
from thinwire.transport.message import HEADER_BYTES, check_header, pack, unpack
from thinwire.transport.streams import Stream, register

UPDATES = register(Stream(name="client-update", number=40, keys=("version", "base version")))
Arrays = dict[str, npt.NDArray[Any]]
Bytes = npt.NDArray[np.uint8]

Sends = Literal["differences", "values", "signs"]
_FLOATS = ("float16", "float32", "float64")
_MIXED = 255
_MOST_TIERS = 127  # a tier's number shares a byte with a flag
MOST_ARRAY_BYTES = 1 << 36


@dataclass(frozen=True, slots=True)
class LinkCode:
    """Code of one direction, the same on clients and server.

    Raises:
        ValueError: The codec is unknown or does not take the option, or an option is out of its range.
    """

    codec: str = "float32"  # name of a codec, as `thinwire.codecs.by_name` has it
    density: float | None = None  # share of the elements that a sparse codec sends; None for the codec's default
    values: str | None = None  # format of a sparse codec's values, such as `"clusters"`; None for the codec's default
    sends: Sends = "differences"  # to the last version, `"values"` themselves, or their `"signs"`
    # densities by name: that of a node whose config has `tier="NAME"`; others have `density`
    tiers: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.tiers and self.density is None:
            raise refusal("tiers need a density for nodes without one", got="density=None", allowed="a share",
                          remedy=f"density={max(self.tiers.values())}")  # fmt: skip
        if len(self.tiers) > _MOST_TIERS:
            raise refusal("too many tiers", got=len(self.tiers), allowed=_MOST_TIERS, remedy="fewer densities")
        for density in (self.density, *self.tiers.values()):
            self.make(density)

    def make(self, density: float | None = None) -> Codec:
        """Return the codec, of another density if one is given."""
        density = self.density if density is None else density
        if self.sends not in get_args(Sends):
            raise refusal("sends is unknown", got=repr(self.sends), allowed=", ".join(get_args(Sends)),
                          remedy='sends="differences"')  # fmt: skip
        key = codec_key(self.codec)
        function, arguments = CODEC_SPECS[key]
        given = {name: value for name, value in (("density", density), ("values", self.values)) if value is not None}
        try:
            made: Codec = getattr(codecs, function)(**{**arguments, **given})
        except TypeError:
            raise refusal(f"codec {key} does not take such options", got=", ".join(given), allowed="its own",
                          remedy="codec='top-k', which takes density and values") from None  # fmt: skip
        return made

    def text(self) -> str:
        """Return the code as text, by which the two ends compare what they were given."""
        given = {name: one for name, one in asdict(self).items() if one not in (None, {}, "")}
        return json.dumps(given, sort_keys=True)

    def of_tier(self, tier: object = None) -> Self:
        """Return the code of a node's tier; the widest, which decodes all, where no tier is named."""
        if self.density is None or not self.tiers:
            return self
        widest = max(self.density, *self.tiers.values())
        return replace(self, density=widest if tier is None else self.tiers.get(str(tier), self.density))


@dataclass(frozen=True, slots=True)
class Uplink(LinkCode):
    """Code of what clients send: the difference between a client's arrays and the global ones that it got."""

    codec: str = "e3m0"
    # a client keeps what a lossy codec dropped, and an update that the server did not count, for its next update
    error_feedback: bool = True
    residual_rounds: int = 20  # the residual of a client that was away for more is dropped: it is a stale gradient
    tag: str = ""  # further text that both ends must have the same, such as the fingerprint of `sign_mask`

    def __post_init__(self) -> None:
        LinkCode.__post_init__(self)
        if self.residual_rounds < 1:
            raise refusal("residual_rounds is too small", got=self.residual_rounds, allowed="1 or more",
                          remedy="residual_rounds=20, or error_feedback=False")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Downlink(LinkCode):
    """Code of what the server sends: versions of the global model, each coded as the difference to the one before.

    Both ends hold the last decoded version, so what the codec dropped is part of the next difference. A client that
    missed versions gets all their differences, or the whole version where that is shorter. With `sends="values"` a
    version stands for itself: a top-k code then sends a masked model, and sign bits the signs of `sign_mask`. Each
    tier has versions of its own; a node has the smallest density until its first reply names its tier.
    """

    codec: str = "e3m0"
    keep: int = 20  # versions whose differences the server keeps; clients further behind get the whole model

    def __post_init__(self) -> None:
        LinkCode.__post_init__(self)
        if self.make().is_lossless_for_float32:
            raise refusal("a lossless downlink sends whole models anyway", got=self.codec, allowed="a lossy codec",
                          remedy="down=None")  # fmt: skip
        if self.keep < 1:
            raise refusal("keep is too small", got=self.keep, allowed="1 or more", remedy="keep=20")

    @classmethod
    def from_text(cls, text: str) -> Downlink:
        """Return the code that `text` wrote, or raise PayloadError."""
        try:
            return cls(**json.loads(text[:8000]))
        except (TypeError, ValueError) as error:
            why = f"the server's downlink is unknown here: {error}; run the same thinwire on all hosts"
            raise PayloadError(why) from None


@dataclass(frozen=True)
class ArrayLayout:
    """Names, shapes and kinds of a model's arrays, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]  # `float` for arrays that are coded, else the type, such as `int64`

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> ArrayLayout:
        """Return the layout of arrays; objects and text are refused."""
        for name, array in arrays.items():
            if array.dtype.kind not in "fiub":
                raise refusal(f"array {name} holds no numbers", got=array.dtype, allowed="floats, integers, bool",
                              remedy="to leave it out of the ArrayRecord")  # fmt: skip
        kinds = ("float" if str(array.dtype) in _FLOATS else str(array.dtype) for array in arrays.values())
        return cls(tuple(arrays), tuple(array.shape for array in arrays.values()), tuple(kinds))

    @cached_property
    def coded(self) -> tuple[int, ...]:
        """Places of the arrays that are coded."""
        return tuple(place for place, kind in enumerate(self.kinds) if kind == "float")

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each array."""
        return tuple(int(np.prod(shape, dtype=np.int64)) for shape in self.shapes)

    @cached_property
    def numel(self) -> int:
        """Elements of all coded arrays."""
        return sum(self.sizes[place] for place in self.coded)

    @cached_property
    def raw_bytes(self) -> int:
        """Bytes of all arrays that are not coded."""
        kinds = zip(self.kinds, self.sizes, strict=True)
        return sum(size * np.dtype(kind).itemsize for kind, size in kinds if kind != "float")

    def text(self) -> str:
        """Return the layout as text."""
        return json.dumps([self.names, self.shapes, self.kinds])

    @classmethod
    def from_text(cls, text: str, *, most_bytes: int = MOST_ARRAY_BYTES) -> ArrayLayout:
        """Return the layout that `text` wrote, or raise PayloadError, also for arrays larger than `most_bytes`."""
        try:
            names, shapes, kinds = json.loads(text)
            shapes = tuple(tuple(map(int, shape)) for shape in shapes)
            found = cls(tuple(map(str, names)), shapes, tuple(map(str, kinds)))
            widths = [4 if kind == "float" else np.dtype(kind).itemsize for kind in found.kinds]
        except (TypeError, ValueError) as error:
            raise PayloadError(f"the layout of the server's model cannot be read: {str(error)[:200]}") from None
        lengths = [math.prod(shape) for shape in found.shapes]  # Python's integers do not overflow
        if min((size for shape in found.shapes for size in shape), default=0) < 0 or not (
            len(found.names) == len(lengths) == len(widths)
            and sum(width * length for width, length in zip(widths, lengths, strict=True)) <= most_bytes
            and all(kind == "float" or np.dtype(kind).kind in "iub" for kind in found.kinds)
        ):
            raise PayloadError("the layout of the server's model holds wrong sizes or types, or too large ones")
        return found

    def check(self, other: ArrayLayout, *, what: str) -> None:
        """Raise PayloadError for arrays of another layout, by the name of the first one that differs."""
        mine, its = ({name: form for name, *form in zip(one.names, one.shapes, one.kinds, strict=True)}
                     for one in (self, other))  # fmt: skip
        for name in (*self.names, *other.names):
            if mine.get(name) != its.get(name):
                raise PayloadError(f"{what}: array {name[:100]!r} is {its.get(name)}, expected {mine.get(name)}; train "
                                   f"the model that the server sent")  # fmt: skip
        if self.names != other.names:
            raise PayloadError(f"{what}: the arrays are in another order; keep the order of the model's state_dict")

    def flat(self, arrays: Mapping[str, npt.NDArray[Any]]) -> torch.Tensor:
        """Return the coded arrays as one vector, float64 where one of them is, else float32."""
        parts = [np.ascontiguousarray(arrays[self.names[place]]).reshape(-1) for place in self.coded]
        dtype = np.float64 if any(part.dtype == np.float64 for part in parts) else np.float32
        whole = np.concatenate([part.astype(dtype) for part in parts]) if parts else np.empty(0, dtype)
        return torch.from_numpy(whole)

    def arrays(self, vector: torch.Tensor, types: Sequence[Any], others: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Return finite arrays: the coded ones from a vector, each of its type, and the others as they are."""
        parts, kinds = iter(torch.split(vector, [self.sizes[place] for place in self.coded])), iter(types)
        with np.errstate(over="ignore"):
            found = {
                name: next(parts).numpy().astype(next(kinds)).reshape(shape) if kind == "float" else others[name]
                for name, shape, kind in zip(self.names, self.shapes, self.kinds, strict=True)
            }  # fmt: skip
        check_finite(found)
        return found


def check_finite(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise NonFiniteError where an array holds NaN or infinity."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            raise NonFiniteError(f"array {name[:100]!r} holds NaN or infinity")


class Content(NamedTuple):
    """Content of a message: the decoded vector, the type of each coded array, the other arrays, and the flags."""

    vector: torch.Tensor
    types: list[str]
    others: Arrays
    flags: int


@dataclass(frozen=True)
class UpdateCode:
    """Code of a model's updates in one direction, of the layout of the model, with the tag of the uplink."""

    code: LinkCode
    layout: ArrayLayout
    tag: str = ""

    @cached_property
    def codec(self) -> Codec:
        """The codec, laid out for the coded arrays."""
        made = self.code.make()
        shapes = [torch.Size(self.layout.shapes[place]) for place in self.layout.coded]
        return made.laid_out(shapes) if isinstance(made, NeedsLayout) else made

    @cached_property
    def sends_values(self) -> bool:
        """Whether values travel, not differences."""
        return self.codec.is_lossless_for_float32 or self.code.sends != "differences"

    @cached_property
    def note(self) -> bytes:
        """Hash of names, shapes, kinds and the tag: both ends must have the same."""
        return hashlib.sha256(f"{self.layout.text()}{self.tag}".encode()).digest()[:8]

    @cached_property
    def most_bytes(self) -> int:
        """Largest body of a message."""
        return 2 + len(self.layout.coded) + self.layout.raw_bytes + self.codec.payload_bytes(self.layout.numel)

    def envelope(self, *, version: int, base: int, size: int | None = None) -> Envelope:
        """Return the envelope of a message to write, of a body's size, or of one to read."""
        return Envelope(
            stream=UPDATES, key=(version, base), codec_id=self.codec.wire_id, numel=self.layout.numel,
            payload_bytes=self.most_bytes if size is None else size, note=self.note, takes_less=size is None,
        )  # fmt: skip

    def encode(
        self, arrays: Arrays, base: torch.Tensor, *, sender: int, version: int, base_version: int,
        residual: torch.Tensor | None = None, flags: int = 0,
    ) -> tuple[Bytes, torch.Tensor]:  # fmt: skip
        """Encode arrays as the difference to `base`, the flat vector that the receiver holds.

        The receiver will match `version`, and the version of the base. `residual`, float32, is what was not sent
        before, and is updated; None for no error feedback. `flags` is the first byte of the body. Returns the message,
        uint8, and what the receiver decodes of the coded part, float32 `(numel,)`.
        """
        layout = self.layout
        layout.check(ArrayLayout.of(arrays), what="the update")
        value = layout.flat(arrays)
        vector = value.to(torch.float32) if self.sends_values else (value - base).to(torch.float32)
        if self.code.sends == "signs":
            vector = signs_of(vector)
        memory, state = ErrorFeedback(), None if residual is None or self.sends_values else Residual(residual)
        if state is not None and bool(vector.isfinite().all()):  # else the receiver refuses it, and the residual stays
            vector = memory.before(state, vector)
        else:
            state = None
        payload = self.codec.encode(vector)
        types = [_FLOATS.index(str(arrays[layout.names[place]].dtype)) for place in layout.coded]
        kinds = (types[:1] or [1]) if len(set(types)) <= 1 else [_MIXED, *types]
        raw = [
            np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
            for name, kind in zip(layout.names, layout.kinds, strict=True) if kind != "float"
        ]  # fmt: skip
        body = torch.cat([torch.from_numpy(np.concatenate([np.array([flags, *kinds], np.uint8), *raw])), payload])
        try:
            sent = self.codec.decode(payload, numel=layout.numel)
        except NonFiniteError:
            sent = torch.full_like(vector, torch.nan)
        if state is not None:
            memory.after(state, sent)
        envelope = self.envelope(version=version, base=base_version, size=body.numel())
        return pack(body, sender=sender, envelope=envelope).numpy(), sent

    def read(self, message: Bytes, *, sender: int, version: int, base_version: int) -> Content:
        """Return the content of a message; raise PayloadError for one of another code, layout, version or sender."""
        envelope, layout = self.envelope(version=version, base=base_version), self.layout
        received = unpack(torch.from_numpy(message.copy()), source=sender, envelope=envelope)
        body, count, who = received.payload.numpy(), len(layout.coded), f"{envelope.describe()} from {sender}"
        if received.note != self.note:
            raise PayloadError(f"{who}: its arrays have other names, shapes or tag than the server's; train the model "
                               f"that the server sent")  # fmt: skip
        width = 2 + count * (len(body) > 1 and int(body[1]) == _MIXED)
        types = [int(one) for one in (body[2:width] if width > 2 else body[1:2])]
        if len(body) < width + layout.raw_bytes or any(one >= len(_FLOATS) for one in types):
            raise PayloadError(f"{who}: its head is too short, or names an unknown type")
        others, start = {}, width
        for name, shape, kind, size in zip(layout.names, layout.shapes, layout.kinds, layout.sizes, strict=True):
            if kind != "float":
                stop = start + size * np.dtype(kind).itemsize
                if kind == "bool" and bool((body[start:stop] > 1).any()):
                    raise PayloadError(f"{who}: array {name[:100]!r} holds other bytes than those of true and false")
                others[name] = body[start:stop].view(kind).reshape(shape).copy()
                start = stop
        vector = self.codec.decode(received.payload[start:].clone(), numel=layout.numel)  # aligned
        names = [_FLOATS[one] for one in (types if width > 2 else types * count)]
        return Content(vector, names, others, int(body[0]))

    def decode(
        self, message: Bytes, onto: torch.Tensor, *, sender: int, version: int, base_version: int,
        held: torch.Tensor | None = None,
    ) -> tuple[Arrays, int]:  # fmt: skip
        """Return the finite arrays of a message for `read`, and its flags.

        A difference is added to the vector `onto`; `held` is what the sender's own arrays began from, where that is
        another one.
        """
        found = self.read(message, sender=sender, version=version, base_version=base_version)
        return self.layout.arrays(self.joined(found.vector, onto, held), found.types, found.others), found.flags

    def joined(self, vector: torch.Tensor, onto: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
        """Return the values that a decoded vector stands for; `decode` has the arguments."""
        if not self.sends_values:
            return onto + vector.to(onto.dtype)
        if held is None or self.code.sends != "differences":
            return vector
        return onto + (vector.to(held.dtype) - held)


def signs_of(vector: torch.Tensor) -> torch.Tensor:
    """Return -1 and 1; NaN stays, and is refused."""
    return torch.where(vector < 0, -1.0, torch.where(vector >= 0, 1.0, vector))


@dataclass(kw_only=True)
class Broadcast:
    """Versions of the global model, as clients hold them, tier by tier; first those without a tier."""

    down: Downlink | None  # None sends whole models
    version: int = 0  # the current one, from 1; 0 before the first
    own: Arrays = field(default_factory=dict)  # the server's own arrays at this version
    layout: ArrayLayout | None = None
    exact: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # `ArrayLayout.flat` of `own`
    held: list[Arrays] = field(default_factory=list)  # what clients hold at this version
    vectors: list[torch.Tensor] = field(default_factory=list)  # `ArrayLayout.flat` of it
    patches: list[dict[int, Bytes]] = field(default_factory=list)  # what leads to a version from the one before

    @cached_property
    def codes(self) -> list[Downlink]:
        """The code of each tier."""
        return [] if self.down is None else [self.down, *map(self.down.of_tier, sorted(self.down.tiers))]

    @property
    def smallest(self) -> int:
        """The tier of the smallest density: every node can take that one."""
        return min(range(len(self.codes)), key=lambda tier: self.codes[tier].density or 1.0, default=0)

    def advance(self, arrays: Arrays) -> ArrayLayout:
        """Make arrays the current version, unless they are, and return their layout."""
        layout = ArrayLayout.of(arrays)
        if layout == self.layout and all(
            arrays[name].dtype == own.dtype and arrays[name].tobytes() == own.tobytes()
            for name, own in self.own.items()
        ):
            return layout
        try:
            check_finite(arrays)
        except NonFiniteError as error:
            raise NonFiniteError(f"the global model: {error}; lower the learning rate of clients or server") from None
        self.exact, self.version = layout.flat(arrays), self.version + 1
        if self.down is None or (layout != self.layout and self.down.sends == "differences"):
            self.held, self.patches = ([arrays] * max(1, len(self.codes)), [{} for _ in self.codes])
        else:
            self.held = [self._coded(UpdateCode(one, layout), tier, arrays) for tier, one in enumerate(self.codes)]
        self.own, self.layout, self.vectors = arrays, layout, [layout.flat(held) for held in self.held]
        return layout

    def _coded(self, code: UpdateCode, tier: int, arrays: Arrays) -> Arrays:
        base = 0 if code.sends_values else self.version - 1
        onto = self.vectors[tier] if self.vectors else torch.empty(0)
        patch, _ = code.encode(arrays, onto, sender=0, version=self.version, base_version=base)
        held, _ = code.decode(patch, onto, sender=0, version=self.version, base_version=base)
        self.patches = self.patches or [{} for _ in self.codes]
        kept = {} if code.sends_values else self.patches[tier]
        newest = self.version - self.codes[tier].keep
        self.patches[tier] = {one: row for one, row in kept.items() if one > newest} | {self.version: patch}
        return held

    def patch_from(self, version: int | None, *, tier: int = 0) -> Bytes | None:
        """Return the messages that lead from a version to the current one; None where a whole model is shorter."""
        if self.down is None:
            return None
        patches = self.patches[tier]
        if self.down.sends != "differences":
            return np.empty(0, np.uint8) if version == self.version else patches[self.version]
        if version is None or not 0 < version <= self.version:
            return None
        needed = range(version + 1, self.version + 1)
        if any(one not in patches for one in needed):
            return None
        joined = np.concatenate([np.empty(0, np.uint8), *(patches[one] for one in needed)])
        return joined if len(joined) < sum(array.nbytes for array in self.held[tier].values()) else None


def follow(code: UpdateCode, held: Arrays, messages: Bytes, *, version: int, target: int) -> Arrays:
    """Return the version that messages of `Broadcast.patch_from` lead to, from the one that is held.

    Raises:
        PayloadError: The messages do not lead to `target`.
    """
    if code.sends_values and len(messages):
        return code.decode(messages, torch.empty(0), sender=0, version=target, base_version=0)[0]
    start = 0
    while start < len(messages) and version < target:
        envelope = code.envelope(version=version + 1, base=version)
        header = check_header(memoryview(messages[start:].data), source=0, envelope=envelope)
        message = messages[start : start + HEADER_BYTES + header.payload_bytes]
        onto = code.layout.flat(held)
        held, _ = code.decode(message, onto, sender=0, version=version + 1, base_version=version)
        start, version = start + len(message), version + 1
    if version != target:
        raise PayloadError(f"differences lead to version {version} of the model, expected {target}")
    return held


def read_array(data: bytes, *, most_bytes: int = MOST_ARRAY_BYTES) -> npt.NDArray[Any]:
    """Return the numbers of a .npy file, or raise PayloadError where it claims other bytes than are there.

    `numpy.load` would take memory for as many elements as the file claims.
    """
    stream = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("its format is not 1.0")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception as error:  # of numpy's reader: ValueError, SyntaxError, TypeError, struct.error
        raise PayloadError(f"an array that is no .npy file: {str(error)[:200]}") from None
    room = len(data) - stream.tell()
    is_whole = math.prod(shape) * dtype.itemsize == room  # Python's integers do not overflow
    if dtype.kind not in "fiub" or room > most_bytes or not is_whole or len(shape) > 16 or not all(
        0 <= length <= MOST_ARRAY_BYTES for length in shape
    ):  # fmt: skip
        raise PayloadError(f"an array claims {dtype} of shape {shape[:8]}, and {room} bytes are there; at most "
                           f"{most_bytes} fit")  # fmt: skip
    found = np.frombuffer(data, dtype=dtype, offset=stream.tell())
    if dtype.kind == "b" and bool((found.view(np.uint8) > 1).any()):
        raise PayloadError("an array of bool holds other bytes than those of true and false")
    return found.reshape(shape, order="F" if is_fortran else "C")


def read_row(data: bytes, *, most_bytes: int = MOST_ARRAY_BYTES) -> Bytes:
    """Return the uint8 of a .npy file of one dimension, by `read_array`."""
    array = read_array(data, most_bytes=most_bytes)
    if array.dtype != np.uint8 or array.ndim != 1:
        raise PayloadError(f"an array of {array.dtype} of shape {array.shape[:8]} in the place of a row of bytes")
    return array
