"""Search for the fastest layout of a model on a site: enumerate, prune, bound, simulate, place.

All grids of five degrees are enumerated. Rules and memory leave some out, each with its reason; for the others the
fewest recomputed layers that fit are taken, and under ZeRO-3 a layer programme says which stay unsharded. A closed-form
lower bound ranks what is left, the best are simulated until no bound is below the best time, and the placement of the
fastest ones is annealed. Of layouts within 0.5 % of the best time the simplest is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, gcd, inf

from thinwire.errors import refusal
from thinwire.site import memory
from thinwire.site.cost_model import (
    Layout,
    ModelShape,
    StepCost,
    most_rank_layers,
    peak_bytes,
    rank_chunks,
)
from thinwire.site.device_grid import Degrees, SitePlacement
from thinwire.site.layers import LayerOption, cheapest_options
from thinwire.site.placement import place
from thinwire.site.site_file import Site
from thinwire.site.site_plan import TIE, LayoutRefusal, SitePlan, degrees_entry, num_cuts

# Pipelines that are simulated at most (other layouts have a closed form), layouts whose placement is annealed, and
# runners-up that are kept.
_SIMULATED, _PLACED, _RUNNERS_UP = 50, 4, 8
# Largest micro-batch and number of chunks that are tried; both are powers of two.
_MOST_MICRO_BATCH, _MOST_INTERLEAVE = 64, 8
_MOST_REMEDIES = 3
_MOST_NEEDED = 1024  # devices that a remedy may name
_CHUNKS = 8  # of a streamed backward pass
# Eagerness of a pipeline over a border: what is tried beside GPipe, and the share of the best time that less may cost.
_EAGERNESS, _EAGER_TIE = (1, 2, 3, 4), 0.01


class NothingFits(ValueError):
    """No layout of a model fits the devices; the text names the nearest one."""


def plan_site(
    site: Site, model: ModelShape, *, global_batch: int, code: tuple[str, str] | None = None,
    most_simulated: int = _SIMULATED, most_placed: int = _PLACED,
) -> SitePlan:  # fmt: skip
    """Find the fastest layout of a model on all devices of a site.

    Args:
        site: Devices and links.
        model: The model.
        global_batch: Sequences of a step of the whole site.
        code: Codecs of activations and of their gradients where the devices stand at several places.
        most_simulated: Pipelines that are simulated at most.
        most_placed: Of these, those whose placement is annealed.

    Raises:
        NothingFits: No layout fits; names the nearest one, the number, the limit and the remedy.
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
        (fastest_start(site, model, layout, known, code=code) for layout in layouts),
        key=lambda step: step.lower_bound_s,
    )
    timed, num_left = _timed(steps, most_simulated=most_simulated)
    timed.sort(key=lambda step: step.step_s)
    placed = [min(place(step), step, key=lambda one: one.step_s) for step in timed[:most_placed]]
    timed = [*placed, *timed[most_placed:]]
    best = least_eager(site, simplest(timed))
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
        if step.layout.recomputed_layers < most and not step.layout.streamed_chunks:
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
    for degrees in _expert_grids(all_grids(site.num_devices), model):
        rule = broken_rule(site, model, degrees, global_batch=global_batch)
        if rule is None:
            allowed.append(degrees)
        else:
            broken[rule] = broken.get(rule, 0) + 1
    return allowed, [LayoutRefusal(what=what, reason=why, grids=grids) for (what, why), grids in broken.items()]


def _expert_grids(grids: Iterator[Degrees], model: ModelShape) -> Iterator[Degrees]:
    """Yield every grid, and again with each number of devices that may share the experts."""
    for degrees in grids:
        for ep in (1,) if model.experts is None else _divisors(gcd(degrees.shards, model.experts.count)):
            yield replace(degrees, ep=ep)


def broken_rule(site: Site, model: ModelShape, degrees: Degrees, *, global_batch: int) -> tuple[str, str] | None:
    """Return the first rule that a grid breaks: what breaks it and why, or None."""
    tp, cp, pp = degrees.tp, degrees.cp, degrees.pp
    fewest = min(node.devices for node in site.nodes)
    if any(node.devices % tp for node in site.nodes):
        return f"tp {tp}", f"tensor parallel stays inside a node; got {tp}, allowed divisors of {fewest} devices"
    if model.experts is not None and not model.experts.is_cut and tp * pp > 1:
        name, degree = ("tp", tp) if tp > 1 else ("pp", pp)
        return f"{name} {degree}", f"mixtures of experts of thinwire share whole layers; got {name} {degree}, allowed 1"
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
                # over a border passes that are begun early hide its latency
                may_be_eager = site.has_border and degrees.pp > 1 and interleave == 1
                for eagerness in (*_EAGERNESS, layout.num_micro_batches) if may_be_eager else (1,):
                    eager = replace(layout, eagerness=eagerness)
                    recomputed = fewest_recomputed(site, model, eager)
                    if recomputed is not None and eagerness <= layout.num_micro_batches:
                        yield replace(eager, recomputed_layers=recomputed)
                yield from filter(None, (mixed_layers(site, model, layout), streamed_layout(site, model, layout)))


def streamed_layout(site: Site, model: ModelShape, layout: Layout) -> Layout | None:
    """Return a layout with its backward pass streamed, or None where that does not fit, or recomputing layers does.

    Recomputing is faster. Layouts that share layers or sequences too are left out.
    """
    degrees, may_stream = layout.degrees, model.can_stream and model.experts is None and model.seq_len >= _CHUNKS
    if not may_stream or degrees.pp * degrees.cp * degrees.tp > 1:
        return None
    streamed = replace(layout, streamed_chunks=_CHUNKS)
    fits = max(peak_bytes(model, streamed)) <= site.memory_bytes and fewest_recomputed(site, model, layout) is None
    return streamed if fits else None


def mixed_layers(site: Site, model: ModelShape, layout: Layout) -> Layout | None:
    """Return the fastest layout under ZeRO-3 that keeps some layers unsharded, or None: other stages, all or none.

    The layer programme chooses for each layer whether its weights stay together all through a step and whether it is
    recomputed.
    """
    limit, layers = site.memory_bytes / (1 + memory.FRAGMENTATION), model.layers
    step = StepCost(model=model, layout=layout, placement=starts(site, layout.degrees)[0])

    def tensors(unsharded: int, recomputed: int) -> float:
        cut = replace(layout, unsharded_layers=unsharded, recomputed_layers=recomputed)
        return peak_bytes(model, cut)[0] / (1 + memory.FRAGMENTATION)

    if layout.zero_stage != 3 or tensors(layers, 0) <= limit:
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
    """Return why a layout does not fit: the number, the limit, and which of the allowed grids would help."""
    found = f"needs {_gigabytes(max(peak_bytes(model, layout)))} a device, has {_gigabytes(site.memory_bytes)}"
    remedies = []
    recomputed = fewest_recomputed(site, model, layout)
    if recomputed:
        remedies.append(f"recompute {recomputed * layout.degrees.pp} layers")
    elif (streamed := streamed_layout(site, model, layout)) is not None:
        remedies.append(f"stream the backward pass in {streamed.streamed_chunks} chunks")
    for name in ("ep", "tp", "pp", "dp_shard"):
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
    site: Site, model: ModelShape, layout: Layout, known: dict[Degrees, list[SitePlacement]] | None = None, *,
    code: tuple[str, str] | None = None,
) -> StepCost:  # fmt: skip
    """Return a layout on the better of the placements to begin with, by Pipette's formula.

    Args:
        site: Devices and links.
        model: The model.
        layout: How it is cut.
        known: Placements of grids, which are added to; links of a placement are worked out once.
        code: As for `plan_site`.
    """
    placements = None if known is None else known.get(layout.degrees)
    if placements is None:
        placements = starts(site, layout.degrees)
        if known is not None:
            known[layout.degrees] = placements
    steps = [StepCost(model=model, layout=layout, placement=placement, code=code) for placement in placements]
    return steps[0] if len(steps) == 1 else min(steps, key=lambda step: step.pipette_s)


def least_eager(site: Site, best: StepCost) -> StepCost:
    """Return a step with the smallest eagerness that costs at most 1 %, for its memory."""
    for eagerness in range(1, best.layout.eagerness):
        layout = replace(best.layout, eagerness=eagerness)
        step = replace(best, layout=layout)
        if step.step_s <= best.step_s * (1 + _EAGER_TIE) and max(peak_bytes(best.model, layout)) <= site.memory_bytes:
            return step
    return best


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


def _rank(step: StepCost) -> tuple[int, float, float, Degrees]:
    """Return a key: degrees above 1, then time, then memory. Times that differ by rounding are one time."""
    degrees = step.layout.degrees
    return num_cuts(degrees), float(f"{step.step_s:.9g}"), max(peak_bytes(step.model, step.layout)), degrees


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
    return NothingFits(refusal(
        f"the model does not fit: {nearest.describe()} with every layer recomputed needs {_gigabytes(peak(nearest))} a "
        f"device, has {_gigabytes(site.memory_bytes)}", got=f"{site.num_devices} devices",
        allowed=f"about {needed} or more of this memory",
        remedy=_remedies(site, model, global_batch=global_batch),
    ))  # fmt: skip


def _remedies(site: Site, model: ModelShape, *, global_batch: int) -> str:
    """Return what helps beside a streamed backward pass, in order of what it sends: inside a site, between sites."""
    found = []
    for number in _powers_of_two(_MOST_NEEDED):
        # shards of the states alone, then of each sequence too
        needed = [
            max(
                peak_bytes(
                    model, replace(smallest_layout(one, global_batch=global_batch), recomputed_layers=model.layers)
                )
            )
            for one in (Degrees(dp_shard=number), Degrees(cp=number))
        ]
        devices = f"{number} devices of this memory"
        if number <= global_batch and needed[0] <= site.memory_bytes:
            found.append(f"to take {devices} (--dp-shard {number}, about {_gigabytes(needed[0])} each)")
            break
        if number > 1 and model.seq_len % (2 * number) == 0 and needed[1] <= site.memory_bytes:
            about = f"{devices} (--cp {number}, about {_gigabytes(needed[1])} each)"
            found += [f"to share each sequence inside a site over {about}",
                      "to share it across sites, with --inside FILE for each"]  # fmt: skip
            break
    found.append("to change the model: a smaller one, linear attention or shorter sequences")
    return "; then ".join(f"{number}. {one}" for number, one in enumerate(found, start=1))


def _may_interleave(model: ModelShape, degrees: Degrees, interleave: int, num_micro_batches: int) -> bool:
    has_stages = degrees.pp > 1 and num_micro_batches % degrees.pp == 0
    # a chunk of one end may hold the embedding or the head alone
    return has_stages and degrees.pp * interleave <= model.layers + 2


def _differs_once(one: Degrees, other: Degrees, name: str) -> bool:
    """Return whether a grid differs in a degree and in one other that gives devices to it."""
    own, others = degrees_entry(one), degrees_entry(other)
    if name == "ep":
        return replace(one, ep=1) == replace(other, ep=1)
    return one.ep == other.ep and sum(own[each] != others[each] for each in own if each != name) == 1


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _powers_of_two(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
