"""Numbers with units: how thinwire reads and writes bytes, rates and times."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from thinwire.errors import refusal

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_TIME_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*"


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes with a decimal prefix and three significant figures.

    Example:
        >>> format_bytes(1_650_000), format_bytes(12)
        ('1.65 MB', '12 B')
    """
    return _format(num_bytes, unit="B")


def format_rate(bits_per_s: float) -> str:
    """Write a rate in bits per second with a decimal prefix.

    Example:
        >>> format_rate(5e6)
        '5.00 Mbit/s'
    """
    return _format(bits_per_s, unit="bit/s")


def format_count(count: float) -> str:
    """Write a plain count with a decimal prefix.

    Example:
        >>> format_count(3_050_000)
        '3.05 M'
    """
    return _format(count, unit="").rstrip()


def format_seconds(seconds: float) -> str:
    """Write a duration, in the unit that fits it once it is rounded: never 60.0 s, nor 1000 us.

    Example:
        >>> format_seconds(0.0042), format_seconds(59.97), format_seconds(3723)
        ('4.2 ms', '1:00 min', '1:02:03')
    """
    if round(seconds * 1e6) < 1000:
        return f"{seconds * 1e6:.0f} us"
    if round(seconds * 1e3, 1) < 1000:
        return f"{seconds * 1e3:.1f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d} min"


def format_moment(at_s: float | None) -> str:
    """Write when something was, with its date, the same for readers everywhere.

    Args:
        at_s: Seconds since 1970; none where unknown. What no calendar holds is unknown too.

    Example:
        >>> format_moment(1e9), format_moment(1e18)
        ('2001-09-09 01:46:40 UTC', 'an unknown time')
    """
    try:
        return "an unknown time" if at_s is None else f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return "an unknown time"


def parse_rate(text: str) -> float:
    """Read a rate such as `5mbit`, `1.5 Gbit/s` or `800k` as bits per second.

    Raises:
        ValueError: The text is no rate, or has no unit: bits and megabits are confused too easily.

    Example:
        >>> parse_rate("5mbit")
        5000000.0
    """
    match = re.fullmatch(_NUMBER + r"([kmgt]?)(?:bit|bits|b)?(?:ps|/s)?\s*", text.lower())
    number = re.fullmatch(_NUMBER, text.lower())
    if match is None or number:
        what = "the rate has no unit" if number else "the rate cannot be read"
        remedy = f"{number.group(1)}mbit" if number else "5mbit"
        raise refusal(what, got=repr(text), allowed="a number with bit, kbit, mbit or gbit", remedy=remedy)
    return float(match.group(1)) * _DECIMAL[match.group(2)]


def parse_bytes(text: str) -> float:
    """Read a size such as `24 GB`, `512MiB` or `1e9` as bytes.

    Raises:
        ValueError: The text is no size.

    Example:
        >>> parse_bytes("24 GB"), parse_bytes("1KiB")
        (24000000000.0, 1024.0)
    """
    match = re.fullmatch(_NUMBER + r"([kmgt]?)(i?)b?\s*", text.lower())
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[match.group(2) if match else ""]
    size = float(match.group(1)) * (1024.0 if match.group(3) else 1000.0) ** power if match else math.inf
    if match is None or (match.group(3) and not match.group(2)) or size == math.inf:
        raise refusal("the size cannot be read", got=repr(text), allowed="a number with B, KB, MB, GB, MiB or GiB",
                      remedy="24GB")  # fmt: skip
    return size


def parse_seconds(text: str) -> float:
    """Read a duration such as `40ms`, `2 s` or `10min` as seconds.

    Raises:
        ValueError: The text is no duration.

    Example:
        >>> parse_seconds("40ms")
        0.04
    """
    match = re.fullmatch(_NUMBER + r"(us|ms|s|min|h)\s*", text.lower())
    if match is None:
        number = re.fullmatch(_NUMBER, text.lower())
        what = "the duration has no unit" if number else "the duration cannot be read"
        remedy = f"{number.group(1)}s" if number else "40ms"
        raise refusal(what, got=repr(text), allowed="a number with us, ms, s, min or h", remedy=remedy)
    return float(match.group(1)) * _TIME_S[match.group(2)]


def _format(value: float, *, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return (
                f"{value / factor:.3g} {prefix}{unit}"
                if value / factor >= 100
                else (f"{value / factor:.{2 if value / factor < 10 else 1}f} {prefix}{unit}")
            )
    return f"{value:.0f} {unit}"
