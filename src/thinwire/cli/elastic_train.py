"""`thinwire train --elastic`: the coordinator and this host's replicas, which others may join."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

from thinwire.cli.elastic_run import replica_roles, run_here, tell
from thinwire.errors import ThinwireError
from thinwire.files import write_whole
from thinwire.membership.invitation import Invitation
from thinwire.membership.journal import Journal
from thinwire.membership.shards import Ledger
from thinwire.sync.elastic import elastic
from thinwire.training.assembly import make_method
from thinwire.training.config import TrainConfig
from thinwire.training.elastic.coordination import ALONE_FILE, JOB_FILE, JOURNAL_FILE, PORT_FILE
from thinwire.training.elastic.job import Job, LocalSettings
from thinwire.training.elastic.launch import Role
from thinwire.training.elastic.leader import check_ranks
from thinwire.training.elastic.states import checkpoints_of
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


def check_elastic(config: TrainConfig) -> None:
    """Refuse what does not go with replicas that come and go.

    Raises:
        ValueError: An option; with the remedy.
        MissingExtra: pyzmq is not installed.
    """
    need_pyzmq()
    if config.pace:
        raise ValueError("--pace does not go with --elastic: parts are fetched by those that need them; leave it out")
    if config.begin_with is not None and config.begin_with < (config.replicas or 1):
        raise ValueError(
            f"--begin-with must be at least the {config.replicas or 1} replicas that this host starts, got "
            f"{config.begin_with}"
        )
    if config.overlap_steps is not None and "," in config.overlap_steps:
        raise ValueError(
            f"--overlap-steps must be one number with --elastic, got {config.overlap_steps}, since nobody knows which "
            f"replicas will come; a slow one is not waited for anyway"
        )
    check_ranks(config, num_ranks=config.ranks_per_replica, num_replicas=config.num_replicas)
    elastic(make_method(config), seat=_Nobody())


def run(config: TrainConfig, *, is_resumed: bool) -> tuple[int, dict[str, Any] | None]:
    """Run the coordinator and this host's replicas to the end.

    Args:
        config: Resolved; the run's folder and its `config.json` are made.
        is_resumed: Whether the run goes on from its last checkpoint.

    Returns:
        The exit code, and the run's summary where it is on this host.
    """
    run_dir = config.run_dir
    address = own_address(address=config.address, interface=config.interface)
    secret, secret_path = _secret(config)
    for name in (PORT_FILE, JOURNAL_FILE, ALONE_FILE):
        (run_dir / name).unlink(missing_ok=True)
    # the replicas wait for the coordinator by themselves, but must know where it will be
    port = config.port or _free_port(address)
    invitation = Invitation(host=address, port=port, secret=secret)
    LocalSettings(
        invitation=dataclasses.replace(invitation, secret=None).text(), secret=str(secret_path),
        out=str(run_dir.resolve()), cache_dir=str(config.cache_dir), threads=config.threads or 1, device=config.device,
        data=config.data, address=address, ranks_per_replica=config.ranks_per_replica,
    ).save()  # fmt: skip
    write_whole(run_dir / JOB_FILE, json.dumps(Job.of(config).to_json()) + "\n")
    if is_resumed:
        _take_over(config)
    if not config.quiet:
        where = " (this host has no address that others reach)" if address == "127.0.0.1" else ""
        tell(f"others join with: thinwire join {invitation.text()}{where}")
    coordinator = Role(
        name="coordinator", module="thinwire.cli.coordinator", is_needed=False,
        words=(str(secret_path), address, str(port), "resume" if is_resumed else "start"),
    )  # fmt: skip
    roles = [coordinator, *replica_roles(config.num_replicas)]
    code = run_here(
        roles, run_dir=run_dir, invitation=invitation, secret=secret, is_quiet=config.quiet,
        part=(run_dir / ALONE_FILE).touch, on_finding=config.on_finding, steer_dry_run=config.steer_dry_run,
        batch_size=config.batch_size or 1,
    )  # fmt: skip
    path = run_dir / "summary.json"
    return code, json.loads(path.read_text()) if code == 0 and path.exists() else None


def _take_over(config: TrainConfig) -> None:
    """Go on with the account of the data that the newest checkpoint holds."""
    state = checkpoints_of(config, warn=tell).latest().state
    if state is None or "data" not in state.note:
        return
    ledger = Ledger(shard_windows=1)
    ledger.load_state_dict(state.note["data"])
    ledger.release_all()
    journal = Journal(config.run_dir / JOURNAL_FILE)
    journal.write("ledger", ledger.state_dict())
    journal.write("numbers", {"next_replica": int(state.note.get("next_replica", 0))})
    journal.close()


def _free_port(address: str) -> int:
    with socket.socket() as trial:
        trial.bind((address, 0))
        return int(trial.getsockname()[1])


def _secret(config: TrainConfig) -> tuple[Secret, Path]:
    """Return the job's secret and its file: the one that was named, or one of the run's own."""
    if config.secret is not None:
        return read_secret(config.secret), config.secret.resolve()
    path = config.run_dir / SECRET_FILE
    if path.exists():
        return read_secret(path), path.resolve()
    try:
        return make_secret(path), path.resolve()
    except OSError as error:
        raise ThinwireError(f"cannot write {path}: {error.strerror}; choose another --out") from error
