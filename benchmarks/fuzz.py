"""Coverage-guided fuzzing of the parsers that read foreign bytes (atheris; `pip install atheris`).

    python benchmarks/fuzz.py --runs 1000000 --json benchmarks/results/fuzz.jsonl    # every target, one after another
    python benchmarks/fuzz.py frame rank-note --runs 1000000                         # some of them
    python benchmarks/fuzz.py frame --seconds 60 --corpus FOLDER                     # one, by time
    python benchmarks/fuzz.py --table benchmarks/results/fuzz.jsonl                  # the table of the docs

Targets are those of `tests/hostile_inputs.py`. Each runs in a process of its own with bounded memory. An input that is
neither read nor refused ends its target and is written to the present folder. Add such inputs to the tests.
Each target gives one JSON line: inputs, seconds, edges covered, corpus size, peak memory and the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

MOST_INPUT_BYTES = 8192
MOST_MEMORY_MB = 2048
# An input that takes longer counts as a finding.
MOST_INPUT_S = 10
_ENDS = {0: "ok", 70: "an input took too long", 71: "out of memory", 77: "an input was neither read nor refused"}
_PROGRESS = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/")
_STATISTIC = re.compile(r"^stat::(\w+):\s+(\d+)$", re.MULTILINE)


def instrumented() -> tuple[Any, dict[str, Any]]:
    """Return the fuzzer, and the targets whose branches it sees."""
    try:
        import atheris
    except ImportError:
        raise SystemExit("the fuzzer is not installed: pip install atheris") from None
    # http.server parses requests for the dashboard, so its branches guide the fuzzer as well
    with atheris.instrument_imports(include=["thinwire", "http.server", "http.cookies"]):
        from tests.hostile_inputs import TARGETS

    return atheris, TARGETS


def fuzz_one(name: str, atheris: Any, targets: dict[str, Any], options: argparse.Namespace) -> None:
    """Fuzz one target in this process, which ends with it."""
    target, seeds = targets[name]
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-")) if options.corpus is None else options.corpus / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    flags = [
        f"-max_len={MOST_INPUT_BYTES}", f"-rss_limit_mb={MOST_MEMORY_MB}", f"-timeout={MOST_INPUT_S}",
        f"-seed={options.seed}", f"-artifact_prefix=fuzz-{name}-", "-print_final_stats=1",
    ]  # fmt: skip
    flags += [f"-runs={options.runs}"] if options.runs else [f"-max_total_time={options.seconds}"]
    atheris.Setup([sys.argv[0], str(corpus), *flags], _counted(target))
    atheris.Fuzz()


def _counted(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    # atheris hands over a bytes object of its own; a target may keep no view of it
    return lambda raw: target(bytes(raw))


def summary_of(log: str, *, code: int) -> dict[str, Any]:
    """Return what the fuzzer's log says of a run that ended with an exit code."""
    progress, statistics = _PROGRESS.findall(log), dict(_STATISTIC.findall(log))
    covered, features, corpus = map(int, progress[-1]) if progress else (0, 0, 0)
    began = int(progress[0][0]) if progress else 0
    return {
        "inputs": int(statistics.get("number_of_executed_units", 0)), "edges": covered, "new_edges": covered - began,
        "features": features, "corpus": corpus, "peak_rss_mb": int(statistics.get("peak_rss_mb", 0)),
        "result": _ENDS.get(code, f"exit code {code}"),
    }  # fmt: skip


def fuzz_all(names: list[str], options: argparse.Namespace) -> int:
    """Fuzz targets one after another, each in a process of its own; return how many failed."""
    atheris, targets = instrumented()
    unknown = sorted(set(names) - set(targets))
    if unknown:
        raise SystemExit(f"unknown targets {', '.join(unknown)}; choose from {', '.join(sorted(targets))}")
    num_failed = 0
    for name in names or sorted(targets):
        began_s = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            child = os.fork()
            if child == 0:
                for stream in (1, 2):
                    os.dup2(log.fileno(), stream)
                fuzz_one(name, atheris, targets, options)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            log.seek(0)
            told = log.read()
        line = {"target": name, **summary_of(told, code=code)}
        line |= {"seconds": round(time.monotonic() - began_s, 1), "seed": options.seed, "machine": machine()}
        print(json.dumps(line), flush=True)
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if code:
            num_failed += 1
            print(told[-4000:], file=sys.stderr)
    return num_failed


def table(lines: Iterable[dict[str, Any]], senders: dict[str, tuple[str, str, bool]]) -> str:
    """Return the docs' table of the latest line of each target, in the order of `senders`."""
    latest = {line["target"]: line for line in lines}
    rows = ["| parser | target | bytes from | sender authenticated | inputs | edges | peak memory | result |"]
    rows.append("|" + " --- |" * 8)
    for name, (what, source, is_authenticated) in senders.items():
        found, known = latest.get(name), "yes" if is_authenticated else "no"
        measured = ("not run", "", "", "")
        if found is not None:
            inputs, memory = f"{found['inputs']:,}", f"{found['peak_rss_mb']} MB"
            measured = (inputs, str(found["edges"]), memory, found["result"])
        rows.append(f"| {what} | `{name}` | {source} | {known} | {' | '.join(measured)} |")
    return "\n".join(rows) + "\n"


def machine() -> dict[str, Any]:
    """Return the machine and the versions that a line holds for."""
    found = {"system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count()}
    found["python"] = platform.python_version()
    for package in ("atheris", "torch", "pyzmq"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def main() -> None:
    """Read the command line and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="what to fuzz; all by default")
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--seconds", type=int, default=60, help="time of each target")
    bound.add_argument("--runs", type=int, default=0, help="inputs of each target, instead of a time")
    parser.add_argument("--corpus", type=Path, default=None, help="folder that keeps each target's corpus")
    parser.add_argument("--seed", type=int, default=1, help="of the fuzzer's choices")
    parser.add_argument("--json", type=Path, default=None, help="file that one line a target is appended to")
    parser.add_argument("--table", type=Path, default=None, metavar="FILE", help="print the table of stored results")
    options = parser.parse_args()
    if options.table is not None:
        from tests.hostile_inputs import SENDERS

        print(table(map(json.loads, options.table.read_text().splitlines()), SENDERS), end="")
        return
    raise SystemExit(1 if fuzz_all(options.targets, options) else 0)


if __name__ == "__main__":
    main()
