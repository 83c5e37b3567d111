"""The processes of a replica's other ranks: the one that leads starts them, and none of them outlives another."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from thinwire.training.elastic.rank0_driver import Rank0Driver
from thinwire.transport.replica_group import InnerGroup

_LOOK_S = 0.1
_JOINING = ("joining its ranks", 300.0)
_END_S = 10.0
_FIND_OUT_S = 1.0
_FAREWELL_S = 3.0
# A process that was stopped finds that its clock went on; a look counts for no longer than this.
_LONGEST_LOOK_S = 1.0


class RankProcesses:
    """The other ranks of a replica, watched as long as they shall run.

    Args:
        command: What starts one, without its rank and the file that all of them meet by.
        num_ranks: Ranks of the replica, this one among them.
        logs: Folder of their logs, `NAME-rank-N.err` each.
        name: What the replica's process is called there.
        report: Called, from a thread, with the reason that a rank is gone or hangs; all ranks have been ended then.
        end: Ends this process, which has not done so by itself soon after: what it waits for may never come.
    """

    def __init__(
        self, command: list[str], *, num_ranks: int, logs: Path, name: str, report: Callable[[str], None],
        end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._report = report
        self._end = end
        self._has_reported = threading.Event()
        self._logs = logs
        self._name = name
        self._is_over = threading.Event()
        self._driver: Rank0Driver | None = None
        self._latest: tuple[str, float] | None = None
        self._waited_s = 0.0
        # for this user's eyes alone, on this host's own disk
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-ranks-", ignore_cleanup_errors=True)
        self.meeting = Path(self._folder.name) / "meeting"
        logs.mkdir(parents=True, exist_ok=True)
        self._processes = {rank: self._start(command, rank) for rank in range(1, num_ranks)}
        self._thread = threading.Thread(target=self._watch, name="thinwire-ranks", daemon=True)
        self._thread.start()

    def follow(self, driver: Rank0Driver) -> None:
        """Watch also how long the other ranks keep this one waiting."""
        self._driver = driver
        driver.find_out = self._wait_for_report

    def close(self) -> None:
        """End the other ranks; they have nothing to lose."""
        self._is_over.set()
        self._thread.join()
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + _END_S
        for process in self._processes.values():
            try:
                process.wait(timeout=max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _start(self, command: list[str], rank: int) -> subprocess.Popen[bytes]:
        with self._log(rank).open("ab") as log:
            words = [*command, str(rank), str(self.meeting)]
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _log(self, rank: int) -> Path:
        return self._logs / f"{self._name}-rank-{rank}.err"

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._is_over.wait(_LOOK_S):
            now_s = time.monotonic()
            passed_s, before_s = min(_LONGEST_LOOK_S, now_s - before_s), now_s
            if why := self._find_problem(passed_s):
                self._give_up(why)
                return

    def _wait_for_report(self) -> None:
        # a rank that dies breaks its connections before anybody can see that it is gone
        self._has_reported.wait(_FIND_OUT_S)

    def _give_up(self, why: str) -> None:
        """End all ranks: the main thread finds its connections broken then, and has a moment to say goodbye."""
        if self._driver is not None:
            self._driver.problem = "lost one of its ranks"
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        self._report(why)
        self._has_reported.set()
        if not self._is_over.wait(_FAREWELL_S):
            self._end()

    def _find_problem(self, passed_s: float) -> str:
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"rank {rank} of this replica {_how_it_ended(code)}; see {self._log(rank)}"
        waits = _JOINING if self._driver is None else self._driver.waits
        # each order has a value of its own, however alike two are
        self._waited_s = self._waited_s + passed_s if waits is self._latest else 0.0
        self._latest = waits
        if waits is None or self._waited_s <= waits[1]:
            return ""
        return f"a rank of this replica hangs: {waits[0]} took longer than {waits[1]:.3g} s; see {self._log(1).parent}"


def _how_it_ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@contextlib.contextmanager
def start_ranks(
    run_dir: Path, *, module: str, leader: int, index: int, num_ranks: int, report: Callable[[str], None],
    end: Callable[[], None],
) -> Iterator[Rank0Driver]:  # fmt: skip
    """Start a replica's other ranks, and lead them as long as the block lasts.

    Args:
        run_dir: The run's folder, which holds this host's settings.
        module: What `python -m` runs for another rank.
        leader: This process's id: the others end with it.
        index: Which of the host's replicas this is.
        num_ranks: Ranks of the replica, at least 2.
        report: See `RankProcesses`.
        end: See `RankProcesses`.
    """
    command = [sys.executable, "-m", module, str(run_dir.resolve()), str(leader), str(index), str(num_ranks)]
    processes = RankProcesses(
        command, num_ranks=num_ranks, logs=run_dir / "logs", name=f"replica-process-{index}", report=report, end=end
    )
    try:
        driver = Rank0Driver(join_ranks(processes.meeting, index=index, rank=0, num_ranks=num_ranks))
        processes.follow(driver)
        yield driver
    finally:
        processes.close()


def join_ranks(meeting: Path, *, index: int, rank: int, num_ranks: int) -> InnerGroup:
    """Join the ranks of a replica of this host; its rank r takes the host's GPU `index * num_ranks + r`."""
    return InnerGroup(rank=rank, size=num_ranks, meeting=meeting, gpu=index * num_ranks + rank)
