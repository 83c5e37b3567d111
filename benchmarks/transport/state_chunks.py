"""How large the chunks of a state should be: seconds and bytes of a fetch over thin wires, by the chunks' size.

    python benchmarks/transport/state_chunks.py

Each row is a lab of a new replica and its holders, a wire of the same kind each. `of ideal` is the time against that of
the state's bytes at the new replica's full rate; `bytes` are the kernel's, which the new replica received, against the
state's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from thinwire.elastic.state_transfer import StateTransfer, publish_state
from thinwire.lab import Lab, Link
from thinwire.transport.addresses import Address
from thinwire.transport.blob_store import BlobStore
from thinwire.transport.secret import Secret
from thinwire.transport.wire.wire_transport import WireTransport
from thinwire.units import parse_rate

WIRES = ("2mbit:25", "10mbit:25", "100mbit:25", "100mbit:100")
HOLDERS = (1, 3)
CHUNKS = tuple(1 << bits for bits in range(16, 21))
SECONDS = 8.0
DEADLINE_S = 120.0


def wait_for(path: Path) -> str:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    return path.read_text()


def take_part(options: argparse.Namespace) -> None:
    """Be host `options.host`: 0 fetches, the others hold."""
    folder, others = Path(options.folder), range(1, options.hosts)
    secret, address = Secret(key=bytes(32)), options.address
    transport = WireTransport(
        replica=options.host, num_replicas=options.hosts, secret=secret, address=address, is_open=True
    )
    library = BlobStore(transport)
    vector = (torch.arange(options.bytes) % 251).to(torch.uint8)
    if options.host:
        root = publish_state(library, b"state", vector, chunk_bytes=options.chunk)
        (folder / f"root{options.host}").write_text(root.hex())
        host, port = wait_for(folder / "port").split()
        transport.add(0, address=Address(host=host, port=int(port)))
        wait_for(folder / "done")
    else:
        for holder in others:
            transport.add(holder)
        (folder / "new").write_text(f"{options.address} {transport.port}")
        (folder / "new").rename(folder / "port")
        assert len(transport.wait_until_connected(others, deadline_s=DEADLINE_S)) == len(others)
        root = bytes.fromhex(wait_for(folder / "root1"))
        start, size = time.monotonic(), {"num_bytes": options.bytes, "chunk_bytes": options.chunk}
        transfer = StateTransfer(library, b"state", **size, root=root)
        for holder in others:
            transfer.add_holder(holder)
        found = transfer.run(deadline_s=DEADLINE_S, may_wait=False)
        print(time.monotonic() - start)
        assert torch.equal(found, vector)
        (folder / "done").write_text("")
    library.close()
    transport.close()


def measure(rate: str, latency_s: float, *, holders: int, chunk: int) -> tuple[float, float]:
    """Return seconds and received bytes, against the ideal."""
    num_bytes = round(parse_rate(rate) / 8 * SECONDS)
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(hosts=1 + holders, rate=rate, link=Link(latency_s=latency_s), can_delay=True) as lab,
    ):
        processes = []
        for host in range(1 + holders):
            words = {"host": host, "hosts": 1 + holders, "folder": folder, "address": lab.address(host)}
            words |= {"bytes": num_bytes, "chunk": chunk}
            command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in words.items())]
            with (Path(folder) / f"out{host}").open("w") as out:
                processes.append(lab.start(command, host=host, stdout=out))
        for process in processes:
            assert process.wait(deadline_s=2 * DEADLINE_S) == 0
        seconds = float((Path(folder) / "out0").read_text())
        return seconds / SECONDS, lab.counters()[0].received_bytes / num_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("host", "hosts", "bytes", "chunk"):
        parser.add_argument(f"--{name}", type=int, default=-1)
    for name in ("folder", "address"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--wires", nargs="+", default=WIRES, help="rate:milliseconds one way")
    parser.add_argument("--holders", nargs="+", type=int, default=HOLDERS)
    parser.add_argument("--chunks", nargs="+", type=int, default=CHUNKS)
    options = parser.parse_args()
    if options.host >= 0:
        take_part(options)
        return
    print("| wire | latency one way | holders | chunk | of ideal | bytes |\n| --- | --- | --- | --- | --- | --- |")
    for wire in options.wires:
        rate, milliseconds = wire.split(":")
        for holders in options.holders:
            for chunk in options.chunks:
                share, received = measure(rate, float(milliseconds) / 1000, holders=holders, chunk=chunk)
                row = f"{rate} | {milliseconds} ms | {holders} | {chunk >> 10} KiB"
                print(f"| {row} | {share:.2f} | {received:.3f} |", flush=True)


if __name__ == "__main__":
    main()
