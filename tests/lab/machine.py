"""Whether this machine can hold a lab: asked of the kernel, so that a fault of ours is never taken for its lack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest


def missing() -> str:
    """Say what this machine lacks for labs, or return an empty text."""
    if sys.platform != "linux":
        return f"labs need Linux, and this is {sys.platform}"
    lacking = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if lacking:
        return f"labs need {', '.join(lacking)}"
    as_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    words = ["unshare", *as_user, "--net", "--mount", "--pid", "--fork", "ip", "link", "set", "lo", "up"]
    tried = subprocess.run(words, check=False, capture_output=True, timeout=20, text=True)
    return f"labs need root or user namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def skip_where_labs_are_impossible() -> None:
    """Skip the test with the reason where this machine cannot hold a lab."""
    reason = missing()
    if reason:
        pytest.skip(reason)
