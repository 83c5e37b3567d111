"""`thinwire traffic`: paths of flows over a leaf/spine fabric, planned, and compared with hashing."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.cli.argument_parsing import USAGE, command
from thinwire.cli.output import log
from thinwire.cli.tables import print_table
from thinwire.errors import ConnectError, excluded, refusal, unknown_name
from thinwire.files import write_whole
from thinwire.options import flag, option
from thinwire.traffic import METHODS, Fabric, FabricFlow, TrafficPlan, plan_traffic, read_fabric, read_flows
from thinwire.traffic.comparison import TrafficRow, compare_methods, failure_chart, write_failure_figure
from thinwire.traffic.method_rounds import RoundFlows, flows_of_rounds, flows_of_run, rounds_of_method, rounds_to_json
from thinwire.traffic.source_ports import (
    DEFAULT_PORTS,
    SPINE_HOP,
    Alone,
    PathProbe,
    TcpPaths,
    probe_by_timing,
    probe_source_ports,
    read_probes,
    with_source_ports,
)
from thinwire.training.config import TrainConfig, default_seq_len, method_problems, resolve
from thinwire.transport.addresses import read_port_range
from thinwire.units import format_bytes, format_rate, format_seconds, parse_rate, parse_seconds
from thinwire.workloads.language.presets import check_model

_HELP = """\
usage: thinwire traffic plan|compare|probe [OPTIONS]

Plan the paths of flows over a leaf/spine fabric.

  plan       choose the path of each flow by one method
  compare    compare all methods on the same flows
  probe      find the path of each source port from this host

thinwire traffic plan --help lists the options of plan.

Options:
  -h, --help                Show this help.
"""

_REMEDY = "give another place with --out or --figure"
# Longest wait for another host of a probe by timing: to come, or for its part of a load.
_MEETING_S = 60.0


@dataclass(frozen=True, kw_only=True)
class FabricOptions:
    """Options of all commands about traffic."""

    fabric: Path | None = None
    """Fabric: leaves, spines, hosts, ports and rates; see examples/traffic/fabric-2x4.json."""
    flows: Path | None = None
    """Flows that are sent at once; see examples/traffic/flows-4.json."""
    run: Path | None = None
    """Folder of a recorded run whose flows are taken; rank n is the n-th host."""
    failed: tuple[str, ...] = ()
    """Dead cable, such as leaf-0/spine-2; spine-2 is all of a spine. Repeatable."""
    k: int = option(4, least=1)
    """Connections into which k-ecmp splits each connection."""
    json: bool = False
    """Print one JSON object on stdout instead of a table."""


@dataclass(frozen=True, kw_only=True)
class TrafficPlanOptions(FabricOptions):
    """Choose a path for each flow: port, spine and, where a flow is split, its pieces.

    max_congestion counts flows of the largest size on the fullest cable; no method can go below the bound.
    """

    method: str = "ethereal"
    """ecmp, k-ecmp, round-robin, c4p, ethereal, colour or spray."""
    seed: int = 0
    """Random seed of the hashes of ecmp and k-ecmp."""
    method_of: str | None = None
    """Training method whose rounds are the flows, such as streaming-diloco; rank n is the n-th host."""
    model: str | None = None
    """Model of --method-of: nano, 35m, 150m, 400m, 1b, hf:PATH, or a size such as 7b. Default: nano."""
    replicas: int | None = option(None, least=2)
    """Replicas of --method-of. Default: the hosts of the fabric."""
    sync_interval: int | None = None
    """H of --method-of. Default: as thinwire train."""
    overlap_steps: int | None = None
    """tau of --method-of. Default: by method."""
    codec: str | None = None
    """Codec of --method-of. Default: by method."""
    probe: tuple[Path, ...] = ()
    """File or folder of `thinwire traffic probe`; the plan then names source ports. Repeatable."""
    out: Path | None = None
    """File of the plan, as JSON. Default: none."""


@dataclass(frozen=True, kw_only=True)
class TrafficCompareOptions(FabricOptions):
    """Compare the methods on the same flows, with and without dead cables."""

    method: tuple[str, ...] = option((), choices=METHODS)
    """Method to compare. Default: all. Repeatable."""
    seeds: int = option(20, least=1)
    """Plans of ecmp and k-ecmp that their numbers are the mean of."""
    figure: Path | None = None
    """SVG file: completion time over the number of dead uplinks of leaf-0."""


@dataclass(frozen=True, kw_only=True)
class TrafficProbeOptions:
    """Find the spine that each source port takes from this host to others; run it on every host that dials.

    A rank dials those before it. Linux only; the spines must answer packets whose time to live ends (ICMP).
    """

    fabric: Path | None = None
    """Fabric: leaves, spines, hosts, ports and rates; see examples/traffic/fabric-2x4.json."""
    source: str | None = None
    """This host's name in the fabric. Default: its host name."""
    to: tuple[str, ...] = ()
    """Other host, as NAME or NAME=ADDRESS. Default: the hosts of other leaves before it. Repeatable."""
    port: int = option(29_600, least=1)
    """Port at which the others will listen (`--port-range 29600-29600`)."""
    source_ports: str = f"{DEFAULT_PORTS[0]}-{DEFAULT_PORTS[-1]}"
    """FIRST-LAST: source ports to try."""
    by: str = option("time-to-live", choices=("time-to-live", "timing"))
    """`time-to-live`: the spines answer. `timing`: loads slow the ports that share a cable; run it on all hosts at
    once, on a quiet network."""
    load_rate: str | None = None
    """Rate of a load, for timing. Default: twice an uplink's."""
    hop: int = option(SPINE_HOP, least=1)
    """Router that is the spine, counted from this host; the leaf is 1."""
    timeout: str = "1s"
    """Longest wait for an answer."""
    out: Path = Path("probe")
    """Folder for the probe file, which is named after this host."""
    json: bool = False
    """Print one JSON object on stdout instead of a table."""


@command("traffic")
def main(arguments: Sequence[str]) -> int:
    """Run `thinwire traffic`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if arguments else USAGE
    actions = {"plan": plan, "compare": compare, "probe": probe}
    if arguments[0] not in actions:
        raise unknown_name("traffic command", arguments[0], actions)
    return actions[arguments[0]](arguments[1:])


@command("traffic", TrafficPlanOptions, prog="thinwire traffic plan", remedy=_REMEDY,
         basic="fabric flows run method_of method probe out json")  # fmt: skip
def plan(options: TrafficPlanOptions) -> int:
    """Run `thinwire traffic plan`."""
    fabric, flows, rounds = _read_planned(options)
    made = plan_traffic(fabric, flows, method=options.method, failed=options.failed, k=options.k, seed=options.seed)
    if options.probe:
        made = with_source_ports(made, read_probes(options.probe))
    found = made.to_json()
    if rounds:
        found["rounds"] = rounds_to_json(made, rounds)
    if options.out is not None:
        write_whole(options.out, json.dumps(found, indent=2) + "\n")
        log(f"wrote {options.out}", command="traffic")
    if options.json:
        print(json.dumps(found))
        return 0
    _show_plan(made)
    if rounds:
        print("\nrounds of an interval over these paths")
        rows = (
            (one["step"], ", ".join(map(str, one["fragments"])), format_bytes(one["bytes"]),
             format_seconds(one["seconds"]), _steps(one["steps_until_applied"]))
            for one in found["rounds"]
        )  # fmt: skip
        print_table(("after step", "fragments", "bytes", "takes", "applied after"), rows)
    for name, note in (("gloo", "rails; name your own interfaces"), ("nccl", "not tried on GPUs")):
        print(f"\n{name} ({note}):")
        for variable, value in found["settings"][name].items():
            print(f"  {variable}={value}")
    return 0


@command("traffic", TrafficCompareOptions, prog="thinwire traffic compare", remedy=_REMEDY,
         basic="fabric flows run failed figure json")  # fmt: skip
def compare(options: TrafficCompareOptions) -> int:
    """Run `thinwire traffic compare`."""
    fabric, flows = _read(options)
    methods = options.method or METHODS
    cases: dict[str, list[TrafficRow]] = {}
    for failed in ((), options.failed) if options.failed else ((),):
        name = "dead: " + ", ".join(failed) if failed else "all cables work"
        cases[name] = compare_methods(fabric, flows, methods=methods, failed=failed, k=options.k, seeds=options.seeds)
    if options.figure is not None:
        most = min(fabric.spines - 1, 8)
        chart = failure_chart(fabric, flows, methods=methods, k=options.k, seeds=options.seeds, most_failed=most)
        write_failure_figure(chart, options.figure)
        log(f"wrote {options.figure}", command="traffic")
    if options.json:
        print(json.dumps({name: [row.to_json() for row in rows] for name, rows in cases.items()}))
        return 0
    heads = ("method", "fullest cable", "bound", "first job", "last job", "connections", "mean of")
    for name, rows in cases.items():
        print(name)
        cells = (
            (row.method, f"{row.max_congestion:.2f} flows", f"{row.bound:.2f}", format_seconds(row.fastest_job_s),
             format_seconds(row.completion_s), row.pieces, f"{row.num_seeds} seeds" if row.num_seeds > 1 else "-")
            for row in rows
        )  # fmt: skip
        print_table(heads, cells, left=("method",))
    return 0


@command("traffic", TrafficProbeOptions, prog="thinwire traffic probe", remedy=_REMEDY, basic="fabric to port out")
def probe(options: TrafficProbeOptions) -> int:
    """Run `thinwire traffic probe`."""
    if options.load_rate is not None and options.by != "timing":
        raise refusal("--load-rate is for a probe by timing", got=f"{options.load_rate} with --by {options.by}",
                      allowed="--load-rate with --by timing", remedy="--by timing")  # fmt: skip
    fabric = _fabric(options.fabric)
    first, last = read_port_range(options.source_ports, what="--source-ports")
    parse_seconds(options.timeout)
    source = options.source or socket.gethostname()
    if source not in fabric.hosts:
        raise unknown_name("--source", source, list(fabric.hosts)[:20])
    destinations = _destinations(options.to, source, fabric)
    if not destinations:
        log(f"{source} dials no host of another leaf; nothing to probe", command="traffic")
    if options.by == "timing":
        found = _probe_by_timing(options, fabric, source, destinations, range(first, last + 1))
    else:
        found = _probe_by_time_to_live(options, destinations, range(first, last + 1))
    if not destinations:
        return 0
    made = PathProbe(source=source, destination_port=options.port, routers=found)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{source}.json"
    write_whole(path, json.dumps(made.to_json(), indent=2) + "\n")
    log(f"wrote {path}", command="traffic")
    if options.json:
        print(json.dumps(made.to_json()))
        return 0
    for name, routers in found.items():
        counts = Counter(routers.values())
        print(f"{source} to {name}: {len(routers)} source ports over {len(counts)} paths")
        for router, count in sorted(counts.items()):
            print(f"  {router}  {count} ports")
    return 0


def _probe_by_time_to_live(
    options: TrafficProbeOptions, destinations: Mapping[str, str], source_ports: range
) -> dict[str, dict[str, str]]:
    """Return the spine of each source port, by destination."""
    found: dict[str, dict[str, str]] = {}
    for name, address in destinations.items():
        try:
            ports = probe_source_ports(
                socket.gethostbyname(address), options.port, source_ports=source_ports, hop=options.hop,
                timeout_s=parse_seconds(options.timeout),
            )  # fmt: skip
        except OSError as error:
            raise _unreachable(name, address, error) from error
        if not ports:
            raise ConnectError(
                f"no router answered at hop {options.hop} on the way to {name} at {address}; give another --hop, let "
                "the spines answer packets whose time to live ends (ICMP time exceeded), or give --by timing"
            )
        found[name] = {str(port): router for port, router in ports.items()}
    return found


def _probe_by_timing(
    options: TrafficProbeOptions, fabric: Fabric, source: str, destinations: Mapping[str, str], source_ports: range
) -> dict[str, dict[str, str]]:
    """Return the path of each source port, by destination; all hosts of the job take part."""
    from thinwire.transport.connect import meet  # torch

    rate = 2 * fabric.uplink_bits_per_s if options.load_rate is None else parse_rate(options.load_rate)
    if not fabric.uplink_bits_per_s < rate < fabric.port_bits_per_s:
        raise refusal(
            "a load would not fill one path alone", got=format_rate(rate),
            allowed=f"above a cable's {format_rate(fabric.uplink_bits_per_s)} and below the port's "
            f"{format_rate(fabric.port_bits_per_s)}",
            remedy="--load-rate, or --by time-to-live",
        )  # fmt: skip
    addresses = {}
    for name, address in destinations.items():
        try:
            addresses[name] = socket.gethostbyname(address)
        except OSError as error:
            raise _unreachable(name, address, error) from error
    meeting = meet(deadline_s=_MEETING_S) or Alone()
    paths = TcpPaths(addresses, options.port, source_ports=source_ports, load_bits_per_s=rate)
    try:
        found = probe_by_timing(meeting, paths, leaf=fabric.hosts[source][0], spines=fabric.spines)
    finally:
        meeting.leave(meeting.world_size)
    return {name: {str(port): path for port, path in ports.items()} for name, ports in found.items()}


def _unreachable(name: str, address: str, error: OSError) -> ConnectError:
    return ConnectError(f"cannot probe {name} at {address}: {error}; give --to {name}=ADDRESS")


def _destinations(given: Sequence[str], source: str, fabric: Fabric) -> dict[str, str]:
    """Return the addresses, or else the names, of the hosts to probe."""
    named = dict(one.partition("=")[::2] for one in given)
    if not given:
        before = itertools.takewhile(lambda name: name != source, fabric.hosts)
        named = {name: "" for name in before if set(fabric.hosts[name]).isdisjoint(fabric.hosts[source])}
    for name in named:
        if name not in fabric.hosts or name == source:
            raise unknown_name("--to", name, [other for other in fabric.hosts if other != source][:20])
    return {name: address or name for name, address in named.items()}


def _fabric(path: Path | None) -> Fabric:
    if path is None:
        raise refusal("--fabric is missing", got="nothing", allowed="a fabric file",
                      remedy="--fabric examples/traffic/fabric-2x4.json")  # fmt: skip
    return read_fabric(path)


def _read(options: FabricOptions) -> tuple[Fabric, list[FabricFlow]]:
    fabric = _fabric(options.fabric)
    if options.flows is not None and options.run is not None:
        raise excluded("--flows", "--run", why="both give the flows", remedy="to leave --run out")
    if options.flows is not None:
        return fabric, read_flows(options.flows)
    if options.run is not None:
        return fabric, flows_of_run(options.run, fabric)
    raise refusal("there are no flows", got="neither --flows nor --run", allowed="one of them",
                  remedy="--flows examples/traffic/flows-4.json")  # fmt: skip


def _read_planned(options: TrafficPlanOptions) -> tuple[Fabric, list[FabricFlow], list[RoundFlows]]:
    """Return the fabric and its flows; those of a training method come with the rounds of an interval."""
    if options.method_of is None:
        for name in ("model", "replicas", "sync_interval", "overlap_steps", "codec"):
            if (given := getattr(options, name)) is not None:
                raise refusal(f"{flag(name)} is for the rounds of a training method",
                              got=f"{given} without --method-of", allowed=f"{flag(name)} with --method-of",
                              remedy="--method-of streaming-diloco")  # fmt: skip
        return *_read(options), []
    for name in ("flows", "run"):
        if getattr(options, name) is not None:
            raise excluded(flag(name), "--method-of", why="both give the flows", remedy=f"to leave {flag(name)} out")
    fabric = _fabric(options.fabric)
    name = "nano" if options.model is None else options.model
    check_model(name)
    given = {"sync_interval": options.sync_interval, "codec": options.codec,
             "overlap_steps": None if options.overlap_steps is None else str(options.overlap_steps)}  # fmt: skip
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    config = TrainConfig.of(method=options.method_of, model=name, **settings)
    config = resolve(config, world_size=None, cores=os.cpu_count() or 1, home=Path.home())
    if problems := method_problems(config):
        raise ValueError(problems[0])
    from thinwire.planning.simulator_adapter import traffic_of
    from thinwire.training.build import make_method
    from thinwire.workloads.language import build_model  # torch, which takes seconds

    count = len(fabric.hosts) if options.replicas is None else options.replicas
    method = make_method(config)
    model = build_model(name, max_seq_len=default_seq_len(name), device="meta")
    traffic = traffic_of(method, model, num_replicas=count)
    rounds = rounds_of_method(
        method.schedule, traffic.payload_bytes, traffic.exchange, fabric=fabric, num_replicas=count
    )
    return fabric, flows_of_rounds(rounds), rounds


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}" if count else "at once"


def _show_plan(plan: TrafficPlan) -> None:
    total_s = max(plan.completion_s.values())
    print(
        f"{plan.method}: fullest cable carries {_number(float(plan.max_congestion))} flows "
        f"(bound {_number(float(plan.bound))}); complete after {format_seconds(total_s)}\n"
        f"{plan.num_pieces} connections for {len(plan.flows)} flows\n"
    )
    has_ports = any(piece.source_ports for pieces in plan.pieces for piece in pieces)
    heads = ("flow", "from", "to", "share", "rail", "to rail", "spine", *(["port"] if has_ports else []))
    rows = (
        (number, flow.source, flow.destination, piece.share, piece.rail, piece.destination_rail,
         "-" if piece.spine is None else piece.spine, *piece.source_ports[:1])
        for number, (flow, pieces) in enumerate(zip(plan.flows, plan.pieces, strict=True)) for piece in pieces
    )  # fmt: skip
    print_table(heads, rows, left=("from", "to"))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
