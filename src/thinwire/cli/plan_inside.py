"""`thinwire plan --inside`: degrees of parallelism for one replica on the devices of a site."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations
from typing import TYPE_CHECKING

from thinwire.charts import Axis, Chart, ChartSeries, Point, image_file, line_chart
from thinwire.cli.output import log, print_line
from thinwire.cli.plan_options import PlanOptions
from thinwire.cli.tables import print_table
from thinwire.codec_specs import (
    DEFAULT_ACTIVATION_CODE,
    DEFAULT_EXPERT_CODE,
    activation_bytes,
    activation_codecs,
    delta_memory_bytes,
)
from thinwire.errors import DataError, excluded, refusal
from thinwire.files import LARGEST_NUMBER, read_json, short, write_json, write_whole
from thinwire.site.cost_model import (
    Layout,
    ModelShape,
    StepCost,
    decoder_shape,
    device_memory,
    peak_bytes,
    with_experts,
)
from thinwire.site.device_grid import Degrees
from thinwire.site.expert_costs import USUAL_CODEC, USUAL_INTERVAL, ExpertShape, chosen_rung, ladder
from thinwire.site.memory import FRAGMENTATION, GRADIENT_BYTES, WEIGHT_BYTES, state_bytes
from thinwire.site.search import memory_front, plan_site
from thinwire.site.site_file import NodeLink, Site, join_sites, load_site
from thinwire.site.site_plan import CAUSES, SitePlan, torchtitan_toml, why_slower
from thinwire.training.config import default_seq_len
from thinwire.units import format_bytes, format_count, format_rate, format_seconds
from thinwire.workloads.cards import BATCH_SIZE
from thinwire.workloads.language.lengths import LengthsOutlook, cost_of, length_outlook, load_lengths
from thinwire.workloads.language.presets import check_model

if TYPE_CHECKING:
    from pathlib import Path

    from thinwire.planning.cluster import Cluster
    from thinwire.planning.training_task import TrainingTask

# Options of a plan between sites.
_BETWEEN = (
    "cluster", "hosts", "rate", "latency", "flops", "memory", "method", "interval", "codec", "min_utilisation",
    "max_penalty", "min_replicas",
)  # fmt: skip
_HEAD = (
    "pp", "dp_replicate", "dp_shard", "cp", "tp", "schedule", "micro-batch", "accumulation", "ZeRO", "recompute",
    "peak", "step", "beside the best",
)  # fmt: skip
# Of the loss that the default code costs: the most of three seeds in LOG.md, 2026-11-27. Others are taken to cost it.
_CODE_LOSS = 0.0015
_SHOWN_RUNNERS_UP = 4
_MOST_TIMES = 1 << 20
_MOST_PROFILE_BYTES = 2**20


def plan_inside(options: PlanOptions) -> int:
    """Plan inside a site, print the plan and write it."""
    check_inside_options(options)
    site = load_site(options.inside[0], links=options.links)
    if options.profile is not None:
        site = site.with_speed(profiled_flops_per_s(options.profile))
    return _report(_planned(site, options), options)


def plan_across(
    options: PlanOptions, sites: Mapping[str, Site], cluster: Cluster, *, sequences: int | None = None
) -> SitePlan:
    """Plan one replica on the devices of several sites, which `cluster` joins.

    Args:
        options: The options, which state the sequences of a step where they are not given.
        sites: By name.
        cluster: Joins them.
        sequences: Of a step of all sites.
    """

    def border(source: str, destination: str) -> NodeLink:
        wire = cluster.wire(source, destination)
        return NodeLink(bandwidth_bits_per_s=wire.bandwidth_bits_per_s, latency_s=wire.latency_s)

    return _planned(join_sites(sites, border), options, sequences=sequences)


def report_across(plan: SitePlan, options: PlanOptions, sites: Iterable[str], *, why: str) -> int:
    """Print the plan of one replica over several sites, and why it is one, and write it."""
    found = _report(plan, options)
    log(f"{why}: this is one replica over {', '.join(sites)}", command="plan")
    return found


def pipeline_s(plan: SitePlan, *, tokens: float) -> float:
    """Return how long one replica over several sites trains to the loss that it would have without a code."""
    from thinwire.planning.loss_penalty import compute_worth  # imports torch

    steps = tokens / (plan.best.layout.global_batch * plan.model.seq_len)
    is_coded = plan.best.code is not None and plan.best.layout.degrees.pp > 1
    return steps * plan.best.step_s * compute_worth(_CODE_LOSS if is_coded else 0.0)


def _planned(site: Site, options: PlanOptions, *, sequences: int | None = None) -> SitePlan:
    code = _border_code(site, options.activation_code)
    seq_len = default_seq_len(options.model) if options.seq_len is None else options.seq_len
    shape = _shape(options.model, seq_len=seq_len)
    # torchtitan shares the stream among tensor-parallel ranks; `thinwire train` does not
    is_shared = options.torchtitan is not None or options.model.startswith("hf:")
    shape = dataclasses.replace(shape, is_sequence_parallel=is_shared, can_stream=options.torchtitan is None)
    return plan_site(site, shape, global_batch=sequences or _sequences(options, seq_len), code=code)


def _report(plan: SitePlan, options: PlanOptions) -> int:
    """Print a plan inside a site, and write it."""
    counts = None if options.lengths is None else load_lengths(options.lengths)
    content = {**plan.to_json(), "model": options.model}
    lengths = None if counts is None else _lengths_outlook(plan, counts)
    if lengths is not None:
        content["lengths"] = dataclasses.asdict(lengths)
    if options.json:
        print(json.dumps(content))
    else:
        _show(plan, options, lengths)
    write_json(options.out, content)
    if options.torchtitan is not None:
        write_whole(options.torchtitan, torchtitan_toml(plan))
    if options.figure is not None:
        write_whole(options.figure, image_file(line_chart(memory_chart(plan, name=options.model))))
        log(f"figure written to {options.figure}", command="plan")
    how = how_to_run(plan.best.layout.degrees, options.out, model=options.model)
    if lengths is not None and plan.best.layout.degrees.pp > 1:
        how += ", with equal windows: torch's pipelines take micro-batches of one shape"
    log(f"written to {options.out}; {how}", command="plan")
    return 0


def _border_code(site: Site, text: str) -> tuple[str, str] | None:
    """Return the codecs of what crosses between sites, or None for 16 bits."""
    if not site.has_border and text != "auto":
        raise refusal("--activation-code is for what crosses between sites", got="nodes of one site", allowed="auto",
                      remedy='two or more --inside, or "site" at the nodes of the file')  # fmt: skip
    if not site.has_border or text == "none":
        return None
    return activation_codecs(DEFAULT_ACTIVATION_CODE if text == "auto" else text)


def border_lines(plan: SitePlan) -> Iterator[str]:
    """Yield what each kind of traffic would cost on the border between sites, and what the plan sends."""
    model, best, site = plan.model, plan.best, plan.site
    rates = _border_rates(site)
    rate = min(rates.values())
    width, tokens = model.width, best.layout.global_batch * model.seq_len
    kinds = {
        "stage boundary (pp)": 4.0 * width, "sequence (cp)": 4.0 * width * model.layers,
        "layer (tp)": 16.0 * width * model.layers,
    }  # fmt: skip
    if best.code is not None:
        coded = sum(activation_bytes(name, width * model.seq_len) for name in best.code) / model.seq_len
        kinds = {f"stage boundary, {'/'.join(best.code)}": coded, **kinds}
    yield ""
    yield "on the border, in 16 bits but for the code:  bytes a token  relative  a step"
    for name, count in kinds.items():
        # half of it goes each way, at the same time
        step = format_seconds(4 * count * tokens / rate)
        yield f"  {name:<42}{count:>14,.0f}{count / (4 * width):>10.2f}  {step}"
    if model.experts is None:
        yield "  experts (ep): this model has none"
    else:
        count = len(set(site.site_of))
        devices = Counter(site.site_of[node] for node in site.node_of)
        memory_bytes = min(devices.values()) * site.memory_bytes
        yield from expert_lines(model, rates, tokens=tokens / count, sites=count, memory_bytes=memory_bytes)
    forward, backward = best.border_bytes
    yield f"the plan sends {format_bytes(forward)} forward and {format_bytes(backward)} back between sites in a step"
    if best.code is not None and best.layout.degrees.pp > 1:
        window = format_bytes(delta_memory_bytes(1, width * model.seq_len))
        yield f"train --activation-memory takes {window} a window on each side of each border between stages"


def _border_rates(site: Site) -> dict[str, float]:
    """Return the slowest link between every two sites, in bits a second, by the sites' names."""
    found: dict[str, float] = {}
    for one, other in permutations(range(len(site.nodes)), 2):
        if site.site_of[one] < site.site_of[other]:
            name = f"{site.nodes[one].site} - {site.nodes[other].site}"
            rates = (site.link(*pair).bandwidth_bits_per_s for pair in ((one, other), (other, one)))
            found[name] = min(found.get(name, math.inf), *rates)
    return found


def expert_lines(
    model: ModelShape, borders: Mapping[str, float], *, tokens: float, sites: int, memory_bytes: float,
    interval: int = USUAL_INTERVAL, codec: str = USUAL_CODEC,
) -> Iterator[str]:  # fmt: skip
    """Yield a table for every kind of border: what each way to train the experts sends over it, the best marked.

    Args:
        model: A model with experts.
        borders: The rate between every two sites in bits a second, by a name.
        tokens: Of one site in a step.
        sites: How many there are.
        memory_bytes: Of all devices of a site.
        interval: Steps between two exchanges of pseudo-gradients.
        codec: Their codec.
    """
    experts = model.experts
    assert experts is not None, "callers ask for models with experts"
    rungs = ladder(experts, tokens=tokens, sites=sites, interval=interval, codec=codec)
    held = state_bytes(model.num_parameters, zero_stage=0, shards=1) * (1 + FRAGMENTATION)
    # copies of the experts of all layers and their gradients stay for a step, beside the site's share of the states
    copies = (WEIGHT_BYTES + GRADIENT_BYTES) * experts.layers * experts.layer_parameters * (1 - 1 / sites)
    chosen = chosen_rung(rungs, may_stream=held / sites + copies <= memory_bytes, holds_all=held <= memory_bytes)
    for rate in dict.fromkeys(borders.values()):
        names = ", ".join(name for name, other in borders.items() if other == rate)
        yield ""
        yield f"experts shared over the border {names} ({format_rate(rate)}), each way in a step:"
        for rung in rungs:
            num_bytes = rung.num_bytes * experts.layers / (sites - 1)
            time = format_seconds(8 * num_bytes / rate) + ("  <- best that fits" if rung is chosen else "")
            yield f"  {rung.number} {rung.what:<45}{format_bytes(num_bytes):>10}  {time}"
    yield (
        f"weights are fewer bytes than tokens from {experts.break_even_tokens():,.0f} remote tokens an expert and step "
        f"({experts.break_even_tokens(crossings=3):,.0f} if fetched again for the backward pass); here each expert "
        f"receives {experts.visits(tokens):,.0f} of each other site"
    )


def profiled_flops_per_s(path: Path) -> float:
    """Return the FLOP/s of both passes of a step, from what `thinwire bench profile --json` has printed.

    The optimizer's update is not in it: a plan takes it to need no time.
    """
    from thinwire.planning.predict import FLOPS_PER_PARAMETER  # imports torch

    content = read_json(path, most_bytes=_MOST_PROFILE_BYTES, command="thinwire bench profile --json")
    numbers = []
    for name in ("num_parameters", "tokens", "forward_s", "backward_s"):
        value = content.get(name) if isinstance(content, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_NUMBER:
            raise DataError(
                f"{path}: this is no profile: {name} must be a number above 0, got {short(value)}; write it with "
                f"thinwire bench profile --json > {path}"
            )
        numbers.append(float(value))
    num_parameters, tokens, forward_s, backward_s = numbers
    return FLOPS_PER_PARAMETER * num_parameters * tokens / (forward_s + backward_s)


def load_sites(options: PlanOptions) -> dict[str, Site]:
    """Read several site files; a site has the name of its file, with a number where a name is there twice."""
    given = [f"--{name}" for name in ("hosts", "flops", "memory") if getattr(options, name) is not None]
    if given:
        raise excluded("--inside", ", ".join(given), why="the site files state it",
                       remedy=f"to leave {', '.join(given)} out")  # fmt: skip
    stems = [path.stem for path in options.inside]
    names = [f"{stem}-{n}" if stems.count(stem) > 1 else stem for n, stem in enumerate(stems)]
    return {name: load_site(path) for name, path in zip(names, options.inside, strict=True)}


def site_sequences(options: PlanOptions, workload: TrainingTask, sites: Mapping[str, Site]) -> int:
    """Return the sequences of a step of each site.

    Where no batch is given it is the best published one, in multiples of the sites' devices if that leaves any.
    """
    if options.batch_size is not None:
        return options.batch_size
    if options.global_batch is not None:
        seq_len = workload.seq_len * len(sites)
        return _sequences(options, seq_len)
    wanted, devices = workload.sequences(len(sites)), math.lcm(*(site.num_devices for site in sites.values()))
    return max(1, round(wanted / devices)) * devices if wanted >= devices else wanted


def plan_each(sites: Mapping[str, Site], options: PlanOptions, *, sequences: int) -> dict[str, SitePlan]:
    """Plan a replica inside each site."""
    seq_len = default_seq_len(options.model) if options.seq_len is None else options.seq_len
    shape = _shape(options.model, seq_len=seq_len)
    plans: dict[str, SitePlan] = {}
    for name, site in sites.items():
        known = next((plan for plan in plans.values() if plan.site == site), None)
        try:
            plans[name] = known or plan_site(site, shape, global_batch=sequences)
        except ValueError as error:
            raise type(error)(f"site {name}: {error}") from error
    return plans


def with_speeds(cluster: Cluster, plans: Mapping[str, SitePlan], *, num_parameters: float) -> Cluster:
    """Return machines as fast as the plans of the sites are; the plans have seen to their memory."""
    from thinwire.planning.predict import FLOPS_PER_PARAMETER  # imports torch

    def speed(plan: SitePlan) -> float:
        tokens = plan.best.layout.global_batch * plan.model.seq_len
        return FLOPS_PER_PARAMETER * num_parameters * tokens / plan.best.step_s

    machines = (
        dataclasses.replace(machine, flops_per_s=speed(plans[machine.name]), memory_bytes=None)
        for machine in cluster.machines
    )
    return dataclasses.replace(cluster, machines=tuple(machines))


def site_line(name: str, plan: SitePlan) -> str:
    """Return a line about the plan inside one of several sites."""
    best = plan.best
    return (
        f"{name}, {_devices(plan.site)}: {best.layout.describe()}: {format_seconds(best.step_s)} a step, at most "
        f"{format_bytes(max(plan.peak_bytes))} of {format_bytes(plan.site.memory_bytes)} a device"
    )


def how_to_run(degrees: Degrees, path: Path, *, model: str) -> str:
    """Return the command that runs a plan, and where it does not."""
    if model.startswith("hf:") and degrees.num_devices > 1:
        return "thinwire train cuts its own models alone; --torchtitan FILE writes the plan for torchtitan"
    return f"thinwire train --plan {path}"


def check_inside_options(options: PlanOptions) -> None:
    """Check the options, as far as it shows without torch and without the site."""
    usual = {field.name: field.default for field in dataclasses.fields(options)}
    given = [f"--{name.replace('_', '-')}" for name in _BETWEEN if getattr(options, name) != usual[name]]
    if given:
        raise excluded(
            "--inside", ", ".join(given), why="it plans one replica inside a site, not several between sites",
            remedy=f"to leave {', '.join(given)} out",
        )  # fmt: skip
    check_model(options.model)
    if options.batch_size is not None and options.global_batch is not None:
        why = "one is in sequences, the other in tokens"
        raise excluded("--batch-size", "--global-batch", why=why, remedy="--global-batch alone")


def _sequences(options: PlanOptions, seq_len: int) -> int:
    if options.global_batch is None:
        return BATCH_SIZE if options.batch_size is None else options.batch_size
    if options.global_batch % seq_len:
        nearest = max(1, round(options.global_batch / seq_len)) * seq_len
        raise refusal(
            "--global-batch holds no whole number of sequences", got=f"{options.global_batch:g} tokens",
            allowed=f"multiples of {seq_len} tokens", remedy=f"--global-batch {nearest}",
        )  # fmt: skip
    return int(options.global_batch / seq_len)


def _shape(name: str, *, seq_len: int) -> ModelShape:
    # torch, which takes seconds: what shows without it has been refused by now
    from thinwire.workloads.language import hf, preset

    if name.startswith("hf:"):
        numbers = hf.decoder_numbers(name.removeprefix("hf:"), seq_len=seq_len)
        experts = numbers.pop("experts", None)
        shape = ModelShape(seq_len=seq_len, **numbers)
        return shape if experts is None else with_experts(shape, ExpertShape(**experts))
    config = preset(name, max_seq_len=seq_len)
    if config.is_linear:
        raise refusal("plans price attention to all earlier keys", got=name, allowed="a model without linear attention",
                      remedy=f"--model {name.removeprefix('linear-')}")  # fmt: skip
    shape = decoder_shape(
        layers=config.layers, width=config.dim, heads=config.heads, vocab_size=config.vocab_size, seq_len=seq_len,
        is_head_tied=config.tied_head,
    )  # fmt: skip
    # exact, with norms and an MLP of another width
    outside = shape.embedding_parameters + (0 if config.tied_head else shape.head_parameters)
    shape = dataclasses.replace(shape, layer_parameters=(config.num_parameters - outside) / config.layers)
    if not config.num_experts:
        return shape
    width = config.expert_dim or config.dim
    bits = [8 * activation_bytes(code, 1024) / 1024 for code in activation_codecs(DEFAULT_EXPERT_CODE)]
    return with_experts(shape, ExpertShape(
        count=config.num_experts, per_token=config.top_k, parameters=2 * width * config.mlp_dim, width=width,
        layers=config.layers, is_cut=False, bits=sum(bits) / 2,
    ))  # fmt: skip


def _lengths_outlook(plan: SitePlan, counts: Mapping[int, int]) -> LengthsOutlook:
    """Return the steps of the plan's data-parallel and context ranks; each computes with all devices of its stages."""
    degrees, best = plan.best.layout.degrees, plan.best
    ring = best.placement.context_links if degrees.cp > 1 else best.placement.shard_links
    per_rank = degrees.tp * degrees.pp
    cost = cost_of(
        layers=plan.model.layers, width=plan.model.width, num_parameters=plan.model.num_parameters,
        flops_per_s=min(best.placement.speeds) * per_rank,
        attention_flops_per_s=min(best.placement.attention_speeds) * per_rank,
        bandwidth_bits_per_s=ring.bandwidth_bits_per_s * per_rank, latency_s=ring.latency_s,
    )  # fmt: skip
    return length_outlook(
        counts, num_devices=degrees.num_devices // per_rank, cost=cost,
        max_tokens=_tokens_that_fit(plan),
        step_tokens=best.layout.global_batch * plan.model.seq_len, piece_tokens=plan.model.seq_len,
    )  # fmt: skip


def _tokens_that_fit(plan: SitePlan) -> int:
    """Return the tokens of a pass that the memory of a rank of the plan holds: the plan's own, as often doubled."""
    layout, most = plan.best.layout, plan.site.memory_bytes

    def times(factor: int) -> Layout:
        return dataclasses.replace(
            layout, micro_batch=factor * layout.micro_batch, global_batch=factor * layout.global_batch
        )

    factor = 1
    while factor < _MOST_TIMES and max(peak_bytes(plan.model, times(2 * factor))) <= most:
        factor *= 2
    return factor * layout.micro_batch * plan.model.seq_len // layout.degrees.cp


def _lengths_lines(lengths: LengthsOutlook) -> Iterator[str]:
    yield (
        f"lengths: {lengths.sequences} sequences a step of {lengths.mean_tokens:,.0f} tokens on average, the longest "
        f"{lengths.longest:,}"
    )
    groups = ""
    if lengths.largest_group > 1:
        groups = f"; {lengths.shared_percent:.1f}% are shared by up to {lengths.largest_group} ranks"
    yield (
        f"a step of them takes {format_seconds(lengths.step_s)} if each goes to the rank that is free first, "
        f"{format_seconds(lengths.in_turn_s)} in turn, {format_seconds(lengths.padded_s)} padded{groups}"
    )


def memory_chart(plan: SitePlan, *, name: str) -> Chart:
    """Return memory of the fullest device against time of a step: what nothing beats in both, and the runners-up."""

    def point(step: StepCost) -> Point:
        return max(peak_bytes(step.model, step.layout)) / 1e9, step.step_s

    front = memory_front(plan)
    series = [ChartSeries(name="nothing is better in both", points=tuple(map(point, front)), colour=0)]
    series += [
        ChartSeries(name=step.layout.describe(), points=(point(step),), colour=2, has_dots=True)
        for step in (*front, *plan.runners_up)
    ]
    series.append(
        ChartSeries(name=plan.best.layout.describe(), points=(point(plan.best),), colour=1, label="the plan",
                    has_dots=True)
    )  # fmt: skip
    return Chart(
        title=f"{name}: memory against time of a step, {_devices(plan.site)}", x=Axis(label="GB of the fullest device"),
        y=Axis(label="seconds of a step"), series=tuple(series),
    )  # fmt: skip


def _show(plan: SitePlan, options: PlanOptions, lengths: LengthsOutlook | None) -> None:
    best, model = plan.best, plan.model
    layout = best.layout
    print_line(
        f"{options.model}, {format_count(model.num_parameters)} parameters, {layout.global_batch} sequences of "
        f"{model.seq_len} tokens a step, {_devices(plan.site)}"
    )
    print_line()
    rows = [_cells(best, "best")]
    rows += [_cells(step, why_slower(step, best)) for step in plan.runners_up[:_SHOWN_RUNNERS_UP]]
    at = 0 if model.experts is None else _HEAD.index("schedule")
    head = _HEAD if not at else (*_HEAD[:at], "ep", *_HEAD[at:])
    print_table(head, rows, left=("schedule", "beside the best"))
    print_line()
    print_line(f"best: {layout.describe()}")
    parts = [
        f"{part / best.step_s:.1%} {CAUSES[name]}" for name, part in best.parts_s.items() if part > 5e-4 * best.step_s
    ]
    print_line(f"time: {format_seconds(best.step_s)} a step: {', '.join(parts)}")
    print_line(
        f"memory: at most {format_bytes(max(plan.peak_bytes))} of {format_bytes(plan.site.memory_bytes)} a device, "
        f"with {FRAGMENTATION:.0%} for fragmentation"
    )
    step_tokens = layout.global_batch * model.seq_len
    print_line(
        f"{format_count(options.tokens)} tokens take {format_seconds(options.tokens / step_tokens * best.step_s)} at "
        f"{format_count(step_tokens / best.step_s)} tokens a second"
    )
    for text in _lengths_lines(lengths) if lengths is not None else ():
        print_line(text)
    for text in border_lines(plan) if plan.site.has_border else ():
        print_line(text)
    left_out = sum(one.grids for one in plan.refused)
    if left_out and not options.explain:
        print_line(f"refused: {left_out} grids, by rules or memory; --explain lists them")
    for text in _explanation(plan) if options.explain else ():
        print_line(text)


def _devices(site: Site) -> str:
    count = site.num_devices
    if count == 1:
        return "1 device"
    return f"{count} devices" + (f" on {len(site.nodes)} nodes" if len(site.nodes) > 1 else "")


def _cells(step: StepCost, reason: str) -> tuple[str, ...]:
    layout, degrees = step.layout, step.layout.degrees
    schedule = layout.schedule + (f" x{layout.interleave}" if layout.interleave > 1 else "")
    return (
        str(degrees.pp), str(degrees.dp_replicate), str(degrees.dp_shard), str(degrees.cp), str(degrees.tp),
        *(() if step.model.experts is None else (str(degrees.ep),)), schedule, str(layout.micro_batch),
        str(layout.num_micro_batches), str(layout.zero_stage),
        "streamed" if layout.streamed_chunks else str(layout.recomputed_layers * degrees.pp),
        format_bytes(max(peak_bytes(step.model, layout))), format_seconds(step.step_s), reason,
    )  # fmt: skip


def _explanation(plan: SitePlan) -> Iterator[str]:
    """Yield the calculation: memory of each kind of stage, time by cause, places of the ranks, and refusals."""
    layout = plan.best.layout
    yield ""
    left = f"{plan.num_left} more pipelines may be as fast" if plan.num_left else "no other one can be faster"
    yield f"timed {plan.num_simulated} of {plan.num_layouts} layouts that fit; {left}"
    kinds = Counter(device_memory(plan.model, layout, stage=stage) for stage in range(layout.degrees.pp))
    for memory, count in kinds.items():
        yield (
            f"memory on {count} of {layout.degrees.pp} stages: {format_bytes(memory.states_bytes)} states + "
            f"{format_bytes(memory.gathered_bytes)} gathered layers + {format_bytes(memory.activations_bytes)} "
            f"activations + {format_bytes(memory.logits_bytes)} logits, and {FRAGMENTATION:.0%}: "
            f"{format_bytes(memory.peak_bytes)}"
        )
    parts = plan.best.parts_s
    yield "time: " + " + ".join(f"{format_seconds(part)} {CAUSES[name]}" for name, part in parts.items() if part)
    ranks = plan.best.placement.rank_order
    yield f"rank order (pp, dp_replicate, dp_shard, cp, tp): {' '.join(ranks)}"
    for one in plan.refused:
        yield f"refused: {one.what}{f' ({one.grids} grids)' if one.grids > 1 else ''}: {one.reason}"
