"""Data gaps of a run's folder and their reasons, so that an empty place is not taken for good news."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.monitor.dashboard.sources import MOST_RANKS, Sources

_NO_METRICS = "No metrics-replica-N.jsonl yet: no replica has written a line about its steps."
_OTHER_HOSTS = "Loss and throughput of replicas on other hosts stand in the folders of the run on those hosts."
_NO_LINKS = "No transfers-replica-N.jsonl or records-rank-N.jsonl with transfers yet."
_OTHER_LINKS = "Links between other hosts stand in the folders of the run on those hosts."
_ONE_END = (
    "Replicas of an elastic run fetch each other's parts, and each host's folder holds one end only; a link's own time "
    "needs both."
)
_FEW_MESSAGES = (
    "A link is shown when both ends of several of its messages are known, or what its connections did between hosts."
)
_NO_WORK = "No rank has told what it computes yet."
_NO_ROUNDS = "No rounds were written down yet."
_FROM_METRICS = (
    "Drawn from metrics and finished transfers: waiting is known a line of metrics at a time, and shown at its end; "
    "what stands still now cannot be seen."
)
_NOBODY = (
    "No findings.jsonl and no records-rank-N.jsonl: nobody judges this run while it goes on. thinwire diagnose reads "
    "what is there."
)
_PAGE = "Judged from the latest records by who shows them; the run itself wrote no findings.jsonl."
_RECORDS = "Judged from all records, as `thinwire diagnose` does; what is over is from findings.jsonl."
_NO_ACTIONS = "No actions.jsonl: nothing acts on findings in this run, or nothing was done yet."
_NO_DOWNTIME = "No downtime.json: lost time is not accounted in this run, or not yet."


def what_is_missing(sources: Sources, told: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence for each section that has less than it could have."""
    is_elastic, is_recorded = told["run"]["is_elastic"], any(one.is_recorded for one in sources.windows.values())
    left_out = f"Files of {sources.num_left_out} more ranks are there; {MOST_RANKS} are followed."
    no_matrix = _ONE_END if is_elastic and not is_recorded else _FEW_MESSAGES
    has_lanes = bool(told["timeline"] and told["timeline"]["lanes"])
    found = {
        "replicas": left_out if sources.num_left_out else "",
        "curves": _first(not sources.replicas, _NO_METRICS, is_elastic, _OTHER_HOSTS),
        "links": _first(not sources.links, _NO_LINKS, is_elastic, _OTHER_LINKS),
        "matrix": _first(told["matrix"] is None, no_matrix),
        "heat": _first(not told["heat"], _NO_WORK),
        "timeline": _first(not has_lanes, _NO_ROUNDS, not is_recorded, _FROM_METRICS),
        "findings": {"nobody": _NOBODY, "page": _PAGE, "records": _RECORDS}.get(told["findings"]["told_by"], ""),
        "actions": _first(not told["actions"]["is_there"], _NO_ACTIONS),
        "downtime": _first(told["downtime"] is None, _NO_DOWNTIME),
    }
    return {name: words for name, words in found.items() if words}


def _first(is_one: bool, one: str, is_other: bool = False, other: str = "") -> str:
    """Return the words of the first that is so, or nothing."""
    return one if is_one else other if is_other else ""
