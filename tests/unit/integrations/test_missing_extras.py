"""Integrations as imported: a missing library is named with its command, and methods are known by name."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys

import pytest
from live_processes import DEADLINE_S

from thinwire.errors import MissingExtra


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("hf", "transformers", "hf"), ("lightning", "lightning", "lightning"), ("titan", "torchtitan", "titan")],
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"thinwire.integrations.{module}"
    for loaded in [name, *(other for other in sys.modules if other == package or other.startswith(f"{package}."))]:
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    command = re.escape(f"{package} is not installed; install it with: pip install 'thinwire[{extra}]'")
    with pytest.raises(MissingExtra, match=command):
        importlib.import_module(name)


# Imports torch once, and forks for each module: none has what another one has imported of thinwire.
FIRST = """
import importlib, os, sys, torch
for module in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        importlib.import_module(f"thinwire.integrations.{module}")
        from thinwire.sync.method import method_of
        method_of("iso-loco")
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        sys.exit(f"{module}: {code}")
"""


@pytest.mark.slow
def test_a_method_may_be_given_by_its_name_where_nothing_else_of_thinwire_is_imported() -> None:
    packages = {"hf": "transformers", "lightning": "lightning", "titan": "torchtitan", "ray": "zmq"}
    modules = [module for module, package in packages.items() if importlib.util.find_spec(package) is not None]
    assert len(modules) >= 2
    done = subprocess.run(
        [sys.executable, "-c", FIRST, *modules], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_secret_of_a_ray_run_is_in_no_text_of_it() -> None:
    from thinwire.integrations.ray import RayRun

    run = RayRun(index=0, replicas=2, uri="thinwire://secret@10.0.0.1:29400", coordinator=None)
    assert "secret" not in repr(run) and "replicas=2" in repr(run)
