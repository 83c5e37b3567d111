"""`thinwire generate`, `export` and `eval`: use of the model that a run has trained."""

from __future__ import annotations

import json as json_format
import math
import time
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.argument_parsing import argument, command
from thinwire.cli.output import log, printable
from thinwire.errors import refusal
from thinwire.options import option
from thinwire.runlog.measures import per_sample
from thinwire.training.config import TrainConfig, check_language, find_run, read_config
from thinwire.units import format_bytes, parse_bytes
from thinwire.workloads.cards import LANGUAGE, WorkloadCard, card_of

if TYPE_CHECKING:
    from thinwire.inference import TrainedModel

# Layout of a text; everything else that could steer the terminal is replaced.
_KEPT = ("\n", "\t")
_PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Continue a text with the model of a run; the tokens are printed as they come."""

    run: Path = argument("RUN")
    """The run's folder."""
    prompt: str
    """Beginning of the text."""
    max_tokens: int = option(200, least=1)
    """Tokens to add, at most; the model may end the text earlier."""
    temperature: float = option(0.8, least=0)
    """Lower is more predictable; 0 takes the most likely token each time."""
    top_k: int = option(50, least=0)
    """Draw among so many of the most likely tokens; 0 draws among all."""
    seed: int = 0
    """Of the draws: the same seed gives the same text."""
    step: int | None = None
    """Take the checkpoint of this step. Default: the run's result, else its newest checkpoint."""
    device: str = option("cpu", choices=("cpu", "cuda"))
    """cpu or cuda."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Write the model of a run into a folder that other software opens."""

    run: Path = argument("RUN")
    """The run's folder."""
    to: str = option(MISSING, choices=("hf", "safetensors"))
    """hf: a folder for AutoModelForCausalLM and AutoTokenizer; safetensors: weights under thinwire's names."""
    out: Path
    """New or empty folder."""
    step: int | None = None
    """Take the checkpoint of this step. Default: the run's result, else its newest checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Compute loss, perplexity and bits per byte of the model of a run on a text, or loss and accuracy on images."""

    run: Path = argument("RUN")
    """The run's folder."""
    data: str | None = None
    """File, folder, stdlib or hf:NAME, as for train. Default: the part of the run's data that was held out."""
    max_bytes: str | None = None
    """Text to read at most, such as 200kB; 0 reads all. Default: 1MB."""
    batch_size: int = option(8, least=1)
    """Sequences that are computed together."""
    step: int | None = None
    """Take the checkpoint of this step. Default: the run's result, else its newest checkpoint."""
    device: str = option("cpu", choices=("cpu", "cuda"))
    """cpu or cuda."""
    json: bool = False
    """Print one JSON object on stdout instead of lines."""


@command("generate", GenerateOptions)
def generate(options: GenerateOptions) -> int:
    """Run `thinwire generate`."""
    if not options.prompt:
        raise refusal("--prompt is empty", got="''", allowed="one character or more", remedy="--prompt 'def '")
    config = _config_of(options)
    check_language(config, what="thinwire generate", remedy=f"thinwire eval {options.run}")
    trained = _load(options)
    from thinwire.workloads.language.generation import Sampling
    from thinwire.workloads.language.generation import generate as continuation

    sampling = Sampling(
        max_tokens=options.max_tokens, temperature=options.temperature, top_k=options.top_k, seed=options.seed
    )
    began_s = time.monotonic()
    print(_plain(options.prompt), end="", flush=True)
    for piece in continuation(trained.model, trained.tokenizer, options.prompt, sampling=sampling):
        print(_plain(piece), end="", flush=True)
    print(flush=True)
    log(f"{_origin(trained)}; {time.monotonic() - began_s:.1f} s", command="generate")
    return 0


@command("export", ExportOptions, remedy="choose another --out")
def export(options: ExportOptions) -> int:
    """Run `thinwire export`."""
    config = _config_of(options)
    if options.to == "hf":
        check_language(config, what="--to hf", remedy="--to safetensors")
    trained = _load(options)
    from thinwire.inference import export_model

    export_model(trained, options.out, to=options.to)
    num_bytes = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.out}: {format_bytes(num_bytes)}, {_origin(trained)}")
    return 0


@command("eval", EvalOptions)
def eval(options: EvalOptions) -> int:  # noqa: A001
    """Run `thinwire eval`."""
    max_bytes = math.ceil(parse_bytes("1MB" if options.max_bytes is None else options.max_bytes)) or None
    config = _config_of(options)
    if (card := card_of(config.run.workload)) is not LANGUAGE:
        for flag, given in (("--data", options.data), ("--max-bytes", options.max_bytes)):
            if given is not None:
                check_language(config, what=flag, remedy=f"to leave {flag} out")
        return _eval_held_out(options, card)
    trained = _load(options)
    from thinwire.inference import evaluate, read_texts

    texts = read_texts(trained, data=options.data, max_bytes=max_bytes)
    found = evaluate(trained, texts, batch_size=options.batch_size, on_tokens=TokenProgress("eval"))
    data = options.data or f"held-out part of {trained.config.data.source}"
    is_cut = max_bytes is not None and found.num_bytes >= max_bytes - 3  # a character is not cut
    values = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    counts = {"tokens": found.num_tokens, "bytes": found.num_bytes, "data": data, "step": trained.step}
    rows = {
        "loss": f"{found.loss:.4f} nats per token",
        "perplexity": f"{found.perplexity:,.2f}",
        "bits per byte": f"{found.bits_per_byte:.4f}",
        "text": f"{printable(data)}: {'the first ' if is_cut else ''}{format_bytes(found.num_bytes)}, "
        f"{found.num_tokens:,} tokens",
        "model": _origin(trained),
    }
    return print_found(values, counts, rows, as_json=options.json)


def _eval_held_out(options: EvalOptions, card: WorkloadCard) -> int:
    trained = _load(options)
    from thinwire.inference import evaluate_held_out

    (loss, *others), count = evaluate_held_out(trained, batch_size=options.batch_size)
    metric, samples = card.measures.metric, card.measures.samples
    data = f"held-out part of {trained.config.data.source}"
    rows = {} if metric is None else {metric.name: metric.show(others[0])}
    rows |= {
        "loss": f"{loss:.4f} {per_sample(samples)}", "data": f"{printable(data)}: {count:,} {samples}",
        "model": _origin(trained),
    }  # fmt: skip
    values = {"loss": loss, **({} if metric is None else {metric.name: others[0]})}
    counts = {samples: count, "data": data, "step": trained.step}
    return print_found(values, counts, rows, as_json=options.json)


def print_found(
    values: Mapping[str, float], counts: Mapping[str, object], rows: Mapping[str, str], *, as_json: bool
) -> int:
    """Print what an evaluation found: values and counts as one JSON object, or rows for readers."""
    if as_json:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        print(json_format.dumps({**finite, **counts}), flush=True)
        return 0
    for name, value in rows.items():
        print(f"{name:<15}{value}")
    return 0


class TokenProgress:
    """Logs now and then how much of a text is done, and how long the rest will take."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._began_s = self._logged_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _PROGRESS_S and done < total:
            self._logged_s = now_s
            left_s = (now_s - self._began_s) * (total - done) / done
            log(f"{done:,} of {total:,} tokens, {left_s:.0f} s left", command=self._command)


def _config_of(options: GenerateOptions | ExportOptions | EvalOptions) -> TrainConfig:
    """Check what names a model, without torch, and return the options of its run."""
    if options.step is not None and options.step < 1:
        raise refusal("--step is too small", got=options.step, allowed="1 or more",
                      remedy=f"thinwire checkpoints {options.run}, which lists the steps")  # fmt: skip
    return read_config(find_run(options.run))


def _load(options: GenerateOptions | ExportOptions | EvalOptions) -> TrainedModel:
    from thinwire.inference import load_trained

    return load_trained(options.run, step=options.step, device=getattr(options, "device", "cpu"))


def _origin(trained: TrainedModel) -> str:
    kind = "the result" if trained.is_final else "a checkpoint"
    whose = "global parameters" if trained.replica is None else f"replica {trained.replica}'s own parameters"
    return f"{whose} of {printable(trained.run_dir)}, {kind}, after step {trained.step:,}"


def _plain(text: str) -> str:
    return "".join(character if character in _KEPT else printable(character) for character in text)
