"""What a host that is no part of a torchft job can do to it, with nothing but its network.

sudo python benchmarks/elastic_engine/torchft_stranger.py REPEATS RESULTS.jsonl

Host 3 is the stranger's. In this order: which ports listen; it reads the Lighthouse's page; it joins as a replica that
has nothing, and is given the state; it joins with a higher step and a state of its own, which the members then fetch;
it asks for one quorum and never comes; and it lets the Lighthouse's page kill a member.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from torchft_job import Job, note, wait_until

from thinwire.lab import Lab

MEMBERS, STRANGER = 2, 3
VISIT = Path(__file__).parent / "torchft_visit.py"


def ports(lab: Lab, host: int) -> list[str]:
    """Return what listens on a host beyond its loopback, as ADDRESS:PORT."""
    result = _on(lab, host, ["ss", "-H", "-l", "-t", "-n"])
    return sorted(line.split()[3] for line in result.splitlines() if not line.split()[3].startswith("127."))


def _on(lab: Lab, host: int, words: list[str]) -> str:
    path = lab.folder / f"said-{time.monotonic_ns()}"
    with path.open("wb") as out:
        lab.start(words, host=host, stdout=out).wait(deadline_s=90)
    return path.read_text()


def run() -> dict[str, Any]:
    with Lab(hosts=4) as lab:
        job = Job(lab, num_replicas=MEMBERS)
        job.start_lighthouse()
        processes = [job.start(member) for member in range(MEMBERS)]
        members = range(MEMBERS)

        def has_committed(steps: int, since_s: float) -> bool:
            return job.has_committed(members, steps=steps, since_s=since_s, participants=MEMBERS)

        if not wait_until(lambda: has_committed(10, 0), deadline_s=120):
            raise RuntimeError(f"the job did not start; see {lab.folder}")
        row: dict[str, Any] = {"what": "torchft_stranger", "ports_of_a_member": len(ports(lab, 0))}
        row["ports_on_any_address"] = sum(port.startswith(("*", "[::]", "0.0.0.0")) for port in ports(lab, 0))
        row |= _visit(lab, job, "look")
        row["state_that_a_stranger_was_given"] = _join(job, first_step=0)
        row["members_that_took_its_state"] = _alter(job)
        row["state_of_a_member_is"] = job.commits(0)[-1]["total"]
        row |= _visit(lab, job, "quorum")
        answered_s = time.monotonic()
        wait_until(lambda: has_committed(1, answered_s), deadline_s=200)
        again = [job.commits(n, since_s=answered_s, participants=MEMBERS) for n in members]
        row["one_request_halts_members_s"] = max(c[0]["at_s"] for c in again) - answered_s if all(again) else None
        row |= _visit(lab, job, "kill")
        time.sleep(2)
        row["members_ended"] = sum(process.exit_code is not None for process in processes)
        return row


def _visit(lab: Lab, job: Job, what: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(_on(lab, STRANGER, [sys.executable, str(VISIT), job.url, what]).splitlines()[-1])
    return said


def _join(job: Job, *, first_step: int) -> float | None:
    """Start a replica on the stranger's host; return the state that it was given, and end it."""
    job.start(STRANGER, first_step=first_step)
    wait_until(lambda: any(event["event"] == "loaded" for event in job.events(STRANGER)), deadline_s=60)
    found = [event["total"] for event in job.events(STRANGER) if event["event"] == "loaded"]
    _end(job)
    return found[0] if found else None


def _alter(job: Job) -> int:
    """Let the stranger say that it is a million steps ahead; return how many members load its state."""
    before_s = time.monotonic()
    job.start(STRANGER, first_step=1_000_000)

    def took() -> list[int]:
        loaded = [(n, event) for n in range(MEMBERS) for event in job.events(n) if event["event"] == "loaded"]
        return [n for n, event in loaded if event["at_s"] > before_s and event["total"] < 0]

    wait_until(lambda: len(set(took())) == MEMBERS, deadline_s=60)
    _end(job)
    return len(set(took()))


def _end(job: Job) -> None:
    """Kill what the stranger runs, and wait until the members commit without it."""
    began_s = time.monotonic()
    job.lab.kill_host(STRANGER)
    members = range(MEMBERS)
    wait_until(lambda: job.has_committed(members, steps=5, since_s=began_s, participants=MEMBERS), deadline_s=200)


if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        note(Path(sys.argv[2]), run())
