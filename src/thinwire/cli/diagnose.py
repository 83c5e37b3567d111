"""`thinwire diagnose FILES...`: findings of a job, from the records of its ranks."""

from __future__ import annotations

import json as json_format
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from thinwire.cli.argument_parsing import argument, command
from thinwire.cli.output import log, printable
from thinwire.errors import refusal

if TYPE_CHECKING:
    from thinwire.monitor.detect.timeline import Job
    from thinwire.monitor.findings import Finding
    from thinwire.runlog.reader import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseOptions:
    """Name the link, sender, receiver, host or rank that is slow, stuck or out of step in a job.

    FILES are the folder of a run, records of thinwire, JSON dumps of torch's Flight Recorder (one file per rank), files
    of NCCL's Inspector, or answers of NCCL's RAS. All files belong to one job.

    The exit code is 0 without a finding and 3 with one. `thinwire diagnose test` tests the links now instead.
    """

    files: tuple[Path, ...] = argument("FILES")
    """Folder or records of one job."""
    json: bool = False
    """Print one JSON object on stdout instead of text."""
    flight_recorder: Path | None = argument("FOLDER", None, is_positional=False)
    """Also write dumps for `python -m torch.distributed.flight_recorder.fr_trace FOLDER`."""
    trace: Path | None = argument("FILE", None, is_positional=False)
    """Also write a timeline of all ranks for ui.perfetto.dev or chrome://tracing."""
    heat: Path | None = argument("FILE", None, is_positional=False)
    """Also write a heat map of each rank's work as one HTML page."""
    heat_of: Literal["all", "compute", "forward", "backward"] = "all"
    """Content of the heat map: whole steps (compute), forward or backward passes, or all three."""
    prometheus: Path | None = argument("FILE", None, is_positional=False)
    """Also write the findings as metrics for node_exporter's textfile collector (a .prom file)."""


FOUND = 3


def main(arguments: Sequence[str]) -> int:
    """Run `thinwire diagnose`.

    Returns:
        0 where nothing is found, 3 where something is, 1 for files that cannot be read, 2 for wrong options.
    """
    if list(arguments[:1]) == ["test"]:
        from thinwire.cli.diagnose_test import main as test

        return test(arguments[1:])
    return _diagnose(arguments)


@command("diagnose", DiagnoseOptions, remedy="give another file or folder")
def _diagnose(options: DiagnoseOptions) -> int:
    from thinwire.monitor.detect.diagnose import findings_of_whole
    from thinwire.monitor.detect.timeline import build
    from thinwire.runlog.run_folder import read_files

    if not options.files:
        raise refusal("FILES are missing", got="nothing", allowed="records of the ranks, or a run's folder",
                      remedy="thinwire diagnose runs/demo")  # fmt: skip
    if options.heat is None and options.heat_of != "all":
        raise refusal("--heat-of needs a file that the heat map goes to", got=f"--heat-of {options.heat_of} alone",
                      allowed="--heat FILE with it", remedy="--heat heat.html")  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        records = read_files(options.files)
    for one in caught:
        log(f"warning: {str(one.message).removeprefix('thinwire: ')}", command="diagnose")
    job = build(records)
    members = records.of_members()
    findings = findings_of_whole(job if members is records else build(members))
    _write_files(options, records, job, findings)
    _print(options, records, findings, job, has_removed=members is not records)
    return FOUND if findings else 0


def _print(
    options: DiagnoseOptions, records: Records, findings: Sequence[Finding], job: Job, *, has_removed: bool
) -> None:  # fmt: skip
    from thinwire.monitor.detect.idle_time import idle_causes, shown_causes
    from thinwire.monitor.findings import report

    idle = shown_causes(job, idle_causes(job))
    # where others said goodbye, or wrote on, the detectors name who did not
    is_cut_off = bool(job.beat_s) and not set(job.beat_s) & set(job.goodbyes)
    unended = sorted(job.beat_s) if is_cut_off else []
    refused = [f"{one.source}:{one.line}: {one.reason}" for one in records.refusals]
    if options.json:
        values = {
            "findings": [finding.to_json() for finding in findings], "idle": [one.to_json() for one in idle],
            "num_records": records.num_records, "num_refused": records.num_refused, "refused": refused,
            "removed": sorted(records.removed), "unended": unended,
        }  # fmt: skip
        print(json_format.dumps(values))
        return
    print(_plain(report(findings)))
    if idle:
        print(_plain("\n".join(["\nidle time by cause:", *(f"  {one}" for one in idle)])))
    remarks = [f"{records.num_records} records, {records.num_refused} lines refused"]
    if unended:
        remarks.append(
            f"the run did not end here: the records of rank{'s' * (len(unended) > 1)} "
            f"{', '.join(map(str, unended[:32]))} stop without a goodbye; they were killed, or go on; compare with the "
            f"folders of the other hosts"
        )
    if has_removed:
        named = ", ".join(map(str, sorted(records.removed)[:32]))
        remarks.append(
            f"not diagnosed, since the run removed them: replicas {named}; the reasons are in findings.jsonl"
        )
    for line in [*remarks, *(f"  refused: {_plain(line)}" for line in refused)]:
        print(line, file=sys.stderr)


def _write_files(options: DiagnoseOptions, records: Records, job: Job, findings: Sequence[Finding]) -> None:
    """Write the files that the options name, beside the text."""
    from thinwire.files import write_whole

    if options.flight_recorder is not None:
        from thinwire.runlog.flight_recorder import write_dumps

        written = write_dumps(records, options.flight_recorder)
        print(f"{len(written)} dumps in {options.flight_recorder}", file=sys.stderr)
    if options.trace is not None:
        from thinwire.monitor.trace import to_trace

        trace = to_trace(job, findings)
        write_whole(options.trace, json_format.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n")
        print(f"{len(trace['traceEvents'])} events in {options.trace}; open it in ui.perfetto.dev", file=sys.stderr)
    if options.heat is not None:
        _write_heat(job, options.heat, kind=options.heat_of)
    if options.prometheus is not None:
        from thinwire.monitor.prometheus_text import findings_text

        write_whole(options.prometheus, findings_text(findings, records, job, at=round(time.time(), 3)))


def _write_heat(job: Job, path: Path, *, kind: str) -> None:
    from thinwire.errors import DataError
    from thinwire.files import write_whole
    from thinwire.monitor.heat import heat_maps, summary_sentence, to_page

    maps = heat_maps(job)
    if kind != "all":
        known = [one.kind for one in maps]
        maps = [one for one in maps if one.kind == kind]
        if not maps:
            timed = f"; timed were: {', '.join(known)}" if known else ""
            raise DataError(f"--heat-of {kind}: no rank timed that{timed}; give --heat-of all")
    write_whole(path, to_page(maps))
    for one in maps:
        print(f"{printable(one.kind)}: {summary_sentence(one)}", file=sys.stderr)
    print(f"{len(maps)} heat map{'s' * (len(maps) != 1)} in {path}; open it in a browser", file=sys.stderr)


def _plain(text: str) -> str:
    """Return a text of several lines without other control characters; see `printable`."""
    return "".join(letter if letter == "\n" or letter.isprintable() else "\ufffd" for letter in text)
