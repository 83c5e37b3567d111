"""The coordinator's journal on a full disk: room taken beforehand, then lines kept in memory, and never half a line."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.full_disk import file_size_limit
from thinwire.elastic.journal import HeldMessages, Journal
from thinwire.errors import ThinwireError


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
    assert [line["number"] for line in Journal(path).lines] == list(range(5000))


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
    """Stands in for `os.write`: no room for so many times, after half of what was to be written.

    Args:
        times: How many times there is no room.
        code: The error.
        on_refusal: Called at each of them with how many are left.
    """

    def __init__(self, times: int, code: int = errno.ENOSPC, on_refusal: Callable[[int], None] | None = None) -> None:
        self.left, self.code, self._on_refusal = 2 * times, code, on_refusal
        self._write = os.write

    def __call__(self, file: int, data: Any) -> int:
        if not self.left:
            return self._write(file, data)
        self.left -= 1
        if self.left % 2:
            return self._write(file, data[: len(data) // 2])
        if self._on_refusal is not None:
            self._on_refusal(self.left // 2)
        raise OSError(self.code, os.strerror(self.code))


def test_lines_wait_in_memory_until_there_is_room_and_that_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    path = tmp_path / "journal"
    journal = Journal(path, say=said.append, until=threading.Event())
    monkeypatch.setattr("os.write", FullDisk(times=5))
    journal.write("line", {"number": 0})
    journal.write("line", {"number": 1})
    assert journal.is_behind and not path.read_text()
    assert [journal.flush() for _ in range(5)] == [False, False, False, False, True]
    assert not journal.is_behind
    journal.close()
    assert path.read_text() == '{"what":"line","number":0}\n{"what":"line","number":1}\n'
    assert len(said) == 2 and "the disk is full" in said[0] and "there is room" in said[1]


def test_beyond_the_bound_the_writer_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, until=threading.Event())
    monkeypatch.setattr("thinwire.elastic.journal._WAIT_S", 0.001)
    monkeypatch.setattr("thinwire.elastic.journal.MAX_UNWRITTEN_BYTES", 60)
    disk = FullDisk(times=20)
    monkeypatch.setattr("os.write", disk)
    for number in range(3):
        journal.write("line", {"number": number})
    assert not disk.left and not journal.is_behind
    assert [line["number"] for line in Journal(path).lines] == [0, 1, 2]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_the_waiting_ends_with_the_process_and_other_errors_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    until = threading.Event()
    journal = Journal(tmp_path / "journal", until=until)
    monkeypatch.setattr("thinwire.elastic.journal.MAX_UNWRITTEN_BYTES", 0)
    monkeypatch.setattr("thinwire.elastic.journal._WAIT_S", 0.001)

    def end_at_the_fifth(left: int) -> None:
        if left == 95:
            until.set()

    disk = FullDisk(times=100, code=code, on_refusal=end_at_the_fifth)
    monkeypatch.setattr("os.write", disk)
    with pytest.raises(ThinwireError, match="make room"):
        journal.write("line", {"number": 0})
    assert disk.left // 2 == (95 if code == errno.ENOSPC else 99), "it tries until the end, or once"
    assert journal.is_behind == (code == errno.ENOSPC)


def test_a_torn_journal_is_opened_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"what":"line","number":0}\n{"what":"li')
    with file_size_limit(path.stat().st_size):
        journal = Journal(path, until=threading.Event())
        journal.write("line", {"number": 1})
        assert journal.is_behind
    journal.close()
    assert [line["number"] for line in Journal(path).lines] == [0, 1]


def test_messages_are_held_while_lines_are_unwritten_and_sent_in_order_once_they_are(tmp_path: Path) -> None:
    sent: list[tuple[bytes, str, dict[str, Any]]] = []
    path = tmp_path / "journal"
    journal = Journal(path, until=threading.Event())
    held = HeldMessages(journal, send=lambda *message: sent.append(message))
    held.send(b"a", "welcome", {})
    with file_size_limit(path.stat().st_size):
        journal.write("decision", {"round": 1})
        held.send(b"a", "decision", {"round": 1})
        held.send(b"a", "answer", {"text": "", "status": {}})
        held.send(b"a", "answer", {"text": "replica 1 was let go"})
        held.release()
        assert [kind for _, kind, _ in sent] == ["welcome", "answer"], "a status is answered, and nothing else is sent"
    held.send(b"a", "call", {})
    held.release()
    assert [kind for _, kind, _ in sent[2:]] == ["decision", "answer", "call"]
    assert [line["round"] for line in Journal(path).lines] == [1]


def test_messages_beyond_the_bound_are_lost_as_on_a_broken_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.elastic.journal.MAX_HELD_MESSAGES", 10)
    sent: list[int] = []
    path = tmp_path / "journal"
    journal = Journal(path, until=threading.Event())
    held = HeldMessages(journal, send=lambda token, kind, fields: sent.append(fields["number"]))
    with file_size_limit(path.stat().st_size):
        journal.write("decision", {"round": 1})
        for number in range(100):
            held.send(b"a", "progress", {"number": number})
    held.release()
    assert sent == [*range(10)]
