"""Sockets that a forked child gives up: while it held a copy, the other end would not see that this process has ended.

A data loader's worker is such a child. It may sit in a slow read long after its parent was killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from functools import cache

from thinwire.transport.tcp_stats import duplicate_socket, open_sockets

# Inodes of this process's own sockets by their number, which another file may have by now.
_own: dict[int, int] = {}
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def keep_from_children(number: int) -> None:
    """Let no child of this process, forked or started, keep a socket open.

    Args:
        number: The socket's descriptor; if it is none any more, nothing happens.
    """
    with contextlib.suppress(OSError):
        _own[number] = os.fstat(number).st_ino
        os.set_inheritable(number, False)
        _watch_forks()


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Let no child keep a TCP socket open that a library opens within the block, as gloo does."""
    before = set(_tcp_sockets())
    try:
        yield
    finally:
        for number in set(_tcp_sockets()) - before:
            keep_from_children(number)


def _tcp_sockets() -> Iterator[int]:
    for number in open_sockets():
        if (copy := duplicate_socket(number)) is not None:
            with copy:
                if copy.family in _FAMILIES:
                    yield number


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_give_up)


def _give_up() -> None:
    """Put an empty file in the place of each socket: a library in the child may still use, or close, its number."""
    if not _own:
        return
    empty = os.open(os.devnull, os.O_RDWR)
    for number, inode in _own.items():
        with contextlib.suppress(OSError):
            if os.fstat(number).st_ino == inode:
                os.dup2(empty, number, inheritable=False)
    os.close(empty)
    _own.clear()
