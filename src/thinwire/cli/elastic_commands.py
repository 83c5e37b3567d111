"""Commands to a running elastic job: join, invite, status, pause, resume, leave."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.argument_parsing import FAILED, argument, command
from thinwire.cli.output import log, print_error
from thinwire.cli.secret import secret_file
from thinwire.errors import ThinwireError, excluded, refusal
from thinwire.options import option
from thinwire.workloads.language.sources import check_source

if TYPE_CHECKING:
    from thinwire.elastic.invitation import Invitation
    from thinwire.transport.secret import Secret

# As long as a replica's process waits for a first answer; admin commands wait less.
_ANSWER_S, _DEADLINE_S = 60.0, 10.0
# A leader on a carrier answers when it polls; another one may have to take over first.
_CARRIED_DEADLINE_S = 60.0
_MAX_CHARACTERS = 4096


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Add this host to a running job of `thinwire train --elastic`.

    The job sends its model, method and settings. Ctrl-C leaves the job; the other replicas continue.
    """

    address: str = argument("ADDRESS", "")
    """Address that the first host printed, - to read it from stdin, or KEY@HOST:PORT of it with --secret. Default: the
    environment's THINWIRE_JOIN."""
    secret: Path | None = None
    """File of the job's secret, if the address does not contain it. Default: the environment's
    THINWIRE_SECRET_FILE."""
    replicas: int = option(1, least=1)
    """Replicas to add on this host."""
    spare: bool = False
    """Wait as a spare: add replicas only if one is lost or replaced (--on-finding replace)."""
    ranks_per_replica: int = option(1, least=1)
    """Processes per replica; each holds a shard of the model (FSDP2)."""
    out: Path | None = None
    """Folder of logs, metrics and checkpoints on this host; an earlier folder of the same run may be reused.
    Default: runs/joined-HOST-PORT."""
    data: str | None = None
    """Location of the same data on this host; required unless the job reads stdlib."""
    model: str | None = None
    """Location of the same hf: model on this host; required if the job trains one."""
    init_from: Path | None = None
    """Location of the same earlier run on this host; required if the job starts from one."""
    checkpoint_to: str | None = None
    """Folder or URL (s3://...) of checkpoints; required if the job keeps one copy for all its hosts. Default:
    checkpoints/ in --out."""
    batch_size: int | None = option(None, least=1)
    """Sequences per step on this host. Default: the job's."""
    device: str | None = option(None, choices=("cpu", "cuda"))
    """cpu or cuda. Default: the job's."""
    threads: int | None = option(None, least=1)
    """Threads of torch per replica. Default: the host's cores divided by its replicas."""
    interface: str | None = None
    """Network interface that other hosts can reach, such as eth0."""
    own_address: str | None = None
    """Address of this host that other hosts can reach, IPv4 or IPv6."""
    advertise: str | None = None
    """HOST:PORT that other hosts dial, such as a port forward; leads to the first port of --port-range."""
    port_range: str | None = None
    """FIRST-LAST: the only ports to listen on, at least one per replica."""
    cache_dir: Path | None = None
    """Folder of tokenizers and token files. Default: ~/.cache/thinwire."""
    quiet: bool = False
    """Print only errors."""


@command("join", JoinOptions, basic="secret replicas data out device")
def join(options: JoinOptions) -> int:
    """Run `thinwire join`; return 128 + N for signal N."""
    if options.interface is not None and options.own_address is not None:
        why = "each of them says how the other hosts reach this one"
        raise excluded("--interface", "--own-address", why=why, remedy="--interface alone")
    if options.data is not None:
        check_source(options.data)
    if options.model is not None and not options.model.startswith("hf:"):
        raise refusal("--model is no hf: model", got=options.model, allowed="hf: and the place of the job's model",
                      remedy="to leave --model out: a preset is the same on all hosts")  # fmt: skip
    invitation, secret, path = _job_at(read_address(options.address, command="thinwire join"), options.secret)
    if options.secret is not None and invitation.secret is not None:
        raise excluded("--secret", "this address", why="it holds the secret already", remedy="to leave --secret out")
    # torch, which takes seconds: what shows without it has been refused by now
    from thinwire.cli.elastic_run import alone_in

    if options.device is not None:
        from thinwire.training.build import check_device

        check_device(options.device)
    run_dir = _folder(options.out, invitation, secret=secret)
    with alone_in(run_dir):
        return _join_from(run_dir, invitation, options, secret=secret, path=path)


def _join_from(
    run_dir: Path, invitation: Invitation, options: JoinOptions, *, secret: Secret, path: Path | None
) -> int:
    from thinwire.cli.elastic_run import ElasticHost, coordinator_role, replica_roles, run_here
    from thinwire.training.elastic.coordinator_process import ALONE_FILE, JOURNAL_FILE, PORT_FILE
    from thinwire.training.elastic.job import LocalSettings
    from thinwire.transport.addresses import listen_config
    from thinwire.transport.secret import write_secret

    if path is None:  # a file of this host's own
        path = run_dir / "secret"
        path.unlink(missing_ok=True)
        write_secret(path, secret)
    for name in (PORT_FILE, JOURNAL_FILE, ALONE_FILE):  # from a time as the run's first host
        (run_dir / name).unlink(missing_ok=True)
    listen = listen_config(
        address=options.own_address, interface=options.interface, towards=invitation.host or "127.0.0.1",
        advertise=options.advertise, port_range=options.port_range,
    )  # fmt: skip
    threads = options.threads or max(1, (os.cpu_count() or 1) // (options.replicas * options.ranks_per_replica))
    LocalSettings(
        invitation=dataclasses.replace(invitation, secret=None).text(), secret=str(path.resolve()),
        out=str(run_dir.resolve()), cache_dir=str(options.cache_dir or Path.home() / ".cache" / "thinwire"),
        threads=threads, device=options.device, batch_size=options.batch_size, data=options.data,
        model=options.model, init_from=None if options.init_from is None else str(options.init_from.resolve()),
        checkpoint_to=options.checkpoint_to, address=listen.address, advertise=options.advertise,
        port_range=options.port_range,
        relay=None if invitation.relay is None else dataclasses.replace(
            invitation, secret=None, coordinator_key=b""
        ).text(),
        ranks_per_replica=options.ranks_per_replica, replicas=options.replicas, is_joined=True,
    ).save()  # fmt: skip
    if options.spare:
        _check_spare(invitation, secret=secret)
    if not options.quiet:
        what = "as a spare" if options.spare else "to take part"
        log(f"joining the job at {invitation.place}, {what}")
    roles = replica_roles(options.replicas)
    if invitation.carrier:  # any host may lead the run once the others are gone
        roles = [coordinator_role(path, invitation), *roles]
    host = ElasticHost(
        run_dir=run_dir, invitation=invitation, secret=secret, is_quiet=options.quiet, is_joined=True,
        spare=socket.gethostname() if options.spare else "",
    )  # fmt: skip
    return run_here(roles, host=host, part=(run_dir / ALONE_FILE).touch)


def _check_spare(invitation: Invitation, *, secret: Secret) -> None:
    """Check before the wait what would otherwise fail only when the spare is needed."""
    from thinwire.elastic.protocol import VERSION
    from thinwire.version import __version__

    status = _status(invitation, secret=secret)
    if (status.get("thinwire"), status.get("protocol")) != (__version__, VERSION):
        raise ThinwireError(
            f"the job runs thinwire {status.get('thinwire')} with protocol version {status.get('protocol')}, and this "
            f"host thinwire {__version__} with protocol version {VERSION}; install the same thinwire on all hosts"
        )


def _folder(out: Path | None, invitation: Invitation, *, secret: Secret) -> Path:
    """Return this host's folder for a job; one that holds a run is compared with the job before it is changed."""
    from thinwire.runlog.run_identity import RUN_FILE, check_folder, identity_from_json, read_identity

    folder = out or Path("runs") / f"joined-{invitation.folder_name}"
    if not (folder / RUN_FILE).exists():
        return folder
    try:
        job = identity_from_json(_status(invitation, secret=secret).get("identity"))
    except ValueError as error:
        raise ThinwireError(
            f"the coordinator states no run ({error}); install the same thinwire on all hosts"
        ) from None
    if out is None and not job.descends_from(read_identity(folder)):
        folder = folder.with_name(f"{folder.name}-{job.run}")  # the usual one is of an earlier run
    check_folder(folder, job)
    return folder


def _status(invitation: Invitation, *, secret: Secret) -> dict[str, Any]:
    from thinwire.elastic.coordinator_client import send_command

    answer = send_command(invitation, secret=secret, deadline_s=_ANSWER_S, verb="status", target="")
    found: dict[str, Any] = answer["status"]
    return found


@dataclass(frozen=True, kw_only=True)
class InviteOptions:
    """Print an address that admits one replica of another host, once.

    Run it on the first host of a job that was started with thinwire train --elastic --invite-only. A leaked
    invitation admits one replica, and a used one none.
    """

    folder: Path = argument("FOLDER")
    """Folder of the run on its first host."""


@command("invite", InviteOptions)
def invite(options: InviteOptions) -> int:
    """Run `thinwire invite`."""
    from thinwire.elastic.coordinator_server import client_keys, coordinator_keys, own_key
    from thinwire.elastic.invitation import Invitation
    from thinwire.elastic.one_time_invitations import add_invitation
    from thinwire.training.elastic.coordinator_process import JOB_FILE, read_port
    from thinwire.training.elastic.job import LocalSettings
    from thinwire.transport.secret import need_pyzmq

    need_pyzmq()
    run_dir = options.folder
    key, found = own_key(run_dir), read_port(run_dir)
    if key is None or found is None:
        raise refusal(
            "the folder is of no elastic run whose first host is this one", got=run_dir,
            allowed="the run's folder on its first host", remedy="thinwire invite there, with the folder of --out",
        )  # fmt: skip
    if not json.loads((run_dir / JOB_FILE).read_text()).get("is_invite_only"):
        raise refusal(
            "anyone who has the run's address can join it, so an invitation would limit nothing", got=run_dir,
            allowed="a run that was started with --invite-only",
            remedy="thinwire train --elastic --invite-only; a run goes on so with --resume too",
        )  # fmt: skip
    listen = LocalSettings.load(run_dir).listen()
    assert listen is not None, "the first host has written where it listens"
    shown = listen.advertised(found[1])
    place = Invitation(
        host=shown.host, port=shown.port, coordinator_key=coordinator_keys(key).public_bytes
    ).by(listen.relay)  # fmt: skip
    ticket = add_invitation(run_dir, public_of=lambda secret: client_keys(secret).public_bytes)
    print(dataclasses.replace(place, secret=ticket).text())
    return 0


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Show state and members of a running job of `thinwire train --elastic`."""

    address: str = argument("ADDRESS", "")
    """Address that the first host printed, - to read it from stdin, KEY@HOST:PORT of it with --secret, or the run's
    folder. Default: the environment's THINWIRE_JOIN."""
    secret: Path | None = None
    """File of the job's secret, if the address does not contain it. Default: the environment's
    THINWIRE_SECRET_FILE."""
    json: bool = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, kw_only=True)
class AdminOptions(StatusOptions):
    """Pause, resume or remove replicas of a running job of `thinwire train --elastic`."""

    replica: int | None = None
    """Number of the replica. Default: all; `leave` needs a replica or a host."""
    host: str | None = None
    """Host whose replicas are meant."""


@command("status", StatusOptions)
def status(options: StatusOptions) -> int:
    """Run `thinwire status`."""
    return _send("status", options, target="")


def _command_to_replicas(verb: str) -> Callable[[Sequence[str]], int]:
    @command(verb, AdminOptions)
    def main(options: AdminOptions) -> int:
        if options.replica is not None and options.host is not None:
            why = "one names a replica, the other all of a host"
            raise excluded("--replica", "--host", why=why, remedy="one of them")
        target = options.host or ("" if options.replica is None else str(options.replica))
        if verb == "leave" and not target:
            raise refusal("the replica that shall leave is missing", got="nothing",
                          allowed="--replica N or --host NAME",
                          remedy="thinwire status, which lists the members")  # fmt: skip
        return _send(verb, options, target=target)

    return main


pause, resume, leave = map(_command_to_replicas, ("pause", "resume", "leave"))


def _send(verb: str, options: StatusOptions, *, target: str) -> int:
    address, path = read_address(options.address, command=f"thinwire {verb}"), options.secret
    if (run_dir := Path(address)).is_dir():
        from thinwire.training.elastic.job import LOCAL_FILE

        try:
            settings = json.loads((run_dir / LOCAL_FILE).read_text())
            address, path = str(settings["invitation"]), path or Path(settings["secret"])
        except (OSError, ValueError, KeyError):
            raise refusal(
                f"the folder is of no elastic run, for it has no {LOCAL_FILE}", got=run_dir,
                allowed="an address, or the folder of an elastic run", remedy="thinwire status ADDRESS",
            ) from None  # fmt: skip
    invitation, secret, _ = _job_at(address, path)
    from thinwire.cli.elastic_run import show_status
    from thinwire.elastic.coordinator_client import send_command

    deadline_s = _CARRIED_DEADLINE_S if invitation.carrier else _DEADLINE_S
    answer = send_command(invitation, secret=secret, deadline_s=deadline_s, verb=verb, target=target)
    if verb == "status" or options.json:
        show_status(answer["status"], as_json=options.json)
    if not answer["ok"]:
        print_error(verb, answer["text"])
        return FAILED
    if answer["text"]:
        log(answer["text"])
    return 0


def _job_at(address: str, path: Path | None) -> tuple[Invitation, Secret, Path | None]:
    """Return a job's invitation, its secret, and the secret's file unless it is in the address."""
    from thinwire.elastic.invitation import read_invitation
    from thinwire.transport.secret import read_secret

    invitation = read_invitation(address)
    path = secret_file(path, in_address=invitation.secret)
    if invitation.secret is not None:
        return invitation, invitation.secret, path
    if path is None:
        raise refusal(
            "the address holds no secret", got="HOST:PORT alone",
            allowed="thinwire://HOST:PORT/SECRET, or --secret FILE",
            remedy="the whole address that the first host printed",
        )  # fmt: skip
    return invitation, read_secret(path), path


def read_address(given: str, *, command: str) -> str:
    """Return the address of a coordinator; stdin (`-`) and the environment (empty) keep it out of `ps`."""
    from thinwire.transport.secret import JOIN_VARIABLE, need_pyzmq

    need_pyzmq()
    # not for the processes that this one starts: they read the secret from its file
    inherited = os.environ.pop(JOIN_VARIABLE, "")
    if given == "-":
        prompt = "address that the first host printed (not shown): "
        line = getpass.getpass(prompt) if sys.stdin.isatty() else sys.stdin.readline(_MAX_CHARACTERS)
        if not line.strip():
            raise refusal("stdin holds no address", got="nothing", allowed="the address that the first host printed",
                          remedy=f"{command} - <<< ADDRESS")  # fmt: skip
        return line.strip()
    if not (given or inherited):
        raise refusal(
            "the address is missing", got="nothing", allowed=f"an argument, - for stdin, or {JOIN_VARIABLE}",
            remedy=f"{command} - <<< ADDRESS, with the address that the first host printed",
        )  # fmt: skip
    return given or inherited.strip()
