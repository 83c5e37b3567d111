"""Lines written while a replica trains: whole ones only, and a full disk costs lines and nothing else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.full_disk import file_size_limit
from thinwire.training.line_file import LineFile


def test_lines_wait_until_they_are_flushed_and_go_to_the_end_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("old\n")
    file = LineFile(tmp_path / "lines")
    file.write("one")
    assert (tmp_path / "lines").read_text() == "old\n"
    file.write("two", is_last=True)
    assert (tmp_path / "lines").read_text() == "old\none\ntwo\n"
    file.write("three")
    file.truncate(4)
    file.write("four")
    file.close()
    assert file.closed and (tmp_path / "lines").read_text() == "old\nfour\n"


def test_what_has_no_room_is_lost_whole_and_told_and_the_file_goes_on_once_there_is_room(tmp_path: Path) -> None:
    told: list[str] = []
    file = LineFile(tmp_path / "lines", warn=told.append)
    file.write("a" * 49, is_last=True)
    with file_size_limit(80):
        for _ in range(3):
            file.write("b" * 49, is_last=True)
    assert (tmp_path / "lines").read_text() == "a" * 49 + "\n" and file.num_lost == 3
    assert len(told) == 1 and "File too large" in told[0] and str(tmp_path / "lines") in told[0]
    file.write("c", is_last=True)
    with file_size_limit(80):
        file.write("d" * 49, is_last=True)
    assert len(told) == 2
    file.close()
    file.close()
    assert (tmp_path / "lines").read_text() == "a" * 49 + "\nc\n"
    assert told[2:] == [f"4 lines are missing in {tmp_path / 'lines'}, since there was no room for them"]


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")

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
        LineFile(tmp_path / "nowhere" / "lines")
