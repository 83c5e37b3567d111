"""Values of a pickle that holds data alone, read without Python's unpickler.

torch's watchdog writes its dumps so. A pickle is a program for a small machine, some of whose instructions import and
call functions. This reader knows the others: numbers, texts, lists, tuples, dicts, and references to what came before.
All else is refused, so nothing that a file says is ever run. Values are not copied: memory stays in the order of the
file's size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

_MARK = object()
_CONSTANTS: dict[bytes, Any] = {b"N": None, b"\x88": True, b"\x89": False, b"(": _MARK}
_EMPTY: dict[bytes, Callable[[], Any]] = {b"]": list, b"}": dict, b")": tuple}
# numbers, then texts by the format of their length, then references to an earlier value
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_TEXTS = {b"\x8c": "<B", b"X": "<I", b"\x8d": "<Q"}
_KEYS = (str, int, float, bool, type(None))
_KEEP, _AGAIN = {b"q": "<B", b"r": "<I"}, {b"h": "<B", b"j": "<I"}


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def number(self, form: str) -> Any:
        found = struct.unpack_from(form, self._data, self._at)[0]
        self._at += struct.calcsize(form)
        return found

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError(f"{size} bytes are announced, {len(self._data) - self._at} follow")
        self._at += size
        return self._data[self._at - size : self._at]

    def since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:  # an IndexError where there is none
            place -= 1
            if place < 0:
                raise ValueError("a list has no beginning")
        found, self.stack[place:] = self.stack[place + 1 :], []
        return found

    def push(self, code: bytes) -> bool:
        """Do an instruction that pushes a value; return whether it is one."""
        if code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            self.stack.append(_EMPTY[code]())
        elif code in _NUMBERS:
            self.stack.append(self.number(_NUMBERS[code]))
        elif code in _TEXTS:
            self.stack.append(self.take(self.number(_TEXTS[code])).decode("utf-8", "replace"))
        elif code == b"\x8a":  # an integer of some bytes
            self.stack.append(int.from_bytes(self.take(self.number("<B")), "little", signed=True))
        elif code in _AGAIN:
            self.stack.append(self.memo[self.number(_AGAIN[code])])
        else:
            return False
        return True

    def join(self, code: bytes) -> bool:
        """Do an instruction that works on values of the stack; return whether it is one."""
        if code in _KEEP:
            self.memo[self.number(_KEEP[code])] = self.stack[-1]
        elif code == b"\x94":
            self.memo[len(self.memo)] = self.stack[-1]
        elif code in b"ea":
            added = self.since_mark() if code == b"e" else [self.stack.pop()]
            self._top(list).extend(added)
        elif code in b"us":
            pairs = self.since_mark() if code == b"u" else [self.stack.pop() for _ in range(2)][::-1]
            if not all(
                type(key) in _KEYS for key in pairs[::2]
            ):  # a tuple's hash visits all that it holds, repeats too
                raise ValueError("a key is no text and no number")
            self._top(dict).update(zip(pairs[::2], pairs[1::2], strict=True))
        elif code == b"t":
            self.stack.append(tuple(self.since_mark()))
        elif code in (b"\x85", b"\x86", b"\x87"):
            count = code[0] - 0x84
            self.stack[-count:] = [tuple(self.stack[-count:])]
        else:
            return False
        return True

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"no {kind.__name__} to add to")
        return self.stack[-1]

    def value(self) -> Any:
        """Return the value that the instructions make."""
        while (code := self.take(1)) != b".":
            if code == b"\x80" or code == b"\x95":  # the protocol, the length of a frame
                self.take(1 if code == b"\x80" else 8)
            elif not (self.push(code) or self.join(code)):
                raise ValueError(f"instruction {code!r} is none of data: it could run a program")
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise ValueError(f"{len(self.stack)} values are left")
        return self.stack[0]


def plain_value(data: bytes) -> Any:
    """Return the value of a pickle of numbers, texts, lists, tuples and dicts.

    Args:
        data: The pickle, of protocol 2 to 5.

    Raises:
        ValueError: It is cut off, malformed, or has an instruction that imports or calls.

    Example:
        >>> plain_value(b"\\x80\\x02}(X\\x01\\x00\\x00\\x00aK\\x03u.")
        {'a': 3}
    """
    try:
        return _Reader(data).value()
    except (struct.error, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"the pickle is cut off or malformed: {type(error).__name__}") from error
