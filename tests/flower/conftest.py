"""Tests that need Flower: tests/multiprocess/test_flower_environment.py runs them in an environment of its own."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["test_*"]
