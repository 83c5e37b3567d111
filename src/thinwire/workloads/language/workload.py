"""Language modelling: decoders and transformers models, trained to predict the next token of texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from thinwire.errors import CheckpointError, MissingExtra, excluded, refusal
from thinwire.planning.training_task import activation_bytes
from thinwire.workloads.cards import LANGUAGE
from thinwire.workloads.language.corpus import Corpus, open_corpus
from thinwire.workloads.language.generation import continue_briefly, find_prompts
from thinwire.workloads.language.hf import (
    HuggingFaceModel,
    build_hf_model,
    has_weights,
    load_hf_tokenizer,
    load_saved_tokenizer,
    with_adapters,
)
from thinwire.workloads.language.lengths import padded_groups
from thinwire.workloads.language.presets import PRESETS, base_name, preset
from thinwire.workloads.language.streamed import streamed
from thinwire.workloads.language.token_files import TOKENIZER
from thinwire.workloads.language.tokenizers import Tokenizer
from thinwire.workloads.language.transformer import Transformer, build_transformer
from thinwire.workloads.sampler import Sampler, ShardBatches, validation_batches
from thinwire.workloads.workload import Batch, Leases, Loss, RunOptions, SampleOutputs, Workload, rows_at_once


class LanguageModel(Protocol):
    """Interface of a model to the training loop; it is a `torch.nn.Module` too.

    Attributes:
        recompute: Whether the backward pass computes a block's activations again in place of keeping them.
        keeps_attention: Whether what attention returned is kept then; set it first.
    """

    recompute: bool
    keeps_attention: bool

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, in tokens."""

    def loss(self, tokens: Tensor, targets: Tensor, *, is_padded: bool = False) -> tuple[Tensor, Tensor]:
        """Return the loss to train on and the mean negative log-likelihood in nats, from (batch, seq) int64 each.

        With `is_padded` negative targets count nothing.
        """

    def decode(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Return the logits after more tokens of a text, (batch, vocab_size), and a cache for the next call."""


def build_model(
    name: str, *, vocab_size: int | None = None, max_seq_len: int | None = None, tied_head: bool | None = None,
    seed: int = 0, device: torch.device | str = "cpu",
) -> nn.Module:  # fmt: skip
    """Build the model of a name as for `preset`, or of `hf:` and a transformers model; the result is a `LanguageModel`.

    A `hf:` model keeps its own vocabulary, longest sequence and head: the first two must be at least as large as asked
    for.

    Raises:
        ValueError: There is no such name, or the `hf:` model is too small for the vocabulary or the sequence.
        MissingExtra: `hf:` without transformers.
        CheckpointError: The `hf:` model cannot be read.

    Example:
        >>> model = build_model("nano", vocab_size=257)
        >>> sum(parameter.numel() for parameter in model.parameters())
        2706624
    """
    if not name.startswith("hf:"):
        config = preset(name, vocab_size=vocab_size, max_seq_len=max_seq_len, tied_head=tied_head)
        return build_transformer(config, seed=seed, device=device)
    model = build_hf_model(name.removeprefix("hf:"), seed=seed, device=device)
    if vocab_size is not None:
        _check_vocabulary(model, name=name, vocab_size=vocab_size)
    if max_seq_len is not None and model.max_seq_len < max_seq_len:
        raise ValueError(f"{name} takes sequences of {model.max_seq_len} tokens, {max_seq_len} were asked for")
    return model


def _check_vocabulary(model: LanguageModel, *, name: str, vocab_size: int) -> None:
    """Refuse a tokenizer whose tokens a model does not all know."""
    if model.vocab_size < vocab_size:
        raise ValueError(f"{name} knows {model.vocab_size} tokens, the tokenizer has {vocab_size}; use a smaller one")


def make_model(config: RunOptions, *, vocab_size: int | None, device: torch.device | str) -> nn.Module:
    """Build the model; weights that are not loaded follow from the seed alone, so all replicas start from the same.

    Raises:
        ValueError: There is no such model, or it does not fit the vocabulary or the sequence.
        CheckpointError: The weights cannot be read.
        MissingExtra: `hf:` without transformers, or `--lora` without peft.
    """
    seed, run = config.run.seed, config.model.init_from
    model = build_model(
        config.model.name, vocab_size=vocab_size, max_seq_len=config.model.seq_len, seed=seed, device=device
    )
    if isinstance(model, Transformer):
        model.balance_over = config.parallel.balance_over
    cast(LanguageModel, model).keeps_attention = config.model.keep_attention
    cast(LanguageModel, model).recompute = config.model.recompute
    if isinstance(model, HuggingFaceModel):  # an earlier run's is read as a folder of transformers
        if config.model.lora is not None:
            model = with_adapters(model, rank=config.model.lora, seed=seed)
        return _streamed(config, model)
    if run is not None and torch.device(device).type != "meta":
        folder = run / "model"
        try:
            model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"cannot start from the weights in {folder}: {reason}; give the --out of a finished run of the same "
                f"model"
            ) from error
    return _streamed(config, model)


def _streamed(config: RunOptions, model: nn.Module) -> nn.Module:
    chunks = config.model.stream_backward
    return model if chunks is None else streamed(model, chunks=chunks)


def sketch(config: RunOptions) -> nn.Module:
    """Build the model on the meta device, and check what goes with it."""
    is_hf = config.model.name.startswith("hf:")
    if config.model.lora is not None:
        MissingExtra.check("peft", extra="peft")
    if config.model.lora is not None and not (is_hf and has_weights(config.model.name.removeprefix("hf:"))):
        raise refusal(
            f"--lora trains adapters of pretrained weights, and --model {config.model.name} has none",
            got=f"--lora {config.model.lora}", allowed="--model hf:PATH with weights",
            remedy="--model hf:PATH, or to leave --lora out",
        )  # fmt: skip
    tokenizer = None if is_hf else own_tokenizer(config)
    vocab_size = 257 if config.data.tokenizer == "bytes" else config.model.vocab_size
    model: Any = make_model(config, vocab_size=tokenizer.vocab_size if tokenizer else vocab_size, device="meta")
    if is_hf and (tokenizer := own_tokenizer(config)) is not None:
        _check_vocabulary(model, name=config.model.name, vocab_size=tokenizer.vocab_size)
    return cast(nn.Module, model)


def own_tokenizer(config: RunOptions) -> Tokenizer | None:
    """Return the tokenizer that comes with the model, None where `--tokenizer` makes one for the data.

    Raises:
        ValueError: Pretrained weights would get token ids of another tokenizer.
        CheckpointError: The model's tokenizer cannot be read.
        MissingExtra: `hf:` without transformers.
    """
    name, kind = config.model.name, config.data.tokenizer
    if not name.startswith("hf:"):
        return None if config.model.init_from is None else _tokenizer_of_run(config, config.model.init_from)
    source = name.removeprefix("hf:")
    is_pretrained = has_weights(source)
    found = load_hf_tokenizer(source) if kind == "auto" else None
    if is_pretrained and kind != "auto":
        raise excluded(
            f"--tokenizer {kind}", f"the pretrained weights of --model {name}",
            why="other token ids would be other rows of its embedding",
            remedy="to leave --tokenizer out, or to remove the weights and train from config.json alone",
        )  # fmt: skip
    if is_pretrained and found is None:
        raise refusal(
            f"--model {name} has pretrained weights but no tokenizer, and another one's token ids would be other rows "
            f"of its embedding",
            got="no tokenizer files", allowed="the tokenizer of the weights",
            remedy=f"tokenizer.save_pretrained({source!r}), or to remove the weights and train from config.json alone",
        )  # fmt: skip
    if found is not None and config.model.vocab_size is not None:
        raise excluded("--vocab-size", f"--model {name}", why="the model brings its own tokenizer",
                       remedy="to leave --vocab-size out")  # fmt: skip
    return found


def _tokenizer_of_run(config: RunOptions, run: Path) -> Tokenizer:
    given = {"--tokenizer": config.data.tokenizer != "auto", "--vocab-size": config.model.vocab_size}
    for option in (option for option, is_given in given.items() if is_given):
        raise excluded(option, f"--init-from {run}", why="the run brings the tokenizer of its weights",
                       remedy=f"to leave {option} out")  # fmt: skip
    path = run / "model" / "tokenizer.json"
    try:
        return load_saved_tokenizer(path.parent)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the tokenizer of --init-from cannot be read; got {path} ({error}); allowed the --out of a finished run; "
            f"try thinwire train --resume {run}"
        ) from error


def wanted_vocabulary(config: RunOptions) -> int:
    """Return how many tokens the tokenizer may have: what the user said, else what the model is made for."""
    if config.model.vocab_size is not None:
        return int(config.model.vocab_size)
    if (name := base_name(config.model.name)) in PRESETS:
        return PRESETS[name].vocab_size
    return int(make_model(config, vocab_size=None, device="meta").vocab_size)  # type: ignore[arg-type]


def open_data(config: RunOptions) -> Corpus:
    """Open the corpus; the first time on a host it is tokenised, which takes a while.

    Raises:
        DataError: There is no such corpus, or it is too small or no text.
        CheckpointError: The model's own tokenizer cannot be read.
    """
    assert config.data.cache_dir is not None
    tokenizer = own_tokenizer(config)
    if tokenizer is not None:
        return open_corpus(config.data.source, cache=config.data.cache_dir, tokenizer=tokenizer)
    return open_corpus(
        config.data.source, cache=config.data.cache_dir, vocab_size=wanted_vocabulary(config),
        tokenizer="bytes" if config.data.tokenizer == "bytes" else "bpe",
    )  # fmt: skip


def make_sampler(config: RunOptions, corpus: Corpus, replica: int) -> Sampler:
    """Return one replica's share of the corpus."""
    assert config.data.batch_size is not None and config.model.seq_len is not None
    return Sampler(
        corpus.train, replica=replica, num_replicas=config.num_replicas, batch_size=config.data.batch_size,
        seq_len=config.model.seq_len, seed=config.run.seed,
        end_of_text=corpus.tokenizer.end_of_text if config.data.sequences == "documents" else None,
    )  # fmt: skip


def held_out_batches(config: RunOptions, corpus: Corpus, num_batches: int) -> Iterable[Batch]:
    """Return at most so many held-out batches, the same at every call."""
    assert config.data.batch_size is not None and config.model.seq_len is not None
    return validation_batches(
        corpus.held_out, batch_size=config.data.batch_size, seq_len=config.model.seq_len, max_batches=num_batches
    )


def _data_of(config: RunOptions) -> Corpus:
    corpus = open_data(config)
    # refuses a corpus that does not fill one window a replica, or none to validate on
    make_sampler(config, corpus, 0)
    held_out_batches(config, corpus, 1)
    return corpus


def _saved_tokenizer(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    try:
        return load_saved_tokenizer(folder)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing, so token ids have no meaning; copy the whole run folder from the host of replica 0"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; copy it again from the host of replica 0") from error


def _saved_model(config: RunOptions, sizes: Mapping[str, int], folder: Path) -> nn.Module:
    if config.model.name.startswith("hf:"):
        return build_hf_model(str(folder))
    shape = preset(config.model.name, max_seq_len=config.model.seq_len, vocab_size=sizes["vocab_size"])
    return build_transformer(shape, weights=safetensors.torch.load_file(folder / "model.safetensors"))


def _leased(config: RunOptions, corpus: Corpus, leases: Leases) -> ShardBatches:
    return ShardBatches(
        corpus.train, batch_size=config.data.batch_size, seq_len=config.model.seq_len, seed=config.run.seed,
        shard_windows=leases.shard_windows, lend=leases.lend, ask_ahead=leases.ask_ahead,
    )  # fmt: skip


def _loss(config: RunOptions, model: nn.Module) -> Loss:
    # other models need not know of padding
    how = {"is_padded": True} if config.data.sequences == "documents" else {}

    def loss(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found, nll = model.loss(tokens, targets, **how)  # type: ignore[operator]
        return found, nll[None]

    return loss


def num_targets(targets: Tensor) -> list[int]:
    """Return how many targets of each row (batch, seq) count: those that are no padding."""
    found: list[int] = (targets >= 0).sum(1).tolist()
    return found


def _parts(config: RunOptions, tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
    if config.data.sequences != "documents":
        yield from rows_at_once(config, tokens, targets)
        return
    size, lengths = config.data.micro_batch or len(tokens), num_targets(targets)
    longest = config.model.seq_len or tokens.shape[1]
    for places in padded_groups(lengths, max_tokens=size * longest):
        part, width = torch.tensor(places, device=tokens.device), lengths[places[0]]
        share = sum(lengths[place] for place in places) / sum(lengths)
        yield tokens[part, :width], targets[part, :width], share


def _activations(config: RunOptions, model: nn.Module, sequences: int) -> float:
    about = {
        "tokens": sequences * config.model.seq_len, "bytes_per_value": 2 if config.model.autocast == "bf16" else 4,
    }  # fmt: skip
    again = 2 if config.model.keep_attention else 1  # values of a token and width that a recomputed block keeps
    found = activation_bytes(
        model, recompute=again if config.model.recompute else 0, chunks=config.model.stream_backward or 1,
        is_shared=config.parallel.cp > 1, **about,
    )  # fmt: skip
    if config.parallel.recompute_layers:
        layers = getattr(getattr(model, "config", None), "layers", 0) or 1
        share = min(1.0, config.parallel.recompute_layers * config.parallel.pp / layers)
        found += share * (activation_bytes(model, recompute=again, **about) - found)
    return found


LANGUAGE_MODELLING = Workload(
    card=LANGUAGE, open_data=_data_of, sketch=sketch,
    companion=lambda corpus: corpus.tokenizer, saved_companion=_saved_tokenizer,
    sizes=lambda tokenizer: {"vocab_size": tokenizer.vocab_size},
    make_model=lambda config, sizes, device: make_model(config, device=device, vocab_size=sizes["vocab_size"]),
    saved_model=_saved_model,
    batches=make_sampler, leased_batches=_leased, held_out=held_out_batches, loss=_loss, parts=_parts,
    num_samples=lambda targets: sum(num_targets(targets)),
    window_samples=lambda config: config.model.seq_len, activation_bytes=_activations,
    samples=SampleOutputs(prompts=find_prompts, answers=continue_briefly),
)  # fmt: skip
