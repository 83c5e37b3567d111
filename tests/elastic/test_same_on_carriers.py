"""The same replicas, data and rounds give the same model to the bit, over the direct wire and on each carrier."""

import contextlib
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.carriers.s3_server import s3_server
from thinwire.averaging.round_context import Average
from thinwire.elastic import coordinator_session
from thinwire.elastic.invitation import Invitation
from thinwire.elastic.mailbox import open_run
from thinwire.events import RoundMark
from thinwire.methods.diloco import diloco
from thinwire.sync.schedule import Round
from thinwire.training.elastic import carried_coordinator, coordinator_process
from thinwire.training.elastic.carried_coordinator import coordinate_on
from thinwire.training.elastic.coordinator_process import JOB_FILE, coordinate
from thinwire.training.elastic.own_loop import RunPlace, join_at
from thinwire.training.summary import parameters_sha256
from thinwire.transport.addresses import free_port
from thinwire.transport.secret import make_secret

STEPS, SYNC_INTERVAL, REPLICAS = 12, 4, 2
STEP_S = 0.1


class Members:
    """Sees whose parts are in the means."""

    def __init__(self) -> None:
        self.found: set[tuple[int, ...]] = set()
        self.steps: list[int] = []

    @property
    def are_whole(self) -> bool:
        """Whether all were in all means, and did all steps: a replica that is slow leaves some out."""
        is_all = self.found == {tuple(range(REPLICAS))}
        return is_all and sorted(self.steps) == sorted([*range(STEPS)] * REPLICAS)

    def on_mark(self, mark: RoundMark) -> None:
        pass

    def on_applied(self, round: Round, average: Average) -> None:
        self.found.add(tuple(average.members))


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

    def train(self) -> tuple[list[str], Members]:
        """Train to the end with two replicas; return the hash of each one's parameters, and who was in the means."""
        place = RunPlace(
            invitation=self.invitation, folder=self.folder, secret_file=None, is_here=False,
            reach={"address": "127.0.0.1"}, begin=self.begin,
        )  # fmt: skip
        found: list[str] = [""] * REPLICAS
        order, members = threading.Lock(), Members()

        def replica() -> None:
            with order:  # the generator is the process's
                torch.manual_seed(0)
                model = torch.nn.Linear(7, 5)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with join_at(
                place, model, inner, method=diloco(sync_interval=SYNC_INTERVAL), steps=STEPS, replicas=REPLICAS
            ) as optimizer:
                optimizer.engine.observers.append(members)
                membership = optimizer._stay.membership
                me = membership.replica
                # from the first round on the members are the same
                membership.session.wait_for(
                    lambda view: sum(one.is_active for one in view.neighbours.values()) == REPLICAS,
                    deadline_s=120, why="the other replica has not begun",
                )  # fmt: skip
                while not optimizer.is_finished:
                    with order:
                        members.steps.append(optimizer.steps_done)
                    # data by the number in the run, so that the order of joins does not matter
                    seed = torch.Generator().manual_seed(1000 * me + optimizer.steps_done)
                    model(torch.randn(4, 7, generator=seed)).square().sum().backward()
                    time.sleep(STEP_S)  # else who is a millisecond slower leaves out steps
                    optimizer.step()
                    optimizer.zero_grad()
            with order:
                found[me] = parameters_sha256(model)

        threads = [threading.Thread(target=replica, daemon=True) for _ in range(REPLICAS)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(timeout=240)
        return found, members

    def close(self) -> None:
        self.until.set()
        if self.thread is not None:
            self.thread.join(timeout=30)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no part miss its round on a busy machine: then the schedule of membership is the same in each run."""
    plain = coordinator_process.coordinator_config
    monkeypatch.setattr(
        coordinator_process, "coordinator_config", lambda job: plain(job, message_s=60.0, suspect_silence_s=60.0)
    )
    monkeypatch.setattr(carried_coordinator, "_MESSAGE_S", 60.0)
    monkeypatch.setattr(carried_coordinator, "_SUSPECT_SILENCE_S", 60.0)
    monkeypatch.setattr(coordinator_session, "_LEAST_TRANSFER_S", 60.0)
    monkeypatch.setattr(coordinator_session, "SILENT_S", 60.0)


def whole_run(folder: Path, carrier: str = "") -> set[str]:
    """Train until both replicas were in all means: on a busy machine one may begin before the other."""
    for number in range(4):
        place = folder.with_name(f"{folder.name}-{number}")
        with contextlib.closing(Run(place, carrier)) as run:
            hashes, members = run.train()
        if members.are_whole:
            return set(hashes)
    raise AssertionError(
        f"no run of four had both replicas in all means, the last one {members.found}, {members.steps}"
    )


def test_the_wire_a_folder_and_a_bucket_give_the_same_parameters(
    tmp_path: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = whole_run(tmp_path / "wire")
    assert len(direct) == 1
    assert whole_run(tmp_path / "carried", f"file://{tmp_path}/store") == direct
    server = s3_server()
    for name, value in server.options().items():
        monkeypatch.setenv(f"AWS_{name.upper()}", str(value))
    assert whole_run(tmp_path / "bucket", f"s3://{server.reset()}/runs") == direct
