"""JSON files of plans and clusters, with errors that name the file and quote short values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.files import write_whole

# A whole number of any length is no float.
MOST = 1e300
MOST_PLAN_BYTES = 16 * 2**20
_LONGEST = 60


def read_json(path: Path, *, most_bytes: int, command: str) -> Any:
    """Read a JSON file of a bounded size.

    Args:
        path: The file.
        most_bytes: A file of more is a mistake, or an attack.
        command: What writes such a file, for the error's text.

    Raises:
        DataError: There is no such file, it is too long, or it is no JSON; names the file and the remedy.
    """
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise DataError(f"{path} has {size} bytes, more than {most_bytes}; is it a file of `{command}`?")
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; `{command}` writes such a file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}; `{command}` writes such a file") from error


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all.

    Raises:
        OSError: The place cannot be written; names it.
    """
    write_whole(path, json.dumps(content, indent=2) + "\n")


def short(found: object) -> str:
    """Return a value for an error's text, cut where it is long.

    Example:
        >>> short("x" * 100)[-8:], short(12)
        ('xxxxx...', '12')
    """
    try:
        text = repr(found)
    except (RecursionError, ValueError):  # nested too deep, or a number with too many digits
        text = f"a {type(found).__name__} of too many parts"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number here")
