"""The texts that `thinwire train` learns from: read, tokenised once, held out in part, and dealt to replicas."""

from thinwire.training.corpora.corpus import Corpus, open_corpus
from thinwire.training.corpora.sampler import Sampler, validation_batches
from thinwire.training.corpora.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer

__all__ = ["BpeTokenizer", "ByteTokenizer", "Corpus", "Sampler", "Tokenizer", "open_corpus", "validation_batches"]
