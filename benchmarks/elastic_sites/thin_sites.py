"""What a far part costs that each replica fetches, or one of each site: rounds of an elastic run over a thin wire.

    sudo python benchmarks/elastic_sites/thin_sites.py

Two hosts of the lab are two sites: inside, replicas reach each other over the host's own loopback; between them lies
one wire of 20 Mbit/s each way that all share. Real seats, councils and connections; a process a site with a thread a
replica, and the coordinator beside the first one's. Nothing is trained: a round begins where the last one has ended.
Bytes are the kernel's, sent and received by the second host, the coordinator's words among them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from thinwire.lab import Lab
from thinwire.membership.coordinator import Coordinator
from thinwire.membership.hub import Hub
from thinwire.membership.invitation import Invitation
from thinwire.membership.joining import Seated, join
from thinwire.transport.secret import Secret
from thinwire.version import __version__

RATE, PORT, DEADLINE_S = "20mbit", 4000, 200.0
SETTINGS = ((2, 1_000_000), (3, 500_000))
WARM_UP, ROUNDS, INTERVAL = 6, 12, 10
SECRET = Secret(key=bytes(32))
RESULTS = Path(__file__).resolve().parent.parent / "results" / "elastic_sites.jsonl"


def wait_for(path: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def coordinate(options: argparse.Namespace) -> None:
    hub = Hub(secret=SECRET, address=options.address, port=PORT, say=print)
    coordinator = Coordinator(
        job={"thinwire": __version__}, planned=2 * options.each, sync_interval=INTERVAL, overlap_steps=0,
        shard_windows=8, send=hub.send, record=lambda what, fields: None, generation=hub.generation,
    )  # fmt: skip
    hub.serve(coordinator, until=(Path(options.folder) / "over").exists)
    hub.close()


def sit_down(options: argparse.Namespace) -> Seated:
    """Join, and become active."""
    invitation = Invitation(host=options.coordinator, port=PORT)
    seated, here = join(
        invitation, secret=SECRET, planned=lambda job: (2 * options.each, INTERVAL), address=options.address
    )
    council = seated.council
    if not options.with_sites:
        council.rates.observe = lambda peer, **rest: None  # type: ignore[method-assign]
    seated.arrive(corpus="c", num_windows=1, address=here.host, port=here.port)
    council.wait_for(lambda view: view.has_started and view.offer, deadline_s=DEADLINE_S, why="")
    council.step_s = 1.0  # nobody is late only because the last round came to it later
    council.insist("active", step=0)
    council.wait_for(lambda view: len(council.active()) == 2 * options.each, deadline_s=DEADLINE_S, why="")
    council.done_with("active")
    everyone = [number for number in council.active() if number != seated.replica]
    seated.transport.inner.wait_until_connected(everyone, deadline_s=DEADLINE_S)  # type: ignore[attr-defined]
    return seated


def take_part(options: argparse.Namespace, number: int) -> None:
    """Be one replica: some rounds to learn the rates, then those that count."""
    folder, seated = Path(options.folder), sit_down(options)
    lines = []
    for round_id in range(WARM_UP + ROUNDS):
        if round_id == WARM_UP:
            (folder / f"ready-{options.site}-{number}").write_text("")
            wait_for(folder / "go")
        began_s, step = time.monotonic(), INTERVAL * (round_id + 1)
        part = torch.full((options.bytes,), seated.replica, dtype=torch.uint8)
        seated.council.step = step
        proposal = seated.seat.propose(
            part, round_id=round_id, launch_step=step, reference_hash=1, most_bytes=options.bytes
        )
        proposal.wait(deadline_s=0.0)
        assert proposal.agreed is not None
        assert all(bool((found == member).all()) for member, found in proposal.agreed.parts.items())
        if round_id >= WARM_UP:
            lines.append({"seconds": time.monotonic() - began_s, "parts": len(proposal.agreed.parts)})
    assert len(lines) == ROUNDS
    found = {"rounds": lines, "sites": seated.council.view.sites}
    (folder / f"part-{options.site}-{number}").write_text(json.dumps(found))
    (folder / f"done-{options.site}-{number}").write_text("")
    wait_for(folder / "over")
    seated.close()


def be_site(options: argparse.Namespace) -> None:
    threads = [threading.Thread(target=take_part, args=(options, number)) for number in range(options.each)]
    if options.site == 0:
        threads.append(threading.Thread(target=coordinate, args=(options,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
            for one in names:
                try:
                    wait_for(folder / f"{before}-{one}")
                except AssertionError:
                    print((folder / "log0").read_text(), (folder / "log1").read_text())
                    raise
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
