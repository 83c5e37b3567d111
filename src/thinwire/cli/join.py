"""`thinwire join ADDRESS`: adds this host's replicas to a running job, which sends all settings."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.argument_parsing import command, parse_options
from thinwire.errors import ThinwireError, excluded, refusal, unknown_name
from thinwire.options import option
from thinwire.workloads.language.sources import check_source

if TYPE_CHECKING:
    from thinwire.elastic.invitation import Invitation
    from thinwire.transport.secret import Secret

# As long as a replica's process waits for a first answer.
_ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Add this host to a running job of `thinwire train --elastic`.

    The job sends its model, method and settings. Ctrl-C leaves the job; the other replicas continue.
    """

    address: Annotated[str, tyro.conf.Positional] = ""
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
    device: str | None = None
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


@command("join")
def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire join --help`.

    Returns:
        0, 1 for an error while running, 2 for wrong options, 128 + N for signal N.
    """
    from thinwire.cli.secret import check_secret, read_address, secret_file
    from thinwire.elastic.invitation import read_invitation
    from thinwire.transport.secret import need_pyzmq, read_secret

    basic = ("secret", "replicas", "data", "out", "device")
    options = parse_options(JoinOptions, arguments, prog="thinwire join", basic=basic)
    if options.interface is not None and options.own_address is not None:
        why = "each of them says how the other hosts reach this one"
        raise excluded("--interface", "--own-address", why=why, remedy="--interface alone")
    if options.device not in (None, "cpu", "cuda"):
        raise unknown_name("--device", options.device, ("cpu", "cuda"))
    if options.data is not None:
        check_source(options.data)
    if options.model is not None and not options.model.startswith("hf:"):
        raise refusal("--model is no hf: model", got=options.model, allowed="hf: and the place of the job's model",
                      remedy="to leave --model out: a preset is the same on all hosts")  # fmt: skip
    need_pyzmq()
    invitation = read_invitation(read_address(options.address, command="thinwire join"))
    if options.secret is not None and invitation.secret is not None:
        raise excluded("--secret", "this address", why="it holds the secret already", remedy="to leave --secret out")
    options = dataclasses.replace(options, secret=secret_file(options.secret, in_address=invitation.secret))
    check_secret(invitation.secret, options.secret)
    secret = invitation.secret or read_secret(options.secret or Path())
    # torch, which takes seconds: what shows without it has been refused by now
    from thinwire.cli.elastic_run import alone_in

    if options.device is not None:
        from thinwire.training.build import check_device

        check_device(options.device)
    run_dir = _folder(options.out, invitation, secret=secret)
    with alone_in(run_dir):
        return _join_from(run_dir, invitation, options)


def _join_from(run_dir: Path, invitation: Invitation, options: JoinOptions) -> int:
    from thinwire.cli.elastic_run import ElasticHost, replica_roles, run_here
    from thinwire.cli.output import log
    from thinwire.training.elastic.coordinator_process import ALONE_FILE, JOURNAL_FILE, PORT_FILE
    from thinwire.training.elastic.job import LocalSettings
    from thinwire.transport.addresses import listen_config

    secret, secret_path = job_secret(invitation.secret, options.secret, run_dir=run_dir)
    for name in (PORT_FILE, JOURNAL_FILE, ALONE_FILE):  # from a time as the run's first host
        (run_dir / name).unlink(missing_ok=True)
    listen = listen_config(
        address=options.own_address, interface=options.interface, towards=invitation.host,
        advertise=options.advertise, port_range=options.port_range,
    )  # fmt: skip
    threads = options.threads or max(1, (os.cpu_count() or 1) // (options.replicas * options.ranks_per_replica))
    LocalSettings(
        invitation=dataclasses.replace(invitation, secret=None).text(), secret=str(secret_path),
        out=str(run_dir.resolve()), cache_dir=str(options.cache_dir or Path.home() / ".cache" / "thinwire"),
        threads=threads, device=options.device, batch_size=options.batch_size, data=options.data,
        model=options.model, init_from=None if options.init_from is None else str(options.init_from.resolve()),
        checkpoint_to=options.checkpoint_to, address=listen.address, advertise=options.advertise,
        port_range=options.port_range,
        ranks_per_replica=options.ranks_per_replica, replicas=options.replicas, is_joined=True,
    ).save()  # fmt: skip
    if options.spare:
        check_spare(invitation, secret=secret)
    if not options.quiet:
        what = "as a spare" if options.spare else "to take part"
        log(f"joining the job at {invitation.host}, port {invitation.port}, {what}")
    roles = replica_roles(options.replicas)
    host = ElasticHost(
        run_dir=run_dir, invitation=invitation, secret=secret, is_quiet=options.quiet, is_joined=True,
        spare=socket.gethostname() if options.spare else "",
    )  # fmt: skip
    return run_here(roles, host=host)


def check_spare(invitation: Invitation, *, secret: Secret) -> None:
    """Check before the wait what would otherwise fail only when the spare is needed.

    Raises:
        ConnectError: No coordinator answers.
        ThinwireError: The job runs another version.
    """
    from thinwire.elastic.coordinator_client import send_command
    from thinwire.elastic.protocol import VERSION
    from thinwire.version import __version__

    status = send_command(invitation, secret=secret, deadline_s=_ANSWER_S, verb="status", target="")["status"]
    if (status.get("thinwire"), status.get("protocol")) != (__version__, VERSION):
        raise ThinwireError(
            f"the job runs thinwire {status.get('thinwire')} with protocol version {status.get('protocol')}, and this "
            f"host thinwire {__version__} with protocol version {VERSION}; install the same thinwire on all hosts"
        )


def _folder(out: Path | None, invitation: Invitation, *, secret: Secret) -> Path:
    """Return this host's folder for a job; one that holds a run is compared with the job before it is changed.

    Raises:
        ConnectError: The folder holds a run, and no coordinator answers.
        Refused: The folder that was named is of another run or incarnation; names both.
    """
    from thinwire.elastic.coordinator_client import send_command
    from thinwire.runlog.run_identity import RUN_FILE, check_folder, identity_from_json, read_identity

    folder = out or Path("runs") / f"joined-{invitation.host}-{invitation.port}"
    if not (folder / RUN_FILE).exists():
        return folder
    status = send_command(invitation, secret=secret, deadline_s=_ANSWER_S, verb="status", target="")["status"]
    try:
        job = identity_from_json(status.get("identity"))
    except ValueError as error:
        raise ThinwireError(
            f"the coordinator states no run ({error}); install the same thinwire on all hosts"
        ) from None
    if out is None and not job.descends_from(read_identity(folder)):
        folder = folder.with_name(f"{folder.name}-{job.run}")  # the usual one is of an earlier run
    check_folder(folder, job)
    return folder


def job_secret(in_address: Secret | None, path: Path | None, *, run_dir: Path) -> tuple[Secret, Path]:
    """Return a job's secret, and a file of this host's own that holds it."""
    from thinwire.transport.secret import read_secret, write_secret

    if path is not None:
        return read_secret(path), path.resolve()
    assert in_address is not None, "check_secret() first"
    own = run_dir / "secret"
    own.unlink(missing_ok=True)
    write_secret(own, in_address)
    return in_address, own.resolve()
