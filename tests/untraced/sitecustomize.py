"""Loaded by every Python that the tests start: imports of large libraries run without coverage's tracer.

What torch does while it is imported is no news to a report on thinwire, and traced it takes twice as long, in each of
the hundreds of processes that the tests start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LARGE = frozenset(
    {"datasets", "numpy", "pyarrow", "rich", "scipy", "tensorboard", "torch", "torchft", "transformers", "tyro"}
)


class Untraced:
    """Finds large libraries as Python does, and puts the tracer aside while one of their modules runs."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in LARGE or sys.gettrace() is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_untraced(module: ModuleType) -> None:
                tracer = sys.gettrace()
                sys.settrace(None)
                try:
                    run(module)
                finally:
                    sys.settrace(tracer)

            spec.loader.exec_module = run_untraced  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Untraced())
