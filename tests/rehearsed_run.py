"""Folders of runs as their recorders leave them, of scenes with faults that are rehearsed, not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.synthetic_jobs import NOISES, InjectedFault, Scene, synthesize
from thinwire.runlog.records import Communicator, header_line, to_line

HOSTS = ("a", "b", "c")


def write_records(folder: Path, *faults: InjectedFault, rounds: int = 48, hosts: tuple[str, ...] = HOSTS) -> Path:
    """Write records-rank-N.jsonl of a scene."""
    folder.mkdir(parents=True, exist_ok=True)
    found = synthesize(Scene(hosts=hosts, rounds=rounds, seed=3, noise=NOISES["calm"], faults=faults))
    for rank in range(len(hosts)):
        own = [one for one in found if isinstance(one, Communicator) or one.rank == rank]
        (folder / f"records-rank-{rank}.jsonl").write_text("\n".join([header_line(), *map(to_line, own)]) + "\n")
    return folder


def finding_line(*, state: str = "new", at: float = 1e9, **changes: Any) -> str:
    """Return a line of findings.jsonl."""
    finding = {
        "kind": "communication slow", "where": "link 0 -> 2",
        "places": [{"kind": "link", "ranks": [0, 2], "hosts": []}], "is_ambiguous": False, "since_s": 9.0,
        "since_round": 30, "seen_round": 34, "evidence": {"times_longer": 4.7, "links": ["0 -> 2"]},
        "text": "Messages take longer.", "confidence": 0.97, "remedy": "look at the cable", "probe": "",
    }  # fmt: skip
    return json.dumps({"at": at, "state": state, "finding": finding | changes}) + "\n"
