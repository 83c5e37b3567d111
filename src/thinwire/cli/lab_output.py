"""Output of `thinwire lab`: the lines of each host, and a table of the kernel's byte counts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from thinwire.lab import HostProcess, Lab, rank_environment
from thinwire.lab.counters import peak_rate, sent_by
from thinwire.units import format_bytes, format_rate, format_seconds

_LAST_LINES_S = 5.0


class Outputs:
    """Where the hosts' lines go: host 0's to our own stdout and stderr, the others' to logs and, named, to stderr."""

    def __init__(self, lab: Lab, *, is_quiet: bool) -> None:
        self._lab = lab
        self._is_quiet = is_quiet
        self._threads: list[threading.Thread] = []
        self._ends: list[int] = []

    def __enter__(self) -> Outputs:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the last lines; a process that outlives its command may keep a pipe open, and is not waited for."""
        for end in self._ends:
            os.close(end)
        for thread in self._threads:
            thread.join(timeout=_LAST_LINES_S)

    def start(self, command: Sequence[str], *, environment: Mapping[str, str]) -> list[HostProcess]:
        """Start the command on all hosts."""
        processes = []
        for host in range(self._lab.num_hosts):
            variables = {**rank_environment(host, self._lab.num_hosts), **environment}
            stdin, stdout, stderr = (0, 1, 2) if host == 0 else (subprocess.DEVNULL, *self._pipes(host))
            process = self._lab.start(
                command, host=host, environment=variables, stdin=stdin, stdout=stdout, stderr=stderr
            )
            processes.append(process)
        return processes

    def _pipes(self, host: int) -> tuple[int, int]:
        ends = []
        for kind in ("out", "err"):
            reading, writing = os.pipe()
            ends.append(writing)
            self._ends.append(writing)
            path = self._lab.folder / f"host-{host}.{kind}"
            thread = threading.Thread(target=self._pump, args=(reading, path, f"host-{host} | "), daemon=True)
            thread.start()
            self._threads.append(thread)
        return ends[0], ends[1]

    def _pump(self, reading: int, path: Path, prefix: str) -> None:
        with open(reading, "rb") as lines, path.open("wb", buffering=0) as log:
            for line in lines:
                log.write(line)
                if not self._is_quiet:
                    text = line.decode(errors="replace").rstrip("\n")
                    with contextlib.suppress(OSError):  # nobody reads our stderr any more; the log goes on
                        _write_line(sys.stderr, prefix + text)


def show_summary(lab: Lab, processes: Sequence[HostProcess], *, seconds: float, is_quiet: bool) -> dict[str, Any]:
    """Show on stderr what each host sent, and return it."""
    counters, samples = lab.counters(), lab.samples()
    hosts = []
    for process, count in zip(processes, counters, strict=True):
        hosts.append(
            {
                "host": process.host,
                "exit_code": process.exit_code,
                "sent_bytes": count.sent_bytes,
                "received_bytes": count.received_bytes,
                "peak_sent_bits_per_s": round(peak_rate(sent_by(samples, host=process.host))),
            }
        )
    if not is_quiet:
        table = Table(title=f"{format_seconds(seconds)}, bytes as the kernel counted them", title_justify="left")
        for column in ("host", "exit code", "sent", "received", "peak sent in 100 ms"):
            table.add_column(column, justify="left" if column == "host" else "right")
        for row in hosts:
            sent, received = format_bytes(row["sent_bytes"] or 0), format_bytes(row["received_bytes"] or 0)
            peak = format_rate(row["peak_sent_bits_per_s"] or 0)
            table.add_row(f"host-{row['host']}", str(row["exit_code"]), sent, received, peak)
        console = Console(stderr=True)
        console.print(table)
        console.print(f"logs and counts: {lab.folder}", soft_wrap=True, highlight=False)
    return {"seconds": seconds, "settings": lab.settings.to_json(), "hosts": hosts}


def _write_line(stream: IO[str], text: str) -> None:
    stream.write(text + "\n")
    stream.flush()
