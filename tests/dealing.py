"""Which worker runs which test: those that compute beside those that wait, so that no core stands still.

Tests that start processes mostly wait: for an import, a deadline, a thin wire. Tests that compute leave no core to
others. So there are five workers where there are two cores, and every third of them computes first, while the others
begin with the files that wait; whoever has done its own kind goes on with what is left of the other.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# These start processes of their own, and make much of it once a file: a file's tests stay together on one worker.
WITH_PROCESSES = ("tests/multiprocess/", "tests/cli/", "tests/lab/", "tests/docs/")

# Their tests share what takes long to compute, which each worker that has one of them would compute again.
SHARING = (
    "tests/laws/test_method_laws.py",
    "tests/elastic/test_own_pace.py",
    "tests/reference/test_dimat.py",
    "tests/unit/monitor/test_synthetic_jobs.py",
)

# The longest first, so that none of them is left over for the end: by their times in one run of all tests.
LONGEST = (
    "tests/multiprocess/test_elastic_run.py",
    "tests/multiprocess/test_killed_checkpoints.py",
    "tests/multiprocess/test_elastic_nan.py",
    "tests/lab/test_doctor_between_hosts.py",
    "tests/multiprocess/test_first_host_lost.py",
    "tests/multiprocess/test_full_run_disk.py",
    "tests/cli/test_lab.py",
    "tests/lab/test_planned_wire.py",
    "tests/cli/test_recipes.py",
    "tests/lab/test_elastic_hosts.py",
    "tests/multiprocess/test_training.py",
    "tests/multiprocess/test_steered_run.py",
    "tests/cli/test_demo.py",
    "tests/multiprocess/test_parallel_replica.py",
    "tests/multiprocess/test_training_options.py",
    "tests/docs/test_examples.py",
    "tests/multiprocess/test_elastic_ranks.py",
    "tests/lab/test_wire_benchmark.py",
    "tests/lab/test_exchange.py",
    "tests/docs/test_notebook.py",
    "tests/multiprocess/test_launch_deaths.py",
    "tests/multiprocess/test_replica_ranks.py",
    "tests/multiprocess/test_training_by_closure.py",
    "tests/lab/test_watched_hosts.py",
    "tests/multiprocess/test_hf_elastic.py",
    "tests/multiprocess/test_listeners.py",
    "tests/multiprocess/test_wire_benchmark_worker.py",
    "tests/multiprocess/test_post_mortem.py",
    "tests/multiprocess/test_slow_replica.py",
    "tests/cli/test_train.py",
    "tests/lab/test_lab_fabric.py",
    "tests/lab/test_train_hosts.py",
    "tests/multiprocess/test_fine_tuning.py",
    "tests/lab/test_probe_wires.py",
    "tests/multiprocess/test_one_bit_methods.py",
    "tests/multiprocess/test_connect.py",
    "tests/docs/test_command_line_docs.py",
    "tests/multiprocess/test_integration_examples.py",
    "tests/multiprocess/test_hf_fsdp.py",
    "tests/multiprocess/test_hf_trainers.py",
    "tests/lab/test_active_hosts.py",
    "tests/multiprocess/test_own_loop.py",
    "tests/cli/test_early_refusals.py",
    "tests/lab/test_forwarded_hosts.py",
)


def unit_of(nodeid: str) -> str:
    """Return what is dealt out as one: a file that starts processes or whose tests share much, or a single test."""
    return nodeid.split("::", 1)[0] if nodeid.startswith((*WITH_PROCESSES, *SHARING)) else nodeid


def rank(unit: str) -> tuple[bool, int, bool]:
    """Return the place of a unit in the row: files that wait, the longest first; then tests that compute."""
    is_long = unit.startswith(("tests/laws/", "tests/reference/", *SHARING))
    return not unit.startswith(WITH_PROCESSES), LONGEST.index(unit) if unit in LONGEST else len(LONGEST), is_long


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
