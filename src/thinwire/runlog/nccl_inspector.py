"""Files of NVIDIA's NCCL Inspector, a profiler plugin that writes a line of JSON for each operation that has ended.

One file a process, `HOST-pidPID.log`, in the folder NCCL_INSPECTOR_DUMP_DIR. What is written is how long a rank's
kernel was in an operation, waiting for others included; with NCCL_INSPECTOR_DUMP_VERBOSE also when it began. An
operation that hangs is not there, nor are those of less than 8 KiB (NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES), those that
fell out of a ring of 1,024 between two dumps, and what had ended since the last dump when a communicator was
destroyed: so gaps and ends that differ a little are no fault.

Reference:
    github.com/NVIDIA/nccl, plugins/profiler/inspector/inspector_json.cc at 5067397c (NCCL 2.30.7, format v4.0, the same
    since 2.28.3). `coll_sn` counts each kind by itself (src/plugin/profiler.cc), `p2p_sn` is a rank's own count
    (inspector_plugin.cc), and the hash is cut to 16 characters (NCCL_COMM_HASH_LENGTH, inspector.h).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from thinwire.errors import DataError, warn_untested
from thinwire.runlog.nccl_values import Timing
from thinwire.runlog.reader import Records, numbered_lines, parse_object, short, text, whole
from thinwire.runlog.records import MOST_RANKS

_MARK = b'"inspector_output_format_version"'
_VERSION = re.compile(r"v4(\.\d{1,6})?")
# A year in microseconds for an operation, and the year 33658 for a clock: more is no time.
_MOST_EXEC_US, _MOST_CLOCK_US = 31_557_600 * 10**6, 10**18
_MOST_CHANNELS = 1024


def is_inspector(first: bytes) -> bool:
    """Return whether a file that begins so is one of the Inspector.

    Example:
        >>> is_inspector(b'{"header":{"id":"0x1"},"metadata":{"inspector_output_format_version":"v4.0"')
        True
    """
    return _MARK in first


def read_inspector(records: Records, path: Path) -> None:
    """Read one file; a bad line never ends the reading.

    Raises:
        DataError: The file cannot be read, or all of it is of another version than v4.
    """
    warn_untested("nccl inspector")
    version, num_taken = "", 0
    for number, line in numbered_lines(path):
        records.num_lines += 1
        try:
            told = parse_object(line)
            version = version or _other_version(told)
            records.check_room()
            records.nccl.timings.append(timing_of(told))
            num_taken += 1
        except (ValueError, KeyError, TypeError) as error:
            records.refuse(path.name, number, str(error) if type(error) is ValueError else "fields are missing")
    if version and not num_taken:
        raise DataError(f"{path} is written by an Inspector of format {version}; this thinwire reads v4")


def _other_version(told: dict[str, Any]) -> str:
    found = _part(told, "metadata").get("inspector_output_format_version")
    return "" if isinstance(found, str) and _VERSION.fullmatch(found) else short(found)


def timing_of(told: dict[str, Any]) -> Timing:
    """Return the timing in one line's object.

    Raises:
        ValueError: It holds what cannot be.
        KeyError: A field is missing.
    """
    header, metadata = _part(told, "header"), _part(told, "metadata")
    if other := _other_version(told):
        raise ValueError(f"another version than v4: {other}")
    name = "coll" if "coll_perf" in told else "p2p"
    own = _part(told, f"{name}_perf")
    num_ranks = whole("n_ranks", header["n_ranks"], least=1, most=MOST_RANKS)
    written_us = whole("dump_timestamp_us", metadata["dump_timestamp_us"], most=_MOST_CLOCK_US)
    return Timing(
        communicator=text("id", header["id"]), rank=whole("rank", header["rank"], most=num_ranks - 1),
        num_ranks=num_ranks, host=text("hostname", metadata["hostname"]), pid=whole("pid", metadata["pid"]),
        kind=text(name, own[name]), sequence=whole(f"{name}_sn", own[f"{name}_sn"]),
        num_bytes=whole(f"{name}_msg_size_bytes", own[f"{name}_msg_size_bytes"]),
        time_s=whole(f"{name}_exec_time_us", own[f"{name}_exec_time_us"], most=_MOST_EXEC_US) / 1e6,
        source=text(f"{name}_timing_source", own.get(f"{name}_timing_source", "")),
        at_s=_begun_us(own, name, written_us) / 1e6,
        peer=whole("p2p_peer", own["p2p_peer"], most=num_ranks - 1) if name == "p2p" else -1,
    )  # fmt: skip


def _begun_us(own: dict[str, Any], name: str, written_us: int) -> int:
    """Return when the first channel's kernel began, where a verbose line tells it, else when the line was written."""
    if "event_trace_ts" not in own:
        return written_us
    trace = _part(own, "event_trace_ts")
    channels = trace["kernel_events"]
    if not isinstance(channels, list) or len(channels) > _MOST_CHANNELS:
        raise ValueError(f"kernel_events is no list of at most {_MOST_CHANNELS}: {short(channels)}")
    begun = [whole(f"{name}_start_ts", trace[f"{name}_start_ts"], most=_MOST_CLOCK_US)]
    for channel in channels:
        if not isinstance(channel, dict):
            raise ValueError(f"an event of a kernel is no JSON object: {short(channel)}")
        begun.append(whole("kernel_start_ts", channel["kernel_start_ts"], most=_MOST_CLOCK_US))
    # a channel without a begin has 0
    return min((one for one in begun[1:] if one), default=0) or begun[0] or written_us


def _part(told: dict[str, Any], name: str) -> dict[str, Any]:
    found = told[name]
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no JSON object: {short(found)}")
    return found
