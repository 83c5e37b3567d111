"""`thinwire diagnose test` in the lab: wires that are slow, or cut, on purpose, and what it says of them.

sudo python benchmarks/diagnosis/active.py

Four hosts at 50 Mbit/s each run the command as a user does; one JSON line a scenario tells what was said, whether that
is right, and how long the test itself took. Everything runs on this one machine, whose cores all hosts share.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.lab import Lab, Link
from thinwire.monitor.findings import Place

RESULTS = Path(__file__).parent.parent / "results" / "diagnosis_active.jsonl"
HOSTS, RATE = 4, 50.0
VICTIM, OTHER = 2, 1
SEVERITIES = (1.5, 3.0)
KEYS = ("kind", "where", "text", "confidence", "evidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One fault, which is there before the test begins."""

    fault: str
    severity: float = 1.0

    @property
    def truth(self) -> Place | None:
        """Where it is."""
        low, high = sorted((VICTIM, OTHER))
        places = {
            "slow link one way": Place(kind="link", ranks=(VICTIM, OTHER)),
            "slow link": Place(kind="link both ways", ranks=(low, high)),
            # TCP needs both ways, so a link that is cut one way carries nothing either way
            "half-open link": Place(kind="link both ways", ranks=(low, high)),
            "cut link": Place(kind="link both ways", ranks=(low, high)),
            "slow sender": Place(kind="sender", ranks=(VICTIM,)),
            "slow receiver": Place(kind="receiver", ranks=(VICTIM,)),
            "slow host": Place(kind="host", hosts=(f"host-{VICTIM}",)),
        }
        return places.get(self.fault)

    def strike(self, lab: Lab) -> None:
        """Break the wires."""
        slow, whole = f"{RATE / self.severity:g}mbit", f"{RATE:g}mbit"
        if self.fault == "slow link":
            lab.set_link(VICTIM, OTHER, rate=slow)
        elif self.fault == "slow link one way":
            link = lab.settings.between(VICTIM, OTHER)
            changed = Link(latency_s=link.latency_s, rate_bits_per_s=RATE / self.severity * 1e6)
            lab.shape(lab.settings.with_link(VICTIM, OTHER, changed))
        elif self.fault == "half-open link":
            link = replace(lab.settings.between(VICTIM, OTHER), is_cut=True)
            lab.shape(lab.settings.with_link(VICTIM, OTHER, link))
        elif self.fault == "cut link":
            lab.cut(VICTIM, OTHER)
        elif self.fault != "clean":
            down = slow if self.fault != "slow sender" else whole
            up = slow if self.fault != "slow receiver" else whole
            lab.set_rate(VICTIM, f"{down}/{up}")


def scenarios() -> Iterator[Scenario]:
    """Return all, the clean ones between the others."""
    for number, severity in enumerate(SEVERITIES):
        yield Scenario(fault="clean")
        for fault in ("slow link one way", "slow link", "slow sender", "slow receiver", "slow host"):
            yield Scenario(fault=fault, severity=severity)
        if number:
            yield Scenario(fault="cut link")
            yield Scenario(fault="half-open link")
    yield Scenario(fault="clean")


def judged(one: Scenario, found: dict[str, Any] | None) -> str:
    """Return how right what was said is."""
    if found is None:
        return "failed"
    told = found["findings"]
    if one.truth is None:
        return "false alarm" if told else "right"
    if not told:
        return "missed"
    wanted = {"kind": one.truth.kind, "ranks": list(one.truth.ranks), "hosts": list(one.truth.hosts)}
    if wanted not in told[0]["places"]:
        return "wrong place"
    return "ambiguous" if told[0]["is_ambiguous"] else "right" if len(told) == 1 else "right, and more"


def run(one: Scenario, *, latency_s: float) -> dict[str, Any]:
    """Run the command on all hosts with the fault; return a line of the results."""
    words = [sys.executable, "-m", "thinwire.cli.main", "diagnose", "test", "--json", "--deadline", "60s"]
    with Lab(hosts=HOSTS, rate=f"{RATE:g}mbit", link=Link(latency_s=latency_s)) as lab:
        one.strike(lab)
        began_s = time.monotonic()
        results = lab.run(words, deadline_s=240, environment={"OMP_NUM_THREADS": "1"})
        seconds = time.monotonic() - began_s
    text = results[0].stdout.strip()
    found = json.loads(text) if text.startswith("{") else None
    told = [] if found is None else found["findings"]
    return {
        "fault": one.fault, "severity": one.severity, "latency_s": latency_s, "verdict": judged(one, found),
        "told": [{key: finding[key] for key in KEYS} for finding in told],
        "exit_codes": [result.exit_code for result in results],
        "command_s": round(seconds, 1), "test_s": None if found is None else round(found["seconds"], 1),
        "load": round(os.getloadavg()[0], 1), "said": "" if found else results[0].stderr[-400:],
    }  # fmt: skip


def main() -> int:
    """Run all scenarios, and append to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds, one way")
    parser.add_argument("--only", help="one fault")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for one in (one for one in scenarios() if given.only in (None, one.fault)):
        line = run(one, latency_s=given.latency)
        with given.out.open("a") as out:
            out.write(json.dumps(line) + "\n")
        where = ", ".join(finding["where"] for finding in line["told"]) or "nothing"
        print(
            f"{one.fault:>18} {one.severity:>4}x {line['verdict']:<12} {line['test_s']} s (all {line['command_s']} s): "
            f"{where} {line['said']}", flush=True,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
