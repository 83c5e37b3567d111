"""`thinwire train --elastic`: the coordinator and this host's replicas, which others may join."""

from __future__ import annotations

import dataclasses
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.cli.elastic_run import replica_roles, run_here, tell
from thinwire.elastic.data_leases import Ledger
from thinwire.elastic.invitation import Invitation
from thinwire.elastic.journal import Journal
from thinwire.errors import CheckpointError, ThinwireError
from thinwire.files import write_whole
from thinwire.sync.elastic import elastic
from thinwire.training.build import make_method
from thinwire.training.checkpoints.global_state import GlobalState, tensors_sha256
from thinwire.training.config import TrainConfig
from thinwire.training.elastic.coordinator_process import ALONE_FILE, JOB_FILE, JOURNAL_FILE, PORT_FILE
from thinwire.training.elastic.job import ElasticJob, LocalSettings
from thinwire.training.elastic.launch import Role
from thinwire.training.elastic.replica_ranks import check_ranks
from thinwire.training.elastic.states import checkpoints_of, newest_state
from thinwire.training.run_identity import RunIdentity, new_identity, read_identity
from thinwire.training.worker import make_run_folder
from thinwire.transport.addresses import own_address
from thinwire.transport.secret import Secret, make_secret, need_pyzmq, read_secret

SECRET_FILE = "secret"


class _Nobody:
    """Stands for a seat where a method is only tried."""

    def active(self) -> tuple[int, ...]:
        raise AssertionError

    def known_step(self) -> int:
        raise AssertionError

    def is_decided(self, round_id: int) -> bool:
        raise AssertionError

    def propose(self, part: Any, **rest: Any) -> Any:
        raise AssertionError

    def reject(self, member: int, **rest: Any) -> None:
        raise AssertionError


def check_elastic(config: TrainConfig) -> None:
    """Refuse what does not go with replicas that come and go.

    Raises:
        ValueError: An option; with the remedy.
        MissingExtra: pyzmq is not installed.
    """
    need_pyzmq()
    if config.pace:
        raise ValueError("--pace does not go with --elastic: parts are fetched by those that need them; leave it out")
    was = LocalSettings.of_resumed(config)
    here = config.num_replicas if was is None else was.replicas
    if config.begin_with is not None and config.begin_with < here:
        raise ValueError(
            f"--begin-with must be at least the {here} replicas that this host starts, got {config.begin_with}"
        )
    if config.overlap_steps is not None and "," in config.overlap_steps:
        raise ValueError(
            f"--overlap-steps must be one number with --elastic, got {config.overlap_steps}, since nobody knows which "
            f"replicas will come; a slow one is not waited for anyway"
        )
    check_ranks(config, num_ranks=config.ranks_per_replica, num_replicas=here)
    elastic(make_method(config), seat=_Nobody())


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An elastic run that is about to begin, or to go on, on this host.

    Attributes:
        config: Resolved options.
        identity: The run, as the incarnation that begins now.
        local: What this host's replicas are told, but for where the coordinator is.
        is_taken_over: Whether this host joined the run, and now goes on with it as its first host.
        state: The global state that the run goes on from; None where it begins from the seed.
        is_kept: Whether that state is no checkpoint yet.
        replaced: Steps of checkpoints of the run that is replaced, which are removed.
    """

    config: TrainConfig
    identity: RunIdentity
    local: LocalSettings
    is_taken_over: bool = False
    state: GlobalState | None = None
    is_kept: bool = False
    replaced: tuple[int, ...] = ()


def prepare(config: TrainConfig) -> Begun:
    """Check which run this is, and find the state that it goes on from; nothing is written.

    Raises:
        ValueError: A new run's place of checkpoints holds those of another one; names both.
        CheckpointError: The run cannot be resumed from this folder; says why.
    """
    local = LocalSettings(
        invitation="", secret="", out=str(config.run_dir.resolve()), cache_dir=str(config.cache_dir),
        threads=config.threads or 1, device=config.device, data=config.data,
        address=own_address(address=config.address, interface=config.interface),
        ranks_per_replica=config.ranks_per_replica, replicas=config.num_replicas,
    )  # fmt: skip
    if config.resume is None:
        identity = new_identity(config_digest=config.digest())
        return Begun(config=config, identity=identity, local=local, replaced=_replaced(config, new=identity))
    before = read_identity(config.run_dir)
    if before.config_digest != config.digest():
        raise CheckpointError(
            f"{config.run_dir} is of run {before.run} with options {before.config_digest}, and its config.json has "
            f"options {config.digest()}; restore config.json, or start a new run"
        )
    identity = before.next_incarnation()
    was = LocalSettings.of_resumed(config)
    if was is not None:
        address = was.address if config.address is None and config.interface is None else local.address
        local = dataclasses.replace(
            local, data=was.data, batch_size=was.batch_size, replicas=was.replicas, address=address
        )  # fmt: skip
    is_taken_over = was is not None and was.is_joined
    state, is_kept = newest_state(config, run=identity, report=tell)
    if state is None and is_taken_over:
        raise CheckpointError(
            f"{config.run_dir} holds no global state of run {before.run} yet; go on with the run on another host that "
            f"took part in it"
        )
    return Begun(
        config=config, identity=identity, local=local, is_taken_over=is_taken_over, state=state, is_kept=is_kept
    )  # fmt: skip


def _replaced(config: TrainConfig, *, new: RunIdentity) -> tuple[int, ...]:
    """Return the steps of checkpoints that a new run removes: those of the run that it replaces in its folder.

    Raises:
        ValueError: There are others.
    """
    checkpoints = checkpoints_of(config, run=None)
    try:
        old = read_identity(config.run_dir).run if config.overwrite else ""
    except CheckpointError:
        old = ""
    steps = checkpoints.steps() if config.checkpoint_to is not None else []
    for step in steps:
        try:
            stamp = checkpoints.describe(step).run
            found = "no run" if stamp is None else f"run {stamp['id']}"
        except CheckpointError as error:
            stamp, found = None, f"a run that cannot be told ({str(error).partition(';')[0]})"
        if not old or stamp is None or stamp["id"] != old:
            raise ValueError(
                f"{checkpoints.place} holds a checkpoint of {found}, step {step}, and this would be run {new.run}; go "
                f"on with the other run in its own folder (thinwire train --resume FOLDER), name another "
                f"--checkpoint-to, or remove what is there"
            )
    return tuple(steps)


def run(begun: Begun) -> tuple[int, dict[str, Any] | None]:
    """Run the coordinator and this host's replicas to the end.

    Args:
        begun: What `prepare` returned.

    Returns:
        The exit code, and the run's summary where it is on this host.
    """
    config, run_dir, address = begun.config, begun.config.run_dir, begun.local.address
    assert address is not None
    plain = dataclasses.replace(config, resume=None, overwrite=False)
    make_run_folder(plain, run=begun.identity, is_resumed=config.resume is not None)
    for step in begun.replaced:
        checkpoints_of(config, run=None).remove(step)
    if begun.is_kept and begun.state is not None:  # replicas go on from checkpoints
        checkpoints_of(config, run=begun.identity).write(begun.state)
    secret, secret_path = _secret(config, is_new=begun.is_taken_over)
    for name in (PORT_FILE, JOURNAL_FILE, ALONE_FILE):
        (run_dir / name).unlink(missing_ok=True)
    # the replicas wait for the coordinator by themselves, but must know where it will be
    port = config.port or _free_port(address)
    invitation = Invitation(host=address, port=port, secret=secret)
    place = dataclasses.replace(invitation, secret=None).text()
    dataclasses.replace(begun.local, invitation=place, secret=str(secret_path)).save()
    if config.resume is not None and config.begin_with is None:
        config = dataclasses.replace(config, begin_with=begun.local.replicas)
    step = 0 if begun.state is None else begun.state.step
    sha256 = "" if begun.state is None else tensors_sha256(begun.state)
    job = ElasticJob.of(config, identity=begun.identity, resumed_step=step, resumed_sha256=sha256)
    write_whole(run_dir / JOB_FILE, json.dumps(job.to_json()) + "\n")
    _begin_journal(begun)
    if not config.quiet:
        if config.resume is not None:
            new_host = ", with this host as its first host and a new secret" if begun.is_taken_over else ""
            tell(f"going on with run {begun.identity.run} from step {step}{new_host}")
        where = " (this host has no address that others reach)" if address == "127.0.0.1" else ""
        tell(f"others join with: thinwire join - <<< {invitation.text()}{where}")
    coordinator = Role(
        name="coordinator", module="thinwire.cli.coordinator", is_needed=False,
        arguments=(str(secret_path), address, str(port)),
    )  # fmt: skip
    roles = [coordinator, *replica_roles(begun.local.replicas)]
    code = run_here(
        roles, run_dir=run_dir, invitation=invitation, secret=secret, is_quiet=config.quiet,
        part=(run_dir / ALONE_FILE).touch, on_finding=config.on_finding, steer_dry_run=config.steer_dry_run,
        batch_size=config.batch_size or 1,
    )  # fmt: skip
    path = run_dir / "summary.json"
    return code, json.loads(path.read_text()) if code == 0 and path.exists() else None


def _begin_journal(begun: Begun) -> None:
    """Begin the coordinator's journal with the run's identity and the account of the data that its state holds."""
    journal = Journal(begun.config.run_dir / JOURNAL_FILE)
    journal.write("run", begun.identity.to_json())
    if begun.state is not None:
        note = begun.state.note
        if "data" in note:
            ledger = Ledger(shard_windows=1)
            ledger.load_state_dict(note["data"])
            ledger.release_all()
            journal.write("ledger", ledger.state_dict())
        else:
            tell(
                f"warning: the state of step {begun.state.step} has no account of the data, since the coordinator did "
                f"not answer when it was written; the data is read from the beginning"
            )
        journal.write("numbers", {"next_replica": int(note.get("next_replica", 0))})
    journal.close()


def _free_port(address: str) -> int:
    with socket.socket() as trial:
        trial.bind((address, 0))
        return int(trial.getsockname()[1])


def _secret(config: TrainConfig, *, is_new: bool) -> tuple[Secret, Path]:
    """Return the job's secret and its file: the one that was named, or one of the run's own.

    Args:
        config: Resolved options.
        is_new: Whether to replace the run's own: who has an address of the coordinator before cannot join then.
    """
    if config.secret is not None:
        return read_secret(config.secret), config.secret.resolve()
    path = config.run_dir / SECRET_FILE
    if is_new:
        path.unlink(missing_ok=True)
    if path.exists():
        return read_secret(path), path.resolve()
    try:
        return make_secret(path), path.resolve()
    except OSError as error:
        raise ThinwireError(f"cannot write {path}: {error.strerror}; choose another --out") from error
