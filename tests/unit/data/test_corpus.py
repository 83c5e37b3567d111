"""Corpora from their sources to tokens on disk."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from live_processes import DEADLINE_S

from tests.sample_texts import TEXTS, decoded
from thinwire.workloads.language import BpeTokenizer, ByteTokenizer, open_corpus
from thinwire.workloads.language.corpus import divide, limit
from thinwire.workloads.language.sources import Document
from thinwire.workloads.language.tokenizers import load_tokenizer

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
        "import sys, hashlib; from thinwire.workloads.language import BpeTokenizer\n"
        "texts = [f'document {n}: to be or not to be, that is question {n * n}\\n' for n in range(60)]\n"
        "print(hashlib.sha256(BpeTokenizer.train(texts, vocab_size=400).to_json().encode()).hexdigest())"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    ).stdout
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
