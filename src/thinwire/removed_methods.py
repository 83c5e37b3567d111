"""Methods that earlier versions had: why they went, and where their results stand."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.errors import refusal, unknown_name

REMOVED = {"pier": "its loss was higher than all-reduce's, for 31 times the bytes of streaming-diloco"}


def unknown_method(name: str, names: Iterable[str]) -> ValueError:
    """Return the error of a method's name that nothing has, or no longer.

    Example:
        >>> print(unknown_method("dilco", ["diloco"]))
        unknown method; got 'dilco'; allowed diloco; try diloco
    """
    reason = REMOVED.get(name.replace("_", "-").lower())
    if reason is None:
        return unknown_name("method", name, names)
    return refusal(
        f"the method was removed: {reason} (docs/experiments/candidates.md)", got=repr(name), allowed=", ".join(names),
        remedy="streaming-diloco or all-reduce",
    )  # fmt: skip
