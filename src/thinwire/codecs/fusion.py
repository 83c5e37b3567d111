"""One function, run as it is on the CPU and as one fused kernel on a GPU, with the same result bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


class Fused:
    """A function over tensors that the compiler fuses where that pays.

    Operation by operation, a GPU would read and write its memory once for each of some twenty operations; fused, it
    does so once. On a CPU the operations run in chunks that stay in cache, and nothing is compiled: a start of several
    seconds and a C++ compiler are too dear for a few milliseconds a round.

    Compiling begins at the first call with a tensor on such a device, never at import. Where there is no working
    compiler, the plain function answers instead, slower but with the same bits, after one warning.

    Args:
        function: Takes tensors, the first of which names the device. It may write to its arguments, but must give the
            same result when it is run a second time.
        backend: The compiler, as `torch.compile` names it.
        device_types: Where to compile.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        backend: str | Callable[..., Any] = "inductor",
        device_types: tuple[str, ...] = ("cuda",),
    ) -> None:
        self._function = function
        self._backend = backend
        self._device_types = device_types
        self._compiled: Callable[..., Any] | None = None
        self._is_broken = False

    def __call__(self, first: torch.Tensor, *rest: torch.Tensor) -> Any:
        """Run the function, compiled if the device of its first argument is one to compile for."""
        if self._is_broken or first.device.type not in self._device_types:
            return self._function(first, *rest)
        if self._compiled is None:
            self._compiled = torch.compile(self._function, backend=self._backend, dynamic=True, fullgraph=True)
        try:
            return self._compiled(first, *rest)
        except torch.OutOfMemoryError:
            raise  # a full device is not a compiler failure
        except Exception as failure:  # each backend has its own kinds of failure; the plain function decides
            result = self._function(first, *rest)
            self._is_broken = True
            warnings.warn(
                f"thinwire's codecs run unfused on {first.device}, because compiling failed: {failure}",
                RuntimeWarning,
                stacklevel=2,
            )
            return result
