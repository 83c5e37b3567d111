"""`thinwire doctor`: checks of this host and of the way to another, each with a remedy."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.argument_parsing import FAILED, argument, command
from thinwire.errors import MissingExtra
from thinwire.units import parse_seconds

if TYPE_CHECKING:
    from thinwire.monitor.doctor.peer import Ask
    from thinwire.transport.addresses import Address


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check this host, and the path to another one, for common problems; print what to do.

    With an address such as 10.77.0.1:29400, the path there is checked too. Run it on both hosts.

    Nothing is changed. The exit code is 1 if a check fails; warnings do not count.
    """

    target: str | None = argument("ADDRESS", None)
    """HOST:PORT of another host, or the address to join a run."""
    interface: str | None = None
    """Network interface that other hosts can reach, such as eth0."""
    address: str | None = None
    """Address of this host that other hosts can reach."""
    advertise: str | None = None
    """HOST:PORT that other hosts dial; the check sees whether it leads to this host."""
    port_range: str | None = None
    """FIRST-LAST: the ports that this host listens on."""
    secret: Path | None = None
    """File of the job's secret, which is checked too. Default: the environment's THINWIRE_SECRET_FILE."""
    out: Path = Path("runs")
    """Folder of the runs."""
    cache_dir: Path = Path("~/.cache/thinwire")
    """Folder of tokenizers and token files."""
    deadline: str = "5s"
    """Longest wait for a connection."""
    json: bool = False
    """Print the checks as JSON on stdout."""


@command("doctor", DoctorOptions, basic="secret out json")
def main(options: DoctorOptions) -> int:
    """Run `thinwire doctor`."""
    from thinwire.cli.secret import secret_file

    options = dataclasses.replace(options, secret=secret_file(options.secret))
    from thinwire.monitor.doctor.doctor import DoctorConfig, has_passed, run_checks

    config = DoctorConfig(
        target=options.target, interface=options.interface, address=options.address,
        advertise=options.advertise, port_range=options.port_range,
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME"), secret=options.secret, out=options.out,
        cache=options.cache_dir, deadline_s=parse_seconds(options.deadline),
    )  # fmt: skip
    checks = []
    for check in run_checks(config, ask=_ask_of(options)):
        checks.append(check)
        if not options.json:
            _show(check.verdict.value, check.name, check.found, check.remedy)
    if options.json:
        print(json.dumps([check.to_json() for check in checks]))
    else:
        _sum_up([check.verdict.value for check in checks])
    return 0 if has_passed(checks) else FAILED


def _ask_of(options: DoctorOptions) -> Ask | None:
    """Return how to ask a job's coordinator about itself, None where its secret is not known."""
    from thinwire.elastic.invitation import read_invitation
    from thinwire.monitor.doctor.peer import Info
    from thinwire.transport.addresses import Address as Endpoint
    from thinwire.transport.secret import read_secret

    try:
        given = read_invitation(options.target or "")
        secret = given.secret
        if secret is None and options.secret is not None:
            secret = read_secret(options.secret)
        from thinwire.elastic.coordinator_client import send_command
    except (ValueError, MissingExtra):
        return None
    if secret is None:
        return None
    deadline_s = parse_seconds(options.deadline)

    def ask(address: Address) -> Info:
        invitation = dataclasses.replace(given, host=address.host, port=address.port)
        answer = send_command(invitation, secret=secret, deadline_s=deadline_s, verb="status", target="")
        status = answer["status"]
        replicas = tuple(
            (f"replica {one['replica']} on {one['host']}", Endpoint(host=str(one["address"]), port=int(one["port"])))
            for one in status["members"] if one["port"]
        )  # fmt: skip
        return Info(version=str(status["thinwire"]), unix_s=float(status["unix_s"]), replicas=replicas)

    return ask


def _show(verdict: str, name: str, found: str, remedy: str) -> None:
    from thinwire.cli.tables import plain

    mark = verdict.upper() if verdict == "wrong" else verdict
    print(plain(f"{mark:<8} {name}: {found}"), flush=True)
    if remedy:
        print(plain(f"         -> {remedy}"), flush=True)


def _sum_up(verdicts: list[str]) -> None:
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("ok", "warning", "wrong", "skipped"))
    print(f"{len(verdicts)} checks: {counts}")
