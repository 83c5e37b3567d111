"""Loaded by every Python that the tests start: imports of large libraries run untraced and without collecting garbage.

What torch does while it is imported is no news to a report on thinwire, and traced it takes twice as long, in each of
the hundreds of processes that the tests start. It makes hundreds of thousands of objects that stay: to look through
them for garbage again and again is a sixth of the time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LARGE = frozenset(
    {"datasets", "numpy", "pyarrow", "rich", "scipy", "tensorboard", "torch", "torchft", "transformers", "tyro"}
)


class Untraced:
    """Finds large libraries as Python does, and puts tracer and collector aside while one of their modules runs."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in LARGE or (sys.gettrace() is None and not gc.isenabled()):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_untraced(module: ModuleType) -> None:
                tracer, collects = sys.gettrace(), gc.isenabled()
                sys.settrace(None)
                gc.disable()
                try:
                    run(module)
                finally:
                    sys.settrace(tracer)
                    if collects:
                        gc.freeze()
                        gc.enable()

            spec.loader.exec_module = run_untraced  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Untraced())
