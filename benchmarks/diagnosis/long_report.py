"""The table of what the long runs of the lab found."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from typing import Any

PLACED = ("right", "ambiguous")
# What a fault is to be told within, one of them: seconds, and rounds that all have finished.
SOON_S, SOON_ROUNDS = 5.0, 5


def report(lines: list[dict[str, Any]], *, is_short: bool = False) -> str:
    """Return tables of Markdown, one for each set of rules that judged; in short ones all from 3 times on is one."""
    rules = list(dict.fromkeys(line["rules"] for line in lines))
    return "\n\n".join(
        f"Rules: {name}\n\n{_table([line for line in lines if line['rules'] == name], is_short)}" for name in rules
    )


def _table(lines: list[dict[str, Any]], is_short: bool) -> str:
    groups: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        for part in line["parts"]:
            name = f"{part['fault']} (two at once)" if len(line["parts"]) > 1 else part["fault"]
            groups[name, min(part["severity"], 3.0) if is_short else part["severity"]].append(part)
    rows = [
        "| fault | severity | struck | told | right | ambiguous | wider | wrong place | wrong kind | missed | "
        "seconds until right: median, 90 % | of them within 5 s or 5 rounds |",
        "| --- " * 12 + "|",
    ]
    for (name, severity), parts in sorted(groups.items()):
        rows.append(f"| {name} | {_severity(severity, is_short)} | {_counts(parts)} |")
    everyone = [(severity, part) for (_, severity), parts in groups.items() for part in parts]
    for title, own in (
        ("hangs, and 3 times and more", [part for severity, part in everyone if severity == 0 or severity >= 3]),
        ("the same without stalls and flapping", [part for severity, part in everyone if _lasts(severity, part)]),
        ("1.5 times", [part for severity, part in everyone if severity == 1.5]),
    ):
        if own:
            rows.append(f"| all: {title} | | {_counts(own)} |")
    return "\n".join([*rows, "", *_sentences(lines)])


def _lasts(severity: float, part: dict[str, Any]) -> bool:
    """Return whether a fault is a hang or a slowdown that lasts: what comes again and again takes several times."""
    return (severity == 0 or severity >= 3) and part["fault"] not in ("stalls", "flapping")


def _severity(severity: float, is_short: bool) -> str:
    return "-" if not severity else "3 to 20 x" if is_short and severity >= 3 else f"{severity:g} x"


def _counts(parts: list[dict[str, Any]]) -> str:
    counts = Counter(part["verdict"] for part in parts)
    placed = [part for part in parts if part["verdict"] in PLACED and part["right_s"] is not None]
    seconds = sorted(part["right_s"] for part in placed)
    soon = sum(part["right_s"] <= SOON_S or part.get("right_rounds", SOON_ROUNDS + 1) <= SOON_ROUNDS for part in placed)
    late = seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))] if seconds else 0.0
    told = f"{statistics.median(seconds):.1f}, {late:.1f}" if seconds else "-"
    names = ("right", "ambiguous", "wider place", "wrong place", "wrong kind", "missed")
    numbers = [len(parts), sum(part["told_s"] is not None for part in parts), *(counts[name] for name in names)]
    return " | ".join([*map(str, numbers), told, f"{soon} of {len(placed)}" if placed else "-"])


def _sentences(lines: list[dict[str, Any]]) -> list[str]:
    alarms = [alarm for line in lines for alarm in line["false_alarms"]]
    rounds, clean_s = sum(line["clean_rounds"] for line in lines), sum(line["clean_s"] for line in lines)
    struck = [line for line in lines if line["parts"]]
    over = sorted(line["over_s"] for line in struck if line["over_s"] is not None)
    fresh = sum(len(line["after"]) for line in struck)
    loads = sorted(line["load"] for line in lines)
    found = [
        f"{len(struck)} scenarios. False alarms: {len(alarms)} in {rounds} rounds ({clean_s:.0f} s) without a fault"
        + (
            f" ({', '.join(f'{name} x {count}' for name, count in Counter(alarms).most_common(8))})." if alarms else "."
        ),
        f"Something new was told {fresh} times in the seconds after a fault was taken back.",
    ]
    if over:
        found.append(
            f"Over within 15 s of the end of the fault: {len(over)} of {len(struck)}, median "
            f"{statistics.median(over):.1f} s."
        )
    if loads:
        found.append(f"Load average {loads[0]} to {loads[-1]}, median {statistics.median(loads)}.")
    return found
