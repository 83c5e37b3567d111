"""The same replicas, data and rounds give the same model to the bit, over the direct wire and on each carrier."""

import contextlib
import json
import logging
import threading
from pathlib import Path
from typing import Any

import torch

from thinwire.elastic.invitation import Invitation
from thinwire.elastic.mailbox import open_run
from thinwire.methods.diloco import diloco
from thinwire.training.elastic.carried_coordinator import coordinate_on
from thinwire.training.elastic.coordinator_process import JOB_FILE, coordinate
from thinwire.training.elastic.own_loop import RunPlace, join_at
from thinwire.training.summary import parameters_sha256
from thinwire.transport.addresses import free_port
from thinwire.transport.secret import make_secret

STEPS, SYNC_INTERVAL, REPLICAS = 12, 4, 2


class Run:
    """A run whose coordinator is a thread of this process."""

    def __init__(self, folder: Path, carrier: str = "") -> None:
        folder.mkdir()
        self.folder, self.carrier = folder, carrier
        self.secret = make_secret(folder / "secret")
        port = 0 if carrier else free_port("127.0.0.1")
        host = "" if carrier else "127.0.0.1"
        self.invitation = Invitation(host=host, port=port, carrier=carrier, secret=self.secret)
        self.until = threading.Event()
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def begin(self, job: dict[str, Any]) -> None:
        with self.lock:
            if self.thread is not None:
                return
            (self.folder / JOB_FILE).write_text(json.dumps(job))
            if self.carrier:
                place = open_run(self.carrier, secret=self.secret, may_create=True)
                lines = [{"what": "job", "job": job}, {"what": "run", **job["identity"]}]

                def work() -> None:
                    coordinate_on(place, run_dir=self.folder, first_lines=lines, say=logging.warning, until=self.until)
            else:

                def work() -> None:
                    coordinate(
                        self.folder, secret_path=self.folder / "secret", address="127.0.0.1",
                        port=self.invitation.port, say=logging.warning, until=self.until,
                    )  # fmt: skip

            self.thread = threading.Thread(target=work, daemon=True)
            self.thread.start()

    def train(self) -> list[str]:
        """Train to the end with two replicas; return the hash of each one's parameters."""
        place = RunPlace(
            invitation=self.invitation, folder=self.folder, secret_file=None, is_here=False,
            reach={"address": "127.0.0.1"}, begin=self.begin,
        )  # fmt: skip
        found: list[str] = [""] * REPLICAS
        order = threading.Lock()

        def replica() -> None:
            torch.manual_seed(0)
            model = torch.nn.Linear(7, 5)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with join_at(
                place, model, inner, method=diloco(sync_interval=SYNC_INTERVAL), steps=STEPS, replicas=REPLICAS
            ) as optimizer:
                me = optimizer._stay.membership.replica
                while not optimizer.is_finished:
                    # data by the number in the run, so that the order of joins does not matter
                    seed = torch.Generator().manual_seed(1000 * me + optimizer.steps_done)
                    model(torch.randn(4, 7, generator=seed)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            with order:
                found[me] = parameters_sha256(model)

        threads = [threading.Thread(target=replica, daemon=True) for _ in range(REPLICAS)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(timeout=240)
        return found

    def close(self) -> None:
        self.until.set()
        if self.thread is not None:
            self.thread.join(timeout=30)


def test_the_wire_and_a_folder_give_the_same_parameters(tmp_path: Path) -> None:
    with contextlib.closing(Run(tmp_path / "wire")) as wire:
        direct = wire.train()
    with contextlib.closing(Run(tmp_path / "carried", f"file://{tmp_path}/store")) as carried:
        assert carried.train() == direct
    assert len(set(direct)) == 1 and direct[0]
