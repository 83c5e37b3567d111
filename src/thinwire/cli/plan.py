"""`thinwire plan`: the method and settings that fit these machines and wires, and the predicted training time."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from thinwire.cli.argument_parsing import FAILED, command
from thinwire.cli.output import log, print_error, print_line
from thinwire.cli.plan_inside import (
    expert_lines,
    load_sites,
    pipeline_s,
    plan_across,
    plan_each,
    plan_inside,
    report_across,
    site_line,
    site_sequences,
    with_speeds,
)
from thinwire.cli.plan_options import PlanOptions, cluster_of
from thinwire.cli.tables import print_table
from thinwire.codec_specs import ACTIVATION_CODECS, codec_key
from thinwire.errors import excluded, refusal
from thinwire.files import write_json
from thinwire.planning.cluster import Cluster
from thinwire.site.expert_costs import USUAL_CODEC, USUAL_INTERVAL
from thinwire.site.search import NothingFits
from thinwire.training.method_catalog import method_entry
from thinwire.units import format_bytes, format_count, format_rate, format_seconds, parse_bytes
from thinwire.workloads.language.presets import check_model

if TYPE_CHECKING:
    from thinwire.carriers.cost import StorePrices
    from thinwire.planning.plan import Needs, Outlook, Plan
    from thinwire.planning.training_task import TrainingTask
    from thinwire.site.site_plan import SitePlan

_HEAD = (
    "method", "H", "tau", "layers", "codec", "exchange", "machines", "time", "computing", "loss", "to equal loss",
    "sent a step", "peak rate",
)  # fmt: skip
_TOP, _NAMED = 3, 8
# Options by which several replicas are asked for.
_OF_REPLICAS = ("method", "interval", "codec", "min_utilisation", "max_penalty", "min_replicas")
# Assumed for a machine whose memory nothing states: that of a large card at home.
_USUAL_MEMORY = "24GB"


@command("plan", PlanOptions, remedy="give another file",
         basic="cluster hosts rate latency flops memory model inside tokens out")  # fmt: skip
def main(options: PlanOptions) -> int:
    """Run `thinwire plan`."""
    if len(options.inside) == 1:
        return plan_inside(options)
    for name in ("lengths", "links", "profile"):
        if (given := getattr(options, name)) is not None:
            raise refusal(f"--{name} belongs to one --inside", got=given, allowed="one site file with it",
                          remedy=f"--inside site.json --{name} {given}")  # fmt: skip
    _check(options)
    if options.inside:
        return _plan_sites(options)
    _check_no_code(options, got="no --inside")
    cluster, source = _with_memory(cluster_of(options), options)
    # torch, which takes seconds: what shows without it has been refused by now
    workload = _workload(options)

    def memory(plan: Plan) -> list[str]:
        return [_memory(plan, workload, cluster, source=source), *_store_lines(plan, options, workload)]

    plan = _best_between(options, workload, cluster)
    return _report_between(plan, options, workload, cluster, memory=memory)


def _plan_sites(options: PlanOptions) -> int:
    """Plan inside each site, then between them, with the step times of the sites' plans.

    A model that does not fit a site is planned as one replica over all of them. One that fits is planned so too, and
    is one replica where that is sooner at the same loss and nothing was asked of several.
    """
    sites = load_sites(options)
    workload = _workload(options)
    workload = dataclasses.replace(workload, batch_size=site_sequences(options, workload, sites), global_batch=None)
    joined = _joined(options, list(sites))
    try:
        plans = plan_each(sites, options, sequences=workload.sequences(len(sites)))
    except NothingFits as error:
        try:
            found = plan_across(options, sites, joined)
        except NothingFits as of_all:
            raise ValueError(f"{error}; on all sites together {of_all}") from of_all
        return report_across(found, options, sites, why="no single site holds the model")
    cluster = with_speeds(joined, plans, num_parameters=workload.num_parameters)
    between = _best_between(options, workload, cluster)
    beside = []
    if not any(getattr(options, name) != getattr(PlanOptions(), name) for name in _OF_REPLICAS):
        sequences = workload.sequences(len(sites)) * len(sites)  # as many as all replicas together
        across = plan_across(options, sites, joined, sequences=sequences)
        across_s, replicas_s = pipeline_s(across, tokens=workload.tokens), between.best.equal_loss_s
        if across_s < replicas_s:
            why = f"sooner by {1 - across_s / replicas_s:.0%} than a replica at each site ({format_long(replicas_s)})"
            return report_across(across, options, sites, why=f"{format_long(across_s)} to equal loss, {why}")
        beside = [f"one replica over all sites would take {format_long(across_s)} to equal loss"]
    _check_no_code(options, got="sites that hold the model, each a replica")
    inside = {name: {**plan.to_json(), "model": options.model} for name, plan in plans.items()}

    def memory(plan: Plan) -> list[str]:
        return [*beside, *(site_line(name, plan) for name, plan in plans.items()), *_expert_lines(plan, plans, cluster)]

    return _report_between(between, options, workload, cluster, memory=memory, more={"inside": inside})


def _expert_lines(between: Plan, plans: Mapping[str, SitePlan], cluster: Cluster) -> list[str]:
    """Return what experts would send between sites that each hold the model, with the plan's interval and codec."""
    inside, best = next(iter(plans.values())), between.best.candidate
    if inside.model.experts is None:
        return []
    borders = {
        f"{one} - {other}": min(cluster.wire(*pair).bandwidth_bits_per_s for pair in ((one, other), (other, one)))
        for one, other in combinations(plans, 2)
    }
    tokens = inside.best.layout.global_batch * inside.model.seq_len
    codec = best.codec if best.codec in ACTIVATION_CODECS["backward"] else USUAL_CODEC
    memory_bytes = min(plan.site.num_devices * plan.site.memory_bytes for plan in plans.values())
    return list(expert_lines(
        inside.model, borders, tokens=tokens, sites=len(plans), memory_bytes=memory_bytes, codec=codec,
        interval=best.sync_interval or USUAL_INTERVAL,
    ))  # fmt: skip


def _check_no_code(options: PlanOptions, *, got: str) -> None:
    if options.activation_code != "auto":
        raise refusal("--activation-code is for one replica over several sites", got=got, allowed="auto",
                      remedy="to leave --activation-code out")  # fmt: skip


def _joined(options: PlanOptions, names: Sequence[str]) -> Cluster:
    """Return the sites as machines of a cluster, joined as the options say; their speeds follow from their plans."""
    if options.cluster is not None:
        cluster = cluster_of(options, needs_flops=False)
        found = [machine.name for machine in cluster.machines]
        if sorted(found) != sorted(names):
            raise refusal("the replicas of --cluster are not the sites", got=_few(found),
                          allowed=_few(names), remedy="replicas named like the site files")  # fmt: skip
        return cluster
    if options.rate is None:
        raise refusal("nothing says how the sites are joined", got="no --rate", allowed="--rate, or --cluster FILE",
                      remedy="--rate 1gbit --latency 20ms")  # fmt: skip
    cluster = cluster_of(dataclasses.replace(options, hosts=len(names)), needs_flops=False)
    named = (dataclasses.replace(one, name=name) for one, name in zip(cluster.machines, names, strict=True))
    return dataclasses.replace(cluster, machines=tuple(named))


def _best_between(options: PlanOptions, workload: TrainingTask, cluster: Cluster) -> Plan:
    from thinwire.planning.candidates import COMPARED, INTERVALS
    from thinwire.planning.search import PlanConstraints, make_plan

    wishes = PlanConstraints(
        methods=options.method or COMPARED, intervals=options.interval or INTERVALS, codecs=options.codec,
        min_utilisation=options.min_utilisation, max_penalty=options.max_penalty, min_replicas=options.min_replicas,
        is_by_store=options.via is not None,
    )  # fmt: skip
    return make_plan(workload, cluster, wishes)


def _report_between(
    plan: Plan, options: PlanOptions, workload: TrainingTask, cluster: Cluster, *,
    memory: Callable[[Plan], list[str]], more: Mapping[str, Any] = MappingProxyType({}),
) -> int:  # fmt: skip
    """Print a plan between machines, and write it.

    Args:
        plan: The plan.
        options: The options.
        workload: What is to be trained.
        cluster: The machines.
        memory: Lines of the output about a plan's memory.
        more: Contents of the plan's file beside the plan.
    """
    from thinwire.planning.explain import explain, write_plan_figure

    if options.json:
        print(json.dumps({**plan.to_json(), **more}))
    else:
        arithmetic = ["", *explain(plan, workload, cluster)] if options.explain else []
        _show(plan, [*memory(plan), *arithmetic])
    if options.figure is not None:
        write_plan_figure(plan, options.figure)
        log(f"figure written to {options.figure}", command="plan")
    if not plan.is_met:
        best = plan.best.prediction.compute_utilisation
        wished = options.min_utilisation
        print_error(
            "plan",
            f"no plan computes {wished:.0%} of the time; the nearest does {best:.0%}; nothing was written; lower "
            f"--min-utilisation or allow a larger --max-penalty",
        )
        return FAILED
    write_json(options.out, {**plan.to_json(), **more})
    log(f"written to {options.out}; thinwire train --plan {options.out}", command="plan")
    return 0


def _check(options: PlanOptions) -> None:
    """Check what is to be trained and chosen from, as far as it shows without torch."""
    check_model(options.model)
    if options.via is not None:
        if options.inside or options.explain:
            other = "--explain" if options.explain else "--inside"
            raise excluded("--via", other, why="it plans direct links", remedy="to leave one out")
        _prices(options.via)
    if options.torchtitan is not None:
        raise refusal("--torchtitan writes the plan of one site", got=f"{len(options.inside)} of --inside",
                      allowed="1", remedy="--inside site.json")  # fmt: skip
    for name in options.method:
        method_entry(name)
    for name in options.codec:
        codec_key(name, what="--codec")
    if options.batch_size is not None and options.global_batch is not None:
        why = "one is of one replica, the other of all together"
        raise excluded("--batch-size", "--global-batch", why=why, remedy="--batch-size alone")
    if not 0 <= options.min_utilisation < 1:
        raise refusal("--min-utilisation is no share", got=options.min_utilisation, allowed="at least 0, below 1",
                      remedy="--min-utilisation 0.95")  # fmt: skip
    if not -1 < options.max_penalty < math.inf:
        raise refusal("--max-penalty is no share of the loss", got=options.max_penalty, allowed="above -1, and finite",
                      remedy="--max-penalty 0.05, which is 5 %")  # fmt: skip


def _with_memory(cluster: Cluster, options: PlanOptions) -> tuple[Cluster, str]:
    """Assume a memory where none is stated; return the machines, and how their memory is known, for the output."""
    unknown = [machine.name for machine in cluster.machines if machine.memory_bytes is None]
    if not unknown:
        return cluster, "--memory" if options.cluster is None else "the cluster file"
    usual = parse_bytes(_USUAL_MEMORY)
    machines = tuple(
        dataclasses.replace(machine, memory_bytes=usual) if machine.memory_bytes is None else machine
        for machine in cluster.machines
    )
    remedy = "state it with --memory" if options.cluster is None else f"add memory_bytes to {options.cluster}"
    who = "" if len(unknown) == len(machines) else f" for {', '.join(unknown[:_NAMED])}"
    return dataclasses.replace(cluster, machines=machines), f"assumed{who}; {remedy}"


def _workload(options: PlanOptions) -> TrainingTask:
    from thinwire.planning.training_task import TrainingTask
    from thinwire.training.config import default_seq_len
    from thinwire.workloads.language import build_model

    seq_len = default_seq_len(options.model) if options.seq_len is None else options.seq_len
    model = build_model(options.model, max_seq_len=seq_len, device="meta")
    return TrainingTask(
        name=options.model, model=model, tokens=options.tokens, seq_len=seq_len, batch_size=options.batch_size,
        global_batch=options.global_batch,
    )  # fmt: skip


def _show(plan: Plan, more: Sequence[str]) -> None:
    """Print a plan."""
    print_line(
        f"{plan.model}, {format_count(plan.num_parameters)} parameters, {format_count(plan.tokens)} tokens, sequences "
        f"of {plan.seq_len}"
    )
    print_line()
    print_table(_HEAD, map(_cells, _shown_outlooks(plan)), left=("method", "codec", "exchange"))
    notes = dict.fromkeys(note for one in plan.outlooks if one.penalty for note in one.penalty.notes)
    if notes:
        print_line()
        for note in notes:
            print_line(f"~ {note}")
    print_line()
    best, names = plan.best, plan.best.candidate.replicas
    print_line(
        f"{'best' if plan.is_met else 'nearest'}: {best.candidate.describe()} ({_few(names)}): "
        f"{format_long(best.prediction.total_s)}, {best.prediction.compute_utilisation:.1%} of it computing"
    )
    for text in [*_alone(plan), *_needs(plan.needs, best)]:
        print_line(text)
    if plan.uneven is not None:
        batches = _few([f"{name} {count}" for name, count in plan.uneven.sequences.items()])
        print_line(
            f"unequal machines: batches by speed ({batches}) compute {plan.uneven.speedup:.3g} times as many tokens a "
            f"second; elastic runs take them: thinwire train --elastic, thinwire join --batch-size"
        )
    for rejection in plan.rejections:
        others = f" and {rejection.count - 1} more" if rejection.count > 1 else ""
        print_line(f"left out: {rejection.what}{others}: {rejection.reason}")
    for text in more:
        print_line(text)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _memory(plan: Plan, workload: TrainingTask, cluster: Cluster, *, source: str) -> str:
    """Compare what a replica of the best candidate needs with what the smallest of its machines has."""
    best = plan.best.candidate
    needed = workload.memory_bytes(micro_batch=best.micro_batch or best.batch_size, recompute=best.recompute)
    least = min(cluster.machine(name).memory_bytes or math.inf for name in best.replicas)
    at_once = "" if best.micro_batch is None else f", {best.micro_batch} of {best.batch_size} sequences at a time"
    at_once += ", activations computed again in the backward pass" if best.recompute else ""
    return f"memory: a replica needs about {format_bytes(needed)} of {format_bytes(least)} ({source}){at_once}"


def _prices(via: str) -> StorePrices:
    from thinwire.carriers.cost import PRICES

    scheme = via.partition("://")[0]
    if scheme not in PRICES or "://" not in via:
        raise refusal("--via names no store with known prices", got=repr(via.partition("#")[0][:60]),
                      allowed=", ".join(f"{name}://" for name in PRICES), remedy="--via s3://bucket/run")  # fmt: skip
    return PRICES[scheme]


def _store_lines(plan: Plan, options: PlanOptions, workload: TrainingTask) -> list[str]:
    """Return what the best candidate's rounds cost through a store, by both ways to exchange, and the choice."""
    from thinwire.carriers.cost import round_cost
    from thinwire.planning.simulator_adapter import traffic_of

    best = plan.best.candidate
    if options.via is None or best.num_replicas == 1:
        return []
    prices, method = _prices(options.via), best.make()
    traffic = traffic_of(method, workload.model, num_replicas=best.num_replicas)
    payload_bytes = sum(channels[traffic.last_channel] for channels in traffic.payload_bytes) / traffic.num_fragments
    rounds = 3600 / plan.best.prediction.step_s / method.schedule.sync_interval * traffic.num_fragments
    costs = [
        round_cost(way, members=best.num_replicas, payload_bytes=payload_bytes) for way in ("all-gather", "two-phase")
    ]
    cheaper = min(costs, key=lambda cost: cost.usd(prices)).topology
    chosen = best.exchange or traffic.exchange.pattern.name
    why = "the cheaper one" if chosen == cheaper else f"the sooner one; {cheaper} is cheaper"
    return [
        f"through {prices.name}: {rounds:,.1f} rounds an hour of {format_bytes(payload_bytes)} a replica; prices "
        f"recalled: {prices.put:g} USD a million PUT, {prices.get:g} a million GET, {prices.egress:g} a GB read",
        *(cost.describe(prices, rounds_per_hour=rounds) for cost in costs),
        f"chosen: {chosen}, {why}",
    ]


def _shown_outlooks(plan: Plan) -> Iterator[Outlook]:
    """Yield the first few, what nothing beats in time and loss, and the best of each method; the file has all."""
    from thinwire.planning.plan import pareto

    shown = {id(one) for one in (*plan.outlooks[:_TOP], *pareto(plan.outlooks))}
    methods: set[tuple[str, bool]] = set()
    for outlook in plan.outlooks:
        kind = outlook.candidate.method, outlook.candidate.num_replicas == 1
        if id(outlook) in shown or kind not in methods:
            yield outlook
        methods.add(kind)


def _cells(outlook: Outlook) -> tuple[str, ...]:
    found, penalty, what = outlook.prediction, outlook.penalty, outlook.candidate
    loss = "unknown" if penalty is None else f"{'~' if penalty.notes else ''}{penalty.share:+.2%}"
    equal = "-" if math.isinf(outlook.equal_loss_s) else format_long(outlook.equal_loss_s)
    settings = (what.sync_interval, what.overlap_steps, what.layers_per_fragment, what.codec, what.exchange)
    name = f"{what.replicas[0]} alone" if what.num_replicas == 1 else what.method
    return (
        name, *("" if value is None else str(value) for value in settings), str(what.num_replicas),
        format_long(found.total_s), f"{found.compute_utilisation:.1%}", loss, equal,
        format_bytes(found.sent_bytes_per_step), format_rate(found.peak_bits_per_s),
    )  # fmt: skip


def _alone(plan: Plan) -> list[str]:
    if plan.alone is None or plan.alone is plan.best:
        return []
    alone = f"{plan.alone.candidate.replicas[0]} alone takes {format_long(plan.alone.prediction.total_s)}"
    if math.isinf(plan.best.equal_loss_s):
        return [alone]
    times = plan.alone.equal_loss_s / plan.best.equal_loss_s
    return [f"{alone}; all together are {times:.3g} times as fast to equal loss"]


def _needs(needs: Needs | None, best: Outlook) -> list[str]:
    if needs is None:
        return []
    wanted = f"{needs.compute_utilisation:.0%}"
    if needs.limit < 0.995:
        wanted += f" of the {needs.limit:.0%} that speeds and latencies allow on any wires"
    factor = needs.rate_factor
    wires = f"wires {factor:.3g} times as fast" if factor > 1 else f"wires of {factor:.1%} of these rates"
    lines = [f"what it takes to compute {wanted}: {wires} with these settings"]
    if needs.sync_interval is not None and best.candidate.sync_interval is not None:
        loss = "" if needs.penalty is None else f", at a loss of {needs.penalty:+.2%}"
        lines.append(f"or on these wires an exchange every {needs.sync_interval} steps{loss}")
    elif best.candidate.sync_interval is not None:
        lines.append("and on these wires no sync interval is long enough")
    return lines


def format_long(seconds: float) -> str:
    """Write a duration in days from two days on.

    Example:
        >>> format_long(86400 * 12.34), format_long(7300)
        ('12.3 d', '2:01:40')
    """
    days = seconds / 86400
    return f"{days:,.1f} d" if days >= 2 else format_seconds(seconds)
