"""Laws that hold in many cases: one test goes through all of them, and names the case in which it fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any


def over(cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a law, whose first arguments are those of a case: a tuple, or one value.

    A test a case costs more than the law itself, where there are hundreds of cases.
    """
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert listed

    def decorate(law: Callable[..., None]) -> Callable[..., None]:
        def test(**others: Any) -> None:
            for case in listed:
                try:
                    law(*case, **others)
                except BaseException as error:
                    error.add_note(f"in the case {', '.join(map(repr, case))}")
                    raise

        test.__name__, test.__doc__, test.__module__ = law.__name__, law.__doc__, law.__module__
        left = list(inspect.signature(law).parameters.values())[len(listed[0]) :]
        test.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]  # what pytest gives to it
        test.pytestmark = list(getattr(law, "pytestmark", []))  # type: ignore[attr-defined]
        return test

    return decorate
