"""Tokenizers: bytes, byte-level BPE trained on the corpus, or a pretrained model's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257

Tokens = NDArray[np.uint32]


class Tokenizer(Protocol):
    """Interface of a tokenizer to the corpora."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens, the end of a text included."""

    @property
    def end_of_text(self) -> int:
        """The token that follows each document; no text encodes to it."""

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode texts, each to an array (tokens,) of uint32."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become U+FFFD."""

    def to_json(self) -> str:
        """Return the text of a `tokenizer.json`, which the tokenizers library reads too."""

    def files(self) -> Mapping[str, str]:
        """Return the text files that a saved model keeps of it, by name; `tokenizer.json` is one."""


class ByteTokenizer:
    """Each byte of UTF-8 is the token of its value; 256 ends a text.

    Example:
        >>> ByteTokenizer().encode(["Aé"])[0].tolist()
        [65, 195, 169]
    """

    vocab_size = 257
    end_of_text = 256

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def to_json(self) -> str:
        """Return it as a BPE without merges."""
        alphabet = {character: byte for byte, character in enumerate(_characters_of_bytes())}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        _make_byte_level(tokenizer)
        tokenizer.add_special_tokens([END_OF_TEXT])
        return tokenizer.to_str(pretty=True)

    def files(self) -> Mapping[str, str]:
        return {"tokenizer.json": self.to_json()}


class _LibraryTokenizer:
    """A tokenizer of the tokenizers library; text that quotes a special token must not encode to it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encodings: list[Any] = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True))


class BpeTokenizer(_LibraryTokenizer):
    """Byte-level byte-pair encoding; every text can be encoded, whatever the training text was."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__(tokenizer)
        self.vocab_size: int = tokenizer.get_vocab_size()
        end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise ValueError(f"the tokenizer has no token {END_OF_TEXT}")
        self.end_of_text: int = end_of_text

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> BpeTokenizer:
        """Train on texts, read once. Pairs seen once are not merged, so a small corpus gives a smaller `vocab_size`.

        Raises:
            ValueError: The vocabulary cannot hold the 256 bytes and the end of a text.

        Example:
            >>> BpeTokenizer.train(["to be or not to be"], vocab_size=1000).vocab_size
            260
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"vocab_size must be at least {SMALLEST_VOCABULARY} (256 bytes and the end of a text), got {vocab_size}"
            )
        tokenizer = tokenizers.Tokenizer(models.BPE())
        _make_byte_level(tokenizer)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(_characters_of_bytes()), show_progress=False,
        )  # fmt: skip
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    def to_json(self) -> str:
        return str(self._tokenizer.to_str(pretty=True))

    def files(self) -> Mapping[str, str]:
        return {"tokenizer.json": self.to_json()}


class PretrainedTokenizer(_LibraryTokenizer):
    """A pretrained model's own tokenizer, from the files that save it, so that token ids are rows of its embedding."""

    def __init__(self, files: Mapping[str, str], *, end_of_text: int) -> None:
        self._files = dict(files)
        super().__init__(tokenizers.Tokenizer.from_str(self._files["tokenizer.json"]))
        # limits and padding that the file may hold are for batches of single texts
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end_of_text = end_of_text
        # ids may have gaps, so the count of tokens is not enough
        self.vocab_size = max([end_of_text, *self._tokenizer.get_vocab(with_added_tokens=True).values()]) + 1

    def to_json(self) -> str:
        return self._files["tokenizer.json"]

    def files(self) -> Mapping[str, str]:
        return dict(self._files)


def load_tokenizer(text: str) -> Tokenizer:
    """Read what `to_json` wrote."""
    try:
        # The one without merges is the one of bytes, and needs no library to encode.
        if not json.loads(text)["model"]["merges"]:
            return ByteTokenizer()
        return BpeTokenizer(tokenizers.Tokenizer.from_str(text))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"this is no tokenizer.json: {error}") from error


def _make_byte_level(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()


def _characters_of_bytes() -> list[str]:
    # The library writes a byte as a printable character: itself where it is one, else the next free one from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    free = iter(range(256, 512))
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]
