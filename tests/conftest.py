"""How the whole test run is laid out over workers, and what every Python that a test starts loads first."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import nursery
import pytest
from hypothesis import settings
from xdist.remote import Producer

from tests.dealing import Dealing

# `untraced/sitecustomize.py` spares the processes that the tests start most of what coverage costs them.
UNTRACED = str(Path(__file__).parent / "untraced")
if UNTRACED not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (UNTRACED, os.environ.get("PYTHONPATH"))))

# What tests start of thinwire is forked from a process that has torch in its memory already, and so are its children.
subprocess.Popen = nursery.Popen  # type: ignore[misc]

# Threads that wait for each other spin by default, and on busy cores take minutes of them from whom they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Machines that run tests are shared and slow now and then: that a single example took long says nothing.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among what is imported and collected, now or later: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what computes for long without coverage's tracer: other tests run the same lines, on less."""
    for item in items:
        if item.nodeid.startswith("tests/reference/"):
            item.add_marker(pytest.mark.no_cover)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Put every tracer aside where a test is marked with no_cover.

    pytest-cov pauses its own. In a worker, which is a process that coverage starts in by itself too, that one would go
    on.
    """
    if item.get_closest_marker("no_cover") is None:
        return (yield)
    tracer, of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    try:
        return (yield)
    finally:
        sys.settrace(tracer)
        threading.settrace(of_threads)  # type: ignore[arg-type]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give torch the number of threads back that it had: a command run in this process sets its own for good."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    try:
        return (yield)
    finally:
        if torch and torch.get_num_threads() != before:
            torch.set_num_threads(before)


@pytest.hookimpl(optionalhook=True)  # without workers there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Dealing:
    return Dealing(config, log)
