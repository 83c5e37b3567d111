"""Self-test of the lab: tries what this machine can shape, and measures it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.errors import LabError
from thinwire.lab.lab import TOOLS, Lab, check_machine
from thinwire.lab.settings import Link
from thinwire.lab.traffic_probe import measure_delays, measure_rate
from thinwire.units import format_rate, format_seconds

RATE_TOLERANCE = 0.05
_RATE_BITS_PER_S = 20e6
_LINK = Link(latency_s=0.02, jitter_s=0.002, loss=0.02)
_DELAY_TOLERANCE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class LabCheck:
    """One thing that was tried.

    Attributes:
        name: What.
        is_ok: Whether it works.
        detail: What was found.
        remedy: What to do where it does not work.
    """

    name: str
    is_ok: bool
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Write it as plain values."""
        return asdict(self)


def examine() -> Iterator[LabCheck]:
    """Try what a lab needs, one thing after the other; the first three are needed by all that follow."""
    try:
        check_machine()
    except LabError as error:
        yield LabCheck(name="programs", is_ok=False, detail=str(error), remedy="see the text")
        return
    tools = ", ".join(str(shutil.which(tool)) for tool in TOOLS)
    yield LabCheck(name="programs", is_ok=True, detail=f"{sys.platform}; {tools}")
    for name, attempt in (("hosts", _try_hosts), ("rates", _try_rates), ("links", _try_links), ("delays", _try_delays)):
        check = _tried(name, attempt)
        yield check
        if name == "hosts" and not check.is_ok:
            return


def _tried(name: str, attempt: Callable[[], tuple[bool, str]]) -> LabCheck:
    try:
        is_ok, detail = attempt()
    except (LabError, TimeoutError) as error:
        text, _, remedy = str(error).partition("; ")
        return LabCheck(name=name, is_ok=False, detail=text, remedy=remedy or "see the text")
    remedy = "" if is_ok else "close what else runs on this machine, and try again"
    return LabCheck(name=name, is_ok=is_ok, detail=detail, remedy=remedy)


def _try_hosts() -> tuple[bool, str]:
    with Lab(hosts=2) as lab:
        results = lab.run(["hostname"], deadline_s=20)
        names = [result.stdout.strip() for result in results]
        rate = measure_rate(lab, 0, 1, seconds=0.5)
    return names == ["host-0", "host-1"], f"hosts with names of their own; {format_rate(rate)} without a limit"


def _try_rates() -> tuple[bool, str]:
    with Lab(hosts=2, rate="20mbit") as lab:
        return _compare(measure_rate(lab, 0, 1))


def _try_links() -> tuple[bool, str]:
    with Lab(hosts=2, links={(0, 1): Link(rate_bits_per_s=_RATE_BITS_PER_S)}) as lab:
        return _compare(measure_rate(lab, 0, 1))


def _compare(rate: float) -> tuple[bool, str]:
    is_ok = abs(rate / _RATE_BITS_PER_S - 1) <= RATE_TOLERANCE
    return is_ok, f"{format_rate(rate)} measured where {format_rate(_RATE_BITS_PER_S)} was set"


def _try_delays() -> tuple[bool, str]:
    with Lab(hosts=2, link=_LINK) as lab:
        maker = "the kernel's netem" if lab.delays_by == "netem" else "our relay (this kernel has no netem)"
        found = measure_delays(lab, 0, 1, packets=1000, interval_s=0.002)
    if not found.delays_s:
        return False, f"by {maker}: no packet arrived"
    is_ok = abs(found.median_s - _LINK.latency_s) <= _DELAY_TOLERANCE_S and 0 < found.loss < 3 * _LINK.loss
    return is_ok, (
        f"by {maker}: {format_seconds(found.median_s)} and {found.loss:.1%} lost where "
        f"{format_seconds(_LINK.latency_s)} and {_LINK.loss:.1%} were set"
    )
