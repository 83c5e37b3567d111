"""Global model of a run, loaded from the run's folder, its evaluation on text, and its export."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from thinwire.ensembles.ensemble import Ensemble
from thinwire.ensembles.expert_set import CachedPrior, ExpertSet, document_hash
from thinwire.errors import CheckpointError, DataError, ThinwireError, refusal, unknown_name
from thinwire.experts.convert import Spectrum, to_low_rank
from thinwire.files import replace_whole, write_whole
from thinwire.training.build import check_device, make_inner_optimizer, make_method
from thinwire.training.checkpoints.checkpoint_files import CheckpointFiles, open_storage, reason_of
from thinwire.training.checkpoints.global_checkpoints import MODEL_FILE, global_files
from thinwire.training.checkpoints.replica_checkpoints import replica_files, unflatten_state
from thinwire.training.config import TrainConfig, check_language, config_text, find_run, read_config
from thinwire.training.elastic.job import LocalSettings
from thinwire.training.summary import save_tensors, write_model
from thinwire.workloads.language import Transformer
from thinwire.workloads.language.corpus import HELD_OUT_FRACTION, divide, limit
from thinwire.workloads.language.presets import TransformerConfig, base_name, preset
from thinwire.workloads.language.sources import Document, open_source
from thinwire.workloads.language.tokenizers import END_OF_TEXT, Tokenizer
from thinwire.workloads.language.transformer import RMS_EPSILON, ROTARY_BASE
from thinwire.workloads.sampler import windows
from thinwire.workloads.workload import Companion

MODEL_FOLDER = "model"
_WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedModel:
    """The global model of a run, or a replica's where the method has no global one, with its companion.

    Attributes:
        model: In evaluation mode, on the device that was asked for; of a run on texts a `LanguageModel` too.
        companion: What belongs beside the weights: the tokenizer of a language model.
        step: Inner steps after which it was taken.
        is_final: Whether it is the result of the run, with its final exchange.
        replica: Replica whose own parameters these are, as in a checkpoint of noloco; None for global ones.
    """

    run_dir: Path
    config: TrainConfig
    model: nn.Module
    companion: Companion
    step: int
    is_final: bool
    replica: int | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return cast(Tokenizer, self.companion)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load_trained(run_dir: Path, *, step: int | None = None, device: str = "cpu") -> TrainedModel:
    """Load the global model of a run: its result, or that of its newest checkpoint.

    Raises:
        CheckpointError: There is no run, no checkpoint or no such step, or a file is damaged; names the remedy.
        ValueError: There is no such device.
    """
    if device not in ("cpu", "cuda"):
        raise unknown_name("--device", device, ("cpu", "cuda"))
    check_device(device)
    config = read_config(find_run(run_dir))
    if (own := LocalSettings.of_resumed(config.replace(resume=run_dir))) is not None:
        config = own.with_own_places(config)  # the options may be those of another host
    config, workload = config.replace(out=run_dir), config.workload
    is_final = step is None and any((run_dir / MODEL_FOLDER).glob(_WEIGHTS))
    replica = None
    if is_final:
        step = config.run.steps
        companion, folder = workload.saved_companion(run_dir / MODEL_FOLDER), run_dir / MODEL_FOLDER
        try:
            model = workload.saved_model(config, workload.sizes(companion), folder)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder / MODEL_FILE} is not the model of this run: {reason_of(error)}; take a checkpoint with --step"
            ) from error
    else:
        files, step, replica = _checkpoint(config, step)
        companion = workload.saved_companion(run_dir / MODEL_FOLDER)
        model = _model_of_checkpoint(config, files, companion, step=step)
    model.eval().requires_grad_(False)
    return TrainedModel(
        run_dir=run_dir, config=config, model=model.to(device), companion=companion, step=step, is_final=is_final,
        replica=replica,
    )  # fmt: skip


def _checkpoint(config: TrainConfig, step: int | None) -> tuple[CheckpointFiles, int, int | None]:
    """Return the files of the wanted checkpoint, or of the newest one that verifies, its step, and its replica.

    The replica is None where all replicas share the parameters, so that those of any one serve.
    """
    owners: dict[CheckpointFiles, int | None] = {}
    if config.elastic.is_enabled:
        owners[global_files(open_storage(config.elastic.checkpoint_to or config.run_dir / "checkpoints"))] = None
    else:
        is_shared = make_method(config).has_common_value
        for replica, files in replica_files(open_storage(config.run_dir / "checkpoints")).items():
            owners[files] = None if is_shared else replica
    steps = {number: files for files in reversed(owners) for number in files.steps()}
    if step is not None and step not in steps:
        known = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointError(
            f"{config.run_dir} has no checkpoint of step {step}; take one of its checkpoints: {known}"
        )
    if step is not None:
        return steps[step], step, owners[steps[step]]
    for number in sorted(steps, reverse=True):
        if not steps[number].problem(number):
            return steps[number], number, owners[steps[number]]
    if steps:
        raise CheckpointError(f"{steps[max(steps)].problem(max(steps))}")
    every = config.output.checkpoint_every
    when = f"the first comes after step {min(every, config.run.steps)}" if every else "they come at the end"
    raise CheckpointError(
        f"{config.run_dir} has no checkpoint yet: {when}; let the run go on (thinwire train "
        f"--resume {config.run_dir}, if it was stopped), and try again"
    )


def _model_of_checkpoint(
    config: TrainConfig, files: CheckpointFiles, companion: Companion, *, step: int
) -> nn.Module:  # fmt: skip
    tensors, skeleton = files.load(step)
    model = config.workload.make_model(config, config.workload.sizes(companion), "cpu")
    try:
        with torch.no_grad():
            if config.elastic.is_enabled:
                _copy(tensors[MODEL_FILE], dict(model.named_parameters()))
            else:
                state = unflatten_state(next(iter(tensors.values())), skeleton)
                # frozen parameters are not in a checkpoint
                _copy(state["model"], {name: p for name, p in model.named_parameters() if p.requires_grad})
                _copy(state["buffers"], dict(model.named_buffers()))
                view = make_method(config).view.bind(model, inner=make_inner_optimizer(config, model))
                view.parameters.load_state_dict(state["optimizer"]["sync"]["global"])
                view.parameters.forget_locals()
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{files.path(step)} does not fit the model of this run: {error}; take another --step"
        ) from error
    return model


def _copy(saved: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    for name, tensor in own.items():
        tensor.copy_(saved[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Loss of a model on a text.

    Attributes:
        loss: Mean negative log-likelihood, nats a token; the end of each document counts as a token.
        num_tokens: Tokens that were predicted.
        num_bytes: UTF-8 bytes of the text.
    """

    loss: float
    num_tokens: int
    num_bytes: int

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits that a coder with this model would need for a byte of the text.

        Example:
            >>> Evaluation(loss=math.log(2), num_tokens=30, num_bytes=60).bits_per_byte
            0.5
        """
        return self.loss * self.num_tokens / math.log(2) / self.num_bytes


def read_texts(
    trained: TrainedModel, *, data: str | None, max_bytes: int | None,
    on_document: Callable[[str], object] | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yield the texts to evaluate on: of `data`, or what was held out of the run's own; at most so many bytes of UTF-8.

    `on_document` is called with each text before it is cut to the limit.

    Raises:
        DataError: There is no such data.
    """
    cache = Path(trained.config.data.cache_dir or Path.home() / ".cache" / "thinwire")
    source = open_source(data or trained.config.data.source, cache=cache)
    documents: Iterable[Document] = source.documents()
    if data is None:
        split = divide(source.documents(), fraction=HELD_OUT_FRACTION, name=source.name)
        parts = split.parts(source.documents())
        documents = (Document(origin=source.name, text=text) for text, is_held_out in parts if is_held_out)

    def every() -> Iterator[Document]:
        for document in documents:
            if on_document is not None:
                on_document(document.text)
            yield document

    for document in limit(every(), max_bytes=max_bytes):
        yield document.text


def evaluate(
    trained: TrainedModel, texts: Iterable[str], *, batch_size: int = 8,
    on_tokens: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:  # fmt: skip
    """Return the loss of a model on texts.

    Every token of every text is predicted, and its end too. The texts form one sequence, as in training: the end of a
    text stands between two, and before the first. It is read in windows of the run's sequence length, each of which
    starts without what came before. `on_tokens` is called with the tokens that are done, and all of them.

    Raises:
        DataError: There is no text.
    """
    tokens, num_bytes = _one_sequence(trained, texts)
    seq_len = trained.config.model.seq_len or 1024
    total, done = 0.0, 0
    for inputs, targets in _batches(tokens, seq_len=seq_len, batch_size=batch_size):
        with torch.no_grad():
            loss: Any = trained.model.loss  # a LanguageModel's
            nll = loss(inputs.to(trained.device), targets.to(trained.device))[1]
        total += float(nll) * targets.numel()
        done += targets.numel()
        on_tokens(done, len(tokens) - 1)
    return Evaluation(loss=total / (len(tokens) - 1), num_tokens=len(tokens) - 1, num_bytes=num_bytes)


def _one_sequence(trained: TrainedModel, texts: Iterable[str]) -> tuple[np.ndarray[Any, Any], int]:
    """Return the tokens of texts with the end of a text around each, and the bytes of the texts."""
    end = np.array([trained.tokenizer.end_of_text], dtype=np.int64)
    num_bytes, pieces = 0, [end]
    for text in texts:
        num_bytes += len(text.encode())
        pieces += [trained.tokenizer.encode([text])[0].astype(np.int64), end]
    if not num_bytes:
        raise DataError("--data holds no text; give a file or a folder that has some")
    return np.concatenate(pieces), num_bytes


def _batches(
    tokens: np.ndarray[Any, Any], *, seq_len: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield all windows in order; the last one is as long as what is left."""
    whole = (len(tokens) - 1) // seq_len
    for begin in range(0, whole, batch_size):
        yield windows(tokens, np.arange(begin, min(whole, begin + batch_size)), seq_len=seq_len)
    rest = torch.from_numpy(tokens[whole * seq_len :])[None]
    if rest.shape[1] > 1:
        yield rest[:, :-1], rest[:, 1:]


_ALL_BATCHES = 1 << 40


def evaluate_held_out(trained: TrainedModel, *, batch_size: int = 8) -> tuple[list[float], int]:
    """Return loss and metric of a model on all data that its run held out, and the number of samples.

    Raises:
        MissingExtra: What reads the data is not installed.
    """
    config, workload = trained.config.replace(batch_size=batch_size, micro_batch=None), trained.config.workload
    loss, totals, count = workload.loss(config, trained.model), torch.zeros(()), 0
    for inputs, targets in workload.held_out(config, workload.open_data(config), _ALL_BATCHES):
        with torch.no_grad():
            shown = loss(inputs.to(trained.device), targets.to(trained.device))[1]
        weight = workload.num_samples(targets)
        totals = totals + shown.cpu().double() * weight
        count += weight
    return (totals / count).tolist(), count


def convert_experts(trained: TrainedModel, *, rank: int, least_energy: float) -> tuple[TrainedModel, list[Spectrum]]:
    """Return a model whose tokens travel to experts in fewer dimensions, and the spectra of all layers' weights.

    Raises:
        ValueError: It is no mixture of experts of ours, the rank is out of range, or a layer would keep less of its
            squared weights.
    """
    name, model = trained.config.model.name, copy.deepcopy(trained.model)
    if not isinstance(model, Transformer) or not model.config.num_experts:
        raise refusal("only mixtures of experts of thinwire are converted", got=f"--model {name}",
                      allowed="a run of moe-nano or moe-35m", remedy="thinwire train --model moe-nano")  # fmt: skip
    spectra: list[Spectrum] = []
    for block in model.blocks:
        block.experts, found = to_low_rank(block.experts, rank)  # type: ignore[arg-type]
        spectra += found
    worst = min(spectra, key=lambda one: one.energy)
    if worst.energy < least_energy:
        enough = max(one.rank_of(least_energy) for one in spectra)
        raise refusal("a layer would keep too little of its squared weights", got=f"{worst.energy:.3f} at rank {rank}",
                      allowed=f"--least-energy {least_energy} or more", remedy=f"--rank {enough}")  # fmt: skip
    model.config = preset(
        f"{base_name(name)}-r{rank}", vocab_size=model.config.vocab_size, max_seq_len=model.config.max_seq_len
    )
    config = trained.config.replace(model=f"{base_name(name)}-r{rank}")
    return replace(trained, model=model.eval().requires_grad_(False), config=config), spectra


def write_run(trained: TrainedModel, out: Path) -> None:
    """Write options and model as a finished run, with nothing of its training."""
    check_new_folder(out)
    try:
        (out / MODEL_FOLDER).mkdir(parents=True, exist_ok=True)
        write_model(out / MODEL_FOLDER, trained.model, files=trained.companion.files())
        write_whole(out / "config.json", config_text(trained.config))
    except OSError as error:
        raise ThinwireError(f"cannot write to {out}: {error.strerror or error}; choose another --out") from error


def open_experts(folder: Path, *, device: str = "cpu") -> ExpertSet:
    """Read a set of experts, whose checkpoints are loaded as those of any run.

    Raises:
        DataError: `set.json` is missing or malformed.
        CheckpointError: A checkpoint is missing.
    """
    return ExpertSet.load(folder, open_model=lambda run: load_trained(run, device=device).model)


def as_trained(experts: ExpertSet, ensemble: Ensemble) -> TrainedModel:
    """Return an ensemble of a set as one model, for `read_texts` and `evaluate`; its windows fit every member."""
    runs = [experts.checkpoint(expert) for expert in experts.experts]
    config = read_config(runs[0])
    seq_len = min(read_config(run).model.seq_len or 1024 for run in runs)
    return TrainedModel(
        run_dir=experts.folder, config=config.replace(seq_len=seq_len), model=ensemble, step=config.run.steps,
        companion=config.workload.saved_companion(runs[0] / MODEL_FOLDER), is_final=True,
    )  # fmt: skip


def with_cached_prior(
    experts: ExpertSet, data: str, *, max_bytes: int | None = None, num_sequences: int = 100
) -> ExpertSet:
    """Return the set with a prior from so many sequences of development text, spread evenly over it.

    Raises:
        DataError: There is no such text, or less than one sequence of it.
    """
    ensemble = experts.ensemble("updating")  # a cached prior is what an updating one has reached
    trained = as_trained(experts, ensemble)
    hashes: set[str] = set()
    texts = read_texts(trained, data=data, max_bytes=max_bytes, on_document=lambda one: hashes.add(document_hash(one)))
    tokens, seq_len = _one_sequence(trained, texts)[0], trained.config.model.seq_len or 1024
    count = (len(tokens) - 1) // seq_len
    if not count:
        raise DataError(f"{data} holds {len(tokens)} tokens, less than one sequence of {seq_len}; give more text")
    numbers = np.linspace(0, count - 1, min(num_sequences, count)).astype(np.int64)
    for begin in range(0, len(numbers), 10):
        inputs, targets = windows(tokens, numbers[begin : begin + 10], seq_len=seq_len)
        ensemble.loss(inputs.to(trained.device), targets.to(trained.device))
    prior = CachedPrior(weights=tuple(ensemble.prior.tolist()), documents=tuple(sorted(hashes)))
    return replace(experts, prior=prior)


FORMATS = ("hf", "safetensors")


def export_model(trained: TrainedModel, folder: Path, *, to: str) -> None:
    """Write a model and its tokenizer into a new or empty folder.

    As `hf`, `AutoModelForCausalLM` and `AutoTokenizer` of transformers open it without code of ours; as `safetensors`
    it has the weights under our names, as in the run's `model` folder.

    Raises:
        ValueError: The format is unknown, or the folder holds something.
        ThinwireError: The folder cannot be written.
    """
    if to not in FORMATS:
        raise unknown_name("--to", to, FORMATS)
    if to == "hf":
        check_language(trained.config, what="--to hf", remedy="--to safetensors")
        if isinstance(trained.model, Transformer) and (config := trained.model.config).is_linear + config.num_experts:
            kind = "linear attention" if config.is_linear else "mixture of experts"
            raise refusal(f"transformers has no model of our {kind}", got=f"--to {to}", allowed="safetensors",
                          remedy="--to safetensors")  # fmt: skip
    check_new_folder(folder)
    files = trained.companion.files()
    model: Any = trained.model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if to == "safetensors" or not isinstance(model, Transformer):
            write_model(folder, model, files=files)
        else:
            tensors = apertus_tensors(model)
            replace_whole(
                folder / "model.safetensors", lambda path: save_tensors(tensors, path, metadata={"format": "pt"})
            )
            shape = apertus_config(model.config, end_of_text=trained.tokenizer.end_of_text)
            write_whole(folder / "config.json", json.dumps(shape, indent=2) + "\n")
            for name, content in files.items():
                write_whole(folder / name, content)
        if to == "hf" and not (folder / "tokenizer_config.json").exists():
            settings = tokenizer_settings(max_seq_len=model.max_seq_len)
            write_whole(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    except OSError as error:
        raise ThinwireError(f"cannot write to {folder}: {error.strerror or error}; choose another --out") from error


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise refusal("--out is not empty", got=folder, allowed="a new or empty folder", remedy=f"--out {folder}-2")


def apertus_config(shape: TransformerConfig, *, end_of_text: int) -> dict[str, Any]:
    """Return the `config.json` with which transformers builds a decoder of ours."""
    return {
        "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "dtype": "float32",
        "vocab_size": shape.vocab_size, "hidden_size": shape.dim, "intermediate_size": shape.mlp_dim,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.heads,
        "hidden_act": "gelu", "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": RMS_EPSILON,
        "max_position_embeddings": shape.max_seq_len, "tie_word_embeddings": shape.tied_head,
        # transformers 5 reads the first, version 4 the other two
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "rope_theta": ROTARY_BASE, "rope_scaling": None,
        "bos_token_id": None, "eos_token_id": end_of_text, "pad_token_id": None, "use_cache": True,
    }  # fmt: skip


def apertus_tensors(model: Transformer) -> dict[str, Tensor]:
    """Return a decoder's weights under the names of transformers' Apertus, on the CPU.

    Example:
        >>> from thinwire.workloads.language import build_transformer
        >>> model = build_transformer(TransformerConfig(vocab_size=16, dim=8, layers=1, heads=2))
        >>> [name for name in apertus_tensors(model) if "proj" in name][:2]
        ['model.layers.0.self_attn.q_proj.weight', 'model.layers.0.self_attn.k_proj.weight']
    """
    found = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.gain}
    if model.head is not None:
        found["lm_head.weight"] = model.head.weight
    blocks: Any = model.blocks
    for number, block in enumerate(blocks):
        attention = block.attention
        matrices = attention.query_key_value.weight.chunk(3)
        gains = attention.query_key_norm.gain.chunk(2)
        layer = {
            **{f"self_attn.{name}_proj": matrix for name, matrix in zip("qkv", matrices, strict=True)},
            **{f"self_attn.{name}_norm": gain for name, gain in zip("qk", gains, strict=True)},
            "self_attn.o_proj": attention.out.weight,
            "attention_layernorm": block.attention_norm.gain, "feedforward_layernorm": block.mlp_norm.gain,
            "mlp.up_proj": block.up.weight, "mlp.down_proj": block.down.weight,
        }  # fmt: skip
        found |= {f"model.layers.{number}.{name}.weight": value for name, value in layer.items()}
    return {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in found.items()}


def tokenizer_settings(*, max_seq_len: int) -> dict[str, Any]:
    """Return the `tokenizer_config.json` beside a `tokenizer.json` of ours."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
        # text that quotes the marker stays text, as in training
        "split_special_tokens": True,
    }  # fmt: skip
