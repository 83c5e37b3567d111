"""Tokens on disk: used again, made again when damaged, never left half written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from live_processes import DEADLINE_S

from tests.sample_texts import decoded
from thinwire.errors import DataError
from thinwire.workloads.language import open_corpus
from thinwire.workloads.language.token_files import TokenWriter, partial_path, sole_builder

# --- sources


def test_a_second_opening_reads_the_cache(folder: Path, cache: Path) -> None:
    first = open_corpus(str(folder), cache=cache, vocab_size=300)
    written = {file: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    second = open_corpus(str(folder), cache=cache, vocab_size=300)
    assert {file: file.stat().st_mtime_ns for file in second.folder.iterdir()} == written
    assert second.sha256 == first.sha256
    assert np.array_equal(first.train, second.train)
    assert {file.name for file in written} == {"tokenizer.json", "train.bin", "held_out.bin", "manifest.json", "lock"}


def test_no_other_user_can_read_the_cached_tokens(folder: Path, cache: Path) -> None:
    before = os.umask(0o022)
    try:
        kept = open_corpus(str(folder), cache=cache, tokenizer="bytes").folder
    finally:
        os.umask(before)
    files = {file.name: oct(file.stat().st_mode & 0o777) for file in kept.iterdir() if file.name != "lock"}
    assert len(files) == 4 and set(files.values()) == {"0o600"}, files


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": 301}, {"tokenizer": "bytes"}, {"held_out_fraction": 0.5}, {"max_bytes": 2000}],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_is_another_folder(change: dict[str, object], folder: Path, cache: Path) -> None:
    first = open_corpus(str(folder), cache=cache, vocab_size=300)
    other = open_corpus(str(folder), cache=cache, **{"vocab_size": 300, **change})  # type: ignore[arg-type]
    assert other.folder != first.folder
    assert other.sha256 != first.sha256


def test_a_changed_file_is_tokenised_again(folder: Path, cache: Path) -> None:
    first = open_corpus(str(folder), cache=cache, tokenizer="bytes")
    (folder / "000.txt").write_text("something else, of another length altogether")
    second = open_corpus(str(folder), cache=cache, tokenizer="bytes")
    assert second.folder != first.folder
    assert "something else, of another length altogether" in [*decoded(second)[0], *decoded(second)[1]]


def test_equal_corpora_in_different_places_have_the_same_hash(folder: Path, cache: Path) -> None:
    first = open_corpus(str(folder), cache=cache / "a", vocab_size=300)
    os.utime(folder / "000.txt", ns=(1, 1))
    assert open_corpus(str(folder), cache=cache / "b", vocab_size=300).sha256 == first.sha256


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def make_longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0\0")


def make_foreign(file: Path) -> None:
    file.write_bytes(b"[1, 2")


@pytest.mark.parametrize("damage", [cut_short, make_longer, make_foreign, Path.unlink])
@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "tokenizer.json", "manifest.json"])
def test_a_damaged_cache_is_made_again(damage: Callable[[Path], None], name: str, folder: Path, cache: Path) -> None:
    first = open_corpus(str(folder), cache=cache, tokenizer="bytes")
    whole = {file.name: file.read_bytes() for file in first.folder.iterdir()}
    damage(first.folder / name)
    second = open_corpus(str(folder), cache=cache, tokenizer="bytes")
    assert {file.name: file.read_bytes() for file in second.folder.iterdir()} == whole


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 2), ("key", "other"), ("dtype", "float32"), ("num_train_tokens", "many"), ("num_documents", None)],
)
def test_a_foreign_manifest_is_written_again(field: str, value: object, folder: Path, cache: Path) -> None:
    first = open_corpus(str(folder), cache=cache, tokenizer="bytes")
    manifest = first.folder / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_text(json.dumps({**json.loads(whole), field: value}))
    open_corpus(str(folder), cache=cache, tokenizer="bytes")
    assert manifest.read_bytes() == whole


def test_what_a_killed_builder_left_is_removed(folder: Path, cache: Path) -> None:
    first = open_corpus(str(folder), cache=cache, tokenizer="bytes")
    (first.folder / "manifest.json").unlink()
    (first.folder / "train.bin.host.1.partial").write_bytes(b"half")
    open_corpus(str(folder), cache=cache, tokenizer="bytes")
    assert not list(first.folder.glob("*.partial"))


@pytest.mark.parametrize("name", ["tokenizer.json", "train.bin", "held_out.bin", "manifest.json"])
def test_a_full_disk_is_named_with_the_bytes_needed_and_leaves_no_half_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    # Everything written to this device fails as on a full disk.
    partial_path(path).symlink_to("/dev/full")
    with (
        pytest.raises(DataError, match=rf"no space left in {tmp_path}: the tokens need about 5\.00 MB"),
        TokenWriter(path) as file,
    ):
        for _ in range(100):
            file.write(bytes(10_000), needed_bytes=5_000_000)
    assert not list(tmp_path.iterdir())


def test_a_small_file_on_a_full_disk_is_refused_too(tmp_path: Path) -> None:
    # It fits into the buffer, so that only the end of the block writes it.
    partial_path(tmp_path / "a").symlink_to("/dev/full")
    with pytest.raises(DataError, match="the tokens need about 3 B"), TokenWriter(tmp_path / "a") as file:
        file.write(b"abc")
    assert not list(tmp_path.iterdir())


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TokenWriter(tmp_path / "a") as file:
        file.write(b"abc")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_made_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=rf"cannot write in {tmp_path}/file/corpora.*cache folder"):
        open_corpus(str(folder), cache=tmp_path / "file", tokenizer="bytes")


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"cannot write in {tmp_path}/gone: No such file"):
        TokenWriter(tmp_path / "gone" / "a")


def test_waiting_for_another_builder_has_a_deadline(tmp_path: Path) -> None:
    start = time.monotonic()
    with (
        sole_builder(tmp_path, deadline_s=5),
        pytest.raises(DataError, match=rf"another process has been building {tmp_path} for 100\.0 ms"),
        sole_builder(tmp_path, deadline_s=0.1),
    ):
        pass
    # a lock that knew no deadline would be waited for without an end: it is this process's own
    assert 0.1 <= time.monotonic() - start < 60


def test_processes_that_start_at_once_come_to_the_same_corpus(folder: Path, cache: Path) -> None:
    code = (
        "import sys; from thinwire.workloads.language import open_corpus\n"
        "c = open_corpus(sys.argv[1], cache=sys.argv[2], vocab_size=400)\n"
        "print(c.sha256, len(c.train), (c.folder / 'manifest.json').stat().st_mtime_ns)"
    )
    command = [sys.executable, "-c", code, str(folder), str(cache)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    # The time of the manifest too: it was built once.
    assert said[0] == said[1] != ""
    assert [process.returncode for process in running] == [0, 0]


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"tokenizer": "words"}, "tokenizer must be 'bpe' or 'bytes', got 'words'"),
        ({"vocab_size": 100}, r"vocab_size must be at least 257 .*got 100"),
        ({"held_out_fraction": 0.0}, r"held_out_fraction must be in \(0, 1\), got 0.0"),
        ({"held_out_fraction": float("nan")}, "got nan"),
        ({"max_bytes": 1}, "max_bytes must be at least 2, got 1"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value(
    argument: dict[str, object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=text):
        open_corpus("stdlib", cache=tmp_path, **argument)  # type: ignore[arg-type]
