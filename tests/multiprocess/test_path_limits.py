"""A path of a running job becomes slow: the finding names it, its share falls at once, and no round is lost."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live_processes
import pytest
from slow_relay import SlowRelay
from training_runs import DOCUMENTS, Started, finish, result

from thinwire.monitor.dashboard.snapshot import snapshot
from thinwire.transport.secret import make_secret

pytestmark = pytest.mark.multiprocess
SOURCE_PORTS = (17_001, 17_002, 17_003)
SLOW = 1  # path
STEPS = 60
OPTIONS = (  # noqa: SIM905 - the words as a user types them
    "--model tiny --tokenizer bytes --batch-size 1 --seq-len 16 --eval-every 0 --final-eval-batches 2 "
    "--checkpoint-every 0 --log-every 20 --threads 1 --quiet --json"
).split()


def free_ports() -> tuple[int, int]:
    """Return a free port for rank 0, the next one for rank 1, and as many for the relay.

    They lie above those that `free_port` hands out, and below those that the kernel lends to connections.
    """
    for port in range(29_600, 32_000, 4):
        sockets = [socket.socket() for _ in range(4)]
        try:
            for number, one in enumerate(sockets):
                one.bind(("127.0.0.1", port + number))
            return port, port + 2
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no four ports in a row are free")


def write_plan(folder: Path, port: int) -> Path:
    pieces = [
        {"share": 1 / 3, "source_port": own, "spare_source_ports": [own + 100, own + 200], "destination_port": port}
        for own in SOURCE_PORTS
    ]
    flow = {"source": "host-1", "destination": "host-0", "pieces": pieces}
    plan = {"format": "thinwire-traffic-plan", "version": 1, "hosts": ["host-0", "host-1"], "assignment": [flow]}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder / "plan.json"


def lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:  # half a line
            break
    return found


def readings(run: Path, rank: int) -> list[dict[str, Any]]:
    return [one for one in lines(run / f"records-rank-{rank}.jsonl") if one.get("record") == "path"]


def shares(run: Path, rank: int) -> list[float]:
    """Return the share of the slow path at each reading."""
    return [one["share"] for one in readings(run, rank) if one["path"] == SLOW]


def actions(run: Path) -> list[dict[str, Any]]:
    return lines(run / "actions.jsonl")


def until(condition: Callable[[], bool], started: Started) -> None:
    started.until(condition, "what is waited for")


def test_a_slow_path_is_named_and_limited_while_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    make_secret(tmp_path / "secret")
    common = [
        "--replicas", "2", "--method", "all-reduce", *OPTIONS, "--steps", str(STEPS), "--data",
        str(tmp_path / "text.jsonl"), "--cache-dir", str(tmp_path / "cache"),
    ]  # fmt: skip
    port, shown = free_ports()
    planned = [
        "--secret", str(tmp_path / "secret"), "--port-range", f"{port}-{port + 1}", "--advertise", f"127.0.0.1:{shown}",
        "--traffic-plan", str(write_plan(tmp_path, shown)),
    ]  # fmt: skip
    # the rate keeps the run going for as long as the test needs, however fast the machine is
    with (
        SlowRelay(shown, target=port, bytes_per_s=4e6) as relay,
        SlowRelay(shown + 1, target=port + 1, bytes_per_s=4e6),
    ):
        for number in itertools.count():  # replica 1 may be the first to take a port, and the plan is then refused
            run = tmp_path / f"run-{number}"
            started = Started([*common, *planned, "--out", str(run)])
            live_processes.until(lambda: shares(run, 1) or started.process.poll() is not None)  # noqa: B023
            if shares(run, 1):
                break
            assert started.end() and "the traffic plan holds for port" in started.stderr, started.stderr
        until(lambda: len(shares(run, 1)) >= 8, started)
        assert all(share > 0.2 for share in shares(run, 1))
        relay.slower = {SOURCE_PORTS[SLOW]: 3e5}
        until(lambda: bool(actions(run)), started)
        until(lambda: max(shares(run, 0)[-1], shares(run, 1)[-1]) < 0.05, started)
        finish(started)
    # the wire moves its shares by itself too, which may leave nothing to find in one of the directions
    limited = {one["target"] for one in actions(run) if one["action"] == "limit path"}
    assert limited and limited <= {"path 1 of link 0 -> 1", "path 1 of link 1 -> 0"}
    assert all(f"action: limit path, {place}: rank" in started.stderr for place in limited)
    rows = {f"path {one['path']} of link {one['from']} -> {one['to']}": one for one in snapshot(run)["paths"]["paths"]}
    assert len(rows) == 6 and all(rows[place]["limit"] < 1 for place in limited)
    assert [rows[f"path {path} of link 1 -> 0"]["source_port"] for path in range(3)] == list(SOURCE_PORTS)
    plain = finish(Started([*common, "--out", str(tmp_path / "plain")]))
    digests = [result(one)["global_parameters_sha256"] for one in (started, plain)]
    assert digests[0] == digests[1]
