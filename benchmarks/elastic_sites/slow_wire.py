"""What one slow wire costs the rounds of an elastic run, gone around or not, and when it is used again once mended.

    sudo python benchmarks/elastic_sites/slow_wire.py

Three hosts of the lab, or more, a replica each, all at 50 Mbit/s; after some rounds the wire from host 0 to host 2,
that way only, carries 5 Mbit/s, and later 50 again. Real seats, sessions and connections; a process a host, and the
coordinator beside the first one's. Nothing is trained: a round begins where the last one has ended. Seconds are the
slowest replica's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bare_rounds import RESULTS, at_once, await_all, coordinate, sit_down, take_round, wait_for

from thinwire.elastic.join import Membership
from thinwire.lab import Lab

RATE, SLOW_BITS, DEADLINE_S = "50mbit", 5e6, 300.0
PART_BYTES = 1_000_000
HEALTHY, SLOW, MENDED = 14, 24, 44
ROUNDS = HEALTHY + SLOW + MENDED


def change_replica(membership: Membership, options: argparse.Namespace) -> None:
    (Path(options.folder) / f"here-{options.host}").write_text("")
    assert membership.replica == options.host


def take_part(options: argparse.Namespace) -> None:
    """Be one replica: rounds over good wires, with a slow one, and with that one mended."""
    folder = Path(options.folder)
    if options.host:
        wait_for(folder / f"here-{options.host - 1}")  # so that host n is replica n
    membership = sit_down(
        options.coordinator, options.address, planned=options.hosts, change=partial(change_replica, options=options)
    )
    lines = []
    for round_id in range(ROUNDS):
        if round_id in (0, HEALTHY, HEALTHY + SLOW):
            (folder / f"ready-{round_id}-{options.host}").write_text("")
            wait_for(folder / f"go-{round_id}")
        seconds, num_parts = take_round(membership, round_id, num_bytes=PART_BYTES)
        lines.append({
            "seconds": seconds, "parts": num_parts,
            "detours": [one.to_list() for one in membership.session.view.detours],
            "latest": membership.session.link_rates.report(latest=1),
        })  # fmt: skip
    (folder / f"part-{options.host}").write_text(json.dumps(lines))
    (folder / f"ready-{ROUNDS}-{options.host}").write_text("")
    wait_for(folder / "over")
    membership.close()


def be_host(options: argparse.Namespace) -> None:
    tasks = [partial(take_part, options)]
    if options.host == 0:
        folder, has_detours = Path(options.folder), bool(options.with_detours)
        tasks.append(partial(coordinate, folder, options.address, planned=options.hosts, has_detours=has_detours))
    at_once(tasks)


def measure(hosts: int, *, with_detours: bool, keep: str) -> dict[str, object]:
    """Return one line."""
    with tempfile.TemporaryDirectory() as name, Lab(hosts=hosts, rate=RATE) as lab:
        folder, processes = Path(name), []
        for host in range(hosts):
            words = {
                "host": host, "folder": folder, "address": lab.address(host), "coordinator": lab.address(0),
                "with-detours": int(with_detours), "hosts": hosts,
            }  # fmt: skip
            command = [sys.executable, __file__, *(f"--{word}={value}" for word, value in words.items())]
            with (folder / f"log{host}").open("w") as log:
                processes.append(lab.start(command, host=host, stdout=log, stderr=log))
        for round_id, bits in ((0, None), (HEALTHY, SLOW_BITS), (HEALTHY + SLOW, None), (ROUNDS, None)):
            logs = [folder / f"log{host}" for host in range(hosts)]
            await_all(folder, [f"ready-{round_id}-{host}" for host in range(hosts)], logs)
            link = replace(lab.settings.between(0, 2), rate_bits_per_s=bits)
            lab.shape(lab.settings.with_link(0, 2, link))
            (folder / ("over" if round_id == ROUNDS else f"go-{round_id}")).write_text("")
        parts = [json.loads((folder / f"part-{host}").read_text()) for host in range(hosts)]
        for process in processes:
            process.wait(deadline_s=DEADLINE_S)
        findings = [line for line in (folder / "log0").read_text().splitlines() if "fetches" in line]
    if keep:
        Path(keep).with_suffix(f".{int(with_detours)}.json").write_text(json.dumps({"parts": parts, "said": findings}))
    return summary(parts, findings, with_detours=with_detours)


def summary(parts: list[list[dict[str, Any]]], findings: list[str], *, with_detours: bool) -> dict[str, object]:
    seconds = [max(part[n]["seconds"] for part in parts) for n in range(ROUNDS)]
    is_around = [bool(parts[2][n]["detours"]) for n in range(ROUNDS)]
    slow, mended = range(HEALTHY, HEALTHY + SLOW), range(HEALTHY + SLOW, ROUNDS)
    until_detour = sum(not is_around[n] for n in slow) if with_detours else 0
    until_direct = next((n for n in mended if not is_around[n]), ROUNDS) - mended[0]
    steady = [seconds[n] for n in slow if is_around[n] or not with_detours]
    return {
        "hosts": len(parts), "wire": "0 -> 2", "rate": RATE, "slow_rate": "5mbit",
        "part_bytes": PART_BYTES, "with_detours": with_detours,
        "healthy_s": spread(seconds[2:HEALTHY]), "slow_s": spread(steady),
        "mended_s": spread(seconds[mended[0] + until_direct + 1 :]), "rounds_until_detour": until_detour,
        "rounds_until_direct": until_direct, "said": findings,
        "detours_of_good_wires": sum(any(one[:2] != [0, 2] for one in line["detours"]) for line in parts[2]),
        "incomplete": sum(line["parts"] < len(parts) for part in parts for line in part),
    }  # fmt: skip


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of some times."""
    if len(seconds) < 2:
        return {}
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3), "rounds": len(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("host", "with-detours"):
        parser.add_argument(f"--{name}", type=int, default=-1)
    for name in ("folder", "address", "coordinator"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--keep", default="", help="a file for each round's times and rates")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    if options.host >= 0:
        be_host(options)
        return
    for _ in range(options.times):
        for with_detours in (False, True):
            line = json.dumps(measure(options.hosts, with_detours=with_detours, keep=options.keep))
            print(line, flush=True)
            with RESULTS.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
