"""Which wing of the package a test file is about: `make test-monitor` runs the tests of the monitor, and so on.

    python -m tests.wings monitor    # its files

The wings are those of the import contracts in pyproject.toml.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent

# Begins of paths below tests/; of several that fit a file, the longest counts.
WINGS: dict[str, tuple[str, ...]] = {
    "core": (
        "laws/", "reference/", "unit/averaging/", "unit/carriers/", "unit/codecs/",
        "unit/ensembles/", "unit/experts/", "unit/methods/", "unit/publish/", "unit/sequences/",
        "unit/split/", "unit/sync/",
        "unit/transport/", "unit/test_", "multiprocess/test_closure_methods", "multiprocess/test_coded_stage",
        "multiprocess/test_connect",
        "multiprocess/test_forked_", "multiprocess/test_gnn_", "multiprocess/test_live_",
        "multiprocess/test_listeners", "multiprocess/test_methods", "multiprocess/test_nursery",
        "multiprocess/test_one_bit_", "multiprocess/test_open_wire", "multiprocess/test_process_group",
        "multiprocess/test_published_",
        "multiprocess/test_replica_ranks", "multiprocess/test_shared_", "multiprocess/test_slow_replica",
        "multiprocess/test_solo_world", "multiprocess/test_split",
        "multiprocess/test_two_optimizers", "multiprocess/test_uneven_steps",
        "multiprocess/test_wire",
    ),
    "elastic": (
        "elastic/", "unit/elastic/", "multiprocess/test_elastic_", "multiprocess/test_first_host_lost",
        "multiprocess/test_own_loop", "multiprocess/test_rank_processes", "multiprocess/test_state_fetch",
        "unit/test_chaos_", "unit/test_torchft_chaos",
    ),
    "monitor": (
        "unit/monitor/", "multiprocess/test_path_limits", "multiprocess/test_polled_jobs",
        "multiprocess/test_post_mortem", "multiprocess/test_steered_run", "multiprocess/test_watch",
        "lab/test_active_hosts", "lab/test_doctor_", "lab/test_forwarded_hosts", "lab/test_watched_hosts",
    ),
    "planner": (
        "laws/test_simulate_laws", "laws/test_traffic_laws", "reference/test_c4_traffic", "reference/test_published_",
        "unit/planning/", "unit/simulate/", "unit/site/", "unit/traffic/", "lab/test_planned_wire",
        "lab/test_probe_wires",
    ),
    "lab": ("lab/", "unit/lab/"),
    "training": (
        "unit/data/", "unit/inference/", "unit/models/", "unit/training/", "unit/workloads/",
        "unit/test_gpu_", "unit/test_quality_",
        "multiprocess/test_activation_memory",
        "multiprocess/test_fine_tuning", "multiprocess/test_full_run_disk", "multiprocess/test_gpu_",
        "multiprocess/test_killed_checkpoints", "multiprocess/test_ladder_", "multiprocess/test_launch_deaths",
        "multiprocess/test_launchers",
        "multiprocess/test_local_launch", "multiprocess/test_lost_stage", "multiprocess/test_parallel_replica",
        "multiprocess/test_streamed_shards", "multiprocess/test_training",
        "lab/test_train_hosts",
    ),
    "faces": (
        "architecture/", "cli/", "docs/", "flower/", "unit/cli/", "unit/integrations/", "unit/test_wire_references",
        "multiprocess/test_flower_", "multiprocess/test_hf_", "multiprocess/test_integration_",
        "multiprocess/test_length_sampler", "multiprocess/test_ray", "multiprocess/test_run_script",
        "multiprocess/test_torch_checkpoints",
        "multiprocess/test_wire_benchmark_",
        "lab/test_rehearse_page", "lab/test_wire_benchmark",
    ),
}  # fmt: skip


def test_files() -> Iterator[str]:
    """Yield the path of every test file, below tests/."""
    return (path.relative_to(TESTS).as_posix() for path in sorted(TESTS.rglob("test_*.py")))


def wing_of(path: str) -> str | None:
    """Return the wing of a test file, None if the table does not know it.

    Example:
        >>> wing_of("lab/test_shaping.py"), wing_of("lab/test_watched_hosts.py")
        ('lab', 'monitor')
    """
    found = [(len(start), wing) for wing, starts in WINGS.items() for start in starts if path.startswith(start)]
    return max(found)[1] if found else None


if __name__ == "__main__":
    print(*(TESTS / path for path in test_files() if wing_of(path) == sys.argv[1]))
