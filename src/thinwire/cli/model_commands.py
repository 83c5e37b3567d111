"""`thinwire generate`, `export` and `eval`: use of the model that a run has trained."""

from __future__ import annotations

import json as json_format
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.argument_parsing import command, parse_options
from thinwire.cli.output import log, printable
from thinwire.cli.train_options import is_named
from thinwire.errors import refusal, unknown_name
from thinwire.options import option
from thinwire.runlog.measures import per_sample
from thinwire.training.config import TrainConfig, check_language, find_run, read_config
from thinwire.units import format_bytes, parse_bytes
from thinwire.workloads.cards import LANGUAGE, WorkloadCard, card_of

if TYPE_CHECKING:
    from thinwire.inference import TrainedModel

_Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
# Layout of a text; everything else that could steer the terminal is replaced.
_KEPT = ("\n", "\t")
_PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Continue a text with the model of a run; the tokens are printed as they come."""

    run: _Run
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
    device: str = "cpu"
    """cpu or cuda."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Write the model of a run into a folder that other software opens."""

    run: _Run
    """The run's folder."""
    to: str
    """hf: a folder for AutoModelForCausalLM and AutoTokenizer; safetensors: weights under thinwire's names."""
    out: Path
    """New or empty folder."""
    step: int | None = None
    """Take the checkpoint of this step. Default: the run's result, else its newest checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Compute loss, perplexity and bits per byte of the model of a run on a text, or loss and accuracy on images."""

    run: _Run
    """The run's folder."""
    data: str | None = None
    """File, folder, stdlib or hf:NAME, as for train. Default: the part of the run's data that was held out."""
    max_bytes: str = "1MB"
    """Text to read at most, such as 200kB; 0 reads all."""
    batch_size: int = option(8, least=1)
    """Sequences that are computed together."""
    step: int | None = None
    """Take the checkpoint of this step. Default: the run's result, else its newest checkpoint."""
    device: str = "cpu"
    """cpu or cuda."""
    json: bool = False
    """Print one JSON object on stdout instead of lines."""


@command("generate")
def generate(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire generate --help`.

    Returns:
        0, 1 for an error while running, 2 for wrong options.
    """
    options = parse_options(GenerateOptions, arguments, prog="thinwire generate")
    if not options.prompt:
        raise refusal("--prompt is empty", got="''", allowed="one character or more", remedy="--prompt 'def '")
    config = _config_of(options.run, step=options.step, device=options.device)
    check_language(config, what="thinwire generate", remedy=f"thinwire eval {options.run}")
    trained = _load(options.run, step=options.step, device=options.device)
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


@command("export", remedy="choose another --out")
def export(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire export --help`.

    Returns:
        0, 1 for an error while running, 2 for wrong options.
    """
    options = parse_options(ExportOptions, arguments, prog="thinwire export")
    if options.to not in ("hf", "safetensors"):
        raise unknown_name("--to", options.to, ("hf", "safetensors"))
    config = _config_of(options.run, step=options.step)
    if options.to == "hf":
        check_language(config, what="--to hf", remedy="--to safetensors")
    trained = _load(options.run, step=options.step, device="cpu")
    from thinwire.inference import export_model

    export_model(trained, options.out, to=options.to)
    num_bytes = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.out}: {format_bytes(num_bytes)}, {_origin(trained)}")
    return 0


@command("eval")
def eval(arguments: Sequence[str]) -> int:  # noqa: A001
    """Run the command; see `thinwire eval --help`.

    Returns:
        0, 1 for an error while running, 2 for wrong options.
    """
    options = parse_options(EvalOptions, arguments, prog="thinwire eval")
    max_bytes = int(parse_bytes(options.max_bytes)) or None
    config = _config_of(options.run, step=options.step, device=options.device)
    if (card := card_of(config.run.workload)) is not LANGUAGE:
        for name in ("data", "max-bytes"):
            if is_named(name, arguments):
                check_language(config, what=f"--{name}", remedy=f"to leave --{name} out")
        return _eval_held_out(options, card)
    trained = _load(options.run, step=options.step, device=options.device)
    from thinwire.inference import evaluate, read_texts

    texts = read_texts(trained, data=options.data, max_bytes=max_bytes)
    found = evaluate(trained, texts, batch_size=options.batch_size, on_tokens=_Progress())
    data = options.data or f"held-out part of {trained.config.data.source}"
    if options.json:
        values = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        counts = {"tokens": found.num_tokens, "bytes": found.num_bytes, "data": data, "step": trained.step}
        print(json_format.dumps({**finite, **counts}), flush=True)
        return 0
    is_cut = max_bytes is not None and found.num_bytes >= max_bytes - 3  # a character is not cut
    rows = {
        "loss": f"{found.loss:.4f} nats per token",
        "perplexity": f"{found.perplexity:,.2f}",
        "bits per byte": f"{found.bits_per_byte:.4f}",
        "text": f"{printable(data)}: {'the first ' if is_cut else ''}{format_bytes(found.num_bytes)}, "
        f"{found.num_tokens:,} tokens",
        "model": _origin(trained),
    }
    for name, value in rows.items():
        print(f"{name:<15}{value}")
    return 0


def _eval_held_out(options: EvalOptions, card: WorkloadCard) -> int:
    trained = _load(options.run, step=options.step, device=options.device)
    from thinwire.inference import evaluate_held_out

    (loss, *values), count = evaluate_held_out(trained, batch_size=options.batch_size)
    metric, samples = card.measures.metric, card.measures.samples
    named = {} if metric is None else {metric.name: values[0]}
    data = f"held-out part of {trained.config.data.source}"
    if options.json:
        finite = {name: value if math.isfinite(value) else None for name, value in {"loss": loss, **named}.items()}
        print(json_format.dumps({**finite, samples: count, "data": data, "step": trained.step}), flush=True)
        return 0
    rows = {} if metric is None else {metric.name: metric.show(values[0])}
    rows |= {
        "loss": f"{loss:.4f} {per_sample(samples)}", "data": f"{printable(data)}: {count:,} {samples}",
        "model": _origin(trained),
    }  # fmt: skip
    for name, value in rows.items():
        print(f"{name:<15}{value}")
    return 0


class _Progress:
    """Logs now and then how much of a text is done, and how long the rest will take."""

    def __init__(self) -> None:
        self._began_s = self._logged_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _PROGRESS_S and done < total:
            self._logged_s = now_s
            left_s = (now_s - self._began_s) * (total - done) / done
            log(f"{done:,} of {total:,} tokens, {left_s:.0f} s left", command="eval")


def _config_of(run_dir: Path, *, step: int | None, device: str = "cpu") -> TrainConfig:
    """Check what names a model, without torch, and return the options of its run."""
    if device not in ("cpu", "cuda"):
        raise unknown_name("--device", device, ("cpu", "cuda"))
    if step is not None and step < 1:
        raise refusal("--step is too small", got=step, allowed="1 or more",
                      remedy=f"thinwire checkpoints {run_dir}, which lists the steps")  # fmt: skip
    return read_config(find_run(run_dir))


def _load(run_dir: Path, *, step: int | None, device: str) -> TrainedModel:
    from thinwire.inference import load_trained

    return load_trained(run_dir, step=step, device=device)


def _origin(trained: TrainedModel) -> str:
    kind = "the result" if trained.is_final else "a checkpoint"
    whose = "global parameters" if trained.replica is None else f"replica {trained.replica}'s own parameters"
    return f"{whose} of {printable(trained.run_dir)}, {kind}, after step {trained.step:,}"


def _plain(text: str) -> str:
    return "".join(character if character in _KEPT else printable(character) for character in text)
