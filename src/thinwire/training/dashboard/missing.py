"""What a folder does not tell, and why: so that an empty place on the page is never taken for good news."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.training.dashboard.sources import MOST_RANKS, Sources


def what_is_missing(sources: Sources, told: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence for each section that has less than it could have."""
    found = {}
    is_elastic, is_recorded = told["run"]["is_elastic"], any(one.is_recorded for one in sources.windows.values())
    if not sources.replicas:
        found["curves"] = "No metrics-replica-N.jsonl yet: no replica has written a line about its steps."
    elif is_elastic:
        found["curves"] = (
            "Loss and throughput of replicas on other hosts stand in the folders of the run on those hosts."
        )
    if not sources.links:
        found["links"] = "No transfers-replica-N.jsonl or records-rank-N.jsonl with transfers yet."
    elif is_elastic:
        found["links"] = "Links between other hosts stand in the folders of the run on those hosts."
    if told["matrix"] is None:
        found["matrix"] = _no_matrix(sources, is_elastic=is_elastic)
    lanes = told["timeline"]["lanes"] if told["timeline"] else []
    if not lanes:
        found["timeline"] = "No rounds were written down yet."
    elif not is_recorded:
        found["timeline"] = (
            "Drawn from metrics and finished transfers: waiting is known a line of metrics at a time, and shown at its "
            "end; what stands still now cannot be seen."
        )
    told_by = told["findings"]["told_by"]
    if told_by == "nobody":
        found["findings"] = (
            "No findings.jsonl and no records-rank-N.jsonl: nobody judges this run while it goes on. "
            "thinwire diagnose reads what is there."
        )
    elif told_by == "page":
        found["findings"] = "Judged by this page from the latest records; the run itself wrote no findings.jsonl."
    if not told["actions"]["is_there"]:
        found["actions"] = "No actions.jsonl: nothing acts on findings in this run, or nothing was done yet."
    if told["downtime"] is None:
        found["downtime"] = "No downtime.json: lost time is not accounted in this run, or not yet."
    if sources.num_left_out:
        found["replicas"] = f"Files of {sources.num_left_out} more ranks are there; this page follows {MOST_RANKS}."
    return found


def _no_matrix(sources: Sources, *, is_elastic: bool) -> str:
    if is_elastic and not any(one.is_recorded for one in sources.windows.values()):
        return (
            "Replicas of an elastic run fetch each other's parts, and each host's folder holds one end only; "
            "a link's own time needs both."
        )
    return "A link is shown when both ends of several of its messages are known."
