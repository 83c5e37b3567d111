"""Elastic runs of training loops of one's own: `join` and the optimizer that it returns."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import nn

from thinwire.elastic.coordinator_server import coordinator_keys, own_key
from thinwire.elastic.invitation import Invitation, read_invitation
from thinwire.elastic.journal import read_journal
from thinwire.errors import (
    CameTooLate,
    ConnectError,
    DesyncError,
    DroppedBadParts,
    Expelled,
    Refused,
    RunOver,
    ThinwireError,
    excluded,
    refusal,
)
from thinwire.files import wait_for_lock, write_whole
from thinwire.runlog.run_identity import new_identity, write_identity
from thinwire.sync.fragments import parameters_by_name
from thinwire.sync.method import Method, method_of
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.training.elastic.coordinator_process import JOB_FILE, JOURNAL_FILE
from thinwire.training.elastic.job import LoopJob
from thinwire.training.elastic.states import CheckpointPolicy
from thinwire.training.elastic.stay import ElasticPolicy, ElasticStay, Left
from thinwire.training.summary import parameters_sha256
from thinwire.transport.addresses import (
    ANY_LOOPBACK,
    Address,
    ListenConfig,
    ReachOptions,
    host_port,
    is_own,
    listen_config,
    read_host_port,
    resolve,
)
from thinwire.transport.connect import given_join_uri, given_secret_file
from thinwire.transport.secret import JOIN_VARIABLE, Secret, make_secret, need_pyzmq, read_secret, write_secret

LOG_FILE = "coordinator.log"
_LOCK_FILE, _START_LOCK_FILE, _SECRET_FILE = "coordinator.lock", "start.lock", "secret"
_START_S = 60.0
# Seconds between two attempts to join again; doubled up to the second.
_AGAIN_S, _LONGEST_AGAIN_S = 0.5, 10.0
_log = logging.getLogger("thinwire")


class JoinReachOptions(ReachOptions, total=False):
    """Options of `join` for hosts that others reach in another way than by their own addresses.

    Attributes:
        address: Address of this host to listen on, by default the one from which the coordinator is reached.
        interface: Or its interface.
        serve: `HOST:PORT` of this host on which the coordinator listens, where the URI is that of a port forward.
    """

    address: str | None
    interface: str | None
    serve: str | None


def join(
    uri: str | None, model: nn.Module, inner: torch.optim.Optimizer, *, method: Method | str = "iso-loco",
    steps: int | None = None, replicas: int = 1, secret: Path | str | None = None, folder: Path | str | None = None,
    **reach: Unpack[JoinReachOptions],
) -> ElasticOptimizer:  # fmt: skip
    """Join an elastic run from a training loop of one's own; the first one on the URI's host creates the run.

    Each process trains on data of its own choice. A process that dies is not waited for longer than a grace period; one
    that comes later, or again, fetches the state and goes on from the step that the others have reached.

    Args:
        uri: Where the run's coordinator is: `thinwire://HOST:PORT`, or with the secret behind it. None for the variable
            THINWIRE_JOIN. A process on that host starts the coordinator where none runs.
        model: The replica's model, of the same shapes on all replicas; its values may differ.
        inner: Any optimizer over the model's parameters.
        method: One that tolerates changing replicas, such as `"iso-loco"`, or its name.
        steps: The run's last inner step. None for a run without an end.
        replicas: Replicas that begin together; the first one waits for them for five minutes.
        secret: File of the job's secret, by default that of the variable THINWIRE_SECRET_FILE. Without one, the first
            process makes `secret` in the folder, for processes of this host.
        folder: Folder of the coordinator's journal and log on its host, by default `runs/joined-HOST-PORT`.
        reach: How the others reach this process, see `JoinReachOptions`.

    Returns:
        An optimizer. Leave its `with` block at the end: after the last step the final exchange gives all replicas the
        same model; before it, this replica leaves the run.

    Raises:
        ValueError: An argument, with the remedy.
        ConnectError: No coordinator answered.
        Refused: The run trains another model, or by another method.
        RunOver: The run has ended; a script that does not catch it exits with 0, after one line.

    Example:
        >>> import tempfile, thinwire
        >>> model, folder = torch.nn.Linear(3, 1), tempfile.mkdtemp()
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with thinwire.join("127.0.0.1:29391", model, inner, steps=4, folder=folder) as optimizer:
        ...     while not optimizer.is_finished:
        ...         model(torch.ones(1, 3)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> optimizer.steps_done
        4
    """
    place = RunPlace.find(uri, secret=secret, folder=folder, reach=reach)
    return join_at(place, model, inner, method=method, steps=steps, replicas=replicas)


def join_at(
    place: RunPlace, model: nn.Module, inner: torch.optim.Optimizer, *, method: Method | str, steps: int | None,
    replicas: int,
) -> ElasticOptimizer:  # fmt: skip
    """Join an elastic run whose place is known; see `join`."""
    need_pyzmq()
    method = method_of(method)
    for name, value in (("steps", steps), ("replicas", replicas)):
        if value is not None and value < 1:
            raise refusal(f"{name} is too low", got=value, allowed="at least 1", remedy=f"{name}=1")
    setup = _setup_of(model, method)

    def new_job() -> LoopJob:
        identity = new_identity(config_digest=hashlib.sha256(json.dumps(setup).encode()).hexdigest()[:32])
        return LoopJob.of(method, setup=setup, num_replicas=replicas, last_step=steps or 0, identity=identity)

    try:
        return ElasticOptimizer(model, inner, method=method, place=place, new_job=new_job)
    except RunOver as over:
        _log.warning("thinwire: nothing to do: %s", over)
        raise CameTooLate(str(over)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Place of a run's coordinator, and how it is started.

    Attributes:
        invitation: Address of the coordinator.
        folder: Folder of its journal and log.
        secret_file: File of the secret; None where the URI holds it.
        is_here: Whether the coordinator's host is this one.
        reach: How the others reach this process.
        begin: Has the coordinator started elsewhere, given the job's description; None for this host or none.
    """

    invitation: Invitation
    folder: Path
    secret_file: Path | None
    is_here: bool
    reach: JoinReachOptions
    begin: Callable[[dict[str, Any]], None] | None = None

    @classmethod
    def find(
        cls, uri: str | None, *, secret: Path | str | None, folder: Path | str | None, reach: JoinReachOptions
    ) -> RunPlace:
        given = uri or given_join_uri()
        if not given:
            raise refusal("the address of the run is missing", got="nothing", allowed="thinwire://HOST:PORT",
                          remedy=f"to set {JOIN_VARIABLE}, or thinwire.join(uri, ...)")  # fmt: skip
        invitation = read_invitation(given)
        if invitation.relay is not None:
            raise refusal("a loop of your own meets no others at a relay", got="an address with a relay",
                          allowed="an address that this host can dial",
                          remedy="thinwire join ADDRESS, or serve= and advertise= on the first host")  # fmt: skip
        if invitation.carrier:
            raise refusal("a loop of one's own does not run through a store yet", got=invitation.carrier,
                          allowed="thinwire://HOST:PORT",
                          remedy="thinwire train --elastic --via, or an address of a host")  # fmt: skip
        if secret is not None and invitation.secret is not None:
            raise excluded("secret", "this address", why="it holds the secret already", remedy="to leave secret out")
        path = None if invitation.secret is not None else given_secret_file(secret)
        place = Path(folder) if folder is not None else invitation.loop_folder
        is_here = is_own(invitation.host) or bool(reach.get("serve"))
        if invitation.secret is None and path is None and not is_here:
            raise refusal(
                "the address holds no secret", got="HOST:PORT alone", allowed="thinwire://HOST:PORT/SECRET, or a file",
                remedy=f"thinwire secret FILE, and secret=FILE on every host, that of {invitation.host} too",
            )  # fmt: skip
        return cls(invitation=invitation, folder=place.resolve(), secret_file=path, is_here=is_here, reach=reach)

    def listen(self) -> ListenConfig:
        towards = None if self.reach.get("serve") else self.invitation.host
        return listen_config(
            address=self.reach.get("address"), interface=self.reach.get("interface"), towards=towards,
            advertise=self.reach.get("advertise"), port_range=self.reach.get("port_range"),
        )  # fmt: skip

    @property
    def near(self) -> Invitation:
        """Address of the coordinator from this host."""
        serve = self.reach.get("serve")
        if serve is None:
            return self.invitation
        found = read_host_port(serve, what="serve")
        host = ANY_LOOPBACK.get(found.host, found.host)
        return dataclasses.replace(self.invitation, host=host, port=found.port)

    def ready(self, new_job: Callable[[], LoopJob]) -> Secret:
        """Start the coordinator where that is this host's part and none runs; return the secret.

        Raises:
            ValueError: The coordinator of this folder is not the one that the address names.
            RunOver: The run in the folder has ended.
            ThinwireError: The coordinator cannot be started.
        """
        if self.begin is not None:
            self.begin(new_job().to_json())
        if not self.is_here:
            return self._secret()
        self.folder.mkdir(parents=True, exist_ok=True)
        # one process of this host at a time
        with (self.folder / _START_LOCK_FILE).open("a") as turn, (self.folder / _LOCK_FILE).open("a") as lock:
            if not wait_for_lock(turn.fileno(), deadline_s=2 * _START_S):  # one that starts it ends within `_START_S`
                raise ThinwireError(
                    f"another process has held {turn.name} for {2 * _START_S:g} s to start the coordinator; end or "
                    f"continue that process"
                )
            secret, key = self._secret(), own_key(self.folder)
            has = b"" if key is None else coordinator_keys(key).public_bytes
            if has != self.invitation.coordinator_key:
                names = "a key that this folder does not hold" if self.invitation.coordinator_key else "no key"
                raise refusal(
                    "the address is not that of this folder's coordinator", got=f"{names}, and {self.folder}",
                    allowed=dataclasses.replace(self.invitation, coordinator_key=has, secret=None).text(),
                    remedy="that address, or folder=NEW-FOLDER",
                )  # fmt: skip
            has_job = (self.folder / JOB_FILE).exists()
            # before the lock: a coordinator that comes to its end holds it for a while when it listens no more
            journal = read_journal(self.folder / JOURNAL_FILE) if has_job else []
            if any(line["what"] in ("finished", "failed") for line in journal):
                raise RunOver(
                    f"the run in {self.folder} has ended; begin another one with folder=NEW-FOLDER, or remove that one"
                )
            if not self._take(lock.fileno()):
                return secret  # its coordinator runs
            if not has_job:
                job = new_job()
                write_identity(self.folder, job.identity)
                write_whole(self.folder / JOB_FILE, json.dumps(job.to_json()) + "\n")
            self._start(lock.fileno())
        return secret

    def _secret(self) -> Secret:
        if self.invitation.secret is not None:
            return self.invitation.secret
        if self.secret_file is not None:
            return read_secret(self.secret_file)
        path = self.folder / _SECRET_FILE
        return read_secret(path) if path.exists() else make_secret(path)

    def _take(self, lock: int) -> bool:
        """Take the coordinator's lock, or return False: one that listens has it, or one that does not end."""
        until_s, has_listened = time.monotonic() + _START_S, False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            listens = False
            with contextlib.suppress(OSError), socket.create_connection((self.near.host, self.near.port), timeout=1):
                listens = True
            # one that was killed keeps its lock, and for a moment its port, until its last thread has gone
            if (listens and has_listened) or time.monotonic() > until_s:
                return False
            has_listened = listens
            time.sleep(0.2)

    def _start(self, lock: int) -> None:
        """Start the coordinator, which holds the lock for as long as it lives, in the background."""
        secret_file = self.secret_file
        if secret_file is None:
            secret_file = self.folder / _SECRET_FILE
            if self.invitation.secret is not None and not secret_file.exists():
                write_secret(secret_file, self.invitation.secret)
        serve = Address(host=resolve(self.invitation.host), port=self.invitation.port)
        if (given := self.reach.get("serve")) is not None:
            serve = read_host_port(given, what="serve")
        words = [
            sys.executable, "-m", "thinwire.cli.processes", "coordinator", str(self.folder), "0", str(secret_file),
            serve.host, str(serve.port),
        ]  # fmt: skip
        with (self.folder / LOG_FILE).open("ab") as log:
            try:
                code = subprocess.run(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock,), start_new_session=True,
                    timeout=_START_S, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                raise ThinwireError(
                    f"the coordinator has not started within {_START_S:g} s; see {self.folder / LOG_FILE}"
                ) from None
        if code:
            raise ThinwireError(f"the coordinator could not be started (code {code}); see {self.folder / LOG_FILE}")
        _log.info("started the coordinator of %s, port %d", self.invitation.host, self.invitation.port)
        if not self.invitation.coordinator_key and not self.invitation.host.startswith(("127.", "localhost", "::1")):
            _log.warning(
                "the address of this run names no key, so any host with the secret can pose as its coordinator; for "
                "the next run: thinwire secret FILE --coordinator %s",
                host_port(self.invitation.host, self.invitation.port),
            )


class ElasticOptimizer(DistributedOptimizer):
    """`DistributedOptimizer` of a run that replicas join and leave; made by `thinwire.join`.

    A replica that the run goes on without, as after a long pause of its process, joins again by itself: within `step`
    the model then gets the global parameters, and `steps_done` the step that the others have reached.
    """

    def __init__(
        self, model: nn.Module, inner: torch.optim.Optimizer, *, method: Method, place: RunPlace,
        new_job: Callable[[], LoopJob],
    ) -> None:  # fmt: skip
        self._plain_method, self._place, self._new_job = method, place, new_job
        self._setup = _setup_of(model, method)
        self._left_why = ""
        self._returned_s = self._seen_stalled_s = 0.0
        self._stay = stay = self._enter()
        try:
            super().__init__(
                model, inner, method=stay.elastic_method(method), transport=stay.membership.transport,
                catch_up=stay.driver,
            )  # fmt: skip
            try:
                self._begin(stay)
            except Expelled as expelled:  # such as those that fetched the state of a replica that died meanwhile
                _log.warning("%s", expelled)
                self._join_again(expelled)
        except BaseException:
            self._stay.stop_states()
            self._stay.close(why="could not begin")
            raise

    @property
    def is_finished(self) -> bool:
        """Whether there is no step to do any more: the last one is done, or this replica was asked to leave."""
        last_step = self._stay.job.last_step
        return bool(self._left_why) or (last_step > 0 and self.steps_done >= last_step)

    @property
    def left_why(self) -> str:
        """Why this replica left before the end of the run; empty where it did not."""
        return self._left_why

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `DistributedOptimizer.step`; waits while the run is paused, and joins again where it must.

        Raises:
            RuntimeError: The run is finished.
            RunOver: The run has ended without this replica.
        """
        if self.is_finished:
            raise RuntimeError(
                f"step() after the end: {self._left_why or f'all {self.steps_done} steps are done'}; leave the loop "
                f"when optimizer.is_finished"
            )
        num_tokens = self._tokens
        try:
            self._policy.before_step()
            with self._ramped():
                result = super().step(closure)
        except Left as left:
            self._left_why = str(left)
            _log.warning("%s", left)
            return None
        except Expelled as expelled:
            _log.warning("%s", expelled)
            self._join_again(expelled)
            return None
        now_s, stalled_s = time.monotonic(), self.statistics.stalled_s
        took_s = now_s - self._returned_s - (stalled_s - self._seen_stalled_s)
        self._returned_s, self._seen_stalled_s = now_s, stalled_s
        self._policy.after_step(self.steps_done, took_s=took_s, num_tokens=num_tokens)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state alone: the state of the run lives in its replicas."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; global values and rounds in flight stay those of the run."""
        self.inner.load_state_dict(state_dict)
        self._share_state()

    def close(self, *, final_exchange: bool = False) -> None:
        """Leave the run; after its last step, do the final exchange and wait for the other replicas first."""
        if self._is_closed:
            return
        has_ended = self.is_finished and not self._left_why
        try:
            if not self._left_why:
                super().close(final_exchange=has_ended and final_exchange)
            if has_ended:
                sha256 = parameters_sha256(self._model)
                finish = self._stay.finish({"sha256": sha256})
                if any(note.get("sha256") != sha256 for note in finish["notes"]):
                    raise DesyncError("a replica ended with other parameters; see that all load the same frozen ones")
        finally:
            self._end(why="has come to the end" if has_ended else self._left_why.partition(" ")[2] or "left")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception, leave the run without waiting for any replica."""
        if kind is None:
            self.close(final_exchange=True)
        else:
            self._end(why="left after an error")

    def _enter(self) -> ElasticStay[LoopJob]:
        secret = self._place.ready(self._new_job)
        try:
            return ElasticStay(
                self._place.near, secret=secret, read_job=self._read_job, listen=self._place.listen(),
                report=_log.info, on_silence=self._on_silence,
            )  # fmt: skip
        except ConnectError as error:
            if not self._place.is_here:
                raise
            raise ConnectError(f"{error}; its log is {self._place.folder / LOG_FILE}") from error

    def _read_job(self, values: Mapping[str, Any]) -> LoopJob:
        job = LoopJob.from_json(values)
        if job.setup["parameters"] != self._setup["parameters"]:
            raise Refused("the run trains a model of other parameters; start the same script on all hosts")
        if job.setup != self._setup:
            raise Refused(
                f"the run's method is {job.setup['method']}, and this process has {self._setup['method']}; start the "
                f"same script on all hosts"
            )
        return job

    def _on_silence(self, text: str) -> None:
        _log.warning("%s", text)
        try:
            self._place.ready(self._new_job)  # it may have been killed, and goes on from its journal
        except (ThinwireError, OSError, subprocess.SubprocessError) as error:
            _log.warning("%s", error)

    def _begin(self, stay: ElasticStay[LoopJob]) -> None:
        offer = stay.announce(corpus="", num_windows=1, first_values=parameters_sha256(self._model))
        step = stay.begin(
            offer, model=self._model, optimizer=self, may_begin_early=stay.job.allows_overdue,
            policy=CheckpointPolicy(checkpoints=None, every=None, last_step=stay.job.last_step),
        )  # fmt: skip
        if step:
            stay.driver.begin_at(self, step)
        self.next_stop = stay.job.last_step or None
        self._policy = ElasticPolicy(
            stay.membership, optimizer=self, throughput=stay.throughput, tokens_per_step=1, step=step,
            is_fresh=not self.inner.state,
        )  # fmt: skip
        self._returned_s, self._seen_stalled_s = time.monotonic(), self.statistics.stalled_s

    def _join_again(self, why: Expelled) -> None:
        """Leave the present stay, and begin another one under a new number."""
        self.abandon()  # what this stay did not send counts as no missing step
        if isinstance(why, DroppedBadParts):
            self.inner.state.clear()
        pause_s = _AGAIN_S
        while True:
            self._stay.stop_states()
            self._stay.close(why=str(why))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_AGAIN_S)
            self._stay = stay = self._enter()
            try:
                self._connect(stay.elastic_method(self._plain_method), stay.membership.transport, stay.driver)
                self._begin(stay)
                return
            except Expelled as again:
                why = again

    def _end(self, *, why: str) -> None:
        if not self._is_closed:
            self.abandon()
        self._stay.stop_states()
        self._stay.close(why=why)

    @contextlib.contextmanager
    def _ramped(self) -> Iterator[None]:
        """Lower the learning rate in the first steps after joining a running job."""
        scale, rates = self._policy.lr_scale(), [group["lr"] for group in self.param_groups]
        if scale < 1.0:
            for group in self.param_groups:
                group["lr"] = group["lr"] * scale
        try:
            yield
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


def _setup_of(model: nn.Module, method: Method) -> dict[str, str]:
    """Return what all replicas of a run must have alike."""
    shapes = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in parameters_by_name(model).items()]
    parameters = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    return {"parameters": parameters, "method": method.describe(num_replicas=2)}
