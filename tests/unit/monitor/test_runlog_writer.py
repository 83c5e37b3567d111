"""Lines written while a replica trains: whole ones only, and a full disk delays them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.full_disk import file_size_limit
from thinwire.runlog.writer import JsonlWriter


def test_lines_wait_until_they_are_flushed_and_go_to_the_end_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("old\n")
    file = JsonlWriter(tmp_path / "lines")
    file.write("one")
    assert (tmp_path / "lines").read_text() == "old\n"
    file.write("two", is_last=True)
    assert (tmp_path / "lines").read_text() == "old\none\ntwo\n"
    file.write("three")
    file.truncate(4)
    file.write("four")
    file.close()
    assert file.closed and (tmp_path / "lines").read_text() == "old\nfour\n"


def test_what_has_no_room_is_kept_and_written_whole_once_there_is_room(tmp_path: Path) -> None:
    told: list[str] = []
    file = JsonlWriter(tmp_path / "lines", warn=told.append)
    file.write("a" * 49, is_last=True)
    with file_size_limit(80):
        for letter in "bcd":
            file.write(letter * 49, is_last=True)
        assert (tmp_path / "lines").read_text() == "a" * 49 + "\n"
    assert len(told) == 1 and "File too large" in told[0] and str(tmp_path / "lines") in told[0]
    file.write("e", is_last=True)
    whole = "".join(letter * 49 + "\n" for letter in "abcd") + "e\n"
    assert (tmp_path / "lines").read_text() == whole and file.num_lost == 0
    with file_size_limit(len(whole) + 1):
        file.write("f" * 49, is_last=True)
        assert len(told) == 2, "the next full disk is reported too"
    file.close()
    file.close()
    assert (tmp_path / "lines").read_text() == whole + "f" * 49 + "\n" and len(told) == 2


def test_beyond_the_bound_the_oldest_lines_are_lost_and_counted(tmp_path: Path) -> None:
    told: list[str] = []
    file = JsonlWriter(tmp_path / "lines", warn=told.append, max_kept_bytes=100)
    with file_size_limit(1):
        for letter in "abcd":
            file.write(letter * 39, is_last=True)
        file.close()
    assert file.num_lost == 4 and told[1:] == [
        f"4 lines are missing in {tmp_path / 'lines'}, since there was no room for them"
    ]
    other = JsonlWriter(tmp_path / "others", max_kept_bytes=100)
    with file_size_limit(1):
        for letter in "abcd":
            other.write(letter * 39, is_last=True)
    other.close()
    assert (tmp_path / "others").read_text() == "c" * 39 + "\n" + "d" * 39 + "\n" and other.num_lost == 2


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    file = JsonlWriter(tmp_path / "lines")

    def write(letter: str) -> None:
        for number in range(2000):
            file.write(letter * 40, is_last=number % 7 == 0)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    lines = (tmp_path / "lines").read_text().splitlines()
    assert sorted(lines) == [letter * 40 for letter in "abc" for _ in range(2000)]


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        JsonlWriter(tmp_path / "nowhere" / "lines")
