"""Which worker runs which test: those that compute beside those that wait, so that no core stands still.

Tests that start processes mostly wait: for an import, a deadline, a thin wire. Tests that compute leave no core to
others. So there are five workers where there are two cores, and every third of them computes first, while the others
begin with the files that wait; whoever has done its own kind goes on with what is left of the other.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests import durations

# These start processes of their own, and make much of it once a file: a file's tests stay together on one worker.
WITH_PROCESSES = ("tests/multiprocess/", "tests/cli/", "tests/lab/", "tests/docs/")

# Their tests share what takes long to compute, which each worker that has one of them would compute again.
SHARING = (
    "tests/laws/test_method_laws.py",
    "tests/elastic/test_own_pace.py",
    "tests/reference/test_dimat.py",
    "tests/unit/monitor/test_synthetic_jobs.py",
)

# What `make durations` stored of an earlier run: the longest first, so that none of them is left over for the end.
SECONDS = durations.stored()


def unit_of(nodeid: str) -> str:
    """Return what is dealt out as one: a file that starts processes or whose tests share much, or a single test."""
    return nodeid.split("::", 1)[0] if nodeid.startswith((*WITH_PROCESSES, *SHARING)) else nodeid


def rank(unit: str) -> tuple[bool, float]:
    """Return the place of a unit in the row: files that wait, the longest first; then tests that compute, it last."""
    seconds = SECONDS.get(unit, 0.0)
    return (False, -seconds) if unit.startswith(WITH_PROCESSES) else (True, seconds)


class Dealing(LoadScopeScheduling):
    """Deals a row of units from both its ends: to workers that compute from the last, to all others from the first."""

    _is_in_order = False

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self._is_in_order:
            for unit in sorted(self.workqueue, key=rank):
                self.workqueue.move_to_end(unit)
            self._is_in_order = True
        if int(node.gateway.id.removeprefix("gw")) % 3 == 0:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Note that a test is done, and forget its unit with the last: the row is counted through after each test."""
        nodeid = self.registered_collections[node][item_index]
        work, unit = self.assigned_work[node], unit_of(nodeid)
        work[unit][nodeid] = True
        if all(work[unit].values()):
            del work[unit]
        self._reschedule(node)
