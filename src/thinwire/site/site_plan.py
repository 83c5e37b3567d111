"""Plan of a layout on a site: the value, its file, its options of `thinwire train`, and torchtitan's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.codec_specs import activation_codecs
from thinwire.errors import DataError
from thinwire.files import short
from thinwire.site.cost_model import ModelShape, StepCost, peak_bytes
from thinwire.site.device_grid import Degrees
from thinwire.site.pipeline import chunk_layers
from thinwire.site.site_file import Site
from thinwire.units import format_seconds

FORMAT, VERSION = "thinwire-site-plan", 1
_LONGEST_NAME = 200
# Layouts whose times differ by a smaller share are equally fast: the one with the fewest degrees above 1 wins.
TIE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRefusal:
    """Grids that were left out."""

    what: str  # the grid, or what several of them share
    reason: str  # the number, the limit and, where there is one, the remedy
    grids: int = 1  # how many grids


@dataclass(frozen=True, kw_only=True)
class SitePlan:
    """The fastest layout, and what it was compared with."""

    site: Site  # the devices
    model: ModelShape
    best: StepCost  # the fastest layout on its placement
    runners_up: tuple[StepCost, ...]  # the fastest layouts of other grids
    refused: tuple[LayoutRefusal, ...]  # grids that were left out
    num_layouts: int  # layouts that fit
    num_simulated: int  # of these, those whose step was timed
    # pipelines beyond the limit of simulations, whose lower bound does not rule them out. No other layout can be faster
    num_left: int
    steps: tuple[StepCost, ...] = ()  # layouts that fit, by rising lower bounds

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak memory of a device of each pipeline rank."""
        return peak_bytes(self.model, self.best.layout)

    def to_json(self) -> dict[str, Any]:
        """Return the plan file's content."""
        layout, code = self.best.layout, self.best.code
        forward, backward = self.best.border_bytes
        border = {
            "activation_code": None if code is None else "/".join(code),
            "stage_sites": list(self.best.placement.stage_sites),
            "border_bytes": {"forward": forward, "backward": backward},
        }  # fmt: skip
        return {
            "format": FORMAT, "version": VERSION,
            "degrees": degrees_entry(layout.degrees),
            "schedule": layout.schedule, "interleave": layout.interleave, "eagerness": layout.eagerness,
            "micro_batch": layout.micro_batch, "accumulation": layout.num_micro_batches,
            "global_batch": layout.global_batch, "seq_len": self.model.seq_len,
            "zero_stage": layout.zero_stage, "unsharded_layers": layout.unsharded_layers,
            "recomputed_layers_per_stage": layout.recomputed_layers, "streamed_chunks": layout.streamed_chunks,
            "rank_order": list(self.best.placement.rank_order),
            "peak_bytes": max(self.peak_bytes), "peak_bytes_per_stage": list(self.peak_bytes),
            "memory_bytes": self.site.memory_bytes,
            "step_s": self.best.step_s, "step_parts_s": self.best.parts_s,
            **(border if self.site.has_border else {}),
            "runners_up": [
                {
                    "degrees": degrees_entry(step.layout.degrees), "layout": step.layout.describe(),
                    "step_s": step.step_s, "peak_bytes": max(peak_bytes(self.model, step.layout)),
                    "reason": why_slower(step, self.best),
                }
                for step in self.runners_up
            ],
            "refused": [{"what": one.what, "reason": one.reason, "grids": one.grids} for one in self.refused],
            "num_layouts": self.num_layouts, "num_simulated": self.num_simulated,
            "num_left": self.num_left,
        }  # fmt: skip


def torchtitan_toml(plan: SitePlan) -> str:
    """Return a layout as sections of torchtitan's configuration.

    torchtitan 0.2 reads them as a file; in 0.3 the fields of `Trainer.Config` have the same names. It recomputes all
    layers or none, and shards all or none: a plan between them gets less memory and more work than planned.
    """
    layout, model = plan.best.layout, plan.model
    degrees, has_stages = layout.degrees, layout.degrees.pp > 1
    local = layout.micro_batch * (layout.num_micro_batches if has_stages else 1)
    sizes = chunk_layers(model.layers, degrees.pp * layout.interleave)
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": degrees.dp_replicate, "data_parallel_shard_degree": degrees.dp_shard,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
        "tensor_parallel_degree": degrees.tp, "context_parallel_degree": degrees.cp,
        "pipeline_parallel_degree": degrees.pp,
        **({} if model.experts is None else {"expert_parallel_degree": degrees.ep}),
    }  # fmt: skip
    if has_stages:
        parallelism |= {
            "pipeline_parallel_schedule": "1F1B" if layout.interleave == 1 else "Interleaved1F1B",
            "pipeline_parallel_microbatch_size": layout.micro_batch,
        }  # fmt: skip
        if set(sizes[1:-1]) <= {max(sizes)}:
            parallelism |= {
                "pipeline_parallel_layers_per_stage": max(sizes),
                "pipeline_parallel_first_stage_less_layers": max(sizes) - sizes[0],
                "pipeline_parallel_last_stage_less_layers": max(sizes) - sizes[-1],
            }  # fmt: skip
        else:
            parallelism["module_fqns_per_model_part"] = _module_names(sizes)
    recomputed = layout.recomputed_layers * degrees.pp
    sections: dict[str, dict[str, Any]] = {
        "training": {
            "local_batch_size": local, "global_batch_size": layout.padded_batch, "seq_len": model.seq_len,
        },
        "parallelism": parallelism, "activation_checkpoint": {"mode": "full" if recomputed else "none"},
    }  # fmt: skip
    lines = [f"# thinwire plan --inside: {layout.describe()}"]
    for count, word in ((recomputed, "recomputed"), (layout.unsharded_layers, "unsharded")):
        if 0 < count < model.layers:
            lines.append(f"# planned: {count} of {model.layers} layers {word}")
    if layout.padded_batch > layout.global_batch:
        lines.append(f"# planned: {layout.global_batch} sequences; torchtitan takes multiples of {layout.padded_batch}")
    for section, values in sections.items():
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _module_names(sizes: Sequence[int]) -> list[list[str]]:
    """Return the modules of each chunk, as torchtitan's decoders name them."""
    names: list[list[str]] = []
    for size in sizes:
        first = sum(sizes[: len(names)])
        names.append([f"layers.{number}" for number in range(first, first + size)])
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "output"]
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRun:
    """Contents of a site's plan file that a run uses."""

    settings: Mapping[str, Any]  # options of `thinwire train`, by their names
    rank_order: tuple[str, ...]  # name of the device of each rank


_MOST_RANKS = 1 << 20
# Options of `thinwire train` that the plan decides, by the file's keys.
_RUN_OPTIONS = {
    "global_batch": "batch_size", "micro_batch": "micro_batch", "seq_len": "seq_len", "zero_stage": "zero_stage",
    "recomputed_layers_per_stage": "recompute_layers", "interleave": "interleave",
    "unsharded_layers": "unsharded_layers",
}  # fmt: skip
_MAY_BE_NONE = ("zero_stage", "recompute_layers", "unsharded_layers")


def read_site_plan(content: Mapping[str, Any]) -> SiteRun:
    """Check the content of a site's plan file, as `SitePlan.to_json` gives it with the model's name added.

    Raises:
        DataError: It is no such plan; names the place, the value and the limit.
    """
    if content.get("version") != VERSION or isinstance(content["version"], bool):
        raise DataError(f"the plan has version {short(content.get('version'))}; this thinwire reads {VERSION}")
    model, degrees, order = content.get("model"), content.get("degrees"), content.get("rank_order")
    if not isinstance(model, str) or not 0 < len(model) <= _LONGEST_NAME:
        raise DataError(f"model must be a text, got {short(model)}; plan again with thinwire plan --inside")
    names = tuple(degrees_entry(Degrees()))
    if not isinstance(degrees, dict) or set(degrees) != set(names):
        raise DataError(f"degrees must hold {', '.join(names)}, got {short(degrees)}")
    settings: dict[str, Any] = {"model": model}
    for name in names:
        settings[name] = _count(degrees[name], f"degrees.{name}", least=1)
    for key, name in _RUN_OPTIONS.items():
        settings[name] = _count(content.get(key), key, least=0 if name in _MAY_BE_NONE else 1)
    num_ranks = Degrees(**{name: settings[name] for name in names}).num_devices
    if not isinstance(order, list) or len(order) != num_ranks or not all(isinstance(name, str) for name in order):
        raise DataError(f"rank_order must name {num_ranks} devices, got {short(order)}")
    if streamed := _count(content.get("streamed_chunks", 0), "streamed_chunks", least=0):
        settings["stream_backward"] = streamed
    settings |= _border_settings(content, settings["pp"])
    # where there is one shard no stage is asked for
    settings = {name: found for name, found in settings.items() if (name, found) not in (("zero_stage", 0), ("ep", 1))}
    lengths = content.get("lengths")
    if lengths is not None and settings["pp"] == 1:  # torch's pipelines take micro-batches of one shape
        if not isinstance(lengths, dict):
            raise DataError(f"lengths must be an object, got {short(lengths)}; plan again with --lengths")
        settings["sequences"] = "documents"
        settings["batch_size"] = _count(lengths.get("pieces"), "lengths.pieces", least=1)
    return SiteRun(settings=settings, rank_order=tuple(order))


def _border_settings(content: Mapping[str, Any], pp: int) -> dict[str, Any]:
    """Return the options of a pipeline between sites; those of a plan without a border are the defaults."""
    found: dict[str, Any] = {"eagerness": _count(content.get("eagerness", 1), "eagerness", least=1)}
    code, sites = content.get("activation_code"), content.get("stage_sites")
    if code is None or pp == 1:
        return found
    try:
        found["activation_code"] = "/".join(activation_codecs(code if isinstance(code, str) else short(code)))
    except ValueError as error:
        raise DataError(f"activation_code: {error}") from error
    if not isinstance(sites, list) or len(sites) != pp:
        raise DataError(f"stage_sites must number the site of {pp} pipeline stages, got {short(sites)}")
    numbers = [_count(one, "stage_sites", least=0) for one in sites]
    return {**found, "stage_sites": ",".join(map(str, numbers))}


def _count(found: object, where: str, *, least: int) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= _MOST_RANKS:
        raise DataError(f"{where} must be a whole number of {least} to {_MOST_RANKS}, got {short(found)}")
    return found


def degrees_entry(degrees: Degrees) -> dict[str, int]:
    """Return all degrees by name."""
    return {name: getattr(degrees, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}


def num_cuts(degrees: Degrees) -> int:
    """Return how many degrees are above 1."""
    return sum(degree > 1 for degree in degrees_entry(degrees).values())


# Parts of a step, as people call them.
CAUSES = {
    "compute": "computing", "recompute": "recomputing", "tensor": "tensor-parallel messages",
    "context": "context-parallel messages", "experts": "messages of experts", "data": "data-parallel messages",
    "waiting": "bubbles and stage messages",
}  # fmt: skip


def why_slower(step: StepCost, best: StepCost) -> str:
    """Return the cause that costs a layout most beside the best one, in seconds: shares are of different steps."""
    own, others = step.parts_s, best.parts_s
    cause = max(CAUSES, key=lambda name: own[name] - others[name])
    if step.step_s <= best.step_s * (1 + TIE):
        more = num_cuts(step.layout.degrees) - num_cuts(best.layout.degrees)
        return f"as fast within {TIE:.1%}, {'with more degrees above 1' if more > 0 else 'not faster'}"
    found = f"{step.step_s / best.step_s - 1:.1%} slower"
    if own[cause] <= others[cause]:  # the ranks that work longest have different causes
        return found
    times = f"{format_seconds(own[cause])} a step instead of {format_seconds(others[cause])}"
    return f"{found}, most by {CAUSES[cause]}: {times}"
