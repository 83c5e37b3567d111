from __future__ import annotations

import subprocess
import sys
import tomllib

from live_processes import DEADLINE_S
from source_tree import ROOT, module_of, sources

from tests import wings

PURE = (
    "averaging.message_pattern", "averaging.mixing", "averaging.topology", "charts", "errors", "events",
    "experts.stream_plan", "monitor.detect", "monitor.findings", "monitor.nccl", "runlog", "sequences.block_tables",
    "shared_random", "simulate", "site", "sync.schedule", "traffic", "units", "workloads.cards",
    "workloads.language.lengths",
)  # fmt: skip


def _is_pure(module: str) -> bool:
    return any(module == f"thinwire.{name}" or module.startswith(f"thinwire.{name}.") for name in PURE)


# One process imports all in turn: what none of them brings, no single one brings.
IMPORT_ALL = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    brought = {"torch", "numpy"} & set(sys.modules)
    if brought:
        sys.exit(f"{module} brings {', '.join(sorted(brought))}")
"""


def test_pure_modules_are_imported_without_torch() -> None:
    modules = ["thinwire", *sorted(filter(_is_pure, map(module_of, sources())))]
    assert len(modules) > 50
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *modules], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_contracts_cover_every_pure_module_that_exists() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = {name for contract in contracts if contract["id"] == "pure" for name in contract["source_modules"]}
    missing = {f"thinwire.{name}" for name in PURE} - listed
    assert not missing, f"add to the contract in pyproject.toml: {sorted(missing)}"


def test_every_test_file_belongs_to_one_wing_and_each_wing_has_a_target() -> None:
    lost = [path for path in wings.test_files() if wings.wing_of(path) is None]
    assert not lost, f"name the wing of each in tests/wings.py: {', '.join(lost)}"
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\ntest-{wing}: ## " in makefile for wing in wings.WINGS)
