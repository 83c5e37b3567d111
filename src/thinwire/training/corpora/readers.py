"""Documents out of files: one reader a suffix, each refusing what is no text by naming the file and the line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} has the unsupported suffix {path.suffix!r}; corpora are {', '.join(READERS)} files")
    try:
        for document in reader(path):
            if document.text:
                yield document
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def decode_text(data: bytes, *, origin: str) -> str:
    """Decode UTF-8, with or without a byte order mark.

    Raises:
        DataError: The bytes hold NUL or are not UTF-8.
    """
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
    """Return the text of a record by the first of `TEXT_FIELDS` that it has.

    Raises:
        DataError: The record has none of them, or it is no text.
    """
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
            column = _text_column(file.schema_arrow, path=path)
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


def _text_column(schema: Any, *, path: Path) -> str:
    import pyarrow

    for field in TEXT_FIELDS:
        if field in schema.names:
            kind = schema.field(field).type
            if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
                return field
    raise DataError(
        f"{path} has no text: it must have a column of strings named 'text' or 'content', "
        f"its columns are {', '.join(schema.names) or 'none'}"
    )


READERS: Mapping[str, Callable[[Path], Iterator[Document]]] = MappingProxyType(
    {
        ".txt": _read_text,
        ".md": _read_text,
        ".py": _read_text,
        ".rst": _read_text,
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
    }
)
