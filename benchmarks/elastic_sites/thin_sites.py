"""What a far part costs that each replica fetches, or one of each site: rounds of an elastic run over a thin wire.

    sudo python benchmarks/elastic_sites/thin_sites.py

Two hosts of the lab are two sites: inside, replicas reach each other over the host's own loopback; between them lies
one wire of 20 Mbit/s each way that all share. Real seats, sessions and connections; a process a site with a thread a
replica, and the coordinator beside the first one's. Nothing is trained: a round begins where the last one has ended.
Bytes are the kernel's, sent and received by the second host, the coordinator's words among them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

from bare_rounds import RESULTS, at_once, await_all, coordinate, sit_down, take_round, wait_for

from thinwire.elastic.join import Membership
from thinwire.lab import Lab

RATE, DEADLINE_S = "20mbit", 200.0
SETTINGS = ((2, 1_000_000), (3, 500_000))
WARM_UP, ROUNDS = 6, 12


def change_replica(membership: Membership, options: argparse.Namespace) -> None:
    if not options.with_sites:
        membership.session.link_rates.observe = lambda peer, **rest: None  # type: ignore[method-assign]


def take_part(options: argparse.Namespace, number: int) -> None:
    """Be one replica: some rounds to learn the rates, then those that count."""
    folder = Path(options.folder)
    membership = sit_down(
        options.coordinator, options.address, planned=2 * options.each, change=partial(change_replica, options=options)
    )
    lines = []
    for round_id in range(WARM_UP + ROUNDS):
        if round_id == WARM_UP:
            (folder / f"ready-{options.site}-{number}").write_text("")
            wait_for(folder / "go")
        seconds, num_parts = take_round(membership, round_id, num_bytes=options.bytes)
        if round_id >= WARM_UP:
            lines.append({"seconds": seconds, "parts": num_parts})
    assert len(lines) == ROUNDS
    found = {"rounds": lines, "sites": membership.session.view.sites}
    (folder / f"part-{options.site}-{number}").write_text(json.dumps(found))
    (folder / f"done-{options.site}-{number}").write_text("")
    wait_for(folder / "over")
    membership.close()


def be_site(options: argparse.Namespace) -> None:
    tasks = [partial(take_part, options, number) for number in range(options.each)]
    if options.site == 0:
        tasks.append(partial(coordinate, Path(options.folder), options.address, planned=2 * options.each))
    at_once(tasks)


def measure(each: int, num_bytes: int, *, with_sites: bool) -> dict[str, object]:
    """Return one line."""
    with tempfile.TemporaryDirectory() as name, Lab(hosts=2, rate=RATE) as lab:
        folder, processes = Path(name), []
        for site in range(2):
            words = {
                "site": site, "each": each, "bytes": num_bytes, "folder": folder, "address": lab.address(site),
                "coordinator": lab.address(0), "with-sites": int(with_sites),
            }  # fmt: skip
            command = [sys.executable, __file__, *(f"--{word}={value}" for word, value in words.items())]
            with (folder / f"log{site}").open("w") as log:
                processes.append(lab.start(command, host=site, stdout=log, stderr=log))
        names = [f"{site}-{number}" for site in range(2) for number in range(each)]
        counts = []
        for before, after in (("ready", "go"), ("done", "over")):
            logs = [folder / f"log{site}" for site in range(2)]
            await_all(folder, [f"{before}-{one}" for one in names], logs)
            found = lab.counters()[1]
            counts.append(found.sent_bytes + found.received_bytes)
            (folder / after).write_text("")
        parts = [json.loads((folder / f"part-{one}").read_text()) for one in names]
        for process in processes:
            process.wait(deadline_s=DEADLINE_S)
    seconds = [max(part["rounds"][n]["seconds"] for part in parts) for n in range(ROUNDS)]
    return {
        "replicas": f"{each}+{each}", "part_bytes": num_bytes, "rate": RATE, "with_sites": with_sites,
        "sites": parts[0]["sites"], "rounds": ROUNDS,
        "megabytes_a_round": round((counts[1] - counts[0]) / ROUNDS / 1e6, 3),
        "seconds_a_round": round(statistics.median(seconds), 3), "longest_s": round(max(seconds), 3),
        "incomplete": sum(found["parts"] < 2 * each for part in parts for found in part["rounds"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("site", "each", "bytes", "with-sites"):
        parser.add_argument(f"--{name}", type=int, default=-1)
    for name in ("folder", "address", "coordinator"):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    if options.site >= 0:
        be_site(options)
        return
    with RESULTS.open("a") as file:
        for each, num_bytes in SETTINGS:
            for with_sites in (False, True):
                line = json.dumps(measure(each, num_bytes, with_sites=with_sites))
                print(line, flush=True)
                file.write(line + "\n")


if __name__ == "__main__":
    main()
