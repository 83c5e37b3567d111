"""Options of a training run: frozen sections, one validator, and `config.json`. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import shlex
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from thinwire.codec_specs import codec_key
from thinwire.errors import CheckpointError, excluded, refusal
from thinwire.monitor.remediation import ON_FINDING
from thinwire.options import flag, option, rules_of
from thinwire.training.method_catalog import MethodEntry, check_method_option, method_entry
from thinwire.training.parallel_config import ONE_RANK, ParallelConfig, parallel_problems
from thinwire.transport.addresses import listen_config
from thinwire.version import __version__
from thinwire.workloads.cards import DIGITS, LANGUAGE, WORKLOAD_OPTIONS, card_of
from thinwire.workloads.language.presets import USUAL_LR, base_name, check_model

if TYPE_CHECKING:
    from thinwire.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and how it computes."""

    name: str = option("nano", name="model", is_basic=True, is_place=True)
    """nano, 35m, 150m, 400m, 1b, linear- or moe-nano and -35m, a size such as 125m, or hf:PATH of transformers."""
    init_from: Path | None = option(None, is_place=True)
    """Start from the model and the tokenizer of an earlier run: its --out."""
    lora: int | None = option(None, least=1)
    """Train and send LoRA adapters of this rank alone, beside frozen hf: weights (pip install 'thinwire[peft]')."""
    seq_len: int | None = option(None, least=1)
    """Tokens per sequence. Default: 128 for nano, else 1024."""
    vocab_size: int | None = option(None, least=1)
    """Tokens of a BPE tokenizer that is trained. Default: the model's."""
    device: str = option("cpu", choices=("cpu", "cuda"), is_basic=True, is_free=True)
    """cpu or cuda; replica n uses GPU n of this host."""
    autocast: str = option("none", choices=("none", "bf16"))
    """Dtype of the forward pass: none or bf16."""
    compile: bool = False
    """Compile the model with torch.compile."""
    recompute: bool = False
    """Compute activations again in the backward pass: less memory, a third more work, the same bits."""
    keep_attention: bool = False
    """With --recompute: keep what attention returned and spare its second forward pass, for twice the kept values."""
    stream_backward: int | None = option(None, least=1)
    """Compute the backward pass in this many chunks of each sequence, for long ones: less memory, no logits kept."""
    threads: int | None = option(None, least=1, is_free=True, is_local=True)
    """Threads of torch per replica. Default: the host's cores divided by its replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The corpus and its batches."""

    source: str = option("stdlib", name="data", is_basic=True, is_place=True)
    """stdlib, a file or folder (txt, md, py, jsonl, parquet), or hf:NAME for a Hugging Face data set."""
    tokenizer: str = option("auto", choices=("auto", "bpe", "bytes"))
    """auto (the hf: model's own, else bpe), bpe (trained once on the data, then cached) or bytes."""
    batch_size: int | None = option(None, least=1, is_basic=True)
    """Sequences or images per step and replica. Default: 8, digits 32."""
    sequences: str = option("windows", choices=("windows", "documents"))
    """windows (of joined text, all of --seq-len tokens) or documents (whole, or in pieces of at most --seq-len)."""
    micro_batch: int | None = option(None, least=1)
    """Sequences per forward pass, to save memory; gradients add up. Default: the whole batch."""
    cache_dir: Path | None = option(None, is_free=True)
    """Folder of tokenizers and token files. Default: ~/.cache/thinwire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The inner optimizer and its learning rate."""

    inner_optimizer: str | None = option(None, choices=("adamw", "adam", "sgd", "plain-sgd", "muon"))
    """adamw, adam, sgd (momentum 0.9), plain-sgd (no momentum) or muon. Default: by method."""
    lr: float | None = option(None, above=0, usual="1e-3", is_basic=True)
    """Peak learning rate of the inner optimizer. Default: by method, model and optimizer."""
    warmup_steps: int | None = option(None, least=0)
    """Steps of linear warm-up. Default: a tenth of the steps, at most 1000."""
    schedule: str = option("cosine", choices=("cosine", "constant"))
    """Learning rate after the warm-up: cosine (down to a tenth of the peak) or constant."""
    weight_decay: float = option(0.1, least=0)
    """Weight decay of matrices; gains of norms do not decay."""
    beta2: float = option(0.99, least=0, below=1, usual=0.99)
    """Decay of Adam's and AdamW's mean squared gradients, in [0, 1)."""
    clip_norm: float = option(1.0, least=0)
    """Largest gradient norm; 0 turns clipping off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Exchange between replicas; `thinwire methods NAME` lists the options of one method."""

    method: str = option("iso-loco", is_basic=True)
    """Training method, see `thinwire methods`; auto measures the links and plans."""
    sync_interval: int | None = option(None, least=1, is_basic=True, unused="it exchanges at every step")
    """H: inner steps between two exchanges of a fragment. Default: 30 for nano, else 100."""
    overlap_steps: str | None = option(None, is_basic=True, unused="it waits for every exchange, so nothing overlaps")
    """tau: inner steps during which an exchange travels; one number, or one per replica: 1,6. Default: 1."""
    blend: float | None = option(
        None, least=0, below=1, usual=0.5, unused="nothing overlaps, so there is nothing to blend"
    )
    """alpha: weight of the local parameters when a round is applied, in [0, 1). Default: by method; 0 if tau is 0."""
    codec: str | None = option(None, is_basic=True, unused="its code is a part of it")
    """Compression: float32, bfloat16, e3m0, top-k, sign or another of thinwire.codecs.NAMES. Default: by method."""
    exchange: str | None = option(
        None, choices=("auto", "all-gather", "two-phase"), unused="its exchange is the cheaper one"
    )
    """Exchange pattern: auto (the cheaper one), all-gather or two-phase. Default: auto."""
    fragment_order: str | None = option(
        None, choices=("strided", "sequential"), unused="it exchanges the whole model at once"
    )
    """Assignment of blocks to fragments: strided or sequential. Default: strided."""
    layers_per_fragment: int | None = option(None, least=1, unused="it exchanges the whole model at once")
    """Blocks per fragment. Default: 3."""
    num_fragments: int | None = option(None, least=1, unused="it exchanges the whole model at once")
    """P: number of fragments, embedding included; replaces --layers-per-fragment."""
    outer_lr: float | None = option(None, above=0, most=10, usual=0.7, unused="it has no outer optimizer")
    """Learning rate of the outer step. Default: by method; iso-loco 1.8 on hidden matrices, 2.4 from 8 replicas on."""
    outer_momentum: float | None = option(None, least=0, below=1, usual=0.9, unused="it has no outer optimizer")
    """Momentum of the outer step. Default: by method; iso-loco 0.7 on hidden matrices."""
    method_option: tuple[str, ...] = ()
    """Option of the method as NAME=VALUE, see `thinwire methods NAME`; --NAME VALUE works too. Repeatable."""
    pace: bool = option(False, is_free=True)
    """Spread each transfer over most of the overlap, for a lower peak rate."""
    final_exchange: bool = True
    """Leave out the exchange after the last step; steps since the last round are then lost."""

    @property
    def overlaps(self) -> int | tuple[int, ...] | None:
        """`overlap_steps` as a number, or one a replica.

        Example:
            >>> SyncConfig(overlap_steps="1,4").overlaps
            (1, 4)
        """
        if self.overlap_steps is None:
            return None
        try:
            numbers = tuple(int(part) for part in self.overlap_steps.split(","))
        except ValueError:
            raise refusal(
                "--overlap-steps is no number", got=repr(self.overlap_steps),
                allowed="one number, or one a replica joined by commas", remedy="--overlap-steps 1",
            ) from None  # fmt: skip
        return numbers[0] if len(numbers) == 1 else numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Subject, length, replicas and addresses of the run."""

    workload: str = "language"
    """What is trained: language, digits (images, pip install 'thinwire[digits]') or MODULE:NAME of your own."""
    replicas: int | None = option(None, least=1, is_basic=True)
    """Number of replicas. Default: 2, or torchrun's WORLD_SIZE."""
    steps: int = option(300, least=1, is_basic=True)
    """Inner steps of each replica."""
    seed: int = 0
    """Random seed of weights, data order and stochastic codecs."""
    interface: str | None = option(None, is_free=True, is_local=True)
    """Network interface that other hosts can reach, such as eth0."""
    address: str | None = option(None, is_free=True, is_local=True)
    """Address of this host that other hosts can reach, IPv4 or IPv6."""
    advertise: str | None = option(None, is_free=True, is_local=True)
    """HOST:PORT that other hosts dial, such as a port forward; leads to the first port of --port-range."""
    port_range: str | None = option(None, is_free=True, is_local=True)
    """FIRST-LAST: the only ports to listen on; needs --elastic or --secret."""
    secret: Path | None = option(None, is_basic=True, is_free=True)
    """File of the job's secret (`thinwire secret FILE`): replicas authenticate each other and encrypt traffic.
    Default: the environment's THINWIRE_SECRET_FILE."""
    traffic_plan: Path | None = option(None, is_free=True)
    """Plan of `thinwire traffic plan --probe`: connections take planned paths; needs --secret and --port-range.
    Default: the environment's THINWIRE_TRAFFIC_PLAN."""
    join_deadline_s: float = option(300.0, above=0, usual=300, is_free=True)
    """Longest wait for the other replicas at the start, in seconds."""
    config: Path | None = option(None, is_basic=True, is_free=True)
    """TOML file of options by section, such as a recipe (`thinwire recipes`); options given here override it."""
    plan: Path | None = option(None, is_free=True)
    """Plan file (`thinwire plan`) with model, method, batch and steps; options given here override it."""
    expected_step_s: float | None = option(None, above=0, usual=0.5, is_free=True)
    """Expected seconds per step; slower steps give a warning. Default: the plan's."""
    on_finding: str = option("warn", choices=ON_FINDING, is_free=True, is_local=True)
    """Reaction to a finding: warn, exclude, restart, replace, abort or off."""
    on_finding_dry_run: bool = option(False, is_free=True, is_local=True)
    """Report what --on-finding would do, and do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """Runs whose replicas join and leave."""

    is_enabled: bool = option(False, name="elastic", is_basic=True)
    """Let replicas join and leave; the run prints the command for other hosts."""
    ranks_per_replica: int = option(1, least=1, is_free=True, is_local=True)
    """Processes per elastic replica; each holds a shard of the model (FSDP2)."""
    port: int = option(29400, least=0, is_free=True)
    """Port of the coordinator; 0 chooses a free one."""
    begin_with: int | None = option(None, is_free=True)
    """Replicas on all hosts that must have joined before the first step. Default: --replicas."""
    via: str | None = option(None, is_free=True, is_local=True)
    """Run through a store that all hosts reach, such as s3://BUCKET/RUNS or file:///FOLDER."""
    invite_only: bool = option(False, is_free=True)
    """Let other hosts join by one-time invitations of thinwire invite only."""
    relay: str | None = option(None, is_free=True, is_local=True)
    """HOST:PORT of thinwire relay, where hosts meet that cannot dial each other."""
    relay_token: Path | None = option(None, is_free=True, is_local=True)
    """File that thinwire relay wrote, copied from there. Default: relay.token."""
    checkpoint_to: str | None = option(None, is_free=True, is_place=True)
    """Folder or URL (s3://...) of checkpoints. Default: checkpoints/ in --out."""
    keep_checkpoints: int = option(2, least=1, is_free=True)
    """Number of checkpoints to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """Files and output of the run."""

    out: Path | None = option(None, is_basic=True, is_free=True)
    """Folder of the run. Default: runs/METHOD-MODEL-seedN, then -2 and so on where a run is there."""
    resume: Path | None = option(None, is_basic=True, is_free=True)
    """Resume the run in this folder, with its own options."""
    overwrite: bool = option(False, is_free=True, is_local=True)
    """Replace the run in --out."""
    eval_every: int | None = option(None, least=0)
    """Steps between evaluations; 0 evaluates only at the end. Default: a sixth of the steps."""
    eval_batches: int = option(8, least=1)
    """Held-out batches per evaluation while training."""
    final_eval_batches: int = option(64, least=1)
    """Held-out batches of the final evaluation."""
    log_every: int = option(10, least=1, is_free=True)
    """Steps between two lines of metrics."""
    checkpoint_every: int | None = option(None, least=0, is_free=True)
    """Steps between two checkpoints; 0 saves only at the end. Default: 100 for nano, else 500."""
    checkpoint_auto: bool = option(False, is_free=True)
    """Choose the interval from the cost of a checkpoint and the failures so far."""
    publish: str | None = option(None, is_free=True)
    """Publish the global parameters every --sync-interval steps, for thinwire follow: file:///FOLDER or s3://BUCKET/RUN,
    without a secret. The whole address is in follow-address.txt of the run's folder."""
    samples: bool = option(True, is_free=True)
    """Write samples.json: how the model continues two texts before and after training. On by default."""
    tensorboard: bool = option(False, is_free=True, is_local=True)
    """Also write metrics for TensorBoard (pip install 'thinwire[report]')."""
    wandb: bool = option(False, is_free=True, is_local=True)
    """Also send metrics to Weights & Biases (pip install 'thinwire[report]')."""
    quiet: bool = option(False, is_free=True, is_local=True)
    """Print only the result and errors."""
    json: bool = option(False, is_free=True, is_local=True)
    """Print the result as one JSON object, the last line on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Train one model on several replicas over slow networks.

    Replicas are started on this machine; under torchrun the same command joins the hosts instead.
    """

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sync: SyncConfig = SyncConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    output: OutputConfig = OutputConfig()
    elastic: ElasticConfig = ElasticConfig()
    parallel: ParallelConfig = ONE_RANK

    @classmethod
    def of(cls, **options: Any) -> TrainConfig:
        """Return the configuration with these options, by their names on the command line.

        Example:
            >>> TrainConfig.of(model="35m", steps=60).model.name
            '35m'
        """
        return cls().replace(**options)

    def replace(self, **options: Any) -> TrainConfig:
        """Return a copy with other values of options, by their names on the command line."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            section, field = OPTIONS[name]
            sections.setdefault(section, {})[field] = value
        changed = {name: dataclasses.replace(getattr(self, name), **fields) for name, fields in sections.items()}
        return dataclasses.replace(self, **changed)

    def option(self, name: str) -> Any:
        """Return the value of an option, by its name on the command line."""
        section, field = OPTIONS[name]
        return getattr(getattr(self, section), field)

    @property
    def num_replicas(self) -> int:
        """`--replicas` of a resolved configuration."""
        assert self.run.replicas is not None, "resolve() first"
        return self.run.replicas

    @property
    def run_dir(self) -> Path:
        """`--out` of a resolved configuration."""
        assert self.output.out is not None, "resolve() first"
        return self.output.out

    @property
    def workload(self) -> Workload:
        """The workload to train; imports torch at the first use."""
        found: Workload = card_of(self.run.workload).load()
        return found

    def digest(self) -> str:
        """Return a hash of all options that change what is computed."""
        text = json.dumps(meaning(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


SECTIONS: Mapping[str, type[Any]] = typing.get_type_hints(TrainConfig)
_RULES = rules_of(SECTIONS)
# Section and field of each option, by its name on the command line.
OPTIONS: Mapping[str, tuple[str, str]] = {name: (section, field.name) for name, (section, field, _) in _RULES.items()}
BASIC = tuple(name for name, (_, _, rule) in _RULES.items() if rule.is_basic)
FREE = tuple(name for name, (_, _, rule) in _RULES.items() if rule.is_free)
PLACES = tuple(name for name, (_, _, rule) in _RULES.items() if rule.is_place)
# Options whose values are files or folders of a host.
PATH_OPTIONS = tuple(
    name for name, (section, field) in OPTIONS.items()
    if Path in typing.get_args(typing.get_type_hints(SECTIONS[section])[field])
)  # fmt: skip
# Options of the first host that other hosts of an elastic run do not use.
LOCAL = tuple(
    name for name, (_, _, rule) in _RULES.items() if rule.is_local or (name in PATH_OPTIONS and not rule.is_place)
)
# Options by which several ranks share a replica.
SHARING = ("ranks_per_replica", *(name for name, (section, _) in OPTIONS.items() if section == "parallel"))
# Options that a method may take, and why one that does not take them has no use for them.
OF_METHODS = {name: rule.unused for name, (_, _, rule) in _RULES.items() if rule.unused}

# Models whose runs take minutes.
_SMALL = ("nano", "linear-nano", "moe-nano", DIGITS.model)
_LR_OF_SGD = {"sgd": 0.02, "plain-sgd": 0.2}


def validate(config: TrainConfig, *, world_size: int | None = None) -> None:
    """Check every option that can be checked without torch.

    Raises:
        ValueError: One line a problem: the option, its value, what is allowed, and what to do.
    """
    problems = [*_bad_values(config), *_bad_combinations(config, is_torchrun=world_size is not None)]
    # a plan or a resumed run may name another method; these are checked once it is known
    is_chosen = config.run.plan is None and config.output.resume is None and config.sync.method.lower() != "auto"
    if not problems and is_chosen:
        problems = method_problems(config)
    if problems:
        raise ValueError("\n".join(problems))


def _bad_values(config: TrainConfig) -> list[str]:
    problems = [
        str(problem)
        for name, (_, field, rule) in _RULES.items()
        if (problem := rule.problem(flag(name), config.option(name), default=field.default)) is not None
    ]
    checks: tuple[Callable[[], object], ...] = (
        lambda: check_model(config.model.name) if card_of(config.run.workload) is LANGUAGE else None,
        lambda: config.sync.codec is None or codec_key(config.sync.codec, what="--codec"),
    )
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    return problems


def method_problems(config: TrainConfig) -> list[str]:
    """Return what is wrong with the options of the method, as far as it shows without torch; one line each."""
    method = config.sync.method
    try:
        entry = method_entry(method)
        named = [check_method_option(text, method=method) for text in config.sync.method_option]
        overlaps = config.sync.overlaps
    except ValueError as error:
        return [str(error)]
    problems = [
        excluded(flag(name), f"--method {method}", why=reason, remedy=f"to leave {flag(name)} out")
        for name, reason in OF_METHODS.items()
        if config.option(name) is not None and name not in entry.takes
    ]
    problems += [
        refusal(f"{name} is given twice", got=f"--method-option {name} and {flag(name)}", allowed="one of them",
                remedy=flag(name))
        for name in named
        if name in OF_METHODS and config.option(name) is not None
    ]  # fmt: skip
    if twice := [name for name in named if named.count(name) > 1]:
        problems.append(
            refusal(f"--method-option {twice[0]} is given twice", got=", ".join(config.sync.method_option),
                    allowed="each option once", remedy="to leave one out")
        )  # fmt: skip
    return [str(problem) for problem in problems] or _bad_overlaps(config, entry, overlaps)


def _bad_overlaps(config: TrainConfig, entry: MethodEntry, overlaps: int | tuple[int, ...] | None) -> list[str]:
    if overlaps is None or "sync_interval" not in entry.takes:
        return []
    interval = config.sync.sync_interval or default_sync_interval(config.model.name)
    given = overlaps if isinstance(overlaps, tuple) else (overlaps,)
    allowed = f"0 to {interval - 1}"
    if max(given) >= interval:
        return [str(refusal(
            f"--overlap-steps is not below --sync-interval, which is {interval}", got=max(given), allowed=allowed,
            remedy=f"--overlap-steps {min(1, interval - 1)}, or --sync-interval {max(given) + 1}",
        ))]  # fmt: skip
    if min(given) < 0:
        what = "--overlap-steps is too small"
        return [str(refusal(what, got=min(given), allowed=allowed, remedy="--overlap-steps 1"))]
    return []


def _bad_combinations(config: TrainConfig, *, is_torchrun: bool) -> list[str]:
    on_finding, is_elastic = config.run.on_finding, config.elastic.is_enabled
    has_documents, windows = config.data.sequences != "windows", "--sequences windows"  # a plan may name documents
    checks = [
        (config.output.publish is not None and "#" in config.output.publish,
         refusal("--publish holds a secret, and options are stored in the run's folder", got="an address with #",
                 allowed="one without", remedy="to leave out # and what follows; the run makes a secret")),
        (config.output.publish is not None and is_elastic,
         excluded("--publish", "--elastic", why="any replica may leave", remedy="to leave one of them out")),
        (config.output.publish is not None and not is_elastic and config.parallel.ranks > 1,
         excluded("--publish", "replicas of several ranks", why="one process publishes the whole model",
                  remedy="thinwire.WeightPublisher in a loop of your own")),
        (config.model.lora is not None and is_elastic,
         excluded("--lora", "--elastic", why="a replica that joins would fetch the frozen weights too",
                  remedy="to leave one of them out")),
        *_streaming_problems(config),
        *_linear_problems(config),
        (config.model.keep_attention and not (config.model.recompute or config.parallel.recompute_layers),
         refusal("--keep-attention is for layers that are computed again", got="no --recompute",
                 allowed="both, or neither", remedy="--recompute")),
        (config.model.keep_attention and config.parallel.cp > 1,
         excluded("--keep-attention", "--cp", why="shared attention is no operator that a checkpoint could keep",
                  remedy="--recompute alone")),
        (config.data.micro_batch is not None and config.elastic.ranks_per_replica > 1,
         excluded("--micro-batch", "--ranks-per-replica", why="the ranks share the batch already",
                  remedy="to leave --micro-batch out")),
        (has_documents and is_elastic,
         excluded("--sequences documents", "--elastic", why="an elastic run lends windows of equal length",
                  remedy=windows)),
        (has_documents and not is_elastic and config.parallel.pp > 1,
         excluded("--sequences documents", "--pp", why="torch's pipelines take micro-batches of one shape",
                  remedy=f"{windows}, or another cut")),
        (config.run.interface is not None and config.run.address is not None,
         excluded("--interface", "--address", why="each of them says how the other hosts reach this one",
                  remedy="--interface alone")),
        (is_elastic and config.output.checkpoint_auto,
         excluded("--checkpoint-auto", "--elastic", remedy="--checkpoint-every 100",
                  why="an elastic run returns to a checkpoint only if all replicas are lost at once")),
        (is_elastic and is_torchrun,
         excluded("--elastic", "torchrun", why="it starts its own replicas and lets others join",
                  remedy="it alone, and thinwire join on the other hosts")),
        *((not is_elastic and section == "elastic" and config.option(name) != _DEFAULTS.option(name),
           refusal(f"{flag(name)} is for elastic runs", got=f"{flag(name)} without --elastic",
                   allowed="both, or neither", remedy="--elastic too, or to leave it out"))
          for name, (section, _) in OPTIONS.items()),
        (not is_elastic and config.output.checkpoint_auto and is_torchrun,
         excluded("--checkpoint-auto", "torchrun", why="hosts may differ", remedy="--checkpoint-every 100")),
        (not is_elastic and on_finding in ("exclude", "restart", "replace"),
         refusal(f"--on-finding {on_finding} is for elastic runs: others cannot go on without a replica",
                 got=f"--on-finding {on_finding} without --elastic", allowed="warn, abort or off",
                 remedy="--elastic too, or --on-finding warn")),
        (not is_elastic and on_finding == "abort" and is_torchrun,
         excluded("--on-finding abort", "torchrun", remedy="--on-finding warn",
                  why="torchrun starts the replicas, so nothing here can end them")),
    ]  # fmt: skip
    reach_options = {"advertise": config.run.advertise, "port_range": config.run.port_range}
    is_reached, has_secret = any(reach_options.values()), is_elastic or config.run.secret is not None
    reach = "--port-range" if config.run.advertise is None else "--advertise"
    has_plan, secret = config.run.traffic_plan is not None, "--secret FILE, of thinwire secret"
    reach_checks = [
        (has_plan and is_elastic, excluded("--traffic-plan", "--elastic", why="a plan is for fixed replicas",
                                           remedy="to leave --elastic out")),
        (has_plan and not has_secret,
         refusal("--traffic-plan needs connections of thinwire's own, and gloo takes any source port",
                 got="no --secret", allowed="--secret FILE", remedy=secret)),
        (is_reached and not has_plan and not has_secret,
         refusal(f"{reach} needs connections of thinwire's own, and gloo listens on any port", got="no --secret",
                 allowed="--secret FILE or --elastic", remedy=secret)),
    ]  # fmt: skip
    found = [problem for is_wrong, problem in reach_checks if is_wrong]
    if is_reached and not found:  # what needs the network is checked later
        try:
            listen_config(address="127.0.0.1", **reach_options)
        except ValueError as error:
            found.append(error)
    of_options = [problem for is_wrong, problem in checks if is_wrong]
    return [str(one) for one in (*workload_problems(config), *of_options, *found, *parallel_problems(config))]


def _streaming_problems(config: TrainConfig) -> list[tuple[bool, ValueError]]:
    """Return each reason against `--stream-backward`, and whether it holds."""
    chunks, which = config.model.stream_backward, "--stream-backward"
    if chunks is None:
        return []
    longest = config.model.seq_len or default_seq_len(config.model.name)
    no_others = {
        "recompute": (config.model.recompute, "it computes layers again by itself"),
        "compile": (config.model.compile, "what the backward pass runs again stays out of a compiled graph"),
        "pp": (config.parallel.pp > 1, "a pipeline's schedule needs the logits of whole sequences"),
        "tp": (config.parallel.tp > 1, "chunks of shared layers were not tried"),
        "recompute_layers": (config.parallel.recompute_layers > 0, "it computes layers again by itself"),
    }
    return [
        (chunks > longest,
         refusal(f"{which} has more chunks than a sequence has tokens", got=chunks, allowed=f"1 to {longest}",
                 remedy=f"{which} {min(8, longest)}")),
        *((is_given, excluded(which, flag(name), why=why, remedy=f"to leave {flag(name)} out"))
          for name, (is_given, why) in no_others.items()),
    ]  # fmt: skip


def _linear_problems(config: TrainConfig) -> list[tuple[bool, ValueError]]:
    """Return each reason against linear attention, and whether it holds."""
    is_linear, own = config.model.name.startswith("linear-"), config.parallel
    others = {
        "cp_policy": own.cp_policy not in ("auto", "ring"), "tp": own.tp > 1, "pp": own.pp > 1,
        "stream_backward": config.model.stream_backward is not None, "keep_attention": config.model.keep_attention,
    }  # fmt: skip
    return [
        (is_linear and is_given,
         excluded(f"--model {config.model.name}", flag(name), why="it is made for keys, not for a state",
                  remedy=f"to leave {flag(name)} out"))
        for name, is_given in others.items()
    ]  # fmt: skip


def default_sync_interval(model: str) -> int:
    """Return the default of `--sync-interval`, for methods that have one."""
    return 30 if base_name(model) in _SMALL else 100


def workload_problems(config: TrainConfig, *, named: Sequence[str] = ()) -> list[ValueError]:
    """Return what is wrong with options of some workloads; the command line names `named`, also as defaults."""
    name = config.run.workload
    try:
        card = card_of(name)
    except ValueError:
        return []  # reported with the other values
    own = f"--workload {name}"
    known = {"model": card.model, "data": card.data}  # as `resolve` fills them in
    wrong = {
        option: "it is for other workloads" for option in WORKLOAD_OPTIONS
        if option not in card.options
        and (option in named or config.option(option) not in (_DEFAULTS.option(option), known.get(option)))
    }  # fmt: skip
    if not card.keeps_ranks:
        why = "its model is not divided among ranks"
        wrong |= {option: why for option in SHARING if config.option(option) != _DEFAULTS.option(option)}
        if config.sync.method.lower() == "auto":
            wrong["method"] = "auto plans for language models"
    if ":" in name and config.elastic.is_enabled:
        wrong["elastic"] = "a host that joins would run a program that another one names"
    return [
        excluded(f"--{option.replace('_', '-')}", own, why=why, remedy=f"to leave --{option.replace('_', '-')} out")
        for option, why in wrong.items()
    ]


def default_seq_len(model: str) -> int:
    """Return the default of `--seq-len`."""
    return 128 if base_name(model) in ("nano", "linear-nano", "moe-nano") else 1024


def resolve(config: TrainConfig, *, world_size: int | None, cores: int, home: Path) -> TrainConfig:
    """Fill in every default that depends on something else: torchrun's world size, the host's cores, the user's home.

    Raises:
        ValueError: `--replicas` contradicts torchrun, or no method has the name.
    """
    workload = card_of(config.run.workload)
    if config.model.init_from is not None:
        config = _started_from(config, config.model.init_from)
    if workload is not LANGUAGE:
        config = config.replace(model=workload.model, data=workload.data)
    ranks = config.parallel.ranks
    if world_size is not None and world_size % ranks:
        raise refusal(
            "torchrun starts no whole number of replicas", got=f"{world_size} ranks, {ranks} a replica",
            allowed=f"multiples of {ranks} ranks", remedy=f"torchrun with {max(1, world_size // ranks) * ranks} ranks",
        )  # fmt: skip
    started = None if world_size is None else world_size // ranks
    if started is not None and config.run.replicas not in (None, started):
        a_replica = "one a replica" if ranks == 1 else f"{ranks} a replica"
        raise refusal(
            "--replicas is not what torchrun starts", got=config.run.replicas,
            allowed=f"torchrun's {world_size} ranks, {a_replica}", remedy="to leave --replicas out",
        )  # fmt: skip
    replicas = started if started is not None else (2 if config.run.replicas is None else config.run.replicas)
    model, method, steps = base_name(config.model.name), config.sync.method, config.run.steps
    card = method_entry(method)
    inner = config.optimizer.inner_optimizer or card.inner_optimizer
    filled: dict[str, Any] = {
        "replicas": replicas, "batch_size": workload.batch_size,
        "seq_len": default_seq_len(model) if workload is LANGUAGE else None,
        "lr": card.lr or _LR_OF_SGD.get(inner) or workload.lr or USUAL_LR.get(model, 3e-4), "inner_optimizer": inner,
        "warmup_steps": min(1000, steps // 10), "eval_every": max(1, math.ceil(steps / 6)),
        "checkpoint_every": 100 if model in _SMALL else 500,
        "threads": max(1, cores // max(1, replicas * config.elastic.ranks_per_replica * ranks)),
        "cache_dir": home / ".cache" / "thinwire",
        "out": Path("runs") / f"{method}-{model.rsplit('/', 1)[-1].replace(':', '-')}-seed{config.run.seed}",
    }  # fmt: skip
    if "sync_interval" in card.kinds:
        filled["sync_interval"] = default_sync_interval(model)
    return config.replace(**{name: value for name, value in filled.items() if config.option(name) is None})


def _started_from(config: TrainConfig, run: Path) -> TrainConfig:
    """Take the model of an earlier run, and the length of its sequences where none is given."""
    saved = read_config(run)
    folder = run / "model"
    if not any(folder.glob("*.safetensors")):
        raise refusal(
            f"--init-from {run} holds no model, which a run writes at its end", got=f"no {folder}/*.safetensors",
            allowed="the --out of a finished run", remedy=f"thinwire train --resume {run}",
        )  # fmt: skip
    name = f"hf:{folder}" if saved.model.name.startswith("hf:") else saved.model.name
    if config.model.name not in (_DEFAULTS.model.name, saved.model.name, name):
        raise excluded(
            f"--model {config.model.name}", f"--init-from {run}", why=f"that run trained {saved.model.name}",
            remedy="to leave --model out",
        )  # fmt: skip
    return config.replace(model=name, seq_len=config.model.seq_len or saved.model.seq_len)


def command_line(config: TrainConfig) -> str:
    """Return the command that repeats a run: every option that matters and is not the default.

    Example:
        >>> command_line(TrainConfig.of(method="diloco", steps=30, final_exchange=False, out=Path("runs/a b")))
        "thinwire train --steps 30 --method diloco --no-final-exchange --out 'runs/a b'"
    """
    words = ["thinwire train"]
    for name in OPTIONS:
        value = config.option(name)
        if value is None or value == _DEFAULTS.option(name) or (name in FREE and name not in ("out", "device")):
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        else:
            words += [f"{flag(name)} {shlex.quote(str(one))}" for one in (value if type(value) is tuple else (value,))]
    return " ".join(words)


def meaning(config: TrainConfig) -> dict[str, Any]:
    """Return the options that change what is computed, by name, as JSON values.

    The workload and degrees of parallelism count where they differ from the default.
    """
    return {
        name: _json_value(config.option(name)) for name, (section, _) in OPTIONS.items()
        if name not in FREE and (
            (section != "parallel" and name != "workload") or config.option(name) != _DEFAULTS.option(name)
        )
    }  # fmt: skip


# Options that earlier versions had, and their values that changed nothing.
_REMOVED = (("elastic", "preserve_norm", False),)


def to_json(config: TrainConfig, *, without: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Return the sections as JSON values, without some options."""
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, (section, field) in OPTIONS.items():
        if name not in without:
            found[section][field] = _json_value(config.option(name))
    return found


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def from_json(values: object) -> TrainConfig:
    """Read what `to_json` returned; it may come over the network.

    Raises:
        ValueError: An option is unknown or of the wrong type.
    """
    if isinstance(values, Mapping):
        unknown = [str(name) for name in values if name not in SECTIONS]
        for section, kind in SECTIONS.items():
            known = {field.name for field in dataclasses.fields(kind)}
            found = values.get(section)
            given = found if isinstance(found, Mapping) else {}
            unknown += [
                f"{section}.{name}" for name in given
                if name not in known and (section, name, given[name]) not in _REMOVED
            ]  # fmt: skip
        if unknown:
            raise ValueError(f"unknown options {', '.join(sorted(unknown))[:200]}")
    config: TrainConfig = msgspec.convert(values, TrainConfig, dec_hook=_path_of)
    return config


def _path_of(kind: type[Any], value: object) -> Any:
    if kind is not Path or not isinstance(value, str):
        raise ValueError(f"expected the name of a file, got {value!r}")
    return Path(value)


def has_run(run_dir: Path) -> bool:
    """Return whether a folder holds a run, or the checkpoints of a run that keeps them there."""
    return (run_dir / "config.json").exists() or any((run_dir / "checkpoints").glob("step-*/*.json"))


def free_folder(folder: Path) -> Path:
    """Return a folder without a run: this one, or its first neighbour of the name FOLDER-2, FOLDER-3 and so on.

    Ranks that share a disk find the same one, since none makes it before all have joined.
    """
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(found for found in itertools.chain([folder], numbered) if not has_run(found))


def find_run(run_dir: Path) -> Path:
    """Return the folder of a run; refuse one that holds none."""
    if not (run_dir / "config.json").is_file():
        raise CheckpointError(f"{run_dir} holds no run (no config.json); give the --out folder of thinwire train")
    return run_dir


def check_language(config: TrainConfig, *, what: str, remedy: str) -> None:
    """Refuse what is for language models alone."""
    if config.run.workload != LANGUAGE.name:
        raise refusal(f"{what} is for language models", got=f"a run of --workload {config.run.workload}",
                      allowed="a run of --workload language", remedy=remedy)  # fmt: skip


def read_config(run_dir: Path) -> TrainConfig:
    """Read `config.json` of a run.

    Raises:
        CheckpointError: There is none, or it is no configuration of this thinwire.
    """
    path = run_dir / "config.json"
    try:
        values = json.loads(path.read_bytes())
        values.pop("thinwire_version", None)
        if isinstance(values.get("model"), str):
            raise CheckpointError(
                f"{path} has no sections: an older thinwire wrote it; resume the run with that version, or start a new "
                f"run with --overwrite"
            )
        return from_json(values)
    except FileNotFoundError:
        raise CheckpointError(
            f"{run_dir} holds no run of thinwire (no config.json); --resume takes the --out of an earlier run"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}; let this user read it, or start a new run with --overwrite"
        ) from error
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no configuration of this thinwire ({error}); restore it, or start a new run with --overwrite"
        ) from error


def config_text(config: TrainConfig) -> str:
    """Return the content of a run's `config.json`."""
    return json.dumps({**to_json(config), "thinwire_version": __version__}, indent=2) + "\n"


_DEFAULTS = TrainConfig()
