"""Look at the dashboard: write a rehearsed run with a fault, and take pictures of its page in headless Chromium.

    python scripts/dashboard_pictures.py --run runs/demo --sizes small --out docs/assets    # the pictures of the docs
    python scripts/dashboard_pictures.py --out pictures    # of a rehearsed run with a slow link

The rehearsed run is made by `tests.synthetic_jobs`: nothing was trained, and its loss is a formula.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from thinwire.monitor.dashboard.server import DashboardServer, Feed
from thinwire.monitor.dashboard.snapshot import RunFollower
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Place
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Communicator, Record, Span, header_line, to_line

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.synthetic_jobs import NOISES, InjectedFault, Scene, synthesize

_STEPS_A_ROUND, _TOKENS_A_STEP, _WIRE_BYTES = 20, 4096, 500_009
# Width and height in CSS pixels, and pixels of the picture for each.
SIZES = {"small": (1400, 1000, 0.7), "wide": (1400, 2300, 1.0), "narrow": (500, 3400, 1.0)}
_CHROMIUM_S = 60.0


def write_rehearsed_run(folder: Path) -> None:
    """Write what a run on three hosts would have written whose link 0 -> 2 became slow in round 30."""
    fault = InjectedFault(kind="slow link", place=Place(kind="link", ranks=(0, 2)), begin=30, severity=5.0)
    scene = Scene(hosts=("oslo", "riga", "turin"), rounds=48, seed=3, noise=NOISES["calm"], faults=(fault,))
    records = [_with_passes(one) if isinstance(one, Span) else one for one in synthesize(scene)]
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "run": {"steps": 1200, "replicas": 3}, "model": {"name": "35m"}, "data": {"source": "stdlib"},
        "sync": {"method": "diloco"},
    }  # fmt: skip
    _write(folder / "config.json", json.dumps(settings))
    for rank in range(3):
        own = [one for one in records if isinstance(one, Communicator) or one.rank == rank]
        _write(folder / f"records-rank-{rank}.jsonl", "\n".join([header_line(), *map(to_line, own)]) + "\n")
        _write(folder / f"metrics-replica-{rank}.jsonl", _metrics(records, rank))
    found = diagnose(from_records(records))
    now = time.time()
    told = [{"at": now - 9, "state": "new", "finding": finding.to_json()} for finding in found]
    _write(folder / "findings.jsonl", "".join(json.dumps(line) + "\n" for line in told))
    action = {"at": now - 8, "action": "warn", "target": found[0].where, "dry_run": False, "finding": 0,
              "result": "reported"}  # fmt: skip
    _write(folder / "actions.jsonl", json.dumps(action) + "\n")
    lost = {"post_checkpoint_s": 1.8, "detection_s": 1.4, "diagnosis_s": 0.2, "reinitialisation_s": 0.0,
            "total_s": 3.4, "run_s": 16.9}  # fmt: skip
    _write(folder / "downtime.json", json.dumps(lost))


def _with_passes(span: Span) -> Span:
    """Let a third of the work be the forward pass and a half the backward one."""
    work_s = span.done_s - span.started_s
    return replace(span, forward_s=round(0.33 * work_s, 6), backward_s=round(0.5 * work_s, 6))


def _metrics(records: list[Record], rank: int) -> str:
    spans = [one for one in records if isinstance(one, Span) and one.rank == rank]
    begin_s = spans[0].started_s
    lines, last_s = [], 0.0
    for index, span in enumerate(spans):
        time_s = span.done_s - begin_s + 1e-3
        waited_s = max(0.0, time_s - last_s - (span.done_s - span.started_s))
        step = (index + 1) * _STEPS_A_ROUND
        bits = 8 * 2 * _WIRE_BYTES / (time_s - last_s)
        loss = 3.1 + 6.4 * math.exp(-step / 260) + 0.12 * math.sin(step * (rank + 2) / 31) * math.exp(-step / 900)
        lines.append({
            "kind": "step", "step": step, "time_s": round(time_s, 4), "loss": loss, "tokens": step * _TOKENS_A_STEP,
            "tokens_per_s": round(_STEPS_A_ROUND * _TOKENS_A_STEP / (time_s - last_s), 1),
            "compute_fraction": round(1 - waited_s / (time_s - last_s), 4),
            "sent_bytes": 2 * _WIRE_BYTES * (index + 1), "received_bytes": 2 * _WIRE_BYTES * (index + 1),
            "sent_bits_per_s": round(bits, 1), "peak_bits_per_s": 1.8e8, "rounds_in_flight": 1,
        })  # fmt: skip
        last_s = time_s
        if step % 200 == 0:
            lines.append({"kind": "eval", "step": step, "time_s": round(time_s, 4), "tokens": step * _TOKENS_A_STEP,
                          "val_loss": loss + 0.05, "targets": 4096})  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def keep_alive(folder: Path, stop: threading.Event) -> None:
    """Let the records of a rehearsed run look as if they were being written, until `stop`."""
    while not stop.wait(0.5):
        for path in folder.glob("*-r*-*.jsonl"):
            path.touch()


def take_pictures(run: Path, out: Path, *, name: str, sizes: Sequence[str]) -> list[Path]:
    """Serve a run and take its pictures, light and dark.

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise FileNotFoundError("chromium is not installed; on Debian: apt-get install chromium")
    feed = Feed(RunFollower(run))
    server = DashboardServer(feed, host="127.0.0.1", port=0)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    serving.start()
    out.mkdir(parents=True, exist_ok=True)
    feed.after(0, wait_s=_CHROMIUM_S)  # the picture is taken a moment after the page is there
    try:
        return [
            _picture(chromium, server.url, out / f"{name}-{size}-{scheme}.png", SIZES[size], is_dark=scheme == "dark")
            for size in sizes
            for scheme in ("light", "dark")
        ]
    finally:
        feed.close()
        server.shutdown()
        serving.join(timeout=5)
        server.server_close()


def _picture(chromium: str, url: str, path: Path, size: tuple[int, int, float], *, is_dark: bool) -> Path:
    with tempfile.TemporaryDirectory() as profile:
        words = [
            chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}",
            f"--force-device-scale-factor={size[2]}", f"--screenshot={path}",
            *(["--blink-settings=preferredColorScheme=0"] if is_dark else []), url,
        ]  # fmt: skip
        subprocess.run(words, check=True, timeout=_CHROMIUM_S, capture_output=True)
    return path


def main() -> None:
    """Read the command line and take the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--run", type=Path, help="the run's folder; without it one is rehearsed")
    parser.add_argument("--out", type=Path, required=True, help="where the pictures go")
    parser.add_argument("--name", default="dashboard", help="what their names begin with")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["wide", "narrow"], help="which pictures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run, stop = options.run, threading.Event()
        if run is None:
            run = Path(temporary) / "rehearsed"
            write_rehearsed_run(run)
            threading.Thread(target=keep_alive, args=(run, stop), daemon=True).start()
        try:
            for path in take_pictures(run, options.out, name=options.name, sizes=options.sizes):
                sys.stderr.write(f"{path} {path.stat().st_size} bytes\n")
        finally:
            stop.set()


if __name__ == "__main__":
    main()
