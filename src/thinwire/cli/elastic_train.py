"""`thinwire train --elastic`: the coordinator and this host's replicas, which others may join."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.cli.elastic_run import ElasticHost, coordinator_role, replica_roles, run_here
from thinwire.cli.output import log
from thinwire.elastic.coordinator_server import KEY_FILE, coordinator_keys, own_key
from thinwire.elastic.data_leases import DataLeases
from thinwire.elastic.elastic_method import elastic
from thinwire.elastic.global_state import GlobalState, tensors_sha256
from thinwire.elastic.invitation import Invitation, read_invitation
from thinwire.elastic.journal import Journal
from thinwire.elastic.mailbox import open_run
from thinwire.elastic.one_time_invitations import INVITATIONS_FILE
from thinwire.errors import CheckpointError, ThinwireError, excluded, refusal
from thinwire.files import write_whole
from thinwire.options import flag
from thinwire.runlog.run_identity import RunIdentity, new_identity, read_identity
from thinwire.training.build import make_method
from thinwire.training.config import TrainConfig
from thinwire.training.elastic.coordinator_process import ALONE_FILE, JOB_FILE, JOURNAL_FILE, PORT_FILE
from thinwire.training.elastic.job import ElasticJob, LocalSettings, shared_places_of
from thinwire.training.elastic.replica_ranks import check_ranks
from thinwire.training.elastic.states import checkpoints_of, newest_state
from thinwire.training.run_origin import run_of
from thinwire.training.worker import make_run_folder
from thinwire.transport.addresses import ANY_LOOPBACK, RelayPlace, free_port, listen_config, read_host_port
from thinwire.transport.relay.member import check_relay
from thinwire.transport.secret import TOKEN_FILE, Secret, make_secret, need_pyzmq, read_secret

SECRET_FILE = "secret"


def check_elastic(config: TrainConfig) -> None:
    """Check the options of an elastic run."""
    need_pyzmq()
    if config.elastic.relay is None and config.elastic.relay_token is not None:
        raise refusal("--relay-token opens a relay, and none is named", got="no --relay", allowed="--relay HOST:PORT",
                      remedy="--relay HOST:29500, where thinwire relay runs")  # fmt: skip
    if config.sync.pace:
        why = "parts are fetched by those that need them"
        raise excluded("--pace", "--elastic", why=why, remedy="to leave --pace out")
    was = LocalSettings.of_resumed(config)
    here = config.num_replicas if was is None else was.replicas
    if config.elastic.begin_with is not None and config.elastic.begin_with < here:
        raise refusal("--begin-with is less than this host starts", got=config.elastic.begin_with,
                      allowed=f"{here} or more", remedy=f"--begin-with {here}")  # fmt: skip
    if config.elastic.via is not None:
        _check_via(config)
    if config.sync.overlap_steps is not None and "," in config.sync.overlap_steps:
        raise refusal(
            "--overlap-steps names replicas, which come and go with --elastic", got=config.sync.overlap_steps,
            allowed="one number; a slow replica is not waited for anyway", remedy="--overlap-steps 1",
        )  # fmt: skip
    check_ranks(config, num_ranks=config.elastic.ranks_per_replica, num_replicas=here)
    elastic(make_method(config), session=None)


def _check_via(config: TrainConfig) -> None:
    if config.elastic.relay is not None:
        why = "hosts of a run on a carrier dial no others"
        raise excluded("--relay", "--via", why=why, remedy="to leave --relay out")
    if config.elastic.invite_only:
        why = "whoever has the secret reads all that lies on the carrier"
        raise excluded("--invite-only", "--via", why=why, remedy="to leave --invite-only out")
    if not read_invitation(str(config.elastic.via)).carrier or "#" in str(config.elastic.via):
        raise refusal(
            "--via names no place on a carrier", got=str(config.elastic.via).partition("#")[0],
            allowed="a URI without a secret, such as file:///shared/runs", remedy="--via file:///shared/runs",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An elastic run that is about to begin, or to go on, on this host.

    Attributes:
        config: Resolved options.
        identity: The run, as the incarnation that begins now.
        local: Settings of this host's replicas, but for the coordinator's address.
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
    """Check which run this is, and find the state that it goes on from; nothing is written."""
    places = shared_places_of(config)
    listen = listen_config(
        address=config.run.address, interface=config.run.interface, advertise=config.run.advertise,
        port_range=config.run.port_range,
    )  # fmt: skip
    local = LocalSettings(
        invitation="", secret="", out=str(config.run_dir.resolve()), cache_dir=str(config.data.cache_dir),
        threads=config.model.threads or 1, device=config.model.device, data=places.get("data"),
        model=places.get("model"), init_from=places.get("init_from"), checkpoint_to=places.get("checkpoint_to"),
        tensorboard=config.output.tensorboard, wandb=config.output.wandb, address=listen.address,
        ranks_per_replica=config.elastic.ranks_per_replica, replicas=config.num_replicas,
        advertise=config.run.advertise, port_range=config.run.port_range, relay=_relay(config),
    )  # fmt: skip
    if config.output.resume is None:
        identity = new_identity(config_digest=config.digest())
        return Begun(config=config, identity=identity, local=local, replaced=_replaced(config, new=identity))
    before = run_of(config)
    identity = before.next_incarnation()
    was = LocalSettings.of_resumed(config)
    if was is not None:
        address = was.address if config.run.address is None and config.run.interface is None else local.address
        local = dataclasses.replace(
            local, data=was.data, model=was.model, init_from=was.init_from, batch_size=was.batch_size,
            replicas=was.replicas, address=address,
            advertise=local.advertise or was.advertise, port_range=local.port_range or was.port_range,
            relay=local.relay or was.relay,
        )  # fmt: skip
    is_taken_over = was is not None and was.is_joined
    state, is_kept = newest_state(config, run=identity, report=log)
    if state is None and is_taken_over:
        raise CheckpointError(
            f"{config.run_dir} holds no global state of run {before.run} yet; go on with the run on another host that "
            f"took part in it"
        )
    return Begun(
        config=config, identity=identity, local=local, is_taken_over=is_taken_over, state=state, is_kept=is_kept
    )  # fmt: skip


def _relay(config: TrainConfig) -> str | None:
    """Return the relay of the options and its token as one address, once the relay has answered."""
    if config.elastic.relay is None:
        return None
    place = read_host_port(config.elastic.relay, what="--relay")
    relay = RelayPlace(address=place, token=read_secret(config.elastic.relay_token or Path(TOKEN_FILE)))
    check_relay(relay)
    return Invitation(host=place.host, port=place.port).by(relay).text()


def _replaced(config: TrainConfig, *, new: RunIdentity) -> tuple[int, ...]:
    """Return the steps of checkpoints that a new run removes: those of the run that it replaces in its folder."""
    checkpoints = checkpoints_of(config, run=None)
    try:
        old = read_identity(config.run_dir).run if config.output.overwrite else ""
    except CheckpointError:
        old = ""
    steps = checkpoints.steps() if config.elastic.checkpoint_to is not None else []
    for step in steps:
        try:
            stamp = checkpoints.describe(step).run
            found = "no run" if stamp is None else f"run {stamp['id']}"
        except CheckpointError as error:
            stamp, found = None, f"an unreadable run ({str(error).partition(';')[0]})"
        if not old or stamp is None or stamp["id"] != old:
            raise ValueError(
                f"{checkpoints.place} holds a checkpoint of {found}, step {step}, and this would be run {new.run}; go "
                f"on with the other run in its own folder (thinwire train --resume FOLDER), name another "
                f"--checkpoint-to, or remove what is there"
            )
    return tuple(steps)


def run(begun: Begun) -> tuple[int, dict[str, Any] | None]:
    """Run the coordinator and this host's replicas to the end; return the exit code and, if it is here, the summary."""
    config, run_dir, address = begun.config, begun.config.run_dir, begun.local.address
    assert address is not None
    plain = config.replace(resume=None, overwrite=False)
    make_run_folder(plain, run=begun.identity, is_resumed=config.output.resume is not None)
    for step in begun.replaced:
        checkpoints_of(config, run=None).remove(step)
    if begun.is_kept and begun.state is not None:  # replicas go on from checkpoints
        checkpoints_of(config, run=begun.identity).write(begun.state)
    via = config.elastic.via
    # the run's place on a carrier follows from the secret: a resumed run has a new one
    secret, secret_path = _secret(config, is_new=begun.is_taken_over or (via is not None and begun.state is not None))
    old = (KEY_FILE,) if begun.is_taken_over else ()  # from an earlier time as the run's first host
    for name in (PORT_FILE, JOURNAL_FILE, ALONE_FILE, INVITATIONS_FILE, *old):
        (run_dir / name).unlink(missing_ok=True)
    key = b"" if via else coordinator_keys(own_key(run_dir, is_made=True) or secret).public_bytes
    # the replicas wait for the coordinator by themselves, but must know where it will be
    listen = begun.local.listen()
    assert listen is not None
    port = listen.ports[0] if listen.ports else config.elastic.port or free_port(address)
    shown = listen.advertised(port)
    invitation = Invitation(host=shown.host, port=shown.port, secret=secret, coordinator_key=key).by(listen.relay)
    # this host's own processes need no way through the outside
    near = Invitation(host=ANY_LOOPBACK.get(address, address), port=port, coordinator_key=key)
    if via is not None:
        near = read_invitation(via)
        open_run(via, secret=secret, may_create=True)  # its processes look for it at once
        invitation = dataclasses.replace(near, secret=secret)
    place = near.text()
    dataclasses.replace(begun.local, invitation=place, secret=str(secret_path)).save()
    if config.output.resume is not None and config.elastic.begin_with is None:
        config = config.replace(begin_with=begun.local.replicas)
    step = 0 if begun.state is None else begun.state.step
    sha256 = "" if begun.state is None else tensors_sha256(begun.state)
    job = ElasticJob.of(config, identity=begun.identity, resumed_step=step, resumed_sha256=sha256)
    write_whole(run_dir / JOB_FILE, json.dumps(job.to_json()) + "\n")
    _begin_journal(begun)
    if not config.output.quiet:
        if config.output.resume is not None:
            new_host = ", with this host as its first host and a new secret" if begun.is_taken_over else ""
            log(f"going on with run {begun.identity.run} from step {step}{new_host}")
        is_alone = shown.host == "127.0.0.1" and via is None and listen.relay is None
        where = " (this host has no address that others reach)" if is_alone else ""
        places = "".join(f" {flag(name)} {shlex.quote(value)}" for name, value in shared_places_of(config).items())
        how = "what this prints, once each: thinwire invite " + shlex.quote(str(run_dir))
        given = shlex.quote(invitation.text()) if via else invitation.text()
        address_text = how if config.elastic.invite_only else f"thinwire join -{places} <<< {given}{where}"
        log(f"others join with: {address_text}")
    roles = [coordinator_role(secret_path, near, address=address, port=port), *replica_roles(begun.local.replicas)]
    code = run_here(
        roles,
        host=ElasticHost(run_dir=run_dir, invitation=near, secret=secret, is_quiet=config.output.quiet),
        part=(run_dir / ALONE_FILE).touch, on_finding=config.run.on_finding, is_dry_run=config.run.on_finding_dry_run,
        batch_size=config.data.batch_size or 1,
    )  # fmt: skip
    path = run_dir / "summary.json"
    return code, json.loads(path.read_text()) if code == 0 and path.exists() else None


def keep_newest(begun: Begun) -> int:
    """Make a checkpoint of the newest state that this host's replicas kept, which `thinwire generate` can read.

    Returns:
        The step that a resumed run goes on from, 0 for the beginning.
    """
    state, is_kept = newest_state(begun.config, run=begun.identity, report=log)
    if state is None:
        return 0
    if is_kept:
        checkpoints_of(begun.config, run=begun.identity).write(state)
    return state.step


def _begin_journal(begun: Begun) -> None:
    """Begin the coordinator's journal with the run's identity and the account of the data that its state holds."""
    journal = Journal(begun.config.run_dir / JOURNAL_FILE)
    journal.write("run", begun.identity.to_json())
    if begun.state is not None:
        note = begun.state.note
        if "data" in note:
            ledger = DataLeases(shard_windows=1)
            ledger.load_state_dict(note["data"])
            ledger.release_all()
            journal.write("leases", ledger.state_dict())
        else:
            log(
                f"warning: the state of step {begun.state.step} has no account of the data, since the coordinator did "
                f"not answer when it was written; the data is read from the beginning"
            )
        journal.write("numbers", {"next_replica": int(note.get("next_replica", 0))})
    journal.close()


def _secret(config: TrainConfig, *, is_new: bool) -> tuple[Secret, Path]:
    """Return the job's secret and its file: the one that was named, or one of the run's own.

    A new one of the run's own keeps out whoever has an address of the coordinator before.
    """
    if config.run.secret is not None:
        return read_secret(config.run.secret), config.run.secret.resolve()
    path = config.run_dir / SECRET_FILE
    if is_new:
        path.unlink(missing_ok=True)
    if path.exists():
        return read_secret(path), path.resolve()
    try:
        return make_secret(path), path.resolve()
    except OSError as error:
        raise ThinwireError(f"cannot write {path}: {error.strerror}; choose another --out") from error
