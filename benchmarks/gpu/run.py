"""Everything that one GPU can show of thinwire, in one call.

    python benchmarks/gpu/run.py --out results                 # nine minutes; the same call goes on
    python benchmarks/gpu/run.py --out results --only codec    # one part
    python benchmarks/gpu/run.py --out /tmp/try --device cpu --tiny    # the script itself, without a GPU
    python benchmarks/gpu/run.py --missing                     # packages to bring as wheels, for --wheels DIR

It needs one NVIDIA GPU, PyTorch 2.9 or later and no network. Parts run in order of their value, each as a process with
a time limit. Results are lines of `results.jsonl` in `--out`, written at once; a part that fails is reported and passed
over, and what is done is not done again. `report.py` makes the table of docs/benchmarks.md from them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Seconds that each part may take, in order of value: two calls together.
LIMITS_S = {
    "exact": 130, "codec": 40, "step": 75, "wire": 95, "watch": 50, "inside": 50, "ranks": 150, "sequence": 150,
    "loss": 100,
}  # fmt: skip
WHAT = {
    "exact": "same bytes and bits as on a CPU: codecs, integer products, every method, kill and resume",
    "codec": "speed of encode and decode beside the device's own copy, and peak memory",
    "step": "cost of the wrapped step, stalls while rounds travel, cost of a round, memory",
    "wire": "two processes on the GPU over 100 Mbit/s and 1 Gbit/s: share of their own speed",
    "watch": "thinwire.watch on nccl, and the Flight Recorder's dump of a forced time-out",
    "inside": "FSDP2, generate, bench profile, and the site planner's step time beside the measured one",
    "ranks": "two ranks on the GPU over nccl: sharded, tensors, sequences and pipelines against one rank",
    "sequence": "shared attention of every policy, the streamed backward's gradients, time, memory and length",
    "loss": "rung G1: data-parallel training and IsoLoCo at equal tokens",
}
NEEDED = ("numpy", "rich", "tokenizers", "safetensors", "psutil", "fsspec", "msgspec", "pyzmq")
_GRACE_S = 10.0  # after its limit a part ends by itself: it begins nothing new


def main() -> int:
    options = parse_options()
    if options.list:
        for name, limit_s in LIMITS_S.items():
            print(f"{name:8}{limit_s:5} s  {WHAT[name]}")
        print(f"{'all':8}{sum(LIMITS_S.values()):5} s")
        return 0
    if options.missing:
        print(" ".join(missing_packages()))
        return 0
    environment = environment_of(options)
    ends_s = time.monotonic() + 60 * options.minutes
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    from records import append, read

    append(options.out, {"part": "run", "key": "machine", "state": "info", **machine(options.device)})
    done = {line["part"] for line in read(options.out) if line.get("state") == "finished"}
    failed = []
    for name, limit_s in LIMITS_S.items():
        if (options.only and name not in options.only) or name in done:
            continue
        left_s = ends_s - time.monotonic()
        if left_s < 5:
            print(f"{name}: left for the next call")
            continue
        limit_s *= 5 if options.tiny else 1  # a test, on a busy machine
        state = run_part(name, seconds=min(limit_s, left_s), options=options, environment=environment)
        append(options.out, {"part": name, "key": "part", "state": state["state"], **state})
        print(f"{name}: {state['state']} after {state['seconds']:.0f} s", flush=True)
        failed += [name] * (state["state"] == "failed")
    return 1 if failed else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins after so many")
    parser.add_argument("--only", action="append", default=[], choices=LIMITS_S, help="part to run; repeatable")
    parser.add_argument("--list", action="store_true", help="print the parts with their time limits")
    parser.add_argument("--missing", action="store_true", help="print the packages that are missing here")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to take missing packages from")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    return parser.parse_args()


def missing_packages() -> list[str]:
    """Return the packages of thinwire that are not installed here."""

    def is_missing(name: str) -> bool:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return True
        return False

    return [name for name in NEEDED if is_missing(name)]


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the parts: the checkout importable, and the wheels unpacked."""
    paths = [str(ROOT / "src"), str(HERE), str(ROOT)]
    if options.wheels is not None:
        target = Path(tempfile.mkdtemp(prefix="thinwire-wheels-"))
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target"]
        subprocess.run([*command, str(target), *map(str, sorted(options.wheels.glob("*.whl")))], check=True)
        paths.append(str(target))
    if options.tiny:
        paths.insert(0, str(ROOT / "tests" / "untraced"))  # has a model of that size
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([given] if given else [])]), "PYTHONUNBUFFERED": "1"}


def run_part(name: str, *, seconds: float, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Run a part as a process group, and end all of it when its time is over."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--device", options.device, "--out", str(options.out)]
    command += ["--seconds", str(max(1.0, seconds - _GRACE_S)), *(["--tiny"] if options.tiny else [])]
    began_s = time.monotonic()
    log = options.out / f"{name}.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=seconds + _GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the part has started
            process.wait()
    state = {0: "finished", 3: "unfinished", None: "timeout"}.get(code, "failed")
    found: dict[str, Any] = {"state": state, "seconds": time.monotonic() - began_s, "code": code}
    if state in ("failed", "timeout"):
        found["log"] = log.read_text(errors="replace")[-1500:]
    return found


def machine(device: str) -> dict[str, Any]:
    """Return what the numbers were measured on."""
    import torch

    found: dict[str, Any] = {
        "at": time.strftime("%Y-%m-%d %H:%M:%S"), "python": platform.python_version(), "torch": torch.__version__,
        "system": platform.release(), "cores": os.cpu_count(), "on": device,
    }  # fmt: skip
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, check=False, capture_output=True, text=True).stdout.strip()
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], check=False, capture_output=True, text=True
    ).stdout
    return {**found, "commit": commit.strip()}


if __name__ == "__main__":
    sys.exit(main())
