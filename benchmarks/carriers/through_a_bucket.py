"""Throughput of an elastic run through a store far away, beside the direct wire, and the requests that it takes.

Two replicas in one process with steps of fixed length. Each has a link of 5 Mbit/s: to the other one, through relays
that pass on no more, or to a store that answers each request after 150 ms. Throughput is the training time of a run
without any waiting over the time that it took.

    python benchmarks/carriers/through_a_bucket.py --steps 240 --sync-interval 80
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from thinwire.carriers.base import Carrier, CarrierCost, Entry, Limits, Payload, as_bytes
from thinwire.carriers.memory import MemoryCarrier, MemoryStore
from thinwire.elastic import mailbox
from thinwire.elastic.invitation import Invitation
from thinwire.methods.diloco import diloco
from thinwire.methods.streaming_diloco import streaming_diloco
from thinwire.training.elastic.carried_coordinator import coordinate_on
from thinwire.training.elastic.coordinator_process import JOB_FILE, coordinate
from thinwire.training.elastic.own_loop import RunPlace, join_at
from thinwire.transport.addresses import free_port
from thinwire.transport.secret import make_secret

DELAY_S, BYTES_PER_S = 0.15, 5e6 / 8


class FarCarrier(Carrier):
    """One process's access to a store behind a link; both directions have a rate of their own.

    Args:
        inner: The store.
        requests_per_hour: Budget of this process.
    """

    def __init__(self, inner: Carrier, *, requests_per_hour: float) -> None:
        self._inner = inner
        self._limits = Limits(requests_per_hour=requests_per_hour)
        self._up, self._down = threading.Lock(), threading.Lock()

    def put(self, name: str, payload: Payload, *, only_new: bool) -> bool:
        self._travel(self._up, len(as_bytes(payload)))
        return self._inner.put(name, payload, only_new=only_new)

    def get(self, name: str, *, most_bytes: int, deadline_s: float) -> torch.Tensor:
        time.sleep(DELAY_S)
        found = self._inner.get(name, most_bytes=most_bytes, deadline_s=deadline_s)
        with self._down:
            time.sleep(found.numel() / BYTES_PER_S)
        return found

    def listing(self, prefix: str, *, after: str = "") -> list[Entry]:
        time.sleep(DELAY_S)
        return self._inner.listing(prefix, after=after)

    def delete(self, names: Iterable[str]) -> None:
        time.sleep(DELAY_S)
        self._inner.delete(names)

    def now(self) -> float:
        return self._inner.now()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def limits(self) -> Limits:
        return self._limits

    def cost(self) -> CarrierCost:
        return self._inner.cost()

    def _travel(self, link: threading.Lock, num_bytes: int) -> None:
        time.sleep(DELAY_S)
        with link:
            time.sleep(num_bytes / BYTES_PER_S)


class PacedRelay:
    """Passes on each connection to a port at a rate, each way."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            caller, _ = self._listener.accept()
            called = socket.create_connection(("127.0.0.1", self._target))
            for source, target in ((caller, called), (called, caller)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    @staticmethod
    def _pass(source: Any, target: Any) -> None:
        while data := source.recv(1 << 14):
            time.sleep(len(data) / BYTES_PER_S)
            target.sendall(data)
        target.close()


class MeasuredRun:
    """A run of two replicas over the wire or a far store.

    Args:
        folder: For the coordinator.
        is_far: Whether it runs through the store.
        options: Of the command.
    """

    def __init__(self, folder: Path, *, is_far: bool, options: argparse.Namespace) -> None:
        self.folder, self.is_far, self.options = folder, is_far, options
        self.opened: list[Carrier] = []
        self.found: list[dict[str, float]] = []
        self._store, self._until, self._lock = MemoryStore(), threading.Event(), threading.Lock()
        self._port = free_port("127.0.0.1")
        secret = make_secret(folder / "secret")
        self._invitation = Invitation(host="127.0.0.1", port=self._port, secret=secret)
        if is_far:
            self._invitation = Invitation(carrier="memory://far", secret=secret)
            mailbox.open_run = self._open  # type: ignore[assignment]

    def _open(self, uri: str, **more: Any) -> Carrier:
        self.opened.append(FarCarrier(MemoryCarrier(self._store), requests_per_hour=self.options.budget))
        return self.opened[-1]

    def _begin(self, job: dict[str, Any]) -> None:
        with self._lock:
            if (self.folder / JOB_FILE).exists():
                return
            (self.folder / JOB_FILE).write_text(json.dumps(job))
        threading.Thread(target=self._coordinate, args=(job,), daemon=True).start()

    def _coordinate(self, job: dict[str, Any]) -> None:
        if self.is_far:
            lines = [{"what": "job", "job": job}, {"what": "run", **job["identity"]}]
            coordinate_on(
                self._open(""), run_dir=self.folder, first_lines=lines, say=logging.warning, until=self._until
            )
        else:
            coordinate(
                self.folder, secret_path=self.folder / "secret", address="127.0.0.1", port=self._port,
                say=logging.warning, until=self._until,
            )  # fmt: skip

    def _replica(self) -> None:
        options, own = self.options, free_port("127.0.0.1")
        reach: Any = {"address": "127.0.0.1"}
        if not self.is_far:
            reach |= {"port_range": f"{own}-{own}", "advertise": f"127.0.0.1:{PacedRelay(own).port}"}
        place = RunPlace(
            invitation=self._invitation, folder=self.folder, secret_file=None, is_here=False, reach=reach,
            begin=self._begin,
        )  # fmt: skip
        model = torch.nn.Linear(options.parameters // 500 - 1, 500)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        method = diloco(sync_interval=options.sync_interval)
        if options.overlap:
            method = streaming_diloco(sync_interval=options.sync_interval, overlap_steps=options.overlap)
        with join_at(place, model, inner, method=method, steps=options.steps, replicas=2) as optimizer:
            began_s = time.monotonic()
            while not optimizer.is_finished:
                model(torch.ones(1, model.in_features)).sum().backward()
                time.sleep(options.step_s)
                optimizer.step()
                optimizer.zero_grad()
            took_s = time.monotonic() - began_s
        self.found.append({"took_s": took_s, "rounds": float(optimizer.statistics.rounds_applied)})

    def run(self) -> dict[str, Any]:
        """Return throughput and requests; the last, blocking exchange and the wait for the end do not count."""
        threads = [threading.Thread(target=self._replica, daemon=True) for _ in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self._until.set()
        took_s = max(one["took_s"] for one in self.found)
        return {
            "kind": self.options.kind, "overlap": self.options.overlap, "took_s": round(took_s, 1),
            "rounds": self.found[0]["rounds"],
            "throughput": round(self.options.steps * self.options.step_s / took_s, 3),
            "requests_per_hour": [round(one.cost().requests * 3600 / took_s) for one in self.opened],
            "load": [round(one, 1) for one in os.getloadavg()],
        }  # fmt: skip


def main() -> None:
    """Print one JSON line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--sync-interval", type=int, default=80)
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--parameters", type=int, default=250_000)
    parser.add_argument("--overlap", type=int, default=0)
    parser.add_argument("--budget", type=float, default=7200.0)
    parser.add_argument("kind", choices=("wire", "bucket"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        run = MeasuredRun(Path(name), is_far=options.kind == "bucket", options=options)
        print(json.dumps(run.run()))


if __name__ == "__main__":
    main()
