"""Parts of a run from its options: method, model, inner optimizer, learning rate; and checks of them and of memory."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from thinwire import codecs, methods
from thinwire.compat import eager
from thinwire.errors import MissingExtra, excluded, refusal
from thinwire.sync.fragments import Pattern, find_blocks
from thinwire.sync.method import Method
from thinwire.sync.multi_optimizer import MultiOptimizer
from thinwire.sync.schedule import WarmUp
from thinwire.training.config import OF_METHODS, TrainConfig, method_problems, validate
from thinwire.units import format_bytes

_FLOOR = 0.1


def make_method(config: TrainConfig) -> Method:
    """Return the method that the options describe.

    Raises:
        ValueError: The method or codec is unknown, an option is out of its range, or the method does not take it.
    """
    if problems := method_problems(config):
        raise ValueError("\n".join(problems))
    recipe = methods.recipe(config.sync.method)
    takes = inspect.signature(recipe).parameters
    arguments: dict[str, Any] = {}
    for name in OF_METHODS:
        value = config.sync.overlaps if name == "overlap_steps" else config.option(name)
        if value is not None:
            arguments[name] = codecs.by_name(str(value)) if name == "codec" else value
    arguments |= methods.parse_options(recipe, config.sync.method_option)
    method = recipe(**arguments)
    _check_run(config, method, takes_overlap="overlap_steps" in takes)
    return method


def _check_run(config: TrainConfig, method: Method, *, takes_overlap: bool) -> None:
    """Check options of the run that do not fit the method."""
    if not config.sync.final_exchange and not method.has_common_value:
        why = "only that exchange makes one model of its replicas'"
        method_of_run = f"--method {config.sync.method}"
        raise excluded("--no-final-exchange", method_of_run, why=why, remedy="to leave --no-final-exchange out")
    steps = range(1, 2 * method.schedule.sync_interval + 1)
    rounds = [round for step in steps for round in method.schedule.launches(step, num_fragments=1)]
    overlaps = isinstance(config.sync.overlaps, tuple) or any(r.apply_step > r.launch_step for r in rounds)
    if config.sync.pace and not overlaps:
        reason = OF_METHODS["overlap_steps"]
        if takes_overlap:
            reason = "with --overlap-steps 0 every exchange is waited for, so there are no steps to spread it over"
        raise excluded("--pace", f"--method {config.sync.method}", why=reason, remedy="to leave --pace out")


def make_inner_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the inner optimizer, with decay on matrices only.

    Gains and biases have a scale of their own, which decay would pull to zero.

    Raises:
        ValueError: Muon is wanted, and the model's blocks have no matrices.
    """
    options = config.optimizer
    assert options.lr is not None
    if options.inner_optimizer == "muon":
        return _make_muon(config, model, lr=options.lr)
    groups, betas = _groups(model.parameters(), weight_decay=options.weight_decay), (0.9, options.beta2)
    if options.inner_optimizer in ("sgd", "plain-sgd"):
        momentum = 0.9 if options.inner_optimizer == "sgd" else 0.0
        return eager(torch.optim.SGD)(groups, lr=options.lr, momentum=momentum)
    if options.inner_optimizer == "adam":
        return eager(torch.optim.Adam)(groups, lr=options.lr, betas=betas, fused=True)
    return eager(torch.optim.AdamW)(groups, lr=options.lr, betas=betas, fused=True)


def _make_muon(config: TrainConfig, model: nn.Module, *, lr: float) -> torch.optim.Optimizer:
    """Give the matrices of the blocks to Muon, and embeddings, the head, norms and biases to AdamW.

    Muon's steps are scaled to AdamW's size (0.2 a root of the longer side), so that one learning rate does for both.
    """
    hidden = _block_matrices(config, model)
    chosen = {id(parameter) for parameter in hidden}
    groups = _groups((p for p in model.parameters() if id(p) not in chosen), weight_decay=config.optimizer.weight_decay)
    betas = (0.9, config.optimizer.beta2)
    muon = eager(torch.optim.Muon)(
        hidden, lr=lr, weight_decay=config.optimizer.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = [eager(torch.optim.AdamW)(groups, lr=lr, betas=betas, fused=True)] if groups else []
    return MultiOptimizer([muon, *adamw])


def _groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Sort what is trained into what decays and what does not; a group of nothing is left out.

    Tensors of different device meshes get groups of their own: one operator takes those of one mesh alone.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault((parameter.ndim < 2, getattr(parameter, "device_mesh", None)), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [
        {"params": members, "weight_decay": 0.0 if is_vector else weight_decay} for (is_vector, _), members in ordered
    ]


def _block_matrices(config: TrainConfig, model: nn.Module) -> list[nn.Parameter]:
    """Return what Muon is for; without any of it a run would be one of AdamW under another name."""
    blocks = {name for names in find_blocks(model).blocks for name in names}
    found = [p for name, p in model.named_parameters() if name in blocks and p.ndim == 2]
    if not found:
        raise refusal(
            f"--inner-optimizer muon is for matrices of a model's blocks, and --model {config.model.name} has none",
            got=f"{len(blocks)} trained tensors in blocks, none of two dimensions", allowed="adamw, adam or sgd",
            remedy="--inner-optimizer adamw",
        )  # fmt: skip
    return found


def lr_factor(step: int, *, config: TrainConfig) -> float:
    """Return the learning rate at a step (from 1) as a share of its peak.

    Example:
        >>> config = TrainConfig.of(steps=100, warmup_steps=10)
        >>> [round(lr_factor(step, config=config), 3) for step in (1, 10, 55, 100)]
        [0.1, 1.0, 0.55, 0.1]
    """
    warmup_steps = config.optimizer.warmup_steps or 0
    if step <= warmup_steps:
        return step / warmup_steps
    if config.optimizer.schedule == "constant" or config.run.steps <= warmup_steps:
        return 1.0
    progress = (step - warmup_steps) / (config.run.steps - warmup_steps)
    return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def check(config: TrainConfig, *, num_local: int | None = None) -> None:
    """Refuse everything that can be refused before a worker starts; loads no weights and reads no data.

    Raises:
        ValueError: One clear line: the option, its value, the limit, the remedy.
        MissingExtra: A logger, or peft for `--lora`, is not installed.
    """
    validate(config)
    check_device(config.model.device)
    for package, is_wanted in (("tensorboard", config.output.tensorboard), ("wandb", config.output.wandb)):
        if is_wanted:
            MissingExtra.check(package, extra="report")
    method = make_method(config)
    own = method.schedule.warmup_steps if isinstance(method.schedule, WarmUp) else None
    if own is not None and (config.optimizer.warmup_steps or 0) > own:
        raise refusal(
            f"--warmup-steps, of the learning rate, ends after the warm-up of --method {config.sync.method}, which "
            f"would freeze what it learnt of small steps",
            got=config.optimizer.warmup_steps, allowed=f"0 to {own}", remedy=f"--warmup-steps {own}",
        )  # fmt: skip
    model = config.workload.sketch(config)
    # the pattern alone: binding a view would copy values, and a model on the meta device has none
    pattern = getattr(method.view, "fragments", Pattern(num_fragments=1))
    num_fragments = len(pattern.partition(find_blocks(model)))
    if config.optimizer.inner_optimizer == "muon":
        _block_matrices(config, model)
    method.schedule.check(num_fragments=num_fragments, num_replicas=config.num_replicas)
    method.exchanges(config.num_replicas)
    method.update(config.num_replicas)
    check_memory(config, model, method, num_local=config.num_replicas if num_local is None else num_local)


def check_device(name: str) -> None:
    """Check that torch has the device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise refusal("--device cuda, but torch sees no GPU", got="cuda", allowed="cpu on this host",
                      remedy="--device cpu, or a CUDA build of torch")  # fmt: skip


# Bytes an element that an inner optimizer remembers, in float32.
_OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "sgd": 4, "plain-sgd": 0, "muon": 4}
# Bytes an element of the global value and its momentum, which a method keeps in the host's memory.
_GLOBAL_BYTES = 8
# Files with the limit of a container's memory: cgroup version 2, then 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory that one replica needs, in bytes.

    Attributes:
        states: Parameters, gradients and what the inner optimizer remembers.
        activations: Of one forward pass of one rank, with the logits.
        host_copies: Global values and momenta beside the model; always in the host's memory.
    """

    states: float
    activations: float
    host_copies: float


def estimate_memory(config: TrainConfig, model: nn.Module, method: Method) -> MemoryEstimate:
    """Estimate the memory of one replica from shapes alone."""
    assert config.data.batch_size is not None
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    per_element = 4 + _OPTIMIZER_BYTES.get(config.optimizer.inner_optimizer or "adamw", 8)
    of_rank = -(-config.data.batch_size // config.parallel.data_ranks)
    activations = config.workload.activation_bytes(config, model, min(config.data.micro_batch or of_rank, of_rank))
    has_copies = method.update(1).program.has_local_steps
    return MemoryEstimate(
        states=stored + trained * per_element, activations=activations,
        host_copies=trained * _GLOBAL_BYTES if has_copies else 0.0,
    )  # fmt: skip


def check_memory(
    config: TrainConfig, model: nn.Module, method: Method, *, num_local: int, limit_bytes: float | None = None
) -> None:
    """Refuse a run whose replicas on this host need more memory than it has, or than `limit_bytes`."""
    found, own = estimate_memory(config, model, method), config.parallel
    parts = f"{format_bytes(found.states)} of parameters, gradients and optimizer, {format_bytes(found.activations)} of"
    if config.model.device == "cuda":
        # ranks of tp share activations, and those of a pipeline hold as many micro-batches as there are stages
        shards = config.elastic.ranks_per_replica * own.ranks // own.dp_replicate
        needed = found.states / shards + found.activations / (config.elastic.ranks_per_replica * own.tp)
        what, parts = "a GPU", f"{parts} activations"
    else:
        # all ranks of a replica on this machine
        needed = own.dp_replicate * (found.states + found.host_copies) + own.data_ranks * found.activations
        parts = f"{parts} activations, {format_bytes(found.host_copies)} of global values"
        what = "one replica"
        if num_local > 1:
            needed, what, parts = num_local * needed, f"{num_local} replicas on this machine", f"each {parts}"
    limit = device_memory_bytes(config.model.device) if limit_bytes is None else limit_bytes
    if needed > limit:
        where = "a GPU here" if config.model.device == "cuda" else "this machine"
        raise refusal(
            f"--model {config.model.name} does not fit the memory of {where}",
            got=f"about {format_bytes(needed)} for {what} ({parts})", allowed=f"{format_bytes(limit)} or less",
            remedy="--stream-backward 8, --recompute, a smaller --micro-batch, --seq-len or --model, or fewer "
                   "--replicas here",
        )  # fmt: skip


def device_memory_bytes(device: str) -> float:
    """Return the memory of this host's first GPU, or of the host, as far as its container may use it."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    found = float(psutil.virtual_memory().total)
    for path in _LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return min(found, float(text)) if text.isdecimal() else found
    return found
