"""Search for the fastest layout of a model on a site: enumerate, prune, bound, simulate, place.

All grids of five degrees are enumerated. Rules and memory leave some out, each with its reason; for the others the
fewest recomputed layers that fit are taken, and under ZeRO-3 a layer programme says which stay unsharded. A closed-form
lower bound ranks what is left, the best are simulated until no bound is below the best time, and the placement of the
fastest ones is annealed. Of layouts within 0.5 % of the best time the simplest is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from thinwire.errors import DataError, refusal
from thinwire.files import short
from thinwire.site import memory
from thinwire.site.cost_model import (
    Degrees,
    Layout,
    ModelShape,
    SitePlacement,
    StepCost,
    most_rank_layers,
    peak_bytes,
    rank_chunks,
)
from thinwire.site.layers import LayerOption, cheapest_options
from thinwire.site.pipeline import chunk_layers
from thinwire.site.placement import place
from thinwire.site.site_file import Site
from thinwire.units import format_seconds

FORMAT, VERSION = "thinwire-site-plan", 1
# Pipelines that are simulated at most (other layouts have a closed form), layouts whose placement is annealed, and
# runners-up that are kept.
_SIMULATED, _PLACED, _RUNNERS_UP = 50, 4, 8
# Layouts whose times differ by a smaller share are equally fast: the one with the fewest degrees above 1 wins.
TIE = 0.005
# Largest micro-batch and number of chunks that are tried; both are powers of two.
_MOST_MICRO_BATCH, _MOST_INTERLEAVE = 64, 8
_MOST_REMEDIES = 3
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRefusal:
    """Grids that were left out.

    Attributes:
        what: The grid, or what several of them share.
        reason: The number, the limit and, where there is one, the remedy.
        grids: How many grids.
    """

    what: str
    reason: str
    grids: int = 1


@dataclass(frozen=True, kw_only=True)
class SitePlan:
    """The fastest layout, and what it was compared with.

    Attributes:
        site: The devices.
        model: The model.
        best: The fastest layout on its placement.
        runners_up: The fastest layouts of other grids.
        refused: Grids that were left out.
        num_layouts: Layouts that fit.
        num_simulated: Of these, those whose step was timed.
        num_left: Pipelines beyond the limit of simulations, whose lower bound does not rule them out. No other layout
            can be faster.
        steps: Layouts that fit, by rising lower bounds.
    """

    site: Site
    model: ModelShape
    best: StepCost
    runners_up: tuple[StepCost, ...]
    refused: tuple[LayoutRefusal, ...]
    num_layouts: int
    num_simulated: int
    num_left: int
    steps: tuple[StepCost, ...] = ()

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak memory of a device of each pipeline rank."""
        return peak_bytes(self.model, self.best.layout)

    def to_json(self) -> dict[str, Any]:
        """Return the plan file's content."""
        layout = self.best.layout
        return {
            "format": FORMAT, "version": VERSION,
            "degrees": _degrees_entry(layout.degrees),
            "schedule": layout.schedule, "interleave": layout.interleave,
            "micro_batch": layout.micro_batch, "accumulation": layout.num_micro_batches,
            "global_batch": layout.global_batch, "seq_len": self.model.seq_len,
            "zero_stage": layout.zero_stage, "unsharded_layers": layout.unsharded_layers,
            "recomputed_layers_per_stage": layout.recomputed_layers,
            "rank_order": list(self.best.placement.rank_order),
            "peak_bytes": max(self.peak_bytes), "peak_bytes_per_stage": list(self.peak_bytes),
            "memory_bytes": self.site.memory_bytes,
            "step_s": self.best.step_s, "step_parts_s": self.best.parts_s,
            "runners_up": [
                {
                    "degrees": _degrees_entry(step.layout.degrees), "layout": step.layout.describe(),
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
    """Contents of a site's plan file that a run uses.

    Attributes:
        settings: Options of `thinwire train`, by their names.
        rank_order: Name of the device of each rank.
    """

    settings: Mapping[str, Any]
    rank_order: tuple[str, ...]


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
    names = tuple(_degrees_entry(Degrees()))
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
    if settings["zero_stage"] == 0:  # there is one shard
        del settings["zero_stage"]
    lengths = content.get("lengths")
    if lengths is not None and settings["pp"] == 1:  # torch's pipelines take micro-batches of one shape
        if not isinstance(lengths, dict):
            raise DataError(f"lengths must be an object, got {short(lengths)}; plan again with --lengths")
        settings["sequences"] = "documents"
        settings["batch_size"] = _count(lengths.get("pieces"), "lengths.pieces", least=1)
    return SiteRun(settings=settings, rank_order=tuple(order))


def _count(found: object, where: str, *, least: int) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= _MOST_RANKS:
        raise DataError(f"{where} must be a whole number of {least} to {_MOST_RANKS}, got {short(found)}")
    return found


def plan_site(
    site: Site, model: ModelShape, *, global_batch: int, most_simulated: int = _SIMULATED, most_placed: int = _PLACED
) -> SitePlan:
    """Find the fastest layout of a model on all devices of a site.

    Args:
        site: Devices and links.
        model: The model.
        global_batch: Sequences of a step of the whole site.
        most_simulated: Pipelines that are simulated at most.
        most_placed: Of these, those whose placement is annealed.

    Raises:
        ValueError: No layout fits; names the nearest one, the number, the limit and the remedy.
    """
    grids, refused = allowed_grids(site, model, global_batch=global_batch)
    layouts: list[Layout] = []
    for degrees in grids:
        plain = smallest_layout(degrees, global_batch=global_batch)
        layouts += fitting_layouts(site, model, degrees, global_batch=global_batch)
        if max(peak_bytes(model, plain)) > site.memory_bytes:
            refused.append(LayoutRefusal(what=plain.describe(), reason=memory_reason(site, model, plain, grids=grids)))
    if not layouts:
        raise _nothing_fits(site, model, refused, grids=grids, global_batch=global_batch)
    known: dict[Degrees, list[SitePlacement]] = {}
    steps = sorted(
        (fastest_start(site, model, layout, known) for layout in layouts), key=lambda step: step.lower_bound_s
    )
    timed, num_left = _timed(steps, most_simulated=most_simulated)
    timed.sort(key=lambda step: step.step_s)
    placed = [min(place(step), step, key=lambda one: one.step_s) for step in timed[:most_placed]]
    timed = [*placed, *timed[most_placed:]]
    best = simplest(timed)
    return SitePlan(
        site=site, model=model, best=best, runners_up=_runners_up(best, timed, steps), refused=tuple(refused),
        num_layouts=len(layouts), num_simulated=len(timed), num_left=num_left, steps=tuple(steps),
    )  # fmt: skip


def memory_front(plan: SitePlan) -> list[StepCost]:
    """Return the layouts that no other one beats in both memory and time, the least memory first.

    Every layout that fits is a candidate, and the same one with all layers recomputed. Ranks are where the search
    begins, or where it ended for the best layout.
    """
    candidates = [plan.best]
    for step in plan.steps:
        most = most_rank_layers(plan.model, step.layout)
        candidates.append(step)
        if step.layout.recomputed_layers < most:
            candidates.append(replace(step, layout=replace(step.layout, recomputed_layers=most)))
    front: list[StepCost] = []
    best_s = inf
    # those that the bound rules out are not timed
    for step in sorted(candidates, key=lambda one: (max(peak_bytes(one.model, one.layout)), one.lower_bound_s)):
        if step.lower_bound_s < best_s and step.step_s < best_s:
            if front and max(peak_bytes(step.model, step.layout)) <= max(peak_bytes(step.model, front[-1].layout)):
                front.pop()
            front.append(step)
            best_s = step.step_s
    return front


def all_grids(num_devices: int) -> Iterator[Degrees]:
    """Yield every grid of five degrees whose product is the number of devices.

    Example:
        >>> len(list(all_grids(1))), len(list(all_grids(8))), len(list(all_grids(6)))
        (1, 35, 25)
    """
    for pp in _divisors(num_devices):
        for tp in _divisors(num_devices // pp):
            for cp in _divisors(num_devices // (pp * tp)):
                rest = num_devices // (pp * tp * cp)
                for dp_shard in _divisors(rest):
                    yield Degrees(pp=pp, dp_replicate=rest // dp_shard, dp_shard=dp_shard, cp=cp, tp=tp)


def allowed_grids(site: Site, model: ModelShape, *, global_batch: int) -> tuple[list[Degrees], list[LayoutRefusal]]:
    """Return the grids that the rules allow, and those that they leave out, one entry a reason."""
    allowed: list[Degrees] = []
    broken: dict[tuple[str, str], int] = {}
    for degrees in all_grids(site.num_devices):
        rule = broken_rule(site, model, degrees, global_batch=global_batch)
        if rule is None:
            allowed.append(degrees)
        else:
            broken[rule] = broken.get(rule, 0) + 1
    return allowed, [LayoutRefusal(what=what, reason=why, grids=grids) for (what, why), grids in broken.items()]


def broken_rule(site: Site, model: ModelShape, degrees: Degrees, *, global_batch: int) -> tuple[str, str] | None:
    """Return the first rule that a grid breaks: what breaks it and why, or None."""
    tp, cp, pp = degrees.tp, degrees.cp, degrees.pp
    fewest = min(node.devices for node in site.nodes)
    if any(node.devices % tp for node in site.nodes):
        return f"tp {tp}", f"tensor parallel stays inside a node; got {tp}, allowed divisors of {fewest} devices"
    if model.heads % tp:
        return f"tp {tp}", f"every device has whole heads; got {tp}, allowed divisors of {model.heads} heads"
    if model.seq_len % (2 * cp):
        return f"cp {cp}", f"a sequence is cut into 2 cp equal parts; got {2 * cp} parts of {model.seq_len} tokens"
    if pp > model.layers:
        return f"pp {pp}", f"every stage has a layer; got {pp}, allowed 1 to {model.layers} layers"
    replicas = degrees.dp_replicate * degrees.dp_shard
    if replicas > global_batch:
        return (
            f"dp_replicate x dp_shard {replicas}",
            f"every replica has a sequence; got {replicas}, allowed 1 to {global_batch} sequences",
        )
    if pp > (most := -(-global_batch // replicas)):
        return f"pp {pp}", f"1F1B has as many micro-batches as stages at least; got {pp} stages, allowed 1 to {most}"
    return None


def smallest_layout(degrees: Degrees, *, global_batch: int) -> Layout:
    """Return the layout of a grid with the least memory before anything is recomputed."""
    return Layout(degrees=degrees, global_batch=global_batch, micro_batch=1, zero_stage=_zero_stages(degrees)[-1])


def _zero_stages(degrees: Degrees) -> tuple[int, ...]:
    """Return ZeRO's stages that a grid may have.

    A pipeline keeps weights and gradients whole between the micro-batches that are under way: torch's schedules do, and
    to fetch them again for every micro-batch would cost as many times the bytes.
    """
    if degrees.shards == 1:
        return (0,)
    return (1, 2, 3) if degrees.pp == 1 else (1,)


def fitting_layouts(site: Site, model: ModelShape, degrees: Degrees, *, global_batch: int) -> Iterator[Layout]:
    """Yield the layouts of a grid that fit, each with the fewest recomputed layers."""
    sequences = -(-global_batch // (degrees.dp_replicate * degrees.dp_shard))  # of the replica that has most
    for micro_batch in _powers_of_two(_MOST_MICRO_BATCH):
        if sequences % micro_batch or sequences // micro_batch < degrees.pp:
            break
        for interleave in _powers_of_two(_MOST_INTERLEAVE):
            if interleave > 1 and not _may_interleave(model, degrees, interleave, sequences // micro_batch):
                break
            for zero_stage in _zero_stages(degrees):
                layout = Layout(
                    degrees=degrees, global_batch=global_batch, micro_batch=micro_batch, zero_stage=zero_stage,
                    interleave=interleave,
                )  # fmt: skip
                recomputed = fewest_recomputed(site, model, layout)
                if recomputed is not None:
                    yield replace(layout, recomputed_layers=recomputed)
                if zero_stage == 3 and (mixed := mixed_layers(site, model, layout)) is not None:
                    yield mixed


def mixed_layers(site: Site, model: ModelShape, layout: Layout) -> Layout | None:
    """Return the fastest layout under ZeRO-3 that keeps some layers unsharded, or None where that is all or none.

    The layer programme chooses for each layer whether its weights stay together all through a step and whether it is
    recomputed.

    Args:
        site: Whose memory is the limit.
        model: The model.
        layout: Under ZeRO-3, without pipeline.
    """
    limit, layers = site.memory_bytes / (1 + memory.FRAGMENTATION), model.layers
    step = StepCost(model=model, layout=layout, placement=starts(site, layout.degrees)[0])

    def tensors(unsharded: int, recomputed: int) -> float:
        cut = replace(layout, unsharded_layers=unsharded, recomputed_layers=recomputed)
        return peak_bytes(model, cut)[0] / (1 + memory.FRAGMENTATION)

    if tensors(layers, 0) <= limit:
        return None
    counts: set[int] = set()
    for most_recomputed in (0, layers):
        # with every layer sharded, and recomputed where that is allowed; the options say what a layer adds
        least = tensors(0, most_recomputed)
        gathered = (tensors(layers, most_recomputed) - least) / layers
        kept = (tensors(0, 1) - least) / (layers - 1) if most_recomputed > 1 else 0.0
        kinds = [(u, r) for u in (0, 1) for r in ((0, 1) if most_recomputed else (0,))]
        options = [
            LayerOption(
                u * gathered + (kept if most_recomputed and not r else 0.0),
                step.layer_s(is_unsharded=bool(u), is_recomputed=bool(r)),
            )
            for u, r in kinds
        ]  # fmt: skip
        chosen = cheapest_options([options] * layers, most_bytes=limit - least) or ()
        counts.add(sum(kinds[number][0] for number in chosen))
    # the programme takes every layer's neighbours to be alike
    near = {count + more for count in counts for more in (-1, 0, 1) if 0 < count + more < layers}
    fit = []
    for count in sorted(near):
        mixed = replace(layout, unsharded_layers=count)
        recomputed = fewest_recomputed(site, model, mixed)
        if recomputed is not None:
            fit.append(replace(mixed, recomputed_layers=recomputed))
    return min(fit, key=lambda one: replace(step, layout=one).step_s, default=None)


def fewest_recomputed(site: Site, model: ModelShape, layout: Layout) -> int | None:
    """Return the fewest recomputed layers of each pipeline rank with which every device fits, or None."""
    limit, most = site.memory_bytes, most_rank_layers(model, layout)
    if max(peak_bytes(model, layout)) <= limit:
        return 0
    one, whole = (peak_bytes(model, replace(layout, recomputed_layers=layers)) for layers in (1, most))
    if max(whole) > limit:
        return None
    # from the first recomputed layer on memory falls by the same amount a layer
    needed = 1
    for rank, (with_one, with_all) in enumerate(zip(one, whole, strict=True)):
        if with_one > limit:
            a_layer = (with_one - with_all) / (sum(rank_chunks(model, layout, rank)) - 1)
            needed = max(needed, 1 + ceil((with_one - limit) / a_layer - 1e-9))
    return min(needed, most)


def memory_reason(site: Site, model: ModelShape, layout: Layout, *, grids: Sequence[Degrees]) -> str:
    """Return why a layout does not fit: the number, the limit, and what would help.

    Args:
        site: Whose memory is the limit.
        model: The model.
        layout: That needs more.
        grids: That the rules allow, of which some may help.
    """
    found = f"needs {_gigabytes(max(peak_bytes(model, layout)))} a device, has {_gigabytes(site.memory_bytes)}"
    remedies = []
    recomputed = fewest_recomputed(site, model, layout)
    if recomputed:
        remedies.append(f"recompute {recomputed * layout.degrees.pp} layers")
    for name in ("tp", "pp", "dp_shard"):
        larger = [
            getattr(degrees, name) for degrees in grids
            if getattr(degrees, name) > getattr(layout.degrees, name) and _differs_once(degrees, layout.degrees, name)
            and max(peak_bytes(model, smallest_layout(degrees, global_batch=layout.global_batch))) <= site.memory_bytes
        ]  # fmt: skip
        if larger:
            remedies.append(f"{name} {min(larger)}")
    return f"{found}: {' or '.join(remedies[:_MOST_REMEDIES])}" if remedies else found


def starts(site: Site, degrees: Degrees) -> list[SitePlacement]:
    """Return the placements to begin with: pipeline stages far apart, and pipeline stages close together."""
    per_stage = degrees.num_blocks // degrees.pp
    far = tuple(range(degrees.num_blocks))
    near = tuple(place * degrees.pp + stage for stage in range(degrees.pp) for place in range(per_stage))
    orders = (far,) if len(site.nodes) == 1 or near == far else (far, near)
    return [SitePlacement(site=site, degrees=degrees, slots=slots) for slots in orders]


def fastest_start(
    site: Site, model: ModelShape, layout: Layout, known: dict[Degrees, list[SitePlacement]] | None = None
) -> StepCost:
    """Return a layout on the better of the placements to begin with, by Pipette's formula.

    Args:
        site: Devices and links.
        model: The model.
        layout: How it is cut.
        known: Placements of grids, which are added to; links of a placement are worked out once.
    """
    placements = None if known is None else known.get(layout.degrees)
    if placements is None:
        placements = starts(site, layout.degrees)
        if known is not None:
            known[layout.degrees] = placements
    steps = [StepCost(model=model, layout=layout, placement=placement) for placement in placements]
    return steps[0] if len(steps) == 1 else min(steps, key=lambda step: step.pipette_s)


def simplest(steps: Sequence[StepCost]) -> StepCost:
    """Return the layout with the fewest degrees above 1 of those that are equally fast, then the fastest."""
    limit = min(step.step_s for step in steps) * (1 + TIE)
    return min((step for step in steps if step.step_s <= limit), key=_rank)


def _timed(steps: Sequence[StepCost], *, most_simulated: int) -> tuple[list[StepCost], int]:
    """Time the layouts that may be the best, or as good: by rising bounds, until these are above the best time.

    Returns:
        The layouts, and how many pipelines were left since enough were simulated.
    """
    found: list[StepCost] = []
    best, pipelines = float("inf"), 0
    for step in steps:
        if step.lower_bound_s > best * (1 + TIE):
            break
        is_pipeline = step.layout.degrees.pp > 1
        pipelines += is_pipeline
        if is_pipeline and pipelines > most_simulated:
            continue
        best = min(best, step.step_s)
        found.append(step)
    return found, max(0, pipelines - most_simulated)


# Parts of a step, as people call them.
CAUSES = {
    "compute": "computing", "recompute": "recomputing", "tensor": "tensor-parallel messages",
    "context": "context-parallel messages", "data": "data-parallel messages", "waiting": "bubbles and stage messages",
}  # fmt: skip


def why_slower(step: StepCost, best: StepCost) -> str:
    """Return the cause that costs a layout most beside the best one, in seconds: shares are of different steps."""
    own, others = step.parts_s, best.parts_s
    cause = max(CAUSES, key=lambda name: own[name] - others[name])
    if step.step_s <= best.step_s * (1 + TIE):
        more = _num_cuts(step.layout.degrees) - _num_cuts(best.layout.degrees)
        return f"as fast within {TIE:.1%}, {'with more degrees above 1' if more > 0 else 'not faster'}"
    found = f"{step.step_s / best.step_s - 1:.1%} slower"
    if own[cause] <= others[cause]:  # the ranks that work longest have different causes
        return found
    times = f"{format_seconds(own[cause])} a step instead of {format_seconds(others[cause])}"
    return f"{found}, most by {CAUSES[cause]}: {times}"


def _rank(step: StepCost) -> tuple[int, float, float, Degrees]:
    """Return a key: degrees above 1, then time, then memory. Times that differ by rounding are one time."""
    degrees = step.layout.degrees
    return _num_cuts(degrees), float(f"{step.step_s:.9g}"), max(peak_bytes(step.model, step.layout)), degrees


def _num_cuts(degrees: Degrees) -> int:
    return sum(degree > 1 for degree in _degrees_entry(degrees).values())


def _runners_up(best: StepCost, timed: Sequence[StepCost], steps: Sequence[StepCost]) -> tuple[StepCost, ...]:
    """Return the fastest layout of each of the next grids; where few were timed, by their bounds."""
    found: dict[Degrees, StepCost] = {}
    for step in (*sorted(timed, key=lambda step: step.step_s), *steps):
        degrees = step.layout.degrees
        if degrees != best.layout.degrees and degrees not in found:
            found[degrees] = step
        if len(found) == _RUNNERS_UP:
            break
    return tuple(sorted(found.values(), key=lambda step: step.step_s))


def _nothing_fits(
    site: Site, model: ModelShape, refused: Sequence[LayoutRefusal], *, grids: Sequence[Degrees], global_batch: int
) -> ValueError:
    if not grids:
        one = refused[0]
        return refusal(
            f"no grid of {site.num_devices} devices keeps the rules, the first: {one.reason}", got=one.what,
            allowed="heads and sequences that the degrees divide, and a sequence for each replica",
            remedy=f"--global-batch {site.num_devices * model.seq_len}",
        )  # fmt: skip

    def peak(degrees: Degrees) -> float:
        layout = smallest_layout(degrees, global_batch=global_batch)
        return max(peak_bytes(model, replace(layout, recomputed_layers=most_rank_layers(model, layout))))

    nearest = min(grids, key=peak)
    whole = memory.state_bytes(model.num_parameters, zero_stage=0, shards=1) * (1 + memory.FRAGMENTATION)
    needed = max(site.num_devices + 1, ceil(whole / site.memory_bytes))
    return refusal(
        f"the model does not fit: {nearest.describe()} with every layer recomputed needs {_gigabytes(peak(nearest))} a "
        f"device, has {_gigabytes(site.memory_bytes)}", got=f"{site.num_devices} devices",
        allowed=f"about {needed} or more of this memory", remedy="more devices, a smaller model or shorter sequences",
    )  # fmt: skip


def _may_interleave(model: ModelShape, degrees: Degrees, interleave: int, num_micro_batches: int) -> bool:
    has_stages = degrees.pp > 1 and num_micro_batches % degrees.pp == 0
    # a chunk of one end may hold the embedding or the head alone
    return has_stages and degrees.pp * interleave <= model.layers + 2


def _differs_once(one: Degrees, other: Degrees, name: str) -> bool:
    """Return whether a grid differs in a degree and in one other that gives devices to it."""
    own, others = _degrees_entry(one), _degrees_entry(other)
    return sum(own[each] != others[each] for each in own if each != name) == 1


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _powers_of_two(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2


def _degrees_entry(degrees: Degrees) -> dict[str, int]:
    return {name: getattr(degrees, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
