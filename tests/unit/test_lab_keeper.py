"""The keeper leaves the process as it found it."""

from __future__ import annotations

import signal
import socket
from types import SimpleNamespace
from typing import Any, cast

from thinwire.lab.channel import Channel
from thinwire.lab.keeper import Keeper


def test_a_keeper_that_is_done_is_told_of_no_more_ended_children() -> None:
    """Python writes to the file it was given for signals; closed, it complains without an end."""
    ours, theirs = map(Channel, socket.socketpair())
    sampler = SimpleNamespace(wait_s=lambda now_s: 0.0, take_if_due=lambda now_s: None)
    keeper = Keeper(theirs, wiring=cast(Any, SimpleNamespace(relay_id=None)), sampler=cast(Any, sampler))
    assert callable(signal.getsignal(signal.SIGCHLD))
    ours.send({"ask": "close", "id": 0})
    keeper.serve()
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    ours.close()
    theirs.close()
