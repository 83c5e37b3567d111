"""Where texts come from, and every way in which a source can be wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.sample_texts import decoded
from thinwire.errors import DataError, MissingExtra
from thinwire.workloads.language import open_corpus
from thinwire.workloads.language.sources import StdlibSource, open_source, read_file

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


def test_a_text_file_without_a_suffix_is_data_and_a_folder_leaves_it_out(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("a thin wire")
    (tmp_path / "notes.txt").write_text("carries little")
    (tmp_path / "program").write_bytes(b"\x7fELF\0")
    texts = [document.text for document in open_source(str(tmp_path / "README"), cache=tmp_path).documents()]
    assert texts == ["a thin wire"]
    assert [one.text for one in open_source(str(tmp_path), cache=tmp_path).documents()] == ["carries little"]
    with pytest.raises(DataError, match="program is binary"):
        list(open_source(str(tmp_path / "program"), cache=tmp_path).documents())


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
    with pytest.raises(DataError, match=rf"no file or folder; got '{tmp_path}/nothing'; allowed stdlib.*hf:NAME"):
        open_corpus(f"{tmp_path}/nothing", cache=tmp_path)


def test_an_unsupported_suffix_is_answered_with_the_supported_ones(tmp_path: Path) -> None:
    text = refused(tmp_path / "a.docx", b"x")
    assert f"{tmp_path}/a.docx has an unknown suffix; got '.docx'; allowed .txt" in text
    assert ".jsonl" in text


def test_a_folder_without_texts_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match=rf"a folder without a file of text; got \'{tmp_path}\'; allowed \.txt"):
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
    with pytest.raises(DataError, match=r"^--data .little. holds no text; give"):
        open_corpus(str(tmp_path / "little.txt"), cache=cache)
