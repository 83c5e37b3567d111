"""Everything that a run of `thinwire train` can be told, as one frozen value. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import CheckpointError
from thinwire.monitor.remediation import ON_FINDING
from thinwire.version import __version__

# Options that do not change what is computed: a resumed run may be given others, and hosts may differ in them.
FREE = (
    "out", "resume", "overwrite", "quiet", "json", "cache_dir", "threads", "interface", "address", "secret",
    "join_deadline_s", "port", "begin_with", "checkpoint_to", "keep_checkpoints", "log_every",
    "tensorboard", "wandb", "checkpoint_every", "device", "pace", "plan",
    "expected_step_s", "ranks_per_replica", "on_finding", "steer_dry_run", "checkpoint_auto",
)  # fmt: skip

# Sequences of a replica's step where nobody says it.
BATCH_SIZE = 8

# Methods that exchange at every step, and so have no interval.
_EVERY_STEP = (
    "all-reduce", "power-sgd", "dgc", "demo", "robust", "ef21", "masha1", "masha2", "one-bit-adam", "zero-one-adam",
    "one-bit-lamb",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Train one model on several replicas over thin wires.

    Replicas are started on this machine; under torchrun the same command joins the hosts instead.
    """

    replicas: int | None = None
    """How many replicas train together. Default: 2, or torchrun's WORLD_SIZE."""
    method: str = "streaming-diloco"
    """When and how replicas exchange; see `thinwire methods`. auto probes the wires between hosts and plans."""
    model: str = "nano"
    """nano, 35m, 150m, 400m, 1b, or hf:PATH for a transformers model."""
    data: str = "stdlib"
    """stdlib, a folder or file of txt, md, py, jsonl or parquet, or hf:NAME for a Hugging Face data set."""
    steps: int = 300
    """Inner steps of every replica."""

    sync_interval: int | None = None
    """H: inner steps between two exchanges of the same fragment. Default: 30 for nano, else 100."""
    overlap_steps: str | None = None
    """tau: inner steps from launch to apply; one number, or one a replica joined by commas. Default: 1."""
    pace: bool = False
    """Spread what is sent over most of the overlap, for a lower peak rate."""
    blend: float | None = None
    """alpha: weight of the local value at apply, in [0, 1). Default: 0.5, or 0 without overlap."""
    codec: str | None = None
    """float32, bfloat16, e3m0, top-k, sign or another of thinwire.codecs.NAMES. Default: the method's own."""
    exchange: str | None = None
    """How payloads travel: auto, all-gather or two-phase. Default: auto, the cheaper one."""
    fragment_order: str | None = None
    """How blocks are dealt out to fragments: strided or sequential. Default: strided."""
    layers_per_fragment: int | None = None
    """Blocks a fragment. Default: 3."""
    num_fragments: int | None = None
    """P: all fragments, that of the embedding and the rest among them; instead of --layers-per-fragment."""
    outer_lr: float | None = None
    """Learning rate of the outer step. Default: the method's; for Nesterov 0.6 below 8 replicas, 0.8 from there."""
    outer_momentum: float | None = None
    """Momentum of the outer step. Default: the method's; for Nesterov 0.9."""
    method_option: tuple[str, ...] = ()
    """NAME=VALUE of an option that only this method has, see `thinwire methods NAME`; may be repeated."""
    final_exchange: bool = True
    """Exchange everything once more after the last step, so that no work is lost."""

    batch_size: int | None = None
    """Sequences a step of one replica. Default: 8."""
    seq_len: int | None = None
    """Tokens a sequence. Default: 128 for nano, else 1024."""
    lr: float | None = None
    """Peak learning rate of the inner optimizer. Default: by model, or 0.02 for sgd."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Default: a tenth of the steps, at most 1000."""
    schedule: str = "cosine"
    """Of the learning rate after the warm-up: cosine (down to a tenth of the peak) or constant."""
    weight_decay: float = 0.1
    """Decay of weight matrices; norms' gains are left alone."""
    clip_norm: float = 1.0
    """Largest norm of a replica's gradient; 0 clips nothing."""
    inner_optimizer: str | None = None
    """adamw, adam, sgd (with momentum 0.9), plain-sgd (without) or muon. Default: what goes with the method."""
    seed: int = 0
    """Of the first weights, the order of the data and stochastic codecs."""

    tokenizer: str = "bpe"
    """bpe (trained once on the data and cached) or bytes."""
    vocab_size: int | None = None
    """Tokens of the BPE tokenizer. Default: the model's."""
    device: str = "cpu"
    """cpu or cuda (replica n takes this host's GPU n)."""
    autocast: str = "none"
    """Dtype of the forward pass: none or bf16."""
    compile: bool = False
    """Run the model through torch.compile."""
    threads: int | None = None
    """Torch's threads a replica. Default: this host's cores shared out, at least 1."""

    eval_every: int | None = None
    """Steps between evaluations of the global parameters; 0: only at the end. Default: a sixth of the steps."""
    eval_batches: int = 8
    """Held-out batches of an evaluation while training."""
    final_eval_batches: int = 64
    """Held-out batches of the evaluation at the end."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; 0 saves only at the end. Default: 100 for nano, else 500."""

    out: Path | None = None
    """Folder of the run. Default: runs/METHOD-MODEL-seedN."""
    resume: Path | None = None
    """Go on with the run in this folder, with its own options."""
    overwrite: bool = False
    """Replace the run that --out holds."""
    plan: Path | None = None
    """Take model, method, settings, batch and steps from a plan (thinwire plan); words given here go before it."""
    expected_step_s: float | None = None
    """Seconds that a step should take; a warning tells when steps take longer for long. Default: the plan's."""
    tensorboard: bool = False
    """Write metrics for TensorBoard too (pip install 'thinwire[report]')."""
    wandb: bool = False
    """Send metrics to Weights & Biases too (pip install 'thinwire[report]')."""
    interface: str | None = None
    """Network interface that the other hosts reach, such as eth0."""
    address: str | None = None
    """Address of this host that the other hosts reach."""
    secret: Path | None = None
    """File that all hosts have (thinwire secret FILE): replicas then prove who they are, and encrypt what they send."""
    elastic: bool = False
    """Let replicas come and go: others join by the address that is printed, and a lost one stops nobody."""
    ranks_per_replica: int = 1
    """Processes of this host that hold each elastic replica together, a shard of the model each (FSDP2)."""
    port: int = 29400
    """Port of the elastic run's coordinator; 0 takes a free one."""
    begin_with: int | None = None
    """Replicas, on all hosts, that an elastic run waits for before its first step. Default: --replicas."""
    preserve_norm: bool = False
    """Keep the length of a single replica's part in an elastic run's means, however many make them."""
    checkpoint_auto: bool = False
    """Choose the steps between checkpoints by what one costs and how often the run was lost; else as told above."""
    checkpoint_to: str | None = None
    """Folder or URL (s3://...) of an elastic run's checkpoints. Default: checkpoints/ in --out."""
    keep_checkpoints: int = 2
    """How many of an elastic run's checkpoints are kept."""
    on_finding: str = "warn"
    """What a run does about its own faults: warn; exclude, restart or replace a replica; abort; or off."""
    steer_dry_run: bool = False
    """Only tell what --on-finding would do."""
    join_deadline_s: float = 300.0
    """Seconds that replicas may come one after another."""
    cache_dir: Path | None = None
    """Where tokenizers and token files are kept. Default: ~/.cache/thinwire."""
    quiet: bool = False
    """Print nothing but the result and errors."""
    json: bool = False
    """Print the result as one JSON object, the last line on stdout."""

    @property
    def overlaps(self) -> int | tuple[int, ...] | None:
        """`overlap_steps` as a number, or one a replica.

        Raises:
            ValueError: It is neither.

        Example:
            >>> TrainConfig(overlap_steps="1,4").overlaps
            (1, 4)
        """
        if self.overlap_steps is None:
            return None
        try:
            numbers = tuple(int(part) for part in self.overlap_steps.split(","))
        except ValueError:
            raise ValueError(
                f"--overlap-steps must be one number, or one a replica joined by commas, got {self.overlap_steps!r}"
            ) from None
        return numbers[0] if len(numbers) == 1 else numbers

    @property
    def num_replicas(self) -> int:
        """`replicas` of a resolved configuration."""
        assert self.replicas is not None, "resolve() first"
        return self.replicas

    @property
    def run_dir(self) -> Path:
        """`out` of a resolved configuration."""
        assert self.out is not None, "resolve() first"
        return self.out

    def digest(self) -> str:
        """Return a hash of all options that change what is computed."""
        text = json.dumps(meaning(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


_CHOICES = {
    "tokenizer": ("bpe", "bytes"),
    "inner_optimizer": ("adamw", "adam", "sgd", "plain-sgd", "muon"),
    "schedule": ("cosine", "constant"),
    "autocast": ("none", "bf16"),
    "exchange": ("auto", "all-gather", "two-phase"),
    "fragment_order": ("strided", "sequential"),
    "on_finding": ON_FINDING,
}
_LEAST = {
    "steps": 1, "replicas": 1, "batch_size": 1, "seq_len": 1, "warmup_steps": 0, "weight_decay": 0, "clip_norm": 0,
    "threads": 1, "eval_every": 0, "eval_batches": 1, "final_eval_batches": 1, "log_every": 1, "checkpoint_every": 0,
    "vocab_size": 1, "port": 0, "keep_checkpoints": 1, "ranks_per_replica": 1,
}  # fmt: skip

# Peak learning rates of AdamW. nano's was tried: `thinwire train --replicas 2 --sync-interval 30 --overlap-steps 3
# --steps 300` on stdlib ended at 4.70, 4.55, 4.51, 4.55 for 1e-3, 3e-3, 6e-3, 1e-2. The others: the papers' scale.
_LR = {"nano": 6e-3, "35m": 1e-3, "150m": 6e-4, "400m": 4e-4, "1b": 3e-4}

_LR_OF_SGD = {"sgd": 0.02, "plain-sgd": 0.2}
# Methods that an AdamW would spoil, or that are meant for another. MASHA takes no more of it than its rate and decay.
_INNER = {"dgc": "plain-sgd", "demo": "plain-sgd", "masha1": "plain-sgd", "masha2": "plain-sgd", "muloco": "muon"}
# DGC carries the momentum itself; DeMo steps with signs.
_LR_OF_METHOD = {"dgc": 0.02, "demo": 1e-3}


def default_seq_len(model: str) -> int:
    """Return the tokens of a sequence where nobody says it."""
    return 128 if model == "nano" else 1024


def resolve(config: TrainConfig, *, world_size: int | None, cores: int, home: Path) -> TrainConfig:
    """Fill in every default that depends on something else.

    Args:
        config: What the user said.
        world_size: torchrun's, where it runs.
        cores: Of this host.
        home: The user's home, for the default cache.

    Raises:
        ValueError: `--replicas` contradicts torchrun.
    """
    if world_size is not None and config.replicas not in (None, world_size):
        raise ValueError(
            f"--replicas is {config.replicas}, but torchrun starts {world_size} ranks, one a replica; leave --replicas "
            f"out under torchrun"
        )
    replicas = world_size if world_size is not None else (2 if config.replicas is None else config.replicas)
    is_nano = config.model == "nano"
    steps = config.steps
    method = config.method.replace("_", "-").lower()
    inner = config.inner_optimizer or _INNER.get(method, "adamw")
    lr = _LR_OF_METHOD.get(method) or _LR_OF_SGD.get(inner) or _LR.get(config.model, 3e-4)
    filled: dict[str, Any] = {
        "replicas": replicas,
        "batch_size": BATCH_SIZE,
        "seq_len": default_seq_len(config.model),
        "lr": lr,
        "inner_optimizer": inner,
        "warmup_steps": min(1000, steps // 10),
        "eval_every": max(1, math.ceil(steps / 6)),
        "checkpoint_every": 100 if is_nano else 500,
        "threads": max(1, cores // max(1, replicas * config.ranks_per_replica)),
        "cache_dir": home / ".cache" / "thinwire",
        "out": Path("runs") / f"{config.method}-{config.model.rsplit('/', 1)[-1].replace(':', '-')}-seed{config.seed}",
    }
    if method not in _EVERY_STEP:
        filled["sync_interval"] = 30 if is_nano else 100
    missing = {name: value for name, value in filled.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **missing)


def command_line(config: Mapping[str, Any]) -> str:
    """Return the command that repeats a run: every option that matters and is not the default.

    Args:
        config: Options by name, as `to_json` returns them.

    Example:
        >>> command_line({"method": "diloco", "steps": 30, "final_exchange": False, "lr": None, "out": "runs/a b"})
        "thinwire train --method diloco --steps 30 --no-final-exchange --out 'runs/a b'"
    """
    defaults = to_json(TrainConfig())
    ignored = {"thinwire_version", *FREE} - {"out", "device"}
    words = ["thinwire train"]
    for name, value in config.items():
        if value is None or name in ignored or value == defaults.get(name):
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words.append(f"--{option} {shlex.quote(str(value))}")
    return " ".join(words)


def meaning(config: TrainConfig) -> dict[str, Any]:
    """Return the options that change what is computed, as JSON values."""
    return {name: value for name, value in to_json(config).items() if name not in FREE}


def to_json(config: TrainConfig) -> dict[str, Any]:
    """Return the options as JSON values."""
    return {field.name: _json_value(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def from_json(values: Mapping[str, Any]) -> TrainConfig:
    """Take back what `to_json` returned.

    Raises:
        ValueError: An option is unknown or of the wrong type.
    """
    fields = {field.name: str(field.type) for field in dataclasses.fields(TrainConfig)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"unknown options {', '.join(unknown)}")
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if not _has_type(value, fields[name]):
            raise ValueError(f"{name} must be {fields[name]}, got {value!r}")
        if isinstance(value, list):
            value = tuple(value)
        arguments[name] = Path(value) if "Path" in fields[name] and value is not None else value
    return TrainConfig(**arguments)


def _has_type(value: Any, annotation: str) -> bool:
    if annotation.startswith("tuple[str"):
        return isinstance(value, list) and all(isinstance(part, str) for part in value)
    kinds: dict[str, tuple[type, ...]] = {
        "int": (int,), "float": (int, float), "str": (str,), "Path": (str,), "bool": (bool,), "None": (type(None),)
    }  # fmt: skip
    allowed = [kind for part in annotation.split(" | ") for kind in kinds[part]]
    return isinstance(value, tuple(allowed)) and (bool in allowed or not isinstance(value, bool))


def read_config(run_dir: Path) -> TrainConfig:
    """Read `config.json` of a run.

    Raises:
        CheckpointError: There is none, or it is no configuration of this thinwire.
    """
    path = run_dir / "config.json"
    try:
        values = json.loads(path.read_text())
        values.pop("thinwire_version", None)
        return from_json(values)
    except FileNotFoundError:
        raise CheckpointError(
            f"{run_dir} holds no run of thinwire (no config.json); --resume takes the --out of an earlier run"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no configuration of this thinwire ({error}); restore it, or start anew with --overwrite"
        ) from error


def config_text(config: TrainConfig) -> str:
    """Return the content of a run's `config.json`."""
    return json.dumps({**to_json(config), "thinwire_version": __version__}, indent=2) + "\n"


def check_values(config: TrainConfig) -> None:
    """Refuse what can be refused by looking at each option alone.

    Raises:
        ValueError: One clear line: the option, its value, the limit.
    """
    for name, least in _LEAST.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise ValueError(f"{flag(name)} must be at least {least}, got {value}")
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        if value is not None and value not in choices:
            raise ValueError(f"{flag(name)} must be one of {', '.join(choices)}, got {value!r}")
    if config.lr is not None and not 0 < config.lr < math.inf:
        raise ValueError(f"--lr must be positive, got {config.lr}")
    if config.expected_step_s is not None and not 0 < config.expected_step_s < math.inf:
        raise ValueError(f"--expected-step-s must be positive, got {config.expected_step_s}")
    if not 0 < config.join_deadline_s < math.inf:
        raise ValueError(f"--join-deadline-s must be positive, got {config.join_deadline_s}")
    if config.interface is not None and config.address is not None:
        raise ValueError("give --interface or --address, not both")


def flag(name: str) -> str:
    """Return an option as the command line writes it."""
    return "--" + name.replace("_", "-")
