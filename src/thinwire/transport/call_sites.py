"""Call sites: the file and line in the user's own code that a call of a process group comes from."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_MOST_SITES = 4096
_OWN = str(Path(__file__).parents[1])
_PACKAGES = ("/site-packages/", "/dist-packages/")
# Roots whose files are nobody's own code, with the name that a frame below them is shown with.
_LIBRARIES = (
    (str(Path(torch.__file__).parent), "torch"),
    (_OWN, "thinwire"),
    (sysconfig.get_paths()["stdlib"], "python"),
)
_library_files: set[str] = set()
_sites: dict[tuple[int, int], tuple[str, CodeType]] = {}  # by code and instruction


@cache
def shown_file(path: str) -> tuple[str, bool]:
    """Return a file as a frame shows it, and whether it is the user's own code.

    Example:
        >>> shown_file("/home/me/train.py"), shown_file(torch.__file__)
        (('train.py', True), ('torch/__init__.py', False))
    """
    for marker in _PACKAGES:
        if marker in path:
            return path.rpartition(marker)[2], False
    for root, name in _LIBRARIES:
        if path.startswith(root + "/"):
            return name + path[len(root) :], False
    return path.rpartition("/")[2], not path.startswith("<")


def user_site() -> str:
    """Return the innermost place of the user's own code as `file:line`; empty if the stack holds none.

    It is called before each call of a process group, so it makes no text twice: a frame's line is decoded from a table
    whose length is that of the function, and costs more than all else here.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename not in _library_files:
            place = id(code), frame.f_lasti
            known = _sites.get(place)
            if known is not None:
                return known[0]
            name, is_own = shown_file(code.co_filename)
            if is_own:
                if len(_sites) >= _MOST_SITES:
                    _sites.clear()
                site = f"{name}:{frame.f_lineno}"
                _sites[place] = site, code  # the code is held, so that no other one gets its id
                return site
            _library_files.add(code.co_filename)
        frame = frame.f_back
    return ""
