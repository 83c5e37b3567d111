"""Tokenised corpora by name: read, split by document hash, tokenised once and kept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from thinwire.errors import DataError
from thinwire.workloads.language.sources import Document, open_source
from thinwire.workloads.language.token_files import (
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER,
    Manifest,
    TokenArray,
    TokenWriter,
    map_tokens,
    read_manifest,
    sha256,
    sole_builder,
    write_bytes,
)
from thinwire.workloads.language.tokenizers import (
    SMALLEST_VOCABULARY,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
)

# Share of documents that `thinwire train` holds out.
HELD_OUT_FRACTION = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The division of a corpus.

    Attributes:
        held_out: Numbers of the documents that are held out.
        cut: Where a corpus of one document is cut, in characters: what follows is held out. None with more documents.
    """

    num_documents: int
    num_bytes: int
    held_out: frozenset[int]
    cut: int | None

    def parts(self, documents: Iterable[Document]) -> Iterator[tuple[str, bool]]:
        """Yield each text with whether it is held out; the documents are those that were divided."""
        for number, document in enumerate(documents):
            if self.cut is None:
                yield document.text, number in self.held_out
            else:
                yield document.text[: self.cut], False
                yield document.text[self.cut :], True


def divide(documents: Iterable[Document], *, fraction: float, name: str) -> Split:
    """Divide a corpus into a training part and a held-out part; the documents are read once.

    A document is held out when the hash of its text is in the lowest `fraction`, in (0, 1), of all hashes; equal
    documents go to the same side. At least one document is on each side; a corpus of one document is cut by position.

    Raises:
        DataError: There is no text, or one character, or text that UTF-8 cannot write.
    """
    numbers: list[int] = []
    count = num_bytes = characters = 0
    lowest, highest = (2**64, 0), (-1, 0)
    for count, document in enumerate(documents, start=1):
        data = utf8(document)
        rank = (
            int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"thinwire.split").digest(), "little"),
            count - 1,
        )
        lowest, highest = min(lowest, rank), max(highest, rank)
        num_bytes, characters = num_bytes + len(data), len(document.text)
        if rank[0] < fraction * 2**64:
            numbers.append(count - 1)
    if count == 0 or (count == 1 and characters < 2):
        raise DataError(f"--data {name!r} holds no text; give a file or a folder that has some")
    if count == 1:
        cut = min(max(1, round(characters * (1 - fraction))), characters - 1)
        return Split(num_documents=1, num_bytes=num_bytes, held_out=frozenset(), cut=cut)
    held_out = frozenset(numbers or [lowest[1]])
    if len(held_out) == count:
        held_out -= {highest[1]}
    return Split(num_documents=count, num_bytes=num_bytes, held_out=held_out, cut=None)


def limit(documents: Iterable[Document], *, max_bytes: int | None) -> Iterator[Document]:
    """Yield documents up to a number of bytes of UTF-8; the one that crosses the limit is cut."""
    if max_bytes is None:
        yield from documents
        return
    left = max_bytes
    for document in documents:
        data = utf8(document)
        if len(data) >= left:
            text = data[:left].decode(errors="ignore")
            if text:
                yield Document(origin=document.origin, text=text)
            return
        left -= len(data)
        yield document


def utf8(document: Document) -> bytes:
    """Encode a document's text; refuse half of a surrogate pair, which JSON can carry and UTF-8 cannot."""
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{document.origin} is no valid text: character {error.start} is half of a pair; remove it"
        ) from None


# With 2,048 tokens a quarter of the standard library gave merges that need 0.8 % more tokens than all of it did, in a
# fifth of the time.
_TRAINING_CHARACTERS_PER_TOKEN = 4096
_BATCH_CHARACTERS = 4 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """A tokenised corpus.

    Attributes:
        tokenizer: What encoded it; its `vocab_size` is what a model needs.
        train: Tokens to train on, (tokens,) uint16 or uint32; each document is followed by the end of text.
        held_out: Tokens to validate on, likewise.
        num_text_bytes: UTF-8 bytes of both.
        sha256: Hash of tokens and tokenizer: equal on two hosts when the corpora are.
    """

    name: str
    tokenizer: Tokenizer
    train: TokenArray
    held_out: TokenArray
    num_documents: int
    num_text_bytes: int
    sha256: str
    folder: Path


def open_corpus(
    spec: str, *, cache: Path | str, tokenizer: str | Tokenizer = "bpe", vocab_size: int = 2048,
    held_out_fraction: float = HELD_OUT_FRACTION, max_bytes: int | None = None, deadline_s: float = 3600.0,
) -> Corpus:  # fmt: skip
    """Open a corpus: tokenise and keep it the first time, map it from the cache later.

    Several processes may open the same corpus at once: one builds it, the others wait.

    Args:
        spec: `stdlib` (the running Python's sources and reference), a file or folder of .txt, .md, .py, .rst, .jsonl or
            .parquet, or `hf:NAME[:SPLIT]`.
        cache: Folder that keeps tokens and tokenizers.
        tokenizer: `bpe`, trained on the part that is trained on, `bytes`, or a tokenizer to encode with.
        vocab_size: Wanted number of BPE tokens, at least 257; a small corpus gives fewer.
        held_out_fraction: Share of documents that is held out, in (0, 1); see `split.divide`.
        max_bytes: Read no more than this many bytes of text.
        deadline_s: How long to wait for another process that builds the same corpus, in seconds.

    Raises:
        ValueError: An argument is outside its range.
        DataError: There is no such corpus, it is empty, binary or malformed, or the cache cannot be written.
        MissingExtra: The kind of corpus needs an optional dependency.
    """
    is_named = isinstance(tokenizer, str)
    for is_wrong, problem in (
        (is_named and tokenizer not in ("bpe", "bytes"), f"tokenizer must be 'bpe' or 'bytes', got {tokenizer!r}"),
        (vocab_size < SMALLEST_VOCABULARY,
         f"vocab_size must be at least {SMALLEST_VOCABULARY} (256 bytes and the end of a text), got {vocab_size}"),
        (not 0 < held_out_fraction < 1, f"held_out_fraction must be in (0, 1), got {held_out_fraction}"),
        (max_bytes is not None and max_bytes < 2, f"max_bytes must be at least 2, got {max_bytes}"),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(problem)
    cache = Path(cache).expanduser()
    source = open_source(spec, cache=cache)
    given, name = (None, tokenizer) if isinstance(tokenizer, str) else (tokenizer, "")
    if given is not None:
        name = sha256(f"{given.end_of_text} {given.to_json()}".encode("utf-8", "surrogatepass"))
    size = vocab_size if tokenizer == "bpe" else 0
    parts = [FORMAT_VERSION, name, size, held_out_fraction, max_bytes, source.listing()]
    key = sha256(json.dumps(parts).encode("utf-8", "surrogatepass"))
    folder = cache / "corpora" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', source.name)[:40]}-{key[:16]}"

    def documents() -> Iterator[Document]:
        return limit(source.documents(), max_bytes=max_bytes)

    corpus = _load(folder, key=key, name=source.name, tokenizer=given)
    if corpus is None:
        with sole_builder(folder, deadline_s=deadline_s):
            # Another process may have built it while this one waited.
            corpus = _load(folder, key=key, name=source.name, tokenizer=given)
            if corpus is None:
                split = divide(documents(), fraction=held_out_fraction, name=source.name)
                made: Tokenizer = given or ByteTokenizer()
                if tokenizer == "bpe":
                    made = _train_tokenizer(split.parts(documents()), split=split, vocab_size=vocab_size)
                _build(folder, documents, key=key, split=split, tokenizer=made)
                corpus = _load(folder, key=key, name=source.name, tokenizer=given)
    if corpus is None:
        raise DataError(f"{folder} was changed while it was built; start again")
    return corpus


def _load(folder: Path, *, key: str, name: str, tokenizer: Tokenizer | None) -> Corpus | None:
    manifest = read_manifest(folder, key=key)
    if manifest is None:
        return None
    try:
        if tokenizer is None:
            tokenizer = load_tokenizer((folder / TOKENIZER).read_text(encoding="utf-8"))
        return Corpus(
            name=name, tokenizer=tokenizer, train=map_tokens(folder / "train.bin", dtype=manifest.dtype),
            held_out=map_tokens(folder / "held_out.bin", dtype=manifest.dtype), num_documents=manifest.num_documents,
            num_text_bytes=manifest.num_text_bytes,
            sha256=sha256((manifest.tokenizer_sha256 + manifest.tokens_sha256).encode()), folder=folder,
        )  # fmt: skip
    except (OSError, ValueError):
        # Changed since the manifest was read: as good as not there.
        return None


def _build(
    folder: Path, documents: Callable[[], Iterator[Document]], *, key: str, split: Split, tokenizer: Tokenizer
) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)
    described = tokenizer.to_json().encode()
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    write_bytes(folder / TOKENIZER, described)
    with ExitStack() as files:
        writers = [files.enter_context(TokenWriter(folder / name)) for name in ("train.bin", "held_out.bin")]
        _write_tokens(writers, split.parts(documents()), split=split, tokenizer=tokenizer, dtype=dtype)
    counts = [writer.num_bytes // np.dtype(dtype).itemsize for writer in writers]
    manifest = Manifest(
        version=FORMAT_VERSION, key=key, dtype=dtype, num_train_tokens=counts[0], num_held_out_tokens=counts[1],
        num_documents=split.num_documents, num_text_bytes=split.num_bytes, tokenizer_sha256=sha256(described),
        tokens_sha256=sha256("".join(writer.sha256 for writer in writers).encode()),
    )  # fmt: skip
    write_bytes(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))  # last of all


def _train_tokenizer(parts: Iterator[tuple[str, bool]], *, split: Split, vocab_size: int) -> Tokenizer:
    enough = _TRAINING_CHARACTERS_PER_TOKEN * vocab_size

    def texts() -> Iterator[str]:
        # Evenly from the whole corpus: its first part alone may be of one kind.
        share = min(1.0, enough / split.num_bytes)
        seen = taken = 0
        for text, is_held_out in parts:
            seen += 0 if is_held_out else len(text)
            if not is_held_out and taken < seen * share:
                taken += min(len(text), enough)
                yield text[:enough]

    return BpeTokenizer.train(texts(), vocab_size=vocab_size)


def _write_tokens(
    writers: list[TokenWriter], parts: Iterator[tuple[str, bool]], *, split: Split, tokenizer: Tokenizer, dtype: str
) -> None:
    stored = np.dtype(dtype).newbyteorder("<")
    end = np.array([tokenizer.end_of_text], dtype=np.uint32)
    characters_done = 0
    for batch in _batches(parts):
        encoded = tokenizer.encode([text for text, _ in batch])
        characters_done += sum(len(text) for text, _ in batch)
        chosen = [
            [tokens for tokens, (_, is_held_out) in zip(encoded, batch, strict=True) if is_held_out == wanted]
            for wanted in (False, True)
        ]
        data = [
            np.concatenate([*chain.from_iterable((tokens, end) for tokens in side), end[:0]]).astype(stored).tobytes()
            for side in chosen
        ]
        written = sum(writer.num_bytes for writer in writers) + sum(map(len, data))
        needed = max(written, round(written * split.num_bytes / characters_done))
        for writer, piece in zip(writers, data, strict=True):
            writer.write(piece, needed_bytes=needed)


def _batches(parts: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part[0])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
