"""What is said of a broken job, and when: torch's default timeout, its monitored barrier and Flight Recorder, and ours.

    python benchmarks/diagnosis/peers.py                    # seven minutes; replaces the results; the lab needs root
    python benchmarks/diagnosis/peers.py --only "is slow"   # one fault, whose results alone are replaced
    python benchmarks/diagnosis/peers.py --report           # the table of what is stored

Three ranks over gloo train with DDP and all-reduce (`peers_job.py`), on one machine, or for three faults in the lab:
a host for each, 100 Mbit/s, a megabyte reduced a step. What ends a job breaks at the sixth step, what slows it down and
what breaks in the lab at the 61st. The group's timeout is 10 s here instead of torch's 30 minutes, so that waiting for
it ends: what would take until then is told as such. The monitored barrier stands before each all-reduce, with a timeout
of 2 s. Times count from the fault. The Flight Recorder is always on, so it is read in the job that also shows the
default timeout; where nothing fails, it is dumped by hand at the end. Where nothing is said, the time is how long was
waited.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_job import ENDING, IN_LAB, SLOW, TIMEOUT_S, job, prepare

from thinwire.errors import DataError
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding
from thinwire.runlog.run_folder import read_files

RESULTS = Path(__file__).parents[1] / "results" / "peers.jsonl"
FAULTS = (*ENDING, *SLOW, *IN_LAB)
TOOLS = ("default timeout", "monitored barrier", "Flight Recorder", "thinwire")
# One job each.
JOBS = (("monitored barrier",), ("default timeout", "Flight Recorder"), ("thinwire",))
# For how long ours is waited for; in a black hole until torch's timeout ends the job.
WAIT_S = {"is slow": 12.0, "stalls": 25.0, "slow link": 20.0, "slow sender": 20.0, "black hole": TIMEOUT_S}
# For how long it is listened to after its first word in a job that goes on, and torch in a job that is slow.
MORE_S, SLOW_WAIT_S = 5.0, 12.0
START_S, DUMP_S = 90.0, 3.0
RATE, SLOWER_RATE = "100mbit", "20mbit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A job that runs.

    Attributes:
        count: Tells how many of its ranks do.
        strike: Breaks it, where that is not done by the job itself.
    """

    count: Callable[[], int]
    strike: Callable[[], None] | None = None


@contextlib.contextmanager
def on_loopback(folder: Path, fault: str, tool: str, victim: int) -> Iterator[Running]:
    """Run a job on this machine."""
    prepare()  # once for all ranks, which are forked
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=job, args=(rank, port, str(folder), fault, tool, victim)) for rank in range(3)]
    for process in ranks:
        process.start()
    try:
        yield Running(count=lambda: sum(process.is_alive() for process in ranks))
    finally:
        for process in ranks:
            process.kill()
            process.join()


@contextlib.contextmanager
def in_lab(folder: Path, fault: str, tool: str) -> Iterator[Running]:
    """Run a job in the lab, a rank a host; what breaks is host 1's way out, or what lies between it and host 2."""
    from thinwire.lab import Lab, rank_environment

    words = [sys.executable, str(Path(__file__).with_name("peers_job.py")), str(folder), fault, tool]
    with Lab(hosts=3, rate=RATE) as lab:
        hosts = [
            lab.start(words, host=host, environment={**rank_environment(host, 3), "OMP_NUM_THREADS": "1"})
            for host in range(3)
        ]

        def strike() -> None:
            (folder / "fault_lab").write_text(str(time.time()))
            if fault == "black hole":
                lab.cut(1, 2)
            elif fault == "slow link":
                lab.set_link(1, 2, rate=SLOWER_RATE)
            else:
                lab.set_rate(1, f"{RATE}/{SLOWER_RATE}")

        yield Running(count=lambda: sum(host.exit_code is None for host in hosts), strike=strike)


class Looks:
    """What thinwire says of a job, look by look.

    Attributes:
        first: The first finding after the fault, the worst where there were several, and when it was seen.
        later: Each other thing that was said after it, when it was seen first.
        before: What was said while nothing was broken; that is not counted after it either.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.first: tuple[float, Finding] | None = None
        self.later: dict[str, float] = {}
        self.before: list[str] = []

    def look(self) -> list[Finding]:
        """Diagnose what is written by now."""
        with contextlib.suppress(DataError):  # not all ranks have begun to write
            return diagnose(read_files([self._folder])) if list(self._folder.glob("records-rank-*.jsonl")) else []
        return []

    def note(self, findings: Sequence[Finding], *, is_broken: bool) -> None:
        """Take note of what a look has shown."""
        for finding in findings:
            said, at = f"{finding.kind}: {finding.where}", time.time()
            if said in self.before:
                continue
            if not is_broken:
                self.before.append(said)
            elif self.first is None:
                self.first = (at, finding)
            elif said != f"{self.first[1].kind}: {self.first[1].where}":
                self.later.setdefault(said, at)

    def told(self, begun: float) -> dict[str, Any]:
        """Return what was said, with times from the fault."""
        later = [f"{at - begun:.1f} s: {said}" for said, at in self.later.items()]
        more = {name: value for name, value in (("later", later), ("before", self.before)) if value}
        if self.first is None:
            return {"at": time.time(), "said": "nothing", "names": "", **more}
        at, first = self.first
        return {"at": at, "said": f"{first.kind}: {first.where}. {first.text}", "names": first.where, **more}


def play(fault: str, tool: str, *, victim: int = 1) -> dict[str, Any]:
    """Return what a tool said of a fault: when first, whom it named, and the words."""
    return play_for(fault, (tool,), victim=victim)[0]


def play_for(fault: str, tools: Sequence[str], *, victim: int = 1) -> list[dict[str, Any]]:
    """Play a fault once, and return what was said of it.

    Args:
        fault: What breaks.
        tools: Whose words; where several, they are read in one job, which is made for the last one.
        victim: The rank that breaks; in the lab it is always that of host 1.
    """
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as name:
        folder, tool = Path(name), tools[-1]
        looks = Looks(folder) if tool == "thinwire" else None
        running = in_lab(folder, fault, tool) if fault in IN_LAB else on_loopback(folder, fault, tool, victim)
        with running as ranks:
            begun = _follow(folder, fault, ranks, looks)
            if tool == "Flight Recorder" and not list(folder.glob("error_*")):
                _ask_for_dumps(folder)
            if looks is not None:
                told = [looks.told(begun)]
            else:
                told = [_words_of_torch(folder, one) for one in tools]
        return [
            {"fault": fault, "tool": one, "after_s": round(own.pop("at") - begun, 2), **own, "load": load}
            for one, own in zip(tools, told, strict=True)
        ]


def _follow(folder: Path, fault: str, ranks: Running, looks: Looks | None) -> float:
    """Wait until all is said of a fault, or nothing is for long; return when the fault began."""
    started, begun = time.time(), 0.0
    wait_s = 2 * TIMEOUT_S if fault in (*ENDING, "black hole") else SLOW_WAIT_S
    if looks is not None:
        wait_s = WAIT_S.get(fault, wait_s)
    while not begun or time.time() < begun + wait_s:
        time.sleep(0.5 if looks is not None and fault not in ENDING else 0.1)
        findings = [] if looks is None else looks.look()
        begun = begun or _begun(folder)  # after the look, whose findings may be of a fault that came just before it
        if looks is not None:
            looks.note(findings, is_broken=begun > 0)
            if looks.first is not None and (fault in ENDING or time.time() > looks.first[0] + MORE_S):
                break
        elif begun and ranks.count() <= 1:
            break
        if not begun and (time.time() > started + START_S or not ranks.count()):
            errors = [path.read_text()[-300:] for path in (*folder.glob("error_*"), *folder.glob("stderr_*"))]
            raise RuntimeError(f"the job did not come to its fault: {errors}")
        if not begun and ranks.strike is not None and len(list(folder.glob("settled_*"))) == 3:
            ranks.strike()
    return begun


def _begun(folder: Path) -> float:
    """Return when the fault began by the first rank that came to it, or 0."""
    return min((float(text) for path in folder.glob("fault_*") if (text := path.read_text())), default=0.0)


def _ask_for_dumps(folder: Path) -> None:
    (folder / "dump_now").touch()
    until_s = time.monotonic() + DUMP_S
    while time.monotonic() < until_s and len(list((folder / "dumps").glob("*"))) < 3:
        time.sleep(0.1)


def _words_of_torch(folder: Path, tool: str) -> dict[str, Any]:
    errors = [json.loads(path.read_text()) for path in sorted(folder.glob("error_*"))]
    died = [path.read_text() for path in sorted(folder.glob("stderr_*")) if "what():" in path.read_text()]
    at = min((error["at"] for error in errors), default=time.time())
    if tool == "Flight Recorder":
        said = f"{'' if errors else 'nothing; dumped by hand: '}{_words_of_analyser(folder / 'dumps')}"
    else:
        said = " / ".join([*(error["said"] for error in errors), *(re.sub(r"\s+", " ", text) for text in died)])
    named = sorted(set(re.findall(r"[Rr]anks?:? (\d+(?:, ?\d+)*)", said)))
    return {"at": at, "said": said[:1500] or "nothing", "names": ", ".join(named)}


def _words_of_analyser(dumps: Path) -> str:
    module = "torch.distributed.flight_recorder.fr_trace"
    words = [sys.executable, "-W", "ignore", "-m", module, "--allow-incomplete-ranks", str(dumps)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
    return f"{len(list(dumps.glob('*')))} dumps of 3; its analyser: {said}"


def table(lines: list[dict[str, Any]]) -> str:
    """Return the results as a table of Markdown."""
    rows = ["| fault of rank 1 | tool | first word after | names | says |", "| --- | --- | --- | --- | --- |"]
    for line in lines:
        said = re.sub(r"\[[^\]]*\] ?", "", line["said"]).replace("|", "/").replace("\n", " ")[:220]
        after = f"{line['after_s']:.1f} s"
        if line["said"].startswith("nothing"):
            after = f"nothing in {after}"
        before = [f"before the fault: {one}" for one in line.get("before", [])]
        said = "; ".join([said, *line.get("later", []), *before])
        rows.append(f"| {line['fault']} | {line['tool']} | {after} | {line['names'] or 'nobody'} | {said} |")
    return "\n".join(rows)


def stored() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the results that are stored, by fault and tool."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {(line["fault"], line["tool"]): line for line in lines}


def keep(lines: Sequence[dict[str, Any]]) -> None:
    """Store results in the place of those of the same fault and tool."""
    known = stored() | {(line["fault"], line["tool"]): line for line in lines}
    order = [(fault, tool) for fault in FAULTS for tool in TOOLS]
    RESULTS.write_text("".join(json.dumps(known[key]) + "\n" for key in order if key in known))


def main() -> None:
    """Read the command line, play, store and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FAULTS, help="one fault")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    for fault in () if options.report else (options.only,) if options.only else FAULTS:
        for tools in JOBS:
            keep(play_for(fault, tools))
    print(table([*stored().values()]))


if __name__ == "__main__":
    main()
