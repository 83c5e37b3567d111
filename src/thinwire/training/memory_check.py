"""Refusal of a run that cannot fit the memory of this machine, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from thinwire.errors import refusal
from thinwire.planning.workload import activation_bytes
from thinwire.sync.method import Method
from thinwire.training.config import TrainConfig
from thinwire.units import format_bytes

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
    """Estimate the memory of one replica from shapes alone.

    Args:
        config: Resolved options.
        model: May be on the meta device; frozen parameters have no gradients and nothing is remembered of them.
        method: Of the run.
    """
    assert config.data.batch_size is not None and config.model.seq_len is not None
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    per_element = 4 + _OPTIMIZER_BYTES.get(config.optimizer.inner_optimizer or "adamw", 8)
    of_rank = -(-config.data.batch_size // config.parallel.data_ranks)
    sequences = min(config.data.micro_batch or of_rank, of_rank)
    about = {
        "tokens": sequences * config.model.seq_len, "bytes_per_value": 2 if config.model.autocast == "bf16" else 4,
    }  # fmt: skip
    activations = activation_bytes(model, recompute=config.model.recompute, **about)
    if config.parallel.recompute_layers:
        layers = getattr(getattr(model, "config", None), "layers", 0) or 1
        share = min(1.0, config.parallel.recompute_layers * config.parallel.pp / layers)
        activations += share * (activation_bytes(model, recompute=True, **about) - activations)
    has_copies = method.view.moment == "after_inner_step"
    return MemoryEstimate(
        states=stored + trained * per_element, activations=activations,
        host_copies=trained * _GLOBAL_BYTES if has_copies else 0.0,
    )  # fmt: skip


def check_memory(
    config: TrainConfig, model: nn.Module, method: Method, *, num_local: int, limit_bytes: float | None = None
) -> None:
    """Refuse a run whose replicas on this host need more memory than there is.

    Args:
        config: Resolved options.
        model: On the meta device.
        method: Of the run.
        num_local: Replicas on this host.
        limit_bytes: Of the device; by default that of this machine.

    Raises:
        ValueError: Names the need, the limit and the remedy.
    """
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
            remedy="--recompute, a smaller --micro-batch, --seq-len or --model, or fewer --replicas here",
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
