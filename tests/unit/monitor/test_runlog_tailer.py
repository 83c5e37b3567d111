"""Tailers of growing files: whole lines once, rewritten and long files."""

from __future__ import annotations

from pathlib import Path

from thinwire.runlog.tailer import JsonlTailer


def test_a_half_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = JsonlTailer(path)
    assert tail.new_lines() == []
    path.write_bytes(b'{"a": 1}\n{"b"')
    assert tail.new_lines() == [b'{"a": 1}']
    assert tail.new_lines() == []
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert tail.new_lines() == [b'{"b": 2}']


def test_a_file_that_a_resume_cut_short_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    tail = JsonlTailer(path)
    assert tail.new_lines() == [b"one", b"two"]
    path.write_bytes(b"one\n")
    assert tail.new_lines() == [b"one"]


def test_what_is_read_of_a_growing_file_is_read_once_and_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = JsonlTailer(path)
    assert file.poll() == (False, [])
    path.write_bytes(b"one\ntw")
    assert file.poll() == (False, [(1, b"one")])
    assert file.poll() == (False, [])
    with path.open("ab") as more:
        more.write(b"o\n\nfour\n")
    assert file.poll() == (False, [(2, b"two"), (4, b"four")])
    path.write_bytes(b"new\n")
    assert file.poll() == (True, [(1, b"new")])


def test_of_a_long_file_the_head_and_the_end_are_read_again_where_it_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = JsonlTailer(path, most_bytes=20, head_bytes=10)
    for name in (b"a", b"b"):
        fresh = tmp_path / "fresh"
        fresh.write_bytes(b"".join(b"%s%03d\n" % (name, number) for number in range(20)))
        fresh.replace(path)
        assert file.poll() == (name == b"b", [(1, name + b"000"), (2, name + b"001")])
        # the first line of the end has lost its begin, or may have
        assert file.poll() == (False, [(3 + n, b"%s%03d" % (name, 17 + n)) for n in range(3)])
        assert file.poll() == (False, [])
    assert file.num_skipped_bytes == 2 * 70
