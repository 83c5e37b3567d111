"""The recipe in Flower's own simulation, and its file as an app of a SuperLink and two SuperNodes on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from counting_relay import counting_relay

from thinwire.cli.main import main

BIN = Path(sys.executable).parent
LONG_S = 800.0
APP = """
[project]
name = "flower-digits"
version = "1.0.0"
description = "Digits of two clients"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "test"
[tool.flwr.app.components]
serverapp = "flower_digits:server_app"
clientapp = "flower_digits:client_app"
[tool.flwr.app.config]
rounds = 1
clients = 2
"""


def test_the_recipe_learns_in_flowers_simulation_and_prints_accuracy_and_bytes() -> None:
    code = "import thinwire.cli.flower_digits as program; program.ROUNDS = 2\n" \
           "import sys; from thinwire.cli.main import main; sys.exit(main(['recipes', 'flower-digits']))"  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=False,
        env={**os.environ, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
    )  # fmt: skip
    found = re.search(r"accuracy (\d\.\d+) after 2 rounds; (\d\.\d+) MB sent, (\d\.\d+) MB without a code", done.stdout)
    assert done.returncode == 0 and found, done.stdout[-3000:] + done.stderr[-3000:]
    assert float(found[1]) > 0.85 and float(found[3]) > 2.5 * float(found[2])
    assert re.search(r"^ +2 +10 +5\.\d+ +6\.\d+ +6\.\d", done.stdout, re.M), done.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@contextmanager
def running(words: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)


def until(text: str, log: Path, *others: Path) -> str:
    """Wait until a log holds a text, and return the log."""
    end = time.monotonic() + LONG_S
    while text not in (found := log.read_text(errors="replace")):
        assert time.monotonic() < end, "\n".join(one.read_text(errors="replace")[-3000:] for one in (log, *others))
        time.sleep(0.2)
    return found


def test_a_superlink_and_supernodes_run_the_file_and_their_wires_carry_what_the_report_says(tmp_path: Path) -> None:
    app, home = tmp_path / "app", tmp_path / "home"
    app.mkdir()
    home.mkdir()
    assert main(["recipes", "cp", "flower-digits", str(app / "flower_digits.py")]) == 0
    (app / "pyproject.toml").write_text(APP)
    port = free_port()  # of all of a SuperLink's interfaces
    (home / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    environment = {
        **os.environ, "FLWR_HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    link, stream, nodes = (
        tmp_path / "link.log",
        tmp_path / "stream.log",
        [tmp_path / f"node-{index}.log" for index in range(2)],
    )
    words = [
        str(BIN / "flower-superlink"), "--insecure", "--disable-runtime-dependency-installation",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    with running(words, environment, link), counting_relay(port) as carried:
        until("Uvicorn running", link)
        node = [str(BIN / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{carried.port}"]
        config = [["--node-config", f"partition-id={index}", "--port", str(free_port())] for index in range(2)]
        with (
            running([*node, *config[0]], environment, nodes[0]),
            running([*node, *config[1]], environment, nodes[1]),
            running([str(BIN / "flwr"), "run", str(app), "here", "--stream"], environment, stream),
        ):
            printed = until("MB without a code", stream, link, *nodes)
    row = re.search(r"^\s+1\s+2\s+(\d+\.\d+)\s+(\d+\.\d+)\s+\d+\.\d\s+\d+\.\d\s+0$", printed, re.M)
    assert row, printed[-3000:]
    up, down = (2 * 1000 * float(one) for one in row.groups())
    # an object of a message travels in a body of its own, with its name; and the message itself beside its content
    objects, named = 2 * 10, 300
    pushed, _ = carried.body_bytes("/v1/fleet/push-object")
    _, pulled = carried.body_bytes("/v1/fleet/pull-object")
    assert up - 10 <= pushed <= up + objects * named, (up, pushed)
    assert down - 10 <= pulled <= down + objects * named, (down, pulled)
