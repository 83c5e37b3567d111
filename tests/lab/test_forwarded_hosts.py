"""An elastic run of two hosts that reach each other through a TCP forwarder only, with few open ports."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.lab import Lab
from thinwire.lab.lab import HostProcess
from thinwire.transport.secret import make_secret

pytestmark = pytest.mark.multiprocess
# On the forwarder, and on the hosts behind it.
OUTSIDE, INSIDE, NUM_PORTS = (50_000, 51_000), 40_000, 3
SOON_S, STEPS = 240.0, 60
FORWARDER = """
import asyncio, sys

async def pump(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()

async def main():
    for place in sys.argv[1:]:
        own, host, port = place.split(":")
        async def forward(reader, writer, host=host, port=int(port)):
            try:
                back, on = await asyncio.open_connection(host, port)
            except OSError:
                writer.close()
                return
            await asyncio.gather(pump(reader, on), pump(back, writer), return_exceptions=True)
        await asyncio.start_server(forward, "0.0.0.0", int(own))
    await asyncio.Event().wait()

asyncio.run(main())
"""
TRAIN = """
# begins with torch loaded
import sys, time, pathlib, torch, thinwire
folder, steps, options = pathlib.Path(sys.argv[1]), int(sys.argv[2]), dict(word.split("=") for word in sys.argv[3:])
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
method = thinwire.methods.streaming_diloco(sync_interval=5, overlap_steps=1)
with thinwire.join(
    None, model, inner, method=method, steps=steps, replicas=2, folder=folder, **options
) as optimizer:
    while not optimizer.is_finished:
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.statistics.rounds_applied > 1:
            folder.joinpath("trains").touch()
            while not folder.parent.joinpath("looked").exists():
                time.sleep(0.1)
print(thinwire.training.summary.parameters_sha256(model), optimizer.statistics.rounds_applied)
"""


def listening_ports(lab: Lab, host: int) -> set[int]:
    """Return the ports of the host's listening sockets, by its kernel's table."""
    path = lab.folder / f"sockets-{host}"
    with path.open("wb") as out:
        assert lab.start(["cat", "/proc/net/tcp", "/proc/net/tcp6"], host=host, stdout=out).wait(deadline_s=30) == 0
    fields = [line.split() for line in path.read_text().splitlines()]
    return {int(found[1].rpartition(":")[2], 16) for found in fields if found[3] == "0A"}


def wait_until(what: Callable[[], bool], processes: list[HostProcess], logs: list[Path]) -> None:
    until_s = time.monotonic() + SOON_S
    while not what():
        ended = [one.exit_code for one in processes if one.exit_code is not None]
        told = "\n".join(log.read_text() for log in logs)
        assert not ended and time.monotonic() < until_s, f"{ended}\n{told}"
        time.sleep(0.2)


def test_a_run_trains_through_a_forwarder_and_opens_the_listed_ports_alone(tmp_path: Path) -> None:
    secret, doctor = tmp_path / "job.secret", tmp_path / "doctor.json"
    make_secret(secret)
    folders, logs = ([tmp_path / f"{name}-{host}" for host in range(2)] for name in ("run", "log"))
    for folder in folders:
        folder.mkdir()
    with Lab(hosts=3) as lab:
        for way in ((0, 1), (1, 0)):
            lab.cut(*way)
        places = [
            f"{OUTSIDE[host] + port}:{lab.address(host)}:{INSIDE + port}"
            for host in range(2)
            for port in range(NUM_PORTS)
        ]
        lab.start([sys.executable, "-c", FORWARDER, *places], host=2)
        shown = [f"{lab.address(2)}:{port}" for port in OUTSIDE]
        environment = {
            "OMP_NUM_THREADS": "1", "THINWIRE_SECRET_FILE": str(secret), "THINWIRE_JOIN": f"thinwire://{shown[0]}",
        }  # fmt: skip
        ports = f"{INSIDE}-{INSIDE + NUM_PORTS - 1}"
        # the first host's coordinator has the first port
        advertise = [f"{lab.address(2)}:{OUTSIDE[0] + 1}", shown[1]]
        options = [[f"advertise={advertise[0]}", f"port_range={INSIDE + 1}-{INSIDE + NUM_PORTS - 1}"],
                   [f"advertise={advertise[1]}", f"port_range={ports}"]]  # fmt: skip
        options[0].append(f"serve={lab.address(0)}:{INSIDE}")
        processes = []
        for host in range(2):
            words = [sys.executable, "-c", TRAIN, str(folders[host]), str(STEPS), *options[host]]
            with logs[host].open("wb") as out:
                processes.append(lab.start(words, host=host, environment=environment, stdout=out, stderr=out))
        wait_until(lambda: all((folder / "trains").exists() for folder in folders), processes, logs)
        opened = [listening_ports(lab, host) for host in range(2)]
        with doctor.open("wb") as out:
            words = [sys.executable, "-m", "thinwire.cli.main", "doctor", "--json", shown[0]]
            code = lab.start(words, host=1, environment=environment, stdout=out).wait(deadline_s=SOON_S)
        (tmp_path / "looked").touch()
        codes = [process.wait(deadline_s=SOON_S) for process in processes]
    told = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join(told)
    ends = [text.splitlines()[-1].split() for text in told]  # hash and rounds, after what was warned of
    assert ends[0][0] == ends[1][0] and all(int(rounds) > 2 for _, rounds in ends), told
    assert [len(one) for one in opened] == [2, 1] and opened[0] | opened[1] <= set(range(INSIDE, INSIDE + NUM_PORTS))
    checks = {check["name"]: check for check in json.loads(doctor.read_text())}
    assert checks["advertised addresses"]["verdict"] == "ok" and code == 0, checks
