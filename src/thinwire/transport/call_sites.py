"""Call sites: the file and line in the user's own code that a call of a process group comes from."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_MOST_FRAMES = 64  # of one stack that are looked at
_OWN = str(Path(__file__).parents[1])
_PACKAGES = ("/site-packages/", "/dist-packages/")
# Roots whose files are nobody's own code, with the name that a frame below them is shown with.
_LIBRARIES = (
    (str(Path(torch.__file__).parent), "torch"),
    (_OWN, "thinwire"),
    (sysconfig.get_paths()["stdlib"], "python"),
)
_shown: dict[str, tuple[str, bool]] = {}


def shown_file(path: str) -> tuple[str, bool]:
    """Return a file as a frame shows it, and whether it is the user's own code.

    Example:
        >>> shown_file("/home/me/train.py"), shown_file(torch.__file__)
        (('train.py', True), ('torch/__init__.py', False))
    """
    known = _shown.get(path)
    if known is None:
        known = _shown[path] = _named(path)
    return known


def _named(path: str) -> tuple[str, bool]:
    for marker in _PACKAGES:
        if marker in path:
            return path.rpartition(marker)[2], False
    for root, name in _LIBRARIES:
        if path.startswith(root + "/"):
            return name + path[len(root) :], False
    return path.rpartition("/")[2], not path.startswith("<")


def user_site(frame: FrameType | None = None) -> str:
    """Return the innermost place of the user's own code as `file:line`; empty if the stack holds none.

    Args:
        frame: Where to begin; the caller's by default.
    """
    frame = sys._getframe(1) if frame is None else frame
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return ""
        name, is_own = shown_file(frame.f_code.co_filename)
        if is_own:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
