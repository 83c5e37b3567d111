"""The simulator against the lab: the same method, wires and step times, once in virtual seconds and once in real ones.

    sudo python benchmarks/simulate/lab_check.py                 # what is not stored yet, half a minute each
    sudo python benchmarks/simulate/lab_check.py --name dgc --fresh
    python benchmarks/simulate/lab_check.py --again              # simulate anew what was measured
    python benchmarks/simulate/lab_check.py --report             # the table of what is stored

In the lab each host runs the real optimizer and sleeps where it would compute. What the simulator is told:

- Rates: the lab's, times the payload's share of a frame. A frame is as long as the MTU and 14 bytes of Ethernet, which
  the lab's token buckets count; 52 of the MTU's bytes are the headers of IPv4 and of TCP with time stamps.
- Latencies: the lab's.
- The time of a step of each host: measured with the same method on the same hosts joined by wires without a limit, as
  the median over intervals of what was not spent on waiting. It is the sleep, and what the engine computes in the
  training thread. What it computes when a round has arrived (to decode and to sum) is a part of the wait, and nobody
  tells the simulator of it.

Nothing is fitted to runs on thin wires. Both sides are looked at over the same whole intervals, behind the warm-up. The
machine must be quiet, or the hosts must come before others: `echo -10 > /proc/self/autogroup` in the shell.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lab_configurations import Configuration, configurations
from lab_worker import Model, inner_of, method_of, summary, whole_intervals

from thinwire import simulate
from thinwire.lab import Lab
from thinwire.lab import network_commands as commands
from thinwire.lab.settings import Link, parse_access
from thinwire.planning.cluster import Cluster, Machine, Wire
from thinwire.planning.simulator_adapter import simulated_cluster, traffic_of
from thinwire.training.summary import describe_machine
from thinwire.units import parse_rate
from thinwire.version import __version__

RESULTS = Path(__file__).parents[1] / "results" / "simulate_lab.jsonl"
WORKER = Path(__file__).with_name("lab_worker.py")
# Of an MTU: the headers of IPv4 (20 bytes) and of TCP (20), with its time stamps (12).
HEADERS_BYTES = 20 + 20 + 12
RUN_DEADLINE_S = 240.0


def payload_share() -> float:
    """Return the part of a full frame's bytes that a program sent, as the lab's token buckets count it.

    Example:
        >>> round(payload_share(), 4)
        0.9564
    """
    return (commands.MTU_BYTES - HEADERS_BYTES) / commands.FRAME_BYTES


def measure_calm(configuration: Configuration, *, congestion: str) -> dict[str, Any]:
    """Run a configuration on wires without a limit."""
    interval = method_of(configuration.method, configuration.arguments).schedule.sync_interval
    with Lab(hosts=configuration.num_hosts) as lab:
        lab.set_congestion_control(congestion)
        steps = configuration.calm_steps or configuration.warm_steps + 4 * interval
        return {"calm": run(lab, configuration, steps=steps)}


def measure_thin(configuration: Configuration, *, congestion: str) -> dict[str, Any]:
    """Run a configuration on its wires."""
    link = Link(latency_s=configuration.latency_s)
    links = {
        pair: Link(rate_bits_per_s=parse_rate(rate), latency_s=latency_s)
        for one, other, rate, latency_s in configuration.links
        for pair in ((one, other), (other, one))
    }
    rates = dict(enumerate(configuration.rates))
    with Lab(hosts=configuration.num_hosts, rates=rates, link=link, links=links) as lab:
        lab.set_congestion_control(congestion)
        return {"thin": run(lab, configuration, steps=configuration.steps)}


def run(lab: Lab, configuration: Configuration, *, steps: int) -> list[dict[str, Any]]:
    """Train on all hosts of a lab and return a summary of each."""
    words = [sys.executable, str(WORKER), json.dumps(configuration.settings(steps=steps))]
    # hosts are sessions of their own, to which the kernel's scheduler gives no part of our priority
    before_others = ["sh", "-c", 'echo -10 2>/dev/null > /proc/self/autogroup; exec "$@"', "sh"]
    results = lab.run([*before_others, *words], deadline_s=RUN_DEADLINE_S, environment={"OMP_NUM_THREADS": "1"})
    if failed := [result for result in results if result.exit_code]:
        raise SystemExit(f"host {failed[0].host} failed: {failed[0].stderr[-2000:]}")
    interval = method_of(configuration.method, configuration.arguments).schedule.sync_interval
    first, last = whole_intervals(steps, interval=interval, warm_steps=configuration.warm_steps)
    found = []
    for result in results:
        told = json.loads(result.stdout.splitlines()[-1])
        times = summary(told["ends_s"], told["stalls_s"], first=first, last=last, interval=interval)
        found.append({**times, **{key: told[key] for key in ("sent_bytes", "num_fragments", "steps_passed")}})
    return found


def cluster_of(configuration: Configuration) -> Cluster:
    """Return the wires as the simulator is told them."""
    share, machines = payload_share(), []
    for host, text in enumerate(configuration.rates):
        access = parse_access(text)
        assert access.up_bits_per_s is not None and access.down_bits_per_s is not None
        machines.append(
            Machine(
                name=f"host-{host}", up_bits_per_s=share * access.up_bits_per_s,
                down_bits_per_s=share * access.down_bits_per_s, latency_s=configuration.latency_s / 2,
            )
        )  # fmt: skip
    wires = [
        Wire(
            source=f"host-{source}", destination=f"host-{to}", bandwidth_bits_per_s=share * parse_rate(rate),
            latency_s=latency_s,
        )
        for one, other, rate, latency_s in configuration.links
        for source, to in ((one, other), (other, one))
    ]  # fmt: skip
    return Cluster(machines=tuple(machines), wires=tuple(wires))


def simulated(configuration: Configuration, *, compute_s: Sequence[float]) -> list[dict[str, float]]:
    """Simulate a configuration and return a summary of each replica.

    Args:
        configuration: What to simulate.
        compute_s: Seconds of a step of each replica.
    """
    method, model = method_of(configuration.method, configuration.arguments), Model(configuration.width)
    inner = inner_of(configuration.inner, model)
    traffic = traffic_of(method, model, num_replicas=configuration.num_hosts, inner=inner)
    found = simulate.simulate_training(
        method.schedule, cluster=simulated_cluster(cluster_of(configuration)),
        replicas=[simulate.SimReplica(step_s=step_s) for step_s in compute_s], payload_bytes=traffic.payload_bytes,
        num_steps=configuration.steps, exchange=traffic.exchange,
    )  # fmt: skip
    interval = method.schedule.sync_interval
    first, last = whole_intervals(configuration.steps, interval=interval, warm_steps=configuration.warm_steps)
    summaries = []
    for replica, ends_s in enumerate(found.step_ends_s):
        stalls_s = [0.0] * configuration.steps
        for stall in found.stalls:
            if stall.replica == replica:
                stalls_s[stall.step - 1] += stall.seconds
        summaries.append(summary(ends_s, stalls_s, first=first, last=last, interval=interval))
    return summaries


def compared(line: dict[str, Any], configuration: Configuration) -> dict[str, Any]:
    """Return a line with what the simulator says now, and how far it is off."""
    virtual = simulated(configuration, compute_s=[host["compute_s"] for host in line["calm"]])
    measured_s, simulated_s = (mean_of(hosts, "step_s") for hosts in (line["thin"], virtual))
    waited_s, simulated_wait_s = (mean_of(hosts, "stall_s") for hosts in (line["thin"], virtual))
    return {
        **line, "virtual": virtual, "measured_step_s": measured_s, "simulated_step_s": simulated_s,
        "error_percent": 100 * (simulated_s / measured_s - 1), "measured_stall_s": waited_s,
        "simulated_stall_s": simulated_wait_s,
    }  # fmt: skip


def mean_of(hosts: Sequence[Mapping[str, float]], key: str) -> float:
    """Return the mean of a number over the hosts."""
    return statistics.fmean(host[key] for host in hosts)


Lines = dict[tuple[str, str], dict[str, Any]]


def read(results: Path) -> Lines:
    """Return what is stored, by name and congestion control; of several lines the last."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {(line["name"], line["congestion"]): line for line in map(json.loads, lines)}


def write(results: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Store lines."""
    results.write_text("".join(json.dumps(rounded(line)) + "\n" for line in lines))


def rounded(found: Any) -> Any:
    """Return values with the digits that mean something."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [rounded(value) for value in found]
    return float(f"{found:.6g}") if isinstance(found, float) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", action="append", help="configurations whose names begin so; all by default")
    parser.add_argument("--fresh", action="store_true", help="measure again what is stored")
    parser.add_argument("--calm", action="store_true", help="measure again on wires without a limit alone")
    parser.add_argument("--again", action="store_true", help="measure nothing, simulate what was measured")
    parser.add_argument("--report", action="store_true", help="print the table, and do nothing else")
    parser.add_argument("--congestion", default="cubic", help="the hosts' TCP congestion control")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    stored = read(options.results)
    wanted = {
        name: configuration
        for name, configuration in configurations().items()
        if not options.report and (not options.name or any(name.startswith(begin) for begin in options.name))
    }
    for name, configuration in wanted.items():
        line = stored.get((name, options.congestion), {})
        if line and line["configuration"] != configuration.to_json():
            line = {}
        if (options.again and not line) or (line and not (options.again or options.fresh or options.calm)):
            continue
        if not options.again:
            line |= {"name": name, "congestion": options.congestion, "configuration": configuration.to_json()}
            line |= circumstances()
            line |= measure_calm(configuration, congestion=options.congestion)
            if "thin" not in line or not options.calm:
                line |= measure_thin(configuration, congestion=options.congestion)
        line = compared(line, configuration)
        stored[name, options.congestion] = line
        write(options.results, list(stored.values()))
        print(row(line, configuration), flush=True)
    shown = [line for line in stored.values() if line["congestion"] == options.congestion]
    if shown and (options.report or options.again):
        print(report(shown))


def circumstances() -> dict[str, Any]:
    """Return what the measured times depend on beside the configuration."""
    return {"load_average": os.getloadavg()[0], "machine": describe_machine("cpu"), "thinwire_version": __version__}


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Return the table, in the order of the configurations, and below it what the errors come to.

    Args:
        lines: As they are stored, of one congestion control.
    """
    by_name = {line["name"]: line for line in lines}
    shown = [
        (by_name[name], known)
        for name, known in configurations().items()
        if name in by_name and by_name[name]["configuration"] == known.to_json()
    ]
    rows = [row(line, configuration) for line, configuration in shown]
    errors = [abs(line["error_percent"]) for line, _ in shown]
    stalls = [abs(line["simulated_stall_s"] - line["measured_stall_s"]) for line, _ in shown]
    worst = max(shown, key=lambda entry: abs(entry[0]["error_percent"]))[0]["name"]
    return "\n".join([
        "| configuration | hosts | Mbit/s | latency, ms | method | measured, s a step | simulated | error, % "
        "| measured stall, s a step | simulated |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"{len(shown)} configurations: errors of a step's time of {statistics.median(errors):.1f} % in the median and "
        f"{max(errors):.1f} % at worst ({worst}); of its stalls {1000 * statistics.median(stalls):.1f} ms and "
        f"{1000 * max(stalls):.1f} ms.",
    ])  # fmt: skip


def row(line: Mapping[str, Any], configuration: Configuration) -> str:
    """Return a line of the table."""
    latencies = {configuration.latency_s, *(latency_s for *_, latency_s in configuration.links)}
    cells = [
        line["name"], configuration.num_hosts, wires_of(configuration),
        " and ".join(f"{1000 * latency_s:.0f}" for latency_s in sorted(latencies)), configuration.method,
        f"{line['measured_step_s']:.4f}", f"{line['simulated_step_s']:.4f}", f"{line['error_percent']:+.1f}",
        f"{line['measured_stall_s']:.4f}", f"{line['simulated_stall_s']:.4f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def wires_of(configuration: Configuration) -> str:
    """Return the rates in short, down and up where they differ.

    Example:
        >>> wires_of(configurations()["diloco, 4 at 5 to 40"])
        '40, 20, 10/5, 40'
    """
    rates = [rate.replace("mbit", "") for rate in configuration.rates]
    text = rates[0] if len(set(rates)) == 1 else ", ".join(rates)
    between = {rate.replace("mbit", "") for _, _, rate, _ in configuration.links}
    return text + "".join(f"; some pairs {rate}" for rate in sorted(between))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
