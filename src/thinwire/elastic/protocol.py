"""Message schemas between coordinator and replicas: JSON objects, validated on arrival.

A message's `kind` names its schema. A message with a missing, unknown or invalid field is refused, and the error names
the field. Sizes and depths are bounded.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from thinwire.errors import PayloadError
from thinwire.roles import ROLES, checked_role

VERSION = 9
# Bytes of a message to a replica, and to the coordinator, which receives no large ones.
MOST_BYTES, MOST_BYTES_HERE = 1 << 20, 1 << 16
_MAX_DEPTH = 16
_MIN_STEP_S, _MAX_STEP_S = 1e-6, 1e6
_MAX_ERROR_LENGTH = 200

# Roots of states that no replica shows: rounds decided before them do not belong to them.
FROM_NOBODY = ("disk", "seed")
# The reason for refusing and removing replicas after the end.
RUN_OVER = "the run has come to its end"

Message = dict[str, Any]

PartFault = Literal["non_finite", "malformed", "foreign", "too_long", "too_heavy"]
# What is wrong with parts that are left out of a mean, as the end of a sentence about several of them.
PART_FAULTS: Mapping[PartFault, str] = {
    "non_finite": "hold NaN or infinity",
    "malformed": "are malformed",
    "foreign": "refer to other global parameters or to another round",
    "too_long": "are far longer than those of the others",
    "too_heavy": "claim far more tokens than those of the others",
}
# Faults that only a comparison with other parts shows: a sound part has them too, beside one of a member that lies.
RELATIVE_FAULTS = frozenset({"foreign", "too_long", "too_heavy"})

# What a member makes of its own copy of a part; unknown where it holds none, or has not looked.
PartVerdict = Literal["sound", "bad", "unknown"]

_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Number = Annotated[float, Meta(ge=0, lt=1 << 63)]
_Text = Annotated[str, Meta(max_length=1 << 16)]
_ReplicaNumber = Annotated[int, Meta(ge=0, lt=1 << 32)]
# A host name or an IP address.
_Address = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,253}\Z")]
_Port = Annotated[int, Meta(gt=0, lt=1 << 16)]
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
# A hash, or empty where there is none; the field may be left out.
_MaybeSha256 = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
# By shard, how many of its windows were used; by replica, bytes a second; and answers so far and the newest one's rate.
_Windows = Annotated[dict[Annotated[int, Meta(ge=0, lt=10**18)], _Count], Meta(max_length=64)]
_Rates = Annotated[dict[Annotated[int, Meta(ge=0, lt=10**10)], _Count], Meta(max_length=1024)]
_Probes = Annotated[dict[Annotated[int, Meta(ge=0, lt=10**10)], tuple[_Count, _Count]], Meta(max_length=256)]

_TO_COORDINATOR: dict[str, dict[str, Any]] = {
    "join": {"version": _Count, "thinwire": _Text, "host": _Text, "role": (_Text, ROLES[0])},
    "here": {
        "address": _Address, "port": _Port, "corpus": _Text, "windows": _Count, "held": _Count, "era": _Count,
        "disk": _Count, "first_values": (_MaybeSha256, ""),
    },
    "active": {"step": _Count},
    "beat": {
        "step": _Count, "step_s": _Number, "roster": _Count,
        "relayed": (Annotated[tuple[_ReplicaNumber, ...], Meta(max_length=1024)], ()),
    },
    "work": {"steps_per_interval": _Number, "tokens_s": _Number, "loss": _Number},
    "rates": {"rates": _Rates, "latest": _Rates, "probes": _Probes},
    "launch": {"round": _Count, "step": _Count, "used": _Windows},
    "withhold": {"round": _Count, "step": _Count, "used": _Windows, "parts": _Count},
    "reject": {
        "round": _Count, "member": _Count, "parts": _Count, "since": _Count, "fault": PartFault, "why": _Text,
        "sha256": (_MaybeSha256, ""),
    },
    "verdict": {"round": _Count, "member": _Count, "verdict": PartVerdict, "sha256": _MaybeSha256},
    "vote": {"round": _Count, "step": _Count, "has": tuple[_ReplicaNumber, ...], "hash": _Count},
    "lease": {"number": _Count},
    "captured": {"step": _Count, "root": _Sha256, "bytes": _Count},
    "account": {"step": _Count},
    "missed": {"step": _Count},
    "lost": {"replica": _Count},
    "stuck": {"round": _Count, "why": _Text},
    "note": {"level": _Text, "text": _Text, "about": (Annotated[str, Meta(max_length=256)], "")},
    "records": {"number": _Count, "text": _Text},
    "done": {"note": dict},
    "leave": {"why": _Text},
    "command": {"verb": _Text, "target": _Text},
}  # fmt: skip
_TO_MEMBER: dict[str, dict[str, Any]] = {
    "welcome": {"replica": _Count, "generation": _Text, "job": dict, "secret": (_MaybeSha256, "")},
    "refused": {"why": _Text},
    "roster": {"members": list, "started": bool, "number": _Count},
    "call": {"round": _Count, "members": list},
    "decision": {
        "round": _Count, "launch_step": _Count, "members": list, "holders": list, "step": _Count, "closed": _Count
    },
    "progress": {"step": _Count, "closed": _Count, "floor": _Count, "kept": _Count, "generation": _Text},
    "pace": {"step_s": _Number, "sites": list, "detours": list},
    "verify": {"round": _Count, "member": _Count},
    "capture": {"step": _Count},
    "state": {"step": _Count, "root": _Text, "bytes": _Count, "holders": list, "note": dict, "era": _Count},
    "account": {"step": _Count, "note": dict},
    "anew": {},
    "recorded": {"number": _Count},
    "leased": {"number": _Count, "shard": _Count, "start": _Count},
    "pause": {"paused": bool},
    "leave": {"why": _Text},
    "expelled": {"why": _Text, "has_bad_parts": bool},
    "failed": {"why": _Text},
    "finish": {"writer": _Count, "notes": list, "note": dict},
    "unknown": {"generation": _Text},
    "answer": {"ok": bool, "text": _Text, "status": dict},
}  # fmt: skip


def decoder(schemas: Mapping[str, Mapping[str, Any]]) -> msgspec.json.Decoder[Any]:
    """Return a decoder of JSON objects whose `kind` names their schema: types by field, or a type and a default.

    Unknown kinds and fields are refused; all its errors are ValueErrors.
    """
    kinds = []
    for kind, fields in schemas.items():
        given = [(name, *(field if isinstance(field, tuple) else (field,))) for name, field in fields.items()]
        kinds.append(msgspec.defstruct(kind, given, tag=kind, tag_field="kind", forbid_unknown_fields=True))
    return msgspec.json.Decoder(functools.reduce(operator.or_, kinds))


_DECODE_FOR_COORDINATOR, _DECODE_FOR_MEMBER = decoder(_TO_COORDINATOR), decoder(_TO_MEMBER)


class _Reachable(msgspec.Struct):
    replica: Annotated[int, Meta(ge=0, lt=1 << 20)]
    host: str
    address: _Address
    port: _Port
    state: str
    role: str = ROLES[0]


_T = TypeVar("_T")


def encode(kind: str, **fields: Any) -> bytes:
    """Return a message's bytes.

    Raises:
        PayloadError: It is larger than a message may be.

    Example:
        >>> decode(encode("capture", step=7), to_member=True)
        {'kind': 'capture', 'step': 7}
    """
    raw = msgspec.json.encode({"kind": kind, **fields})
    if len(raw) > MOST_BYTES:
        raise PayloadError(f"a message {kind!r} of {len(raw)} bytes is larger than the {MOST_BYTES} that are allowed")
    return raw


def decode(raw: bytes, *, to_member: bool) -> Message:
    """Read and validate a message, one for replicas or for the coordinator.

    Raises:
        PayloadError: It is no message of this protocol; names what is wrong.
    """
    most = MOST_BYTES if to_member else MOST_BYTES_HERE
    if len(raw) > most:
        raise PayloadError(f"a message of {len(raw)} bytes, at most {most} are allowed")
    try:
        found = (_DECODE_FOR_MEMBER if to_member else _DECODE_FOR_COORDINATOR).decode(raw)
    except (ValueError, RecursionError) as error:  # all errors of msgspec are ValueErrors
        raise PayloadError(
            f"a message that does not fit: {_brief(error)}; run the same thinwire on all hosts"
        ) from None
    kind, fields = found.__struct_config__.tag, msgspec.structs.asdict(found)
    if _is_deep(fields, _MAX_DEPTH):
        raise PayloadError(f"a message {kind!r} that is nested more than {_MAX_DEPTH} deep")
    if kind == "beat" and fields["step_s"] and not _MIN_STEP_S <= fields["step_s"] <= _MAX_STEP_S:
        raise PayloadError(f"step_s of a message 'beat' must be 0, or from {_MIN_STEP_S:g} to {_MAX_STEP_S:g}")
    return {"kind": kind, **fields}


def _is_deep(value: Any, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(one, most - 1) for one in inner if isinstance(one, dict | list))


def checked_member(described: Any) -> Mapping[str, Any]:
    """Validate an entry of the roster, which this replica is to connect to.

    Raises:
        PayloadError: It names no replica that could be dialled.
    """
    found = _convert(described, _Reachable, what="a member of the roster that is none")
    try:
        checked_role(found.role)
    except ValueError as error:
        raise PayloadError(f"a member of the roster: {error}") from None
    return dict(described)


def numbers(values: Any, *, what: str) -> tuple[int, ...]:
    """Validate a list of replica numbers.

    Raises:
        PayloadError: It is none.
    """
    return _convert(values, tuple[_ReplicaNumber, ...], what=f"{what} must be a list of replicas' numbers")


def _convert(value: Any, expected: type[_T], *, what: str) -> _T:
    try:
        return msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        raise PayloadError(f"{what}: {_brief(error)}") from None


def _brief(error: Exception) -> str:
    return printable(str(error), most=_MAX_ERROR_LENGTH)


def printable(text: str, *, most: int) -> str:
    """Return another host's text without characters that a terminal would obey.

    Example:
        >>> printable("alpha\x1b[2J", most=20)
        'alpha?[2J'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])
