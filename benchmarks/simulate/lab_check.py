"""The simulator against the lab: the same method, wires and step times, once in virtual seconds and once in real ones.

    sudo python benchmarks/simulate/lab_check.py                 # what is not stored yet, half a minute each
    sudo python benchmarks/simulate/lab_check.py --name dgc --fresh
    python benchmarks/simulate/lab_check.py --again              # simulate anew what was measured
    python benchmarks/simulate/lab_check.py --report             # the table of what is stored

In the lab each host runs the real optimizer and sleeps where it would compute. What the simulator is told:

- Rates: the lab's, times the payload's share of a frame. A frame is as long as the MTU and 14 bytes of Ethernet, which
  the lab's token buckets count; 52 of the MTU's bytes are the headers of IPv4 and of TCP with time stamps.
- Latencies: the lab's.
- The time of a step of each host: measured with the same method on the same hosts joined by wires without a limit and
  without overlap, as the median over intervals of what was not spent on waiting. It is the sleep, and what the engine
  computes in the training thread.
- The time of a round where no wire limits it, to pack, decode and sum: what the host that waits least waits there for
  each round. It is the exchange's `message_s`, divided by its messages in a row.

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lab_worker import Model, inner_of, method_of, summary, whole_intervals

from thinwire import simulate
from thinwire.lab import Lab, network
from thinwire.lab.settings import Link, parse_access
from thinwire.planning.cluster import Cluster, Machine, Wire
from thinwire.planning.virtual import traffic_of, virtual_cluster
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
    return (network.MTU_BYTES - HEADERS_BYTES) / network.FRAME_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What is run and simulated.

    Attributes:
        method: Its name.
        rates: Each host's access, as the lab reads it: `"10mbit"`, or down and up, `"50mbit/10mbit"`.
        sleep_s: Seconds that a step sleeps, on each host or on all.
        steps: Inner steps.
        warm_steps: The first of them, which are not looked at.
        arguments: Of the method.
        latency_s: Between any two hosts, one way.
        links: Pairs that have a wire of their own, both ways: two hosts, its rate, its latency.
        width: Of the model.
        inner: The inner optimizer.
        calm_steps: Inner steps on wires without a limit.
    """

    method: str
    rates: tuple[str, ...]
    sleep_s: float | tuple[float, ...]
    steps: int
    warm_steps: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    latency_s: float = 0.0
    links: tuple[tuple[int, int, str, float], ...] = ()
    width: int = 256
    inner: str = "sgd"
    calm_steps: int = 0

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.rates)

    @property
    def calm_arguments(self) -> dict[str, Any]:
        """The arguments without overlap where the method can do without: then the time of a round shows as a wait."""
        if self.method == "decoupled-diloco":
            return dict(self.arguments)
        return {name: 0 if name == "overlap_steps" else value for name, value in self.arguments.items()}

    def settings(self, *, steps: int) -> dict[str, Any]:
        """Return what a worker is told."""
        sleep_s = [self.sleep_s] * self.num_hosts if isinstance(self.sleep_s, float) else list(self.sleep_s)
        return {
            "method": self.method, "arguments": dict(self.arguments), "inner": self.inner, "width": self.width,
            "sleep_s": sleep_s, "steps": steps,
        }  # fmt: skip


def configurations() -> dict[str, Configuration]:
    """Return all, by name: every method, 2 to 4 hosts, 1 to 100 Mbit/s, wires and hosts alike and not."""
    every_step = {"sleep_s": 0.05, "steps": 60, "warm_steps": 5, "calm_steps": 40}
    # codes take the cores' time, and hosts that share them must not wait for each other
    longer = {"sleep_s": 0.15, "steps": 45, "warm_steps": 5, "calm_steps": 35}
    alone = {"sleep_s": 0.05, "steps": 80, "warm_steps": 20, "calm_steps": 60}
    tens = {"sync_interval": 10}
    return {
        # everything, at every step
        "all-reduce, 2 at 100": Configuration(method="all-reduce", rates=("100mbit",) * 2, **every_step),
        "all-reduce, 3 up slower than down": Configuration(
            method="all-reduce", rates=("100mbit/40mbit",) * 3, **every_step, arguments={"codec": "bfloat16"}
        ),
        "robust, 4 at 50": Configuration(method="robust", rates=("50mbit",) * 4, **every_step, width=128),
        # the whole model, now and then
        "local-sgd, 2 at 20": Configuration(method="local-sgd", rates=("20mbit",) * 2, **alone, arguments=tens),
        "diloco, 2 at 10": Configuration(method="diloco", rates=("10mbit",) * 2, **alone, arguments=tens),
        "diloco, 3 at 50, 20 ms": Configuration(
            method="diloco", rates=("50mbit",) * 3, **alone, arguments=tens, latency_s=0.02
        ),
        "diloco, 4 at 5 to 40": Configuration(
            method="diloco", rates=("40mbit", "20mbit", "10mbit/5mbit", "40mbit"), sleep_s=0.1, steps=160,
            warm_steps=40, calm_steps=100, arguments={"sync_interval": 20}, width=128,
        ),
        "slowmo, 3 up slower than down": Configuration(
            method="slowmo", rates=("50mbit/10mbit",) * 3, **alone, arguments=tens, width=192
        ),
        "muloco, 3 at 5": Configuration(method="muloco", rates=("5mbit",) * 3, **alone, arguments=tens),
        "sparse-loco, 2 at 1": Configuration(
            method="sparse-loco", rates=("1mbit",) * 2, **alone, arguments=tens, width=384
        ),
        "noloco, 4 at 10 to 20": Configuration(
            method="noloco", rates=("20mbit", "10mbit", "20mbit", "15mbit"), sleep_s=0.05, steps=90, warm_steps=20,
            calm_steps=60, arguments=tens,
        ),
        "dimat, 4 in a ring at 20": Configuration(method="dimat", rates=("20mbit",) * 4, **alone, arguments=tens),
        # on the wire for an interval
        "eager, 2 at 5": Configuration(
            method="eager", rates=("5mbit",) * 2, sleep_s=0.05, steps=100, warm_steps=20, calm_steps=60,
            arguments=tens | {"codec": "bfloat16"},
        ),
        "co2, 3 at 10 and 5": Configuration(
            method="co2", rates=("10mbit", "5mbit", "10mbit"), sleep_s=0.05, steps=100, warm_steps=20, calm_steps=60,
            arguments=tens, width=128,
        ),
        # in fragments, while steps go on
        "streaming-diloco, 2 at 1": Configuration(
            method="streaming-diloco", rates=("1mbit",) * 2, sleep_s=0.1, steps=100, warm_steps=20, calm_steps=60,
            arguments={"sync_interval": 10, "overlap_steps": 2},
        ),
        "streaming-diloco, 2 at 2, no overlap": Configuration(
            method="streaming-diloco", rates=("2mbit",) * 2, **alone,
            arguments={"sync_interval": 10, "overlap_steps": 0, "layers_per_fragment": 1},
        ),
        "streaming-diloco, 3, one slower": Configuration(
            method="streaming-diloco", rates=("10mbit", "4mbit", "10mbit/4mbit"), sleep_s=(0.06, 0.06, 0.09), steps=100,
            warm_steps=20, calm_steps=60, arguments={"sync_interval": 10, "overlap_steps": 1, "layers_per_fragment": 2},
        ),
        "streaming-diloco, 4 at 5": Configuration(
            method="streaming-diloco", rates=("5mbit",) * 4, sleep_s=0.08, steps=100, warm_steps=20, calm_steps=60,
            arguments={"sync_interval": 10, "overlap_steps": 5},
        ),
        "streaming-diloco, 4 in two phases, 10 ms": Configuration(
            method="streaming-diloco", rates=("10mbit",) * 4, sleep_s=0.06, steps=120, warm_steps=20, calm_steps=60,
            arguments={"sync_interval": 10, "overlap_steps": 1, "exchange": "two-phase", "codec": "block-int8"},
            latency_s=0.01,
        ),
        "streaming-diloco, 4 at two sites": Configuration(
            method="streaming-diloco", rates=("50mbit",) * 4, sleep_s=0.06, steps=120, warm_steps=20, calm_steps=60,
            arguments={"sync_interval": 10, "overlap_steps": 2, "layers_per_fragment": 2},
            links=tuple((one, other, "3mbit", 0.015) for one in (0, 1) for other in (2, 3)),
        ),
        "streaming-diloco, 2 at 100, bfloat16": Configuration(
            method="streaming-diloco", rates=("100mbit",) * 2, **alone, width=512,
            arguments={"sync_interval": 5, "overlap_steps": 1, "codec": "bfloat16"},
        ),
        "decoupled-diloco, 3 at 3": Configuration(
            method="decoupled-diloco", rates=("3mbit",) * 3, sleep_s=0.06, steps=120, warm_steps=24, calm_steps=72,
            arguments={"sync_interval": 12, "overlap_steps": 2},
        ),
        "decoupled-diloco, 4 at 5, one slower": Configuration(
            method="decoupled-diloco", rates=("20mbit", "5mbit", "5mbit", "5mbit"), sleep_s=(0.06, 0.06, 0.06, 0.08),
            steps=120, warm_steps=24, calm_steps=72, arguments={"sync_interval": 12, "overlap_steps": 3},
        ),
        # compressed gradients, at every step
        "power-sgd, 2 at 2": Configuration(method="power-sgd", rates=("2mbit",) * 2, **longer),
        "dgc, 4 at 2": Configuration(method="dgc", rates=("2mbit",) * 4, **longer, arguments={"density": 0.01}),
        "demo, 2 at 2, 20 ms": Configuration(method="demo", rates=("2mbit",) * 2, **longer, latency_s=0.02),
        "ef21, 3 at 2 to 10": Configuration(
            method="ef21", rates=("10mbit", "10mbit/2mbit", "5mbit"), **longer, width=384
        ),
        "one-bit-adam, 2 at 2": Configuration(
            method="one-bit-adam", rates=("2mbit",) * 2, **longer, arguments={"warmup_steps": 4}, inner="adamw"
        ),
        "one-bit-lamb, 3 at 3": Configuration(
            method="one-bit-lamb", rates=("3mbit",) * 3, sleep_s=0.15, steps=45, warm_steps=11, calm_steps=40,
            arguments={"warmup_steps": 10}, inner="adamw", width=192,
        ),
        "zero-one-adam, 2 at 5": Configuration(
            method="zero-one-adam", rates=("5mbit",) * 2, sleep_s=0.08, steps=84, warm_steps=20, calm_steps=84,
            arguments={"variance_steps": 20, "variance_updates": 2, "local_doubling_steps": 16, "max_local_steps": 4},
            inner="adamw",
        ),
        "masha1, 2 at 5": Configuration(
            method="masha1", rates=("5mbit",) * 2, sleep_s=0.1, steps=80, warm_steps=5, calm_steps=40, width=128,
        ),
        "masha2, 3 at 20, one slower": Configuration(
            method="masha2", rates=("20mbit",) * 3, sleep_s=(0.08, 0.08, 0.12), steps=60, warm_steps=5, calm_steps=40,
            width=128,
        ),
    }  # fmt: skip


def measure_calm(configuration: Configuration, *, congestion: str) -> dict[str, Any]:
    """Run a configuration on wires without a limit, its rounds without overlap."""
    arguments = configuration.calm_arguments
    schedule = method_of(configuration.method, arguments).schedule
    with Lab(hosts=configuration.num_hosts) as lab:
        control(lab, congestion)
        steps = configuration.calm_steps or configuration.warm_steps + 4 * schedule.sync_interval
        return {"calm": run(lab, replace(configuration, arguments=arguments), steps=steps)}


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
        control(lab, congestion)
        return {"thin": run(lab, configuration, steps=configuration.steps)}


def control(lab: Lab, congestion: str) -> None:
    """Let TCP on all hosts react to congestion in one way, whatever this machine's own is."""
    for host in range(lab.num_hosts):
        words = f"ip route replace 10.77.0.0/24 dev eth0 proto kernel scope link src {lab.address(host)} congctl"
        if lab.start([*words.split(), congestion], host=host).wait(deadline_s=10):
            raise SystemExit(f"this kernel has no congestion control {congestion!r}")


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


def round_s(configuration: Configuration, calm: Sequence[Mapping[str, float]], *, num_fragments: int) -> float:
    """Return the seconds of a round where no wire limits it.

    Args:
        configuration: What ran.
        calm: What the hosts told of wires without a limit.
        num_fragments: Of the model.
    """
    schedule = method_of(configuration.method, configuration.calm_arguments).schedule
    interval = schedule.sync_interval
    steps = configuration.calm_steps or configuration.warm_steps + 4 * interval
    first, last = whole_intervals(steps, interval=interval, warm_steps=configuration.warm_steps)
    applied = [bool(schedule.applies(step, num_fragments=num_fragments)) for step in range(first + 1, last + 1)]
    return min(host["median_stall_s"] for host in calm) * (last - first) / sum(applied)


def simulated(configuration: Configuration, calm: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Simulate a configuration and return a summary of each replica.

    Args:
        configuration: What to simulate.
        calm: What the hosts told of wires without a limit.
    """
    method, model = method_of(configuration.method, configuration.arguments), Model(configuration.width)
    inner, everyone = inner_of(configuration.inner, model), range(configuration.num_hosts)
    traffic = traffic_of(method, model, num_replicas=configuration.num_hosts, inner=inner)
    links = virtual_cluster(cluster_of(configuration))
    stages = traffic.exchange.pattern.stages(links, senders=everyone, members=everyone)
    own_s = round_s(configuration, calm, num_fragments=traffic.num_fragments)
    message_s = own_s / sum(stage.num_messages for stage in stages)
    found = simulate.simulate_training(
        method.schedule, cluster=links, replicas=[simulate.Replica(step_s=host["compute_s"]) for host in calm],
        payload_bytes=traffic.payload_bytes, num_steps=configuration.steps,
        exchange=replace(traffic.exchange, message_s=message_s),
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
    virtual = simulated(configuration, line["calm"])
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
        if (options.again and not line) or (line and not (options.again or options.fresh or options.calm)):
            continue
        if not options.again:
            line = {**line, "name": name, "congestion": options.congestion, **circumstances()}
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
    shown = [(by_name[name], known) for name, known in configurations().items() if name in by_name]
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
