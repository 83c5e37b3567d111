"""The daemon says what it cannot do, and leaves the process as it found it."""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from thinwire.lab import namespace_daemon
from thinwire.lab.daemon_client import Channel
from thinwire.lab.namespace_daemon import NamespaceDaemon

REMEDY = "; set TMPDIR to a folder that takes files, or give one (folder=)"


@pytest.fixture
def no_file_can_be_written() -> Iterator[None]:
    """Make every folder unusable for temporary files, also for root."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fault_of_a_daemon_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a daemon in this process up to its folder."""
    ours, theirs = socket.socketpair()
    lab = Channel(ours)
    lab.send({"folder": None})
    with monkeypatch.context() as patched:
        patched.setattr(namespace_daemon, "enter_namespaces", lambda *, as_user: None)
        patched.setattr(namespace_daemon.signal, "signal", lambda *_: None)
        patched.setattr(namespace_daemon.os, "fork", lambda: pytest.fail("a daemon without a folder went on"))
        assert namespace_daemon.main([str(theirs.detach())]) == 1
    received = lab.receive()
    lab.close()
    assert received is not None and received[0]["event"] == "failed"
    return str(received[0]["text"])


def test_a_temporary_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))  # as it is when it goes after the first use
    fault = fault_of_a_daemon_without_a_folder(monkeypatch)
    assert fault.startswith(
        f"the lab's folder cannot be made: No such file or directory: {tmp_path}/gone/thinwire-lab-"
    )
    assert fault.endswith(REMEDY)


@pytest.mark.usefixtures("no_file_can_be_written")
def test_where_no_folder_takes_files_those_that_were_tried_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    fault = fault_of_a_daemon_without_a_folder(monkeypatch)
    assert fault.startswith(f"the lab's folder cannot be made: No usable temporary directory found in ['{tmp_path}', ")
    assert fault.endswith(f"]{REMEDY}")


def test_a_daemon_that_is_done_is_told_of_no_more_ended_children() -> None:
    """Python writes to the file it was given for signals; closed, it complains without an end."""
    ours, theirs = map(Channel, socket.socketpair())
    sampler = SimpleNamespace(wait_s=lambda now_s: 0.0, take_if_due=lambda now_s: None)
    daemon = NamespaceDaemon(theirs, lab_network=cast(Any, SimpleNamespace(relay_id=None)), sampler=cast(Any, sampler))
    assert callable(signal.getsignal(signal.SIGCHLD))
    ours.send({"ask": "close", "id": 0})
    daemon.serve()
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    ours.close()
    theirs.close()
