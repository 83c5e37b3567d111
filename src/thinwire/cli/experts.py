"""`thinwire experts`: experts that are trained apart with `thinwire train`, and combined afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.cli.argument_parsing import USAGE, argument, command
from thinwire.cli.model_commands import TokenProgress, print_found
from thinwire.cli.output import log, printable
from thinwire.ensembles.expert_set import PRIORS, ExpertSet
from thinwire.errors import refusal, unknown_name
from thinwire.options import option
from thinwire.units import format_bytes, parse_bytes

_HELP = """\
usage: thinwire experts add|branch|eval|merge SET [OPTIONS]
       thinwire experts convert RUN [OPTIONS]

Combine experts that are trained apart, each with thinwire train.

  add        copy the finished model of a run into the folder SET
  convert    let tokens of a mixture of experts travel in fewer dimensions
  branch     write the start of a new expert: one member, or an average
  eval       compute loss and perplexity of all experts together
  merge      write the weighted average of like experts as one model

thinwire experts eval --help lists the options of eval.

Options:
  -h, --help                Show this help.
"""
_REMEDY = "choose another folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddOptions:
    """Copy the finished model of a run into a set of experts, which is made where there is none."""

    experts: Path = argument("SET")
    """Folder of the set."""
    run: Path = argument("RUN")
    """The --out of a finished run with the tokenizer of the set: branched from a member, or of the same data."""
    name: str
    """Name of the expert in the set."""
    domain: str = ""
    """Text that it was trained on, in your words. Default: its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchOptions:
    """Write the start of a new expert as a folder for `thinwire train --init-from`.

    With --start it is one member. With --data it is the average of all, weighted by how probable each makes this text.
    """

    experts: Path = argument("SET")
    """Folder of the set."""
    start: str | None = None
    """Member to start from."""
    data: str | None = None
    """Text of the new domain: a file, folder, stdlib or hf:NAME. 100 sequences of it are read."""
    max_bytes: str = "1MB"
    """Text to read at most; 0 reads all."""
    out: Path
    """New or empty folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Convert a trained mixture of experts to one whose tokens travel to experts in fewer dimensions (MoLE).

    The nearest factors are taken, and the loss before and after is printed. Fine-tune the result: thinwire train
    --init-from OUT --model moe-nano-rRANK.
    """

    run: Path = argument("RUN")
    """The --out of a finished run with --model moe-nano or moe-35m."""
    rank: int
    """Dimensions in which tokens travel."""
    least_energy: float = option(0.9, least=0, most=1)
    """Share of the squared weights that each layer must keep."""
    data: str | None = None
    """Texts of the loss: a file, folder, stdlib or hf:NAME. Default: what the run held out."""
    max_bytes: str = "1MB"
    """Text to read at most; 0 reads all."""
    out: Path
    """New or empty folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Write the weighted average of experts of one shape as one model, for `thinwire eval`, `generate` and `export`."""

    experts: Path = argument("SET")
    """Folder of the set."""
    weights: str | None = None
    """NAME=WEIGHT,... with the sum 1; members that are not named have 0. Default: all alike."""
    out: Path
    """New or empty folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleOptions:
    """Compute loss, perplexity and bits per byte of all experts as an ensemble.

    At each token an expert weighs as much as the text so far suits it.
    """

    experts: Path = argument("SET")
    """Folder of the set."""
    data: str
    """File, folder, stdlib or hf:NAME to evaluate on."""
    prior: str = option("uniform", choices=PRIORS)
    """Weights before a text: uniform, updating (from texts so far), cached (--development) or average (of all,
    whatever the text)."""
    development: str | None = None
    """Text for --prior cached, other than --data. Its prior is kept in set.json. Default: the one kept there."""
    most_members: int | None = option(None, least=1)
    """With --prior cached: load only so many of the most probable experts."""
    max_bytes: str = "1MB"
    """Text to read at most, such as 200kB; 0 reads all."""
    batch_size: int = option(8, least=1)
    """Sequences that are computed together."""
    device: str = option("cpu", choices=("cpu", "cuda"))
    """cpu or cuda."""
    json: bool = False
    """Print one JSON object on stdout instead of lines."""


@command("experts")
def main(arguments: Sequence[str]) -> int:
    """Run `thinwire experts`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if arguments else USAGE
    actions = {"add": add, "branch": branch, "convert": convert, "eval": evaluate, "merge": merge}
    if arguments[0] not in actions:
        raise unknown_name("experts command", arguments[0], actions)
    return actions[arguments[0]](arguments[1:])


@command("experts", AddOptions, prog="thinwire experts add", remedy=_REMEDY)
def add(options: AddOptions) -> int:
    """Run `thinwire experts add`."""
    with ExpertSet.changing(options.experts) as before:
        experts = before.add(options.run, name=options.name, domain=options.domain)
        experts.save()
    added, names = experts.experts[-1], ", ".join(experts.names)
    print(f"{options.experts / added.name}: {added.parameters:,} parameters, {added.tokens:,} tokens; experts: {names}")
    return 0


@command("experts", BranchOptions, prog="thinwire experts branch", remedy=_REMEDY)
def branch(options: BranchOptions) -> int:
    """Run `thinwire experts branch`."""
    if (options.start is None) == (options.data is None):
        raise refusal("a branch starts from one member, or from the average that suits a text",
                      got="both" if options.start else "neither --start nor --data", allowed="one of them",
                      remedy="--start NAME")  # fmt: skip
    if options.start is not None:
        experts = ExpertSet.load(options.experts)
        weights = experts.weights({options.start: 1.0})
    else:
        from thinwire.inference import open_experts, with_cached_prior

        experts = with_cached_prior(
            open_experts(options.experts), options.data or "", max_bytes=_bytes(options.max_bytes)
        )
        assert experts.prior is not None
        weights = experts.prior.weights
    experts.branch(options.out, weights=weights)
    print(f"{options.out}: {_shares(dict(zip(experts.names, weights, strict=True)))}")
    print(f"thinwire train --init-from {options.out} --data {options.data or 'TEXT'} --out RUN")
    return 0


@command("experts", ConvertOptions, prog="thinwire experts convert", remedy=_REMEDY)
def convert(options: ConvertOptions) -> int:
    """Run `thinwire experts convert`."""
    max_bytes = _bytes(options.max_bytes)
    from thinwire.inference import check_new_folder, convert_experts, load_trained, read_texts, write_run
    from thinwire.inference import evaluate as loss_of

    check_new_folder(options.out)
    trained = load_trained(options.run)
    converted, spectra = convert_experts(trained, rank=options.rank, least_energy=options.least_energy)
    texts = list(read_texts(trained, data=options.data, max_bytes=max_bytes))
    before, after = (loss_of(one, texts).loss for one in (trained, converted))
    write_run(converted, options.out)
    kept, error = min(one.energy for one in spectra), sum(one.squared_error for one in spectra)
    print(f"{options.out}: {converted.config.model.name}; each layer keeps {kept:.3f} or more of its squared weights")
    print(f"squared error of all weights {error:.4g}; loss {before:.4f} before, {after:.4f} after")
    return 0


@command("experts", MergeOptions, prog="thinwire experts merge", remedy=_REMEDY)
def merge(options: MergeOptions) -> int:
    """Run `thinwire experts merge`."""
    experts = ExpertSet.load(options.experts)
    weights = experts.weights(None if options.weights is None else _weights(options.weights))
    experts.merge(options.out, weights=weights)
    print(f"{options.out}: {_shares(dict(zip(experts.names, weights, strict=True)))}")
    return 0


@command("experts", EnsembleOptions, prog="thinwire experts eval", remedy=_REMEDY,
         basic="data prior development json")  # fmt: skip
def evaluate(options: EnsembleOptions) -> int:
    """Run `thinwire experts eval`."""
    if options.development is not None and options.prior != "cached":
        raise refusal("--development is for --prior cached", got=f"--prior {options.prior}", allowed="--prior cached",
                      remedy="--prior cached, or to leave --development out")  # fmt: skip
    max_bytes = _bytes(options.max_bytes)
    from thinwire.inference import as_trained, open_experts, read_texts, with_cached_prior
    from thinwire.inference import evaluate as loss_of

    experts = open_experts(options.experts, device=options.device)
    if options.development is not None:
        experts = with_cached_prior(experts, options.development, max_bytes=max_bytes)
    ensemble = experts.ensemble(options.prior, most_members=options.most_members)
    trained = as_trained(experts, ensemble)
    check = experts.prior.check if experts.prior is not None and options.prior == "cached" else None
    texts = read_texts(trained, data=options.data, max_bytes=max_bytes, on_document=check)
    found = loss_of(trained, texts, batch_size=options.batch_size, on_tokens=TokenProgress("experts"))
    if options.development is not None:
        with ExpertSet.changing(experts.folder) as now:
            if now.experts == experts.experts:
                experts.save()
            else:
                log(
                    f"{experts.folder} has other experts by now, so the cached prior was not kept; compute it again",
                    command="experts",
                )
    values = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    rows = {
        "loss": f"{found.loss:.4f} nats per token", "perplexity": f"{found.perplexity:,.2f}",
        "bits per byte": f"{found.bits_per_byte:.4f}",
        "text": f"{printable(options.data)}: {format_bytes(found.num_bytes)}, {found.num_tokens:,} tokens",
        "experts": f"{_shares(ensemble.mean_posterior)}; prior {options.prior}",
    }  # fmt: skip
    counts = {"tokens": found.num_tokens, "bytes": found.num_bytes, "data": options.data, "prior": options.prior,
              "experts": ensemble.mean_posterior}  # fmt: skip
    return print_found(values, counts, rows, as_json=options.json)


def _bytes(text: str) -> int | None:
    return math.ceil(parse_bytes(text)) or None


def _weights(text: str) -> dict[str, float]:
    parts = [part.partition("=") for part in text.split(",")]
    try:
        found = {name: float(value) for name, _, value in parts}
        if len(found) < len(parts):
            raise ValueError("a name stands twice")
        return found
    except ValueError:
        raise refusal("--weights cannot be read", got=repr(text[:80]), allowed="NAME=WEIGHT,..., each name once",
                      remedy="--weights python=0.5,prose=0.5") from None  # fmt: skip


def _shares(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.3f}" for name, share in weights.items() if share >= 0.0005)
