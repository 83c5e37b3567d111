"""Messages between coordinator and replicas: JSON of a fixed form, validated on arrival.

A message is one object with a `kind`; the fields of each kind and their types stand in a table here. Whatever does not
fit is refused with the field's name. Bytes are bounded, and nothing in a message is ever run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from thinwire.errors import PayloadError

VERSION = 4
# To a replica, and to the coordinator, which has less to hear.
MOST_BYTES, MOST_BYTES_HERE = 1 << 20, 1 << 16
_MOST_TEXT = 1 << 16
_MOST_DEPTH = 16
_LEAST_STEP_S, _MOST_STEP_S = 1e-6, 1e6

# A name or an IPv4 address, and SHA-256 in hexadecimal digits.
_ADDRESS, _ROOT = re.compile(r"[A-Za-z0-9._-]{1,253}"), re.compile(r"[0-9a-f]{64}")

# Roots of states with which a past begins: what was decided before is not theirs.
FROM_NOBODY = ("disk", "seed")
# Why nobody is taken in any more.
RUN_OVER = "the run has come to its end"

Message = dict[str, Any]

_NUMBERS = (int, float)
_TO_COORDINATOR: dict[str, dict[str, type | tuple[type, ...]]] = {
    "join": {"version": int, "thinwire": str, "host": str},
    "here": {"address": str, "port": int, "corpus": str, "windows": int, "held": int, "era": int, "disk": int},
    "active": {"step": int},
    "beat": {"step": int, "step_s": _NUMBERS, "roster": int},
    "work": {"steps_per_interval": _NUMBERS, "tokens_s": _NUMBERS, "loss": _NUMBERS},
    "rates": {"rates": dict, "latest": dict},
    "launch": {"round": int, "step": int, "used": dict},
    "withhold": {"round": int, "step": int, "used": dict, "parts": int},
    "reject": {"round": int, "member": int, "parts": int, "since": int},
    "vote": {"round": int, "step": int, "has": list, "hash": int},
    "lease": {"number": int},
    "captured": {"step": int, "root": str, "bytes": int},
    "account": {"step": int},
    "missed": {"step": int},
    "lost": {"replica": int},
    "stuck": {"round": int, "why": str},
    "note": {"level": str, "text": str},
    "records": {"number": int, "text": str},
    "done": {"note": dict},
    "leave": {"why": str},
    "command": {"verb": str, "target": str},
}
_TO_MEMBER: dict[str, dict[str, type | tuple[type, ...]]] = {
    "welcome": {"replica": int, "generation": str, "job": dict},
    "refused": {"why": str},
    "roster": {"members": list, "started": bool, "number": int},
    "call": {"round": int, "members": list},
    "decision": {"round": int, "launch_step": int, "members": list, "holders": list, "step": int, "closed": int},
    "progress": {"step": int, "closed": int, "floor": int, "kept": int, "generation": str},
    "pace": {"step_s": _NUMBERS, "sites": list, "detours": list},
    "capture": {"step": int},
    "state": {"step": int, "root": str, "bytes": int, "holders": list, "note": dict, "era": int},
    "account": {"step": int, "note": dict},
    "anew": {},
    "recorded": {"number": int},
    "leased": {"number": int, "shard": int, "start": int},
    "pause": {"paused": bool},
    "leave": {"why": str},
    "expelled": {"why": str, "is_non_finite": bool},
    "failed": {"why": str},
    "finish": {"writer": int, "notes": list, "note": dict},
    "unknown": {"generation": str},
    "answer": {"ok": bool, "text": str, "status": dict},
}


def encode(kind: str, **fields: Any) -> bytes:
    """Return a message's bytes.

    Raises:
        PayloadError: It is larger than a message may be.

    Example:
        >>> decode(encode("capture", step=7), to_member=True)
        {'kind': 'capture', 'step': 7}
    """
    raw = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
    if len(raw) > MOST_BYTES:
        raise PayloadError(f"a message {kind!r} of {len(raw)} bytes is larger than the {MOST_BYTES} that are allowed")
    return raw


def decode(raw: bytes, *, to_member: bool) -> Message:
    """Read and check a message.

    Args:
        raw: What came.
        to_member: Whether it is one that replicas get, not the coordinator.

    Raises:
        PayloadError: It is no message of this form; names what is wrong.
    """
    most = MOST_BYTES if to_member else MOST_BYTES_HERE
    if len(raw) > most:
        raise PayloadError(f"a message of {len(raw)} bytes, at most {most} are allowed")
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError):
        raise PayloadError("a message that is no JSON") from None
    if not isinstance(message, dict):
        raise PayloadError("a message that is no object")
    table = _TO_MEMBER if to_member else _TO_COORDINATOR
    kind = str(message.get("kind"))
    fields = table.get(kind)
    if fields is None:
        raise PayloadError(f"a message of the unknown kind {kind[:40]!r}; run the same thinwire on all hosts")
    if set(message) - {"kind"} != set(fields):
        raise PayloadError(f"a message {kind!r} with the fields {str(sorted(message))[:200]}")
    if _is_deep(message, _MOST_DEPTH):
        raise PayloadError(f"a message {kind!r} that is nested more than {_MOST_DEPTH} deep")
    for name, expected in fields.items():
        _check(kind, name, message[name], expected)
    if not to_member:
        _check_values(kind, message)
    return message


def _is_deep(value: Any, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(one, most - 1) for one in inner if isinstance(one, dict | list))


def _check_values(kind: str, message: Message) -> None:
    """Refuse what others would stumble over that it is passed on to."""
    if kind == "here" and not _is_place(message["address"], message["port"]):
        raise PayloadError(f"a replica at {message['address'][:40]!r}, port {message['port']}, which is no address")
    if kind == "captured" and not _ROOT.fullmatch(message["root"]):
        raise PayloadError(f"root of a message 'captured' must be 64 digits, got {message['root'][:40]!r}")
    if kind == "beat" and message["step_s"] and not _LEAST_STEP_S <= message["step_s"] <= _MOST_STEP_S:
        raise PayloadError(f"step_s of a message 'beat' must be 0, or from {_LEAST_STEP_S:g} to {_MOST_STEP_S:g}")


def _check(kind: str, name: str, value: Any, expected: type | tuple[type, ...]) -> None:
    is_flag = isinstance(value, bool)
    if not isinstance(value, expected) or (is_flag and expected is not bool):
        raise PayloadError(f"{name} of a message {kind!r} is {str(value)[:40]!r}, which is no value of it")
    if isinstance(value, int | float) and not is_flag and not 0 <= value < 1 << 63:
        raise PayloadError(f"{name} of a message {kind!r} must be from 0 to 2**63 - 1, got {value}")
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        raise PayloadError(f"{name} of a message {kind!r} has {len(value)} characters, at most {_MOST_TEXT}")


def checked_member(described: Any) -> Mapping[str, Any]:
    """Check what the coordinator says of a replica that others are to connect to.

    Raises:
        PayloadError: It names no replica that could be dialled.
    """
    kinds = {"replica": int, "host": str, "address": str, "port": int, "standing": str}
    if not isinstance(described, Mapping) or any(type(described.get(name)) is not kind for name, kind in kinds.items()):
        raise PayloadError(f"a member of the roster that is none: {str(described)[:80]!r}")
    if not (0 <= described["replica"] < 1 << 20 and _is_place(described["address"], described["port"])):
        raise PayloadError(f"replica {described['replica']} at {described['address'][:40]!r}, which is no address")
    return described


def _is_place(address: str, port: int) -> bool:
    return 0 < port < 1 << 16 and _ADDRESS.fullmatch(address) is not None


def printable(text: str, *, most: int) -> str:
    """Return what another host says of itself as people may be shown it: without what a terminal would obey.

    Example:
        >>> printable("alpha\x1b[2J", most=20)
        'alpha?[2J'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def numbers(values: Any, *, what: str) -> tuple[int, ...]:
    """Check a list of replicas' numbers.

    Raises:
        PayloadError: It is none.
    """
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 32 for value in values):
        raise PayloadError(f"{what} must be a list of replicas' numbers")
    return tuple(values)


def windows_of(values: Any) -> dict[int, int]:
    """Check how far shards were used: texts of shards' numbers to windows.

    Raises:
        PayloadError: It is no such thing.
    """
    if not isinstance(values, Mapping) or len(values) > 64:
        raise PayloadError("shards in use must be at most 64")
    found = {}
    for shard, used in values.items():
        if not (isinstance(shard, str) and shard.isascii() and shard.isdecimal() and len(shard) < 19):
            raise PayloadError(f"a shard's number must be a whole number, got {str(shard)[:40]!r}")
        if type(used) is not int or used < 0:
            raise PayloadError(f"the windows used of shard {shard} must be a whole number, got {str(used)[:40]!r}")
        found[int(shard)] = used
    return found


def rates_of(values: Any) -> dict[int, int]:
    """Check how fast a replica's answers reach the others: texts of replicas' numbers to bytes a second.

    Raises:
        PayloadError: It is no such thing.
    """
    if not isinstance(values, Mapping) or len(values) > 1024:
        raise PayloadError("rates must be of at most 1024 replicas")
    for peer, rate in values.items():
        if not (isinstance(peer, str) and peer.isascii() and peer.isdecimal() and len(peer) < 11):
            raise PayloadError(f"a replica's number must be a whole number, got {str(peer)[:40]!r}")
        if type(rate) is not int or not 0 <= rate < 1 << 63:
            raise PayloadError(f"the rate to replica {peer} must be a whole number, got {str(rate)[:40]!r}")
    return {int(peer): rate for peer, rate in values.items()}
