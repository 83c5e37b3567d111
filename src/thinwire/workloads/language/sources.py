"""Sources of documents: the running Python, files and folders by suffix, or a Hugging Face data set."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import DataError, MissingExtra

TEXT_FIELDS = ("text", "content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text of a corpus.

    Attributes:
        origin: Where it is from, for error texts: a path, `path:line` or `path:row`.
        text: The text; never empty.
    """

    origin: str
    text: str


def read_file(path: Path) -> Iterator[Document]:
    """Read the documents of one file by its suffix (see `READERS`); empty ones are left out.

    Raises:
        DataError: The suffix is not known, or the file cannot be read as what its suffix says.
        MissingExtra: A parquet file without pyarrow.
    """
    try:
        for document in _reader_of(path)(path):
            if document.text:
                yield document
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _reader_of(path: Path) -> Callable[[Path], Iterator[Document]]:
    """Return what reads a file that is named by itself; one without a suffix is plain text."""
    reader = READERS.get(path.suffix.lower()) if path.suffix else _read_text
    if reader is None:
        raise DataError(
            f"{path} has an unknown suffix; got {path.suffix!r}; allowed {', '.join(READERS)}, or none for plain text; "
            f"try a copy named {path.stem}.txt, if it is text"
        )
    return reader


def decode_text(data: bytes, *, origin: str) -> str:
    """Decode UTF-8, with or without a byte order mark; refuse NUL and what is not UTF-8."""
    nul = data.find(b"\0")
    if nul >= 0:
        raise DataError(f"{origin} is binary: byte {nul} is NUL; leave it out, or convert it to UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{origin} is no UTF-8 text: byte {error.start} cannot be decoded; leave it out, or convert it to UTF-8"
        ) from None


def text_of_record(record: object, *, origin: str) -> str:
    """Return the text of a record by the first of `TEXT_FIELDS` that it has; refuse one without."""
    if isinstance(record, Mapping):
        for field in TEXT_FIELDS:
            if isinstance(record.get(field), str):
                return str(record[field])
    raise DataError(f"{origin} has no text: it must be an object with a text in the field 'text' or 'content'")


def _read_text(path: Path) -> Iterator[Document]:
    yield Document(origin=str(path), text=decode_text(path.read_bytes(), origin=str(path)))


def _read_jsonl(path: Path) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            origin = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(decode_text(line, origin=origin))
            except (json.JSONDecodeError, RecursionError) as error:
                raise DataError(f"{origin} is no JSON: {error}; a .jsonl file holds one JSON object a line") from None
            yield Document(origin=origin, text=text_of_record(record, origin=origin))


def _read_parquet(path: Path) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra.of("pyarrow", extra="parquet") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            column = next((field for field in TEXT_FIELDS if field in schema.names and _is_text(schema, field)), None)
            if column is None:
                raise DataError(
                    f"{path} has no text: it must have a column of strings named 'text' or 'content', "
                    f"its columns are {', '.join(schema.names) or 'none'}"
                )
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for text in batch.column(0).to_pylist():
                    # A row without a value is an empty document.
                    yield Document(origin=f"{path}:{row}", text=text or "")
                    row += 1
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} is no parquet file that can be read: {error}; write it again, or leave it out"
        ) from None


def _is_text(schema: Any, field: str) -> bool:
    return str(schema.field(field).type) in ("string", "large_string")


READERS: Mapping[str, Callable[[Path], Iterator[Document]]] = {
    **dict.fromkeys((".txt", ".md", ".py", ".rst"), _read_text), ".jsonl": _read_jsonl, ".parquet": _read_parquet,
}  # fmt: skip


_NO_SOURCE = {"site-packages", "dist-packages", "__pycache__"}


class Source(Protocol):
    """Documents in an order that is the same at every reading."""

    @property
    def name(self) -> str:
        """A short name."""

    def listing(self) -> list[list[str | int]]:
        """Return what changes when the content does, without reading it: names, sizes, times."""

    def documents(self) -> Iterator[Document]:
        """Read all documents."""


def check_source(spec: str) -> None:
    """Refuse data that does not exist, or that nothing here reads; no file is opened, and no folder read to its end.

    Raises:
        DataError: There is nothing of this name, or nothing in it that can be read.
        MissingExtra: `hf:` without datasets, or a parquet file without pyarrow.
    """
    if spec == "stdlib":
        return
    if spec.startswith("hf:"):
        MissingExtra.check("datasets", extra="hf")
        return
    path = Path(spec).expanduser()
    if not path.exists():
        raise DataError(
            f"--data names no file or folder; got {spec!r}; allowed stdlib, a file or folder, or hf:NAME; try "
            f"--data stdlib"
        )
    if not path.is_dir():
        if _reader_of(path) is _read_parquet:
            MissingExtra.check("pyarrow", extra="parquet")
        return
    for _, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(Path(name).suffix.lower() in READERS and not name.startswith(".") for name in names):
            return
    raise DataError(
        f"--data names a folder without a file of text; got {spec!r}; allowed {', '.join(READERS)} files; try another "
        f"folder, or a file in it by its own name"
    )


def open_source(spec: str, *, cache: Path) -> Source:
    """Return the source that a text names.

    Args:
        spec: `stdlib`; the path of a file or folder; or `hf:NAME[:SPLIT]`, where NAME is a local folder, or the name of
            a data set on the hub, with a slash and its configuration where it has several.
        cache: Folder in which the datasets library keeps what it prepares.
    """
    if spec == "stdlib":
        return StdlibSource()
    if spec.startswith("hf:"):
        return HuggingFaceSource(spec, cache=cache / "datasets")
    check_source(spec)
    path = Path(spec).expanduser()
    if path.is_dir():
        files = [file for file in _walk(path, skip=frozenset()) if file.suffix.lower() in READERS]
        return FileSource(path.resolve().name, root=path, files=files)
    return FileSource(path.stem, root=path.parent, files=[path])


class FileSource:
    """The files of a folder, in sorted order, without hidden ones and those of an unknown suffix; or a single file."""

    def __init__(self, name: str, *, root: Path, files: Sequence[Path]) -> None:
        self.name = name
        self._root = root
        self._files = files

    def listing(self) -> list[list[str | int]]:
        return [_stat(file, root=self._root) for file in self._files]

    def documents(self) -> Iterator[Document]:
        for file in self._files:
            yield from read_file(file)


class StdlibSource:
    """The source files of the running Python's standard library, and the topics of its reference (`pydoc_data`).

    Tests are source too, where the Python has them; files that are no text in the encoding they declare (there are
    some, to test just that) and data files are left out.
    """

    name = "stdlib"

    def __init__(self) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(root, skip=_NO_SOURCE) if file.suffix == ".py"]

        def is_data(file: Path) -> bool:
            # the topics are read as texts below; as a source file they are one long literal
            folders = file.relative_to(root).parts[:-1]
            return any(name.endswith("data") or name == "cjkencodings" for name in folders)

        self._files = [file for file in files if not is_data(file)]
        self._root = root
        if not self._files:
            raise DataError(f"the running Python has no source files in {root}; give a folder of texts as data")

    def listing(self) -> list[list[str | int]]:
        version: list[str | int] = [platform.python_implementation(), platform.python_version()]
        return [version, *(_stat(file, root=self._root) for file in self._files)]

    def documents(self) -> Iterator[Document]:
        for file in self._files:
            try:
                with tokenize.open(file) as lines:
                    text = lines.read()
            except (SyntaxError, UnicodeError, OSError):
                continue
            if text and "\0" not in text:
                yield Document(origin=str(file), text=text)
        try:
            topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        except (ImportError, AttributeError):
            return  # some distributions package the documentation apart
        for name in sorted(topics):
            if topics[name]:
                yield Document(origin=f"pydoc topic {name}", text=topics[name])


class HuggingFaceSource:
    """One split of a data set, read with the datasets library; no code of the data set is run."""

    def __init__(self, spec: str, *, cache: Path) -> None:
        try:
            self._datasets: Any = importlib.import_module("datasets")
        except ImportError:
            raise MissingExtra.of("datasets", extra="hf") from None
        name, _, split = spec.removeprefix("hf:").partition(":")
        self._spec, self._path, self._split = spec, name, split or "train"
        self.name = name.rstrip("/").rsplit("/", 1)[-1] or "dataset"
        try:
            self._rows = self._load(cache)
        except (OSError, ValueError, self._datasets.exceptions.DatasetsError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"cannot read {spec}: {reason}; it must be a data set on the hub or a local folder of one, "
                "as hf:NAME or hf:NAME:SPLIT"
            ) from error
        found = next((field for field in TEXT_FIELDS if field in self._rows.column_names), None)
        if found is None:
            raise DataError(
                f"{spec} has no text: it must have a column named 'text' or 'content', "
                f"its columns are {', '.join(self._rows.column_names)}"
            )
        self._column = found

    def listing(self) -> list[list[str | int]]:
        info = self._rows.info
        rows: list[str | int] = [self._path, self._split, len(self._rows), str(info.version), info.dataset_size or 0]
        path = Path(self._path)
        files = _walk(path, skip=frozenset()) if path.is_dir() else []
        return [rows, *(_stat(file, root=path) for file in files)]

    def documents(self) -> Iterator[Document]:
        for number, row in enumerate(self._rows):
            origin = f"{self._spec}:{number}"
            text = text_of_record({self._column: row[self._column] or ""}, origin=origin)
            if text:
                yield Document(origin=origin, text=text)

    def _load(self, cache: Path) -> Any:
        path = Path(self._path)
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            found = self._datasets.load_from_disk(self._path)
            if not isinstance(found, self._datasets.DatasetDict):
                return found
            if self._split not in found:
                raise ValueError(f"there is no split {self._split!r}, the splits are {', '.join(found)}")
            return found[self._split]
        if self._path.startswith(("/", ".", "~")) and not path.exists():
            raise FileNotFoundError(f"there is no folder {path}")
        parts = self._path.split("/")
        name, config = (self._path, None) if path.exists() or len(parts) < 3 else ("/".join(parts[:2]), parts[2])
        return self._datasets.load_dataset(name, config, split=self._split, cache_dir=str(cache))


def _walk(root: Path, *, skip: frozenset[str] | set[str]) -> list[Path]:
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        files.extend(Path(folder, name) for name in names if not name.startswith("."))
    # By parts, so that the order does not depend on the separator nor on the file system's own order.
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(root).parts)


def _stat(file: Path, *, root: Path) -> list[str | int]:
    try:
        found = file.stat()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    return [file.relative_to(root).as_posix(), found.st_size, found.st_mtime_ns]
