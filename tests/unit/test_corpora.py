"""Corpora from their sources to tokens on disk."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from thinwire.errors import DataError, MissingExtra
from thinwire.training.corpora import BpeTokenizer, ByteTokenizer, Corpus, open_corpus
from thinwire.training.corpora.readers import Document, read_file
from thinwire.training.corpora.sources import StdlibSource, open_source
from thinwire.training.corpora.split import divide, limit
from thinwire.training.corpora.token_files import TokenWriter, partial_path, sole_builder
from thinwire.training.corpora.tokenizers import load_tokenizer

TEXTS = [f"document {number}: to be or not to be, that is question {number * number}\n" for number in range(60)]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def decoded(corpus: Corpus) -> tuple[list[str], list[str]]:
    """Return the documents of both parts, as the tokens say."""
    sides = []
    for tokens in (corpus.train, corpus.held_out):
        ends = np.flatnonzero(tokens == corpus.tokenizer.end_of_text)
        assert len(tokens) == 0 or ends[-1] == len(tokens) - 1
        sides.append([corpus.tokenizer.decode(part.tolist()) for part in np.split(tokens, ends + 1)[:-1]])
    return sides[0], sides[1]


# --- sources


def write_parquet(path: Path, columns: dict[str, list[object]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".rst", ".TXT"])
def test_a_text_file_is_one_document(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a{suffix}"
    file.write_bytes("\ufeffGrüße\r\n".encode())
    assert [document.text for document in read_file(file)] == ["Grüße\r\n"]


@pytest.mark.parametrize("field", ["text", "content"])
def test_each_line_of_jsonl_is_a_document(field: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"{field}": "one"}}\n\n{{"{field}": "", "id": 1}}\n{{"id": 2, "{field}": "two"}}')
    assert [(document.origin, document.text) for document in read_file(file)] == [
        (f"{file}:1", "one"),
        (f"{file}:4", "two"),
    ]


@pytest.mark.parametrize("field", ["text", "content"])
def test_each_row_of_parquet_is_a_document(field: str, tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", {"id": [1, 2, 3, 4], field: ["one", None, "", "two"]})
    assert [(document.origin, document.text) for document in read_file(file)] == [
        (f"{file}:0", "one"),
        (f"{file}:3", "two"),
    ]


def test_a_folder_is_read_in_sorted_order_without_hidden_and_foreign_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", "a/b.py", ".git/c.txt", "image.png", ".hidden.txt", "a-b/c.rst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    source = open_source(str(tmp_path), cache=tmp_path)
    assert [document.text for document in source.documents()] == ["a/b.py", "a/z.md", "a-b/c.rst", "a.txt", "b.txt"]


def test_the_standard_library_is_sources_and_topics_without_installed_packages_and_data() -> None:
    origins = [document.origin for document in StdlibSource().documents()]
    assert any(origin.endswith("/dataclasses.py") for origin in origins)
    assert "pydoc topic assert" in origins
    assert not [origin for origin in origins if "site-packages" in origin or "tokenizedata" in origin]
    assert not [origin for origin in origins if "pydoc_data" in origin]


def test_the_standard_library_becomes_a_corpus(cache: Path) -> None:
    corpus = open_corpus("stdlib", cache=cache, max_bytes=300_000, vocab_size=400)
    assert corpus.name == "stdlib"
    assert corpus.num_text_bytes == 300_000
    assert corpus.tokenizer.vocab_size == 400
    assert corpus.train.dtype == np.uint16
    assert 0 < len(corpus.held_out) < len(corpus.train)
    assert "import" in decoded(corpus)[0][0]


def write_disk(folder: Path) -> str:
    import datasets

    datasets.Dataset.from_dict({"id": [1, 2, 3], "text": ["one", "", "two"]}).save_to_disk(folder)
    return f"hf:{folder}"


def write_disk_of_splits(folder: Path) -> str:
    import datasets

    rows = datasets.Dataset.from_dict({"content": ["one", None, "two"]})
    datasets.DatasetDict({"test": rows}).save_to_disk(folder)
    return f"hf:{folder}:test"


def write_folder_of_jsonl(folder: Path) -> str:
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": ""}\n{"text": "two"}\n')
    return f"hf:{folder}:train"


@pytest.mark.parametrize("write", [write_disk, write_disk_of_splits, write_folder_of_jsonl])
def test_a_local_data_set_is_read(write: Callable[[Path], str], tmp_path: Path, cache: Path) -> None:
    spec = write(tmp_path / "set")
    source = open_source(spec, cache=cache)
    assert [(document.origin, document.text) for document in source.documents()] == [
        (f"{spec}:0", "one"),
        (f"{spec}:2", "two"),
    ]
    assert source.name == "set"


def test_a_change_of_a_local_data_set_changes_its_listing(tmp_path: Path, cache: Path) -> None:
    spec = write_folder_of_jsonl(tmp_path / "set")
    before = open_source(spec, cache=cache).listing()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "other"}\n')
    assert open_source(spec, cache=cache).listing() != before


# --- what cannot be read


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        list(open_source(str(path), cache=path.parent).documents())
    return str(caught.value)


def test_a_missing_path_is_named_with_what_data_can_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"no file or folder {tmp_path}/nothing.*stdlib.*hf:NAME"):
        open_corpus(f"{tmp_path}/nothing", cache=tmp_path)


def test_an_unsupported_suffix_is_answered_with_the_supported_ones(tmp_path: Path) -> None:
    text = refused(tmp_path / "a.docx", b"x")
    assert f"{tmp_path}/a.docx has the unsupported suffix '.docx'" in text
    assert ".jsonl" in text


def test_a_folder_without_texts_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match=rf"{tmp_path} holds no file of a corpus; it must have \.txt"):
        open_corpus(str(tmp_path), cache=tmp_path)


def test_binary_data_is_named_with_its_place(tmp_path: Path) -> None:
    assert f"{tmp_path}/a.txt is binary: byte 2 is NUL" in refused(tmp_path / "a.txt", b"ab\0c")


def test_text_that_is_no_utf8_is_named_with_its_place(tmp_path: Path) -> None:
    text = refused(tmp_path / "a.txt", "Grüße".encode("latin-1"))
    assert f"{tmp_path}/a.txt is no UTF-8 text: byte 2" in text
    assert "convert it to UTF-8" in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a"', "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"title": "a"}', "has no text"),
        (b'{"text": 5}', "has no text"),
        (b'"text"', "has no text"),
        (b'{"text": "\xff"}', "is no UTF-8 text"),
    ],
)
def test_a_bad_line_of_jsonl_is_named_by_file_and_number(line: bytes, said: str, tmp_path: Path) -> None:
    text = refused(tmp_path / "a.jsonl", b'{"text": "good"}\n' + line + b"\n")
    assert text.startswith(f"{tmp_path}/a.jsonl:2 {said}")


def test_half_of_a_surrogate_pair_is_named_by_its_document(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1 is no valid text: character 1"):
        open_corpus(str(tmp_path / "a.jsonl"), cache=cache)


def test_a_parquet_file_that_is_none_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/a.parquet is no parquet file" in refused(tmp_path / "a.parquet", b"PAR1 not really PAR1")


@pytest.mark.parametrize("columns", [{"title": ["a"]}, {"text": [1]}])
def test_a_parquet_file_without_texts_is_named_with_its_columns(
    columns: dict[str, list[object]], tmp_path: Path
) -> None:
    file = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(DataError, match=rf"{file} has no text.*its columns are {next(iter(columns))}"):
        list(read_file(file))


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    # A link to itself cannot be opened by anyone, not even by root.
    file.symlink_to(file)
    with pytest.raises(DataError, match=rf"cannot read {file}"):
        list(read_file(file))


@pytest.mark.parametrize("spec", ["nowhere-at-all/none", "set:absent"])
def test_a_data_set_that_is_not_there_is_named(spec: str, tmp_path: Path, cache: Path) -> None:
    write_disk_of_splits(tmp_path / "set")
    with pytest.raises(DataError, match=rf"cannot read hf:{tmp_path}/{spec}: .*hf:NAME:SPLIT"):
        open_source(f"hf:{tmp_path}/{spec}", cache=cache)


def test_a_name_that_the_hub_cannot_answer_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"cannot read hf:nobody/nothing/en:test: .*data set on the hub"):
        open_source("hf:nobody/nothing/en:test", cache=cache)


def test_a_data_set_without_texts_is_named_with_its_columns(tmp_path: Path, cache: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"title": ["a"]}).save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match=r"has no text.*its columns are title"):
        open_source(f"hf:{tmp_path}/set", cache=cache)


@pytest.mark.parametrize(("module", "extra"), [("datasets", "hf"), ("pyarrow", "parquet")])
def test_without_its_library_a_source_says_what_to_install(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    spec = "hf:anything" if module == "datasets" else str(tmp_path / "a.parquet")
    with pytest.raises(MissingExtra, match=rf"{module} is not installed.*thinwire\[{extra}\]"):
        list(open_source(spec, cache=tmp_path).documents())


@pytest.mark.parametrize("data", ["", "x"])
def test_a_corpus_without_enough_text_to_divide_is_named(data: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "little.txt").write_text(data)
    with pytest.raises(DataError, match="little is empty"):
        open_corpus(str(tmp_path / "little.txt"), cache=cache)


# --- tokenizers

AWKWARD = ["", "a", "Grüße, 世界 🎉\n\t  x", "<|endoftext|>", "\x00\x7f\u0085", "a" * 1000]


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> ByteTokenizer | BpeTokenizer:
    return ByteTokenizer() if request.param == "bytes" else BpeTokenizer.train(TEXTS, vocab_size=300)


def test_every_text_comes_back_from_its_tokens(tokenizer: ByteTokenizer | BpeTokenizer) -> None:
    for text, tokens in zip(AWKWARD, tokenizer.encode(AWKWARD), strict=True):
        assert tokenizer.decode(tokens.tolist()) == text
        assert not (tokens == tokenizer.end_of_text).any()
        assert not (tokens >= tokenizer.vocab_size).any()


def test_a_saved_tokenizer_encodes_as_before(tokenizer: ByteTokenizer | BpeTokenizer) -> None:
    loaded = load_tokenizer(tokenizer.to_json())
    assert type(loaded) is type(tokenizer)
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    for before, after in zip(tokenizer.encode(AWKWARD), loaded.encode(AWKWARD), strict=True):
        assert before.tolist() == after.tolist()


def test_the_tokenizers_library_reads_what_is_saved_alike(tokenizer: ByteTokenizer | BpeTokenizer) -> None:
    import tokenizers

    theirs = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    text = AWKWARD[2]
    assert theirs.encode(text).ids == tokenizer.encode([text])[0].tolist()
    assert theirs.decode(theirs.encode(text).ids) == text
    assert theirs.token_to_id("<|endoftext|>") == tokenizer.end_of_text


def test_training_in_another_process_gives_the_same_tokenizer() -> None:
    code = (
        "import sys, hashlib; from thinwire.training.corpora import BpeTokenizer\n"
        "texts = [f'document {n}: to be or not to be, that is question {n * n}\\n' for n in range(60)]\n"
        "print(hashlib.sha256(BpeTokenizer.train(texts, vocab_size=400).to_json().encode()).hexdigest())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    mine = BpeTokenizer.train(TEXTS, vocab_size=400).to_json()
    assert said.strip() == hashlib.sha256(mine.encode()).hexdigest()


def test_a_vocabulary_larger_than_the_text_allows_ends_early() -> None:
    tokenizer = BpeTokenizer.train(["to be or not to be"], vocab_size=50_000)
    assert 257 < tokenizer.vocab_size < 300


def test_a_vocabulary_too_small_for_the_bytes_is_refused_with_its_value() -> None:
    with pytest.raises(ValueError, match=r"vocab_size must be at least 257.*got 256"):
        BpeTokenizer.train(["a"], vocab_size=256)


@pytest.mark.parametrize("text", ["", "{}", '{"model": {"merges": ["a b"]}}'])
def test_a_text_that_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load_tokenizer(text)


# --- division


def documents(*texts: str) -> list[Document]:
    return [Document(origin=f"text {number}", text=text) for number, text in enumerate(texts)]


def test_about_the_wanted_share_is_held_out() -> None:
    split = divide(documents(*map(str, range(20_000))), fraction=0.02, name="numbers")
    # 400 expected, deviation 20.
    assert 300 < len(split.held_out) < 500


def test_a_document_is_on_the_same_side_whatever_else_is_there() -> None:
    texts = [str(number) for number in range(2000)]
    forwards = divide(documents(*texts), fraction=0.1, name="numbers")
    backwards = divide(documents("more", *reversed(texts)), fraction=0.1, name="numbers")
    held_out = {texts[number] for number in forwards.held_out}
    assert held_out == {["more", *reversed(texts)][number] for number in backwards.held_out} - {"more"}


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_both_sides_have_a_document(fraction: float, count: int) -> None:
    split = divide(documents(*map(str, range(count))), fraction=fraction, name="numbers")
    assert 1 <= len(split.held_out) < count


@pytest.mark.parametrize(("text", "kept"), [("ab", "a"), ("a" * 100, "a" * 98), ("é" * 50, "é" * 49)])
def test_a_single_document_is_cut_by_position(text: str, kept: str) -> None:
    split = divide(documents(text), fraction=0.02, name="one")
    assert list(split.parts(documents(text))) == [(kept, False), (text[len(kept) :], True)]


@pytest.mark.parametrize(("max_bytes", "texts"), [(None, ["aé", "bc"]), (3, ["aé"]), (2, ["a"]), (4, ["aé", "b"])])
def test_a_limit_cuts_the_document_that_crosses_it(max_bytes: int | None, texts: list[str]) -> None:
    assert [document.text for document in limit(documents("aé", "bc"), max_bytes=max_bytes)] == texts


# --- tokens on disk


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_document_is_in_exactly_one_part(tokenizer: str, folder: Path, cache: Path) -> None:
    corpus = open_corpus(str(folder), cache=cache, tokenizer=tokenizer, vocab_size=300, held_out_fraction=0.1)
    train, held_out = decoded(corpus)
    assert sorted(train + held_out) == sorted(TEXTS)
    assert 1 <= len(held_out) < 20
    assert corpus.num_documents == 60
    assert corpus.num_text_bytes == sum(map(len, TEXTS))


def test_a_single_file_is_held_out_at_its_end(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "book.txt").write_text("abcdefghij" * 10)
    corpus = open_corpus(str(tmp_path / "book.txt"), cache=cache, tokenizer="bytes", held_out_fraction=0.1)
    assert decoded(corpus) == (["abcdefghij" * 9], ["abcdefghij"])


def test_held_out_texts_do_not_train_the_tokenizer(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "book.txt").write_text("ab" * 400 + "yz" * 200)
    corpus = open_corpus(str(tmp_path / "book.txt"), cache=cache, vocab_size=300, held_out_fraction=0.4)
    pair, unseen = corpus.tokenizer.encode(["ab", "yz"])
    assert (len(pair), len(unseen)) == (1, 2)


def test_a_vocabulary_beyond_16_bits_is_stored_in_32(tmp_path: Path, cache: Path) -> None:
    letters = np.random.default_rng(0).integers(97, 123, (16_000, 12), dtype=np.uint8)
    words = [bytes(word).decode() for word in letters]
    (tmp_path / "a.txt").write_text(" ".join(words + words + words[:1000]))
    corpus = open_corpus(str(tmp_path / "a.txt"), cache=cache, vocab_size=70_000)
    assert corpus.tokenizer.vocab_size > 2**16
    assert corpus.train.dtype == np.uint32
    assert corpus.train.max() > 2**16


def test_the_tokens_are_mapped_and_not_writable(folder: Path, cache: Path) -> None:
    corpus = open_corpus(str(folder), cache=cache, tokenizer="bytes")
    assert isinstance(corpus.train, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


def test_a_corpus_larger_than_one_batch_of_encoding_is_whole(tmp_path: Path, cache: Path) -> None:
    texts = [letter * 2_500_000 for letter in "abcde"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = open_corpus(str(tmp_path / "a.jsonl"), cache=cache, tokenizer="bytes", held_out_fraction=0.3)
    assert len(corpus.train) + len(corpus.held_out) == 5 * 2_500_001
    counts = np.bincount(np.concatenate((corpus.train, corpus.held_out)), minlength=257)
    assert counts[[*b"abcde", 256]].tolist() == [2_500_000] * 5 + [5]


def test_a_second_opening_reads_the_cache(folder: Path, cache: Path) -> None:
    first = open_corpus(str(folder), cache=cache, vocab_size=300)
    written = {file: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    second = open_corpus(str(folder), cache=cache, vocab_size=300)
    assert {file: file.stat().st_mtime_ns for file in second.folder.iterdir()} == written
    assert second.sha256 == first.sha256
    assert np.array_equal(first.train, second.train)
    assert {file.name for file in written} == {"tokenizer.json", "train.bin", "held_out.bin", "manifest.json", "lock"}


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
    assert time.monotonic() - start < 2


def test_processes_that_start_at_once_come_to_the_same_corpus(folder: Path, cache: Path) -> None:
    code = (
        "import sys; from thinwire.training.corpora import open_corpus\n"
        "c = open_corpus(sys.argv[1], cache=sys.argv[2], vocab_size=400)\n"
        "print(c.sha256, len(c.train), (c.folder / 'manifest.json').stat().st_mtime_ns)"
    )
    command = [sys.executable, "-c", code, str(folder), str(cache)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = [process.communicate(timeout=60)[0] for process in running]
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
