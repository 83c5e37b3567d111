"""Loaded by every Python that the tests start: large libraries are imported untraced, without collecting garbage.

What torch does while it is imported is no news to a report on thinwire, and traced it takes twice as long, in each of
the hundreds of processes that the tests start. It makes hundreds of thousands of objects that stay: to look through
them for garbage again and again is a sixth of the time.

The first optimizer of a process makes torch import its compiler, which takes longer than torch itself. Here it stays
away until something compiles.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from tiny_model import WithTiny

LARGE = frozenset({"datasets", "numpy", "pyarrow", "rich", "scipy", "tensorboard", "torch", "torchft", "transformers"})

# What imports the compiler only to hide functions from it.
DECORATORS = {"torch._compile": ("_disable_dynamo",), "torch.optim.optimizer": ("_use_grad_for_differentiable",)}


class Untraced:
    """Finds large libraries as Python does, and puts tracer and collector aside while one of their modules runs."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_outermost = sys.gettrace() is not None or gc.isenabled()
        if name not in DECORATORS and (name.partition(".")[0] not in LARGE or not is_outermost):
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
                    for decorator in DECORATORS.get(name, ()):
                        setattr(module, decorator, _delayed(getattr(module, decorator), is_step="grad" in decorator))
                finally:
                    sys.settrace(tracer)
                    if collects:
                        gc.freeze()
                        gc.enable()

            spec.loader.exec_module = run_untraced  # type: ignore[method-assign]
        return spec


def _delayed(decorate: Callable[..., Any], *, is_step: bool) -> Callable[..., Any]:
    """Make a decorator whose functions run as they are while the compiler is not imported, and decorated then."""

    def decorator(function: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        if function is None:
            return functools.partial(decorator, recursive=recursive)
        decorated = decorate(function) if is_step else decorate(function, recursive)

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            if "torch._dynamo" in sys.modules:
                return decorated(*arguments, **options)
            if not is_step:
                return function(*arguments, **options)
            with sys.modules["torch"].set_grad_enabled(arguments[0].defaults["differentiable"]):
                return function(*arguments, **options)

        return run

    return decorator


sys.meta_path[:0] = [Untraced(), WithTiny()]
