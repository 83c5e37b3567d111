"""`thinwire diagnose test`: tests all wires of a job now, and names the link, sender, receiver or host at fault."""

from __future__ import annotations

import json as json_format
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.argument_parsing import FAILED, command, parse_options
from thinwire.cli.output import log
from thinwire.cli.process_names import process_of
from thinwire.cli.train_options import adopt_launcher, world_size
from thinwire.errors import excluded, refusal
from thinwire.units import format_rate, format_seconds, parse_rate, parse_seconds

if TYPE_CHECKING:
    from thinwire.monitor.active_test.active_test import Outcome
    from thinwire.monitor.active_test.evaluation import Measured, PairTest

FOUND = 3
_MOST_ROWS = 56
_STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveTestOptions:
    """Test all links between the hosts of a job now, and name the link, sender, receiver or host at fault.

    Start it on every host with torchrun, or on this machine alone with --replicas. The exit code is 0 without a finding
    and 3 with one.
    """

    replicas: int | None = None
    """Number of ranks to start on this machine, instead of torchrun."""
    expect: str | None = None
    """Expected rate of each link, such as 100mbit. Default: links are compared with each other."""
    budget: str = "10s"
    """Approximate time for all pairs of healthy hosts."""
    secret: Path | None = None
    """File of the job's secret, the same on all hosts; see thinwire secret."""
    interface: str | None = None
    """Network interface that other hosts can reach, such as eth0."""
    address: str | None = None
    """Address of this host that other hosts can reach."""
    deadline: str = "60s"
    """Longest wait for a rank at the start."""
    json: bool = False
    """Print one JSON object on stdout instead of text."""


@command("diagnose test")
def main(arguments: Sequence[str]) -> int:
    """Run `thinwire diagnose test`.

    Returns:
        0 where nothing is found, 3 where something is, 1 where it could not be tested, 2 for wrong options.
    """
    # where the store ends, torch's own log would print a page of C++ frames beside our one line
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    options = parse_options(
        ActiveTestOptions, arguments, prog="thinwire diagnose test", basic="replicas expect secret json"
    )
    _check(options)
    return _test(options) if options.replicas is None else _start(arguments, options.replicas)


def _check(options: ActiveTestOptions) -> None:
    """Check the options before anything is started."""
    adopt_launcher()
    ranks = world_size()
    if options.replicas is not None and ranks is not None:
        raise excluded("--replicas", "torchrun", why=f"it has started {ranks} ranks", remedy="to leave --replicas out")
    if options.replicas is None and ranks in (None, 1):
        raise refusal(
            "a test is between hosts", got="one host", allowed="torchrun on 2 or more, a lab, or --replicas",
            remedy="--replicas 3, or thinwire lab --hosts 3 -- thinwire diagnose test",
        )  # fmt: skip
    if options.replicas is not None and not 2 <= options.replicas <= 64:
        raise refusal("--replicas is out of its range", got=options.replicas, allowed="2 to 64", remedy="--replicas 3")
    if options.expect is not None:
        parse_rate(options.expect)
    for name in ("budget", "deadline"):
        if parse_seconds(getattr(options, name)) <= 0:
            raise refusal(f"--{name} is too short", got=getattr(options, name), allowed="above 0s",
                          remedy=f"--{name} 10s")  # fmt: skip


def _start(arguments: Sequence[str], replicas: int) -> int:
    """Run the ranks as processes of this machine; the first one prints."""
    from thinwire.transport.addresses import RENDEZVOUS_FILE

    command = [sys.executable, "-m", *process_of("diagnose-rank").split(), str(os.getpid()), *arguments]
    command += ["--replicas", "None"]  # a rank starts no others
    ranks: list[subprocess.Popen[bytes]] = []
    folder = tempfile.TemporaryDirectory(prefix="thinwire-rendezvous-", ignore_cleanup_errors=True)
    job = {"WORLD_SIZE": str(replicas), RENDEZVOUS_FILE: str(Path(folder.name) / "store")}
    try:
        for number in range(replicas):
            own = {**os.environ, **job, "RANK": str(number), "LOCAL_RANK": str(number)}
            out = None if number == 0 else subprocess.DEVNULL
            ranks.append(subprocess.Popen(command, env=own, stdout=out))
        return max(rank.wait() for rank in ranks)
    except KeyboardInterrupt:
        _log("stopped; all ranks have ended")
        return FAILED
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGTERM)
        for rank in ranks:
            try:
                rank.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
        folder.cleanup()


def _test(options: ActiveTestOptions) -> int:
    from thinwire.monitor.active_test.active_test import run_test
    from thinwire.transport.connect import connect_reachable

    expect = None if options.expect is None else parse_rate(options.expect)
    gathering = connect_reachable(
        interface=options.interface, address=options.address, secret=options.secret,
        deadline_s=parse_seconds(options.deadline),
    )  # fmt: skip
    try:
        tested = run_test(
            gathering, budget_s=parse_seconds(options.budget), expect_bits_per_s=expect, report=_log,
            show=lambda outcome: _show(outcome, expect, as_json=options.json),
        )  # fmt: skip
        gathering.rendezvous.leave(len(gathering.endpoints), wait_s=5.0)
    finally:
        gathering.transport.close()
    return FOUND if tested.num_findings else 0


def _show(tested: Outcome, expect: float | None, *, as_json: bool) -> None:
    from thinwire.cli.tables import plain
    from thinwire.monitor.findings import report

    measured = tested.measured
    assert measured is not None, "rank 0 shows what it measured"
    if as_json:
        values: dict[str, Any] = {
            "findings": [finding.to_json() for finding in tested.findings],
            "measured": _values(measured),
        }
        values["seconds"] = round(tested.seconds, 3)
        print(json_format.dumps(values), flush=True)
        return
    for line in _table(measured):
        print(plain(line))
    print()
    for line in report(tested.findings).splitlines():
        print(plain(line))
    sys.stdout.flush()
    _log(f"tested in {format_seconds(tested.seconds)}")
    if len(measured.hosts) == 2 and expect is None:
        _log("two ranks have only each other to compare with; --expect RATE says what their wire should carry")


def _values(measured: Measured) -> dict[str, Any]:
    def named(cells: Any) -> list[dict[str, Any]]:
        return [{"from": cell[0], "to": cell[1], **values} for cell, values in sorted(cells)]

    def flow(found: Any) -> Any:
        return ((cell, {"num_bytes": one.num_bytes, "seconds": one.seconds}) for cell, one in found.items())

    done = measured.all_reduce
    pairs = (
        (cell, {
            "rate_bits_per_s": pair.rate_bits_per_s, "latency_s": pair.latency_s, "overhead_s": pair.overhead_s,
            "fault": pair.fault, "detail": pair.detail,
        })
        for cell, pair in measured.pairs.items()
    )  # fmt: skip
    return {
        "hosts": list(measured.hosts),
        "absent": {str(rank): why for rank, why in measured.absent.items()},
        "loopback_bits_per_s": {str(rank): rate for rank, rate in measured.loopback_bits_per_s.items()},
        "pairs": named(pairs), "neighbours": named(flow(measured.neighbours)),
        "everyone": named(flow(measured.everyone)),
        "all_reduce": None if done is None else {
            "order": list(done.order), "num_bytes": done.num_bytes, "seconds": done.seconds,
            "wrong": [list(link) for link in done.wrong],
        },
    }  # fmt: skip


def _table(measured: Measured) -> list[str]:
    """Return what was measured as lines: hosts, then pairs, the slowest first where there are many."""
    from thinwire.monitor.active_test.evaluation import all_reduce_s, reference_rate

    lines = [
        f"rank {rank} on {measured.hosts[rank]}: {format_rate(rate)} to itself"
        for rank, rate in sorted(measured.loopback_bits_per_s.items())
    ]
    cells = sorted(measured.pairs, key=lambda cell: (measured.pairs[cell].rate_bits_per_s, cell))
    shown = cells if len(cells) <= _MOST_ROWS else cells[:_MOST_ROWS]
    reference = reference_rate(list(measured.rates.values()))
    head = f"{'from':>4} {'to':>4} {'latency':>9} {'alone':>13} {'of usual':>9} {'in a ring':>10} {'all at once':>12}"
    lines += ["", head] if cells else []
    lines += [
        _row(measured, cell, measured.pairs[cell], reference) for cell in (sorted(shown) if shown == cells else shown)
    ]
    if shown != cells:
        lines.append(f"... and {len(cells) - len(shown)} quicker ones")
    done = measured.all_reduce
    if done is not None:
        due_s = all_reduce_s(done, measured)
        lines += ["", f"all-reduce of {4e-6 * (done.num_bytes // 4):.1f} MB around {' '.join(map(str, done.order))}: "
                  f"{format_seconds(done.seconds)}, its wires allow {format_seconds(due_s)}, "
                  f"{'a wrong sum' if done.wrong else 'the exact sum'}"]  # fmt: skip
    return lines


def _row(measured: Measured, cell: tuple[int, int], pair: PairTest, reference: float) -> str:
    def seconds_beside(flows: Any) -> str:
        from thinwire.monitor.active_test.evaluation import expected_s

        if cell not in flows or not pair.rate_bits_per_s:
            return "-"
        return f"{flows[cell].seconds / expected_s(flows, measured)[cell]:.2f} x"

    if pair.fault:
        return f"{cell[0]:>4} {cell[1]:>4} {pair.fault}: {pair.detail}"
    share = f"{pair.rate_bits_per_s / reference:.0%}" if reference else "-"
    return (
        f"{cell[0]:>4} {cell[1]:>4} {format_seconds(pair.latency_s):>9} {format_rate(pair.rate_bits_per_s):>13} "
        f"{share:>9} {seconds_beside(measured.neighbours):>10} {seconds_beside(measured.everyone):>12}"
    )


def _log(text: str) -> None:
    log(text, command="diagnose test")
