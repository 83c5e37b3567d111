"""The models `tiny` and `moe-tiny`: a third of the width of `nano`, for runs of tests in which size proves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_WIDTH = 64
_MODULE = "thinwire.workloads.language.presets"


class WithTiny:
    """Finds the module that knows models by name as Python does, and adds the tiny ones."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _MODULE else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_add(module: Any) -> None:
                run(module)
                module.PRESETS = with_tiny(module.PRESETS)
                module.USUAL_LR |= {"tiny": module.USUAL_LR["nano"], "moe-tiny": module.USUAL_LR["moe-nano"]}

            spec.loader.exec_module = run_and_add  # type: ignore[method-assign]
        return spec


def with_tiny(presets: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the presets and the tiny ones."""
    import dataclasses  # every process that a test starts comes to this file, and few of them to this line

    return {
        **presets, "tiny": dataclasses.replace(presets["nano"], dim=_WIDTH, mlp_dim=4 * _WIDTH),
        "moe-tiny": dataclasses.replace(presets["moe-nano"], dim=_WIDTH, mlp_dim=_WIDTH, layers=2),
    }  # fmt: skip
