"""The coordinator's journal where the disk is full: room taken beforehand, then waiting, and never half a line."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.full_disk import file_size_limit
from thinwire.errors import ThinwireError
from thinwire.membership.journal import Journal


def test_room_is_taken_beforehand_and_given_back(tmp_path: Path) -> None:
    path, reserve_bytes = tmp_path / "journal", 1 << 20
    journal = Journal(path, reserve_bytes=reserve_bytes)
    for number in range(5000):
        journal.write("line", {"number": number, "text": "x" * 200})
        found = path.stat()
        assert found.st_blocks * 512 >= found.st_size + reserve_bytes // 2 - 4096, "room for half as much is there"
    journal.close()
    journal.close()
    found = path.stat()
    assert found.st_blocks * 512 <= found.st_size + 8192
    assert [line["number"] for line in Journal(path).lines()] == list(range(5000))


def test_a_line_for_which_there_is_no_room_is_left_out_whole_and_can_come_later(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write("line", {"number": 0})
    with file_size_limit(path.stat().st_size + 10), pytest.raises(ThinwireError, match=r"cannot write .*make room"):
        journal.write("line", {"number": 1})
    journal.write("line", {"number": 2})
    journal.close()
    assert path.read_text() == '{"what":"line","number":0}\n{"what":"line","number":2}\n'


class FullDisk:
    """Stands in for `os.write`: no room for so many times, after half of what was to be written."""

    def __init__(self, times: int, code: int = errno.ENOSPC) -> None:
        self.left, self.code = 2 * times, code
        self._write = os.write

    def __call__(self, file: int, data: Any) -> int:
        if not self.left:
            return self._write(file, data)
        self.left -= 1
        if self.left % 2:
            return self._write(file, data[: len(data) // 2])
        raise OSError(self.code, os.strerror(self.code))


def test_who_writes_waits_until_there_is_room_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    path = tmp_path / "journal"
    journal = Journal(path, say=said.append, until=threading.Event())
    monkeypatch.setattr("thinwire.membership.journal._WAIT_S", 0.001)
    monkeypatch.setattr("os.write", FullDisk(times=5))
    journal.write("line", {"number": 0})
    journal.write("line", {"number": 1})
    journal.close()
    assert path.read_text() == '{"what":"line","number":0}\n{"what":"line","number":1}\n'
    assert len(said) == 2 and "the disk is full" in said[0] and "there is room" in said[1]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_the_waiting_ends_with_the_process_and_other_errors_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    until = threading.Event()
    journal = Journal(tmp_path / "journal", until=until)
    disk = FullDisk(times=1_000_000, code=code)
    monkeypatch.setattr("os.write", disk)
    stop = threading.Timer(0.1, until.set)
    if code == errno.ENOSPC:
        stop.start()
    with pytest.raises(ThinwireError, match="make room"):
        journal.write("line", {"number": 0})
    assert (disk.left == 2_000_000 - 2) == (code == errno.EIO)
    monkeypatch.undo()
    journal.close()
    assert not (tmp_path / "journal").read_text()
