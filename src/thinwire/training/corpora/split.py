"""Held-out split of a corpus by each document's own hash, so that it does not depend on the order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from thinwire.errors import DataError
from thinwire.training.corpora.readers import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The division of a corpus.

    Attributes:
        num_documents: All documents.
        num_bytes: Bytes of UTF-8 in all of them.
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
    """Divide a corpus into what is trained on and what is held out.

    A document is held out when the hash of its text is in the lowest `fraction` of all hashes; equal documents go to
    the same side. At least one document is on each side; a corpus of one document is cut by position.

    Args:
        documents: Read once.
        fraction: Expected share that is held out, in (0, 1).
        name: What the corpus is called in an error.

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
        raise DataError(f"{name} is empty: there is no text in it; give a file or a folder that has some")
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
    """Encode a document's text.

    Raises:
        DataError: The text holds half of a surrogate pair, which JSON can carry and UTF-8 cannot.
    """
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{document.origin} is no valid text: character {error.start} is half of a pair; remove it"
        ) from None
