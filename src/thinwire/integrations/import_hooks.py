"""Calls that follow the import of a module: a library is changed once it is imported, and never imported for it."""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHooks(importlib.abc.MetaPathFinder):
    """Finder that calls a function after a module's code has run; put it in front of `sys.meta_path`.

    Args:
        hooks: Functions by the full names of modules; each gets the module.
    """

    def __init__(self, hooks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._hooks = hooks

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Find the module as the other finders do, and let its loader call the hook."""
        if fullname not in self._hooks:
            return None
        others = (one for one in sys.meta_path if one is not self and hasattr(one, "find_spec"))
        spec: ModuleSpec | None = next((s for one in others if (s := one.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # one of its own for each module
            loader.exec_module = functools.partial(self._run, loader.exec_module)
        return spec

    def _run(self, run_code: Callable[[ModuleType], None], module: ModuleType) -> None:
        run_code(module)
        self._hooks[module.__name__](module)

    def install(self) -> None:
        """Begin with modules that are imported from now on; those that are there already are changed at once."""
        sys.meta_path.insert(0, self)
        for name in [name for name in self._hooks if name in sys.modules]:
            self._hooks[name](sys.modules[name])
