"""Why a kernel or its files refuse a TAP device: each reason by its name, with its own remedy."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from thinwire.errors import LabError
from thinwire.lab.namespace_daemon import open_tap


@pytest.mark.parametrize(
    ("number", "reason", "remedy"),
    [
        (errno.EACCES, "this user may not use /dev/net/tun (Permission denied)", "chmod 0666 /dev/net/tun"),
        (errno.EPERM, "this user may not use /dev/net/tun (Operation not permitted)", "run as root where that may"),
        (errno.ENOENT, "this kernel refuses both (/dev/net/tun: No such file or directory)", "modprobe tun"),
        (errno.ENODEV, "this kernel refuses both (/dev/net/tun: No such device)", "modprobe tun"),
    ],
)
def test_a_file_that_is_missing_and_one_that_may_not_be_opened_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, number: int, reason: str, remedy: str
) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(LabError) as told:
        open_tap("tap0")
    assert reason in str(told.value) and remedy in str(told.value)
    assert "\n" not in str(told.value)


def test_a_device_that_is_refused_leaves_no_open_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tun").touch()
    file = os.open(tmp_path / "tun", os.O_RDWR)

    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "open", lambda path, flags: file)
    monkeypatch.setattr(fcntl, "ioctl", refuse)
    with pytest.raises(LabError, match="this user may not use /dev/net/tun"):
        open_tap("tap0")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
