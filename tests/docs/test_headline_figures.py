"""The headline figures of README and docs are those of `benchmarks/results/`.

A claim is a pattern in a page and the values that the stored results give for its groups. It fails where the page or
the results change alone, and where the sentence is gone. Whitespace of a page counts as one blank.
"""

from __future__ import annotations

import json
import re
import runpy
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest
from markdown_pages import ROOT

from tests.hostile_inputs import SENDERS
from thinwire.runlog.run_numbers import format_times
from thinwire.units import format_bytes
from thinwire.wire_benchmark.result_table import ResultRow, rows
from thinwire.wire_benchmark.runner import BenchWire, summary

RESULTS = ROOT / "benchmarks" / "results"
FIVE, ONE, NO_LIMIT = BenchWire(rate_bits_per_s=5e6), BenchWire(rate_bits_per_s=1e6), BenchWire()
DELAYED = BenchWire(rate_bits_per_s=20e6, latency_s=0.04, jitter_s=0.005, loss=0.001)
# Repeats from this one on were measured on other machines, and have a table of their own.
OTHER_DAY = 3


class Results:
    """The stored results of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def lines(self, name: str) -> list[Any]:
        """Return the objects of a file, one a line."""
        return [json.loads(line) for line in (self._folder / name).read_text().splitlines()]

    def whole(self, name: str) -> Any:
        """Return the one object of a file."""
        return json.loads((self._folder / name).read_text())


Values = Callable[[Results], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Figures of one place in a page.

    Attributes:
        page: Its path from the root.
        pattern: A regular expression that matches there and nowhere else in the page; its groups are the figures.
        values: What the groups must be.
    """

    page: str
    pattern: str
    values: Values

    def groups(self, text: str) -> tuple[str, ...]:
        """Return the figures of a page's text."""
        found = list(re.finditer(self.pattern, " ".join(text.split())))
        assert len(found) == 1, f"{self.page} has {len(found)} places like {self.pattern!r}; bring the claim up to date"
        return found[0].groups()


def ladder(results: Results, *, rung: str = "A") -> list[Any]:
    """Return the rows of the quality ladder's report."""
    folder = str(ROOT / "benchmarks" / "quality")
    sys.path.insert(0, folder)
    try:
        report = runpy.run_path(f"{folder}/report.py")
    finally:
        sys.path.remove(folder)
        for name in ("rungs", "ladder"):
            sys.modules.pop(name, None)
    lines = {report["key_of"](line): line for line in results.lines("quality.jsonl")}
    return [report["table"], *report["rows"](report["RUNGS"][rung], lines)]


def bytes_and_losses(results: Results) -> list[str]:
    _, *found = ladder(results)
    dense, mine = (next(row for row in found if row.method == name) for name in ("data-parallel", "iso-loco"))
    assert (mine.replicas, mine.seeds, dense.seeds) == (2, 3, 3)
    return [
        format_bytes(mine.bytes_per_replica), format_bytes(dense.bytes_per_replica),
        format_times(dense.bytes_per_replica / mine.bytes_per_replica), f"{-mine.gap_percent:.2f}",
        f"{mine.loss:.4f}", f"{dense.loss:.4f}",
    ]  # fmt: skip


def with_muon(results: Results) -> list[str]:
    _, *found = ladder(results)
    names = ("data-parallel, Muon", "iso-loco, Muon inside")
    dense, mine = (next(row.loss for row in found if row.method == name) for name in names)
    return [f"{dense:.3f}", f"{100 * (mine / dense - 1):.1f}", f"{mine:.3f}"]


def with_a_mean(results: Results) -> list[str]:
    _, *found = ladder(results)
    mine = next(row for row in found if row.method == "muloco, H 16, mean of 16 values" and row.replicas == 2)
    return [f"{mine.loss:.4f}", format_bytes(mine.bytes_per_replica).removesuffix(" MB")]


def gaps(results: Results) -> list[str]:
    _, *found = ladder(results)
    return [
        f"{next(row.gap_percent for row in found if (row.method, row.replicas) == (name, count)):+.2f}"
        for count in (2, 4, 8) for name in ("iso-loco", "streaming-diloco")
    ]  # fmt: skip


def wire_rows(results: Results) -> dict[tuple[BenchWire, str], ResultRow]:
    found = [one for one in map(summary, results.lines("wire.jsonl")) if one["repeat"] < OTHER_DAY]
    return {(row.wire, row.contender): row for row in rows(found) if row.num_hosts == 2}


def shares(results: Results, *wanted: tuple[BenchWire, str], form: str = "{:.3f}", factor: float = 1.0) -> list[str]:
    found = wire_rows(results)
    return [form.format(factor * statistics.median(found[one].shares)) for one in wanted]


def spread_of_shares(results: Results, wire: BenchWire) -> list[str]:
    values = wire_rows(results)[wire, "streaming-e3m0"].shares
    assert len(values) == 3
    return [f"{value:.3f}" for value in (statistics.median(values), min(values), max(values))]


def chaos(results: Results) -> tuple[dict[str, Any], dict[str, Any]]:
    short, long = results.lines("chaos.jsonl")[-2:]
    assert (short["options"]["minutes"], long["options"]["minutes"]) == (3.0, 20.0)
    return short, long


def of_chaos(value: Callable[[dict[str, Any]], Sequence[str]]) -> Values:
    """Return the values of both runs, one after the other."""
    return lambda results: [text for run in chaos(results) for text in value(run)]


def rejoins(number: int, kind: str, *names: tuple[str, str]) -> Values:
    """Return values of a line of `rejoin.jsonl`, each rounded to a place such as `0.1`."""

    def rounded(value: float, place: str) -> str:
        return str(Decimal(str(value)).quantize(Decimal(place), ROUND_HALF_UP))

    return lambda results: [rounded(results.lines("rejoin.jsonl")[number][kind][name], place) for name, place in names]


def own_pace(results: Results) -> list[str]:
    found = [line["with"] for line in results.lines("elastic_own_pace.jsonl")]
    least, most = (100 * function(one["share"] for one in found) for function in (min, max))
    return [f"{least:.0f}", f"{most:.0f}", f"{100 * max(one['slowdown'] for one in found):.0f}"]


def slow_wire(results: Results) -> list[str]:
    lines = [line for line in results.lines("elastic_sites.jsonl") if line.get("hosts") == 3]
    direct, around = ([line for line in lines if line["with_detours"] is flag] for flag in (False, True))
    return [
        f"{line[name]['median']:.2f}"
        for these, name in ((around, "slow_s"), (direct, "slow_s"), (around, "healthy_s")) for line in these
    ]  # fmt: skip


def site_row(replicas: str) -> Values:
    def values(results: Results) -> list[str]:
        lines = [line for line in results.lines("elastic_sites.jsonl") if line.get("replicas") == replicas]
        alone, once = (next(line for line in lines if line["with_sites"] is flag) for flag in (False, True))
        names = ("megabytes_a_round", "seconds_a_round")
        return [f"{line[name]:.2f}" for name in names for line in (alone, once)]

    return values


def memory_row(method: str) -> Values:
    def values(results: Results) -> list[str]:
        row = next(row for row in results.whole("memory.json")["rows"] if row["method"] == method)
        sizes = [f"{row[name] / 1e6:.0f}" for name in ("median_bytes", "min_bytes", "max_bytes")]
        return [*sizes, f"{row['copies_over_inner']:.2f}"]

    return values


def share_of_codec(interval: int) -> Values:
    def values(results: Results) -> list[str]:
        shares = results.whole("codec_share.json")["percent_of_interval"].values()
        return [f"{value:.2f}" for found in (share[str(interval)] for share in shares) for value in found]

    return values


def at_h_100(results: Results) -> list[str]:
    found = []
    for name in ("streaming-e3m0", "all-reduce-bf16"):
        (line,) = (
            line for line in results.lines("wire-h100.jsonl")
            if line["cell"]["contender"] == name and line["cell"]["wire"]["rate_bits_per_s"]
        )  # fmt: skip
        sent = statistics.fmean(one["sent_bytes_since_gate"] for one in line["kernel"])
        payload = statistics.fmean(host["gate_payload_bytes_sent"] for host in line["hosts"])
        form = "{:.2f}" if sent < 1e7 else "{:.1f}"
        found += [form.format(sent / 1e6), form.format(payload / 1e6), f"{sent / payload:.3f}"]
    return found


NUMBER = r"([+-]?[\d,]+(?:\.\d+)?)"
SPREAD = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"
PERCENT = rf"{NUMBER} % \({NUMBER} to {NUMBER}\)"
BENCHMARKS, COSTS, ELASTIC_RUNS = "docs/benchmarks.md", "docs/benchmarks/costs.md", "docs/benchmarks/elastic.md"
FUZZING, ELASTIC = "docs/benchmarks/fuzzing.md", "docs/explanation/elastic-rounds.md"

CLAIMS = {
    "README: bytes and losses": Claim(
        page="README.md",
        pattern=rf"IsoLoCo, sent (\S+ MB) a replica; an all-reduce at every step takes (\S+ GB): (\d+) times as much\. "
        rf"The loss at equal tokens is {NUMBER} % lower \({NUMBER} against {NUMBER} ",
        values=bytes_and_losses,
    ),
    "README: with Muon": Claim(
        page="README.md",
        pattern=rf"on both sides, data-parallel training ends at {NUMBER} and IsoLoCo {NUMBER} % higher, at {NUMBER}\.",
        values=with_muon,
    ),
    "loss: a mean of global values": Claim(
        page=BENCHMARKS,
        pattern=rf"at the rate of data-parallel Muon, ends at {NUMBER} with it for {NUMBER} MB",
        values=with_a_mean,
    ),
    "choosing: gaps of the default": Claim(
        page="docs/choosing.md",
        pattern=r"\| --- \| --- \| --- \| " + r" ".join(rf"\| {n} \| {NUMBER} % \| {NUMBER} % \|" for n in (2, 4, 8)),
        values=gaps,
    ),
    "README: speed at 5 Mbit/s": Claim(
        page="README.md",
        pattern=r"at 5 Mbit/s .*? keeps (\d+) % of its speed, PowerSGD (\d+) %, DistributedDataParallel (\d+) %",
        values=lambda results: shares(
            results, *((FIVE, name) for name in ("streaming-e3m0", "ddp-powersgd", "ddp")), form="{:.0f}", factor=100
        ),
    ),
    "wire: Streaming DiLoCo at 5 Mbit/s": Claim(
        page=BENCHMARKS,
        pattern=rf"Streaming DiLoCo with E3M0 keeps {NUMBER} \({NUMBER} to {NUMBER}, three repeats\) of its speed at 5",
        values=lambda results: spread_of_shares(results, FIVE),
    ),
    "wire: the others at 5 Mbit/s": Claim(
        page=BENCHMARKS,
        pattern=rf"There an all-reduce keeps {NUMBER}, PyTorch's DDP {NUMBER}, DDP with PowerSGD {NUMBER}, "
        rf"DiLoCo {NUMBER} and torchft's DiLoCo with fragments {NUMBER}\.",
        values=lambda results: [
            *shares(results, (FIVE, "all-reduce"), (FIVE, "ddp")),
            *shares(
                results, *((FIVE, name) for name in ("ddp-powersgd", "diloco", "torchft-diloco")), form="{:.2f}"
            ),
        ],
    ),
    "wire: with latency and loss": Claim(
        page=BENCHMARKS,
        pattern=rf"at 20 Mbit/s it keeps {NUMBER} \({NUMBER} to {NUMBER}, three repeats\)",
        values=lambda results: spread_of_shares(results, DELAYED),
    ),
    "wire: at 1 Mbit/s": Claim(
        page=BENCHMARKS,
        pattern=rf"1\.9 times as long as its steps, it keeps {NUMBER}, PowerSGD {NUMBER}, torchft {NUMBER} "
        rf"and DDP {NUMBER} ",
        values=lambda results: shares(
            results, *((ONE, name) for name in ("streaming-e3m0", "ddp-powersgd", "torchft-diloco", "ddp"))
        ),
    ),
    "wire: what each part contributes": Claim(
        page=BENCHMARKS,
        pattern=rf"from DiLoCo's {NUMBER}: fragments alone {NUMBER}, overlap alone {NUMBER}, E3M0 alone {NUMBER}; "
        rf"fragments and overlap {NUMBER}; all three {NUMBER}\.",
        values=lambda results: shares(
            results,
            *(
                (FIVE, name)
                for name in (
                    "diloco", "fragments-only", "overlap-only", "diloco-e3m0", "streaming-dense", "streaming-e3m0",
                )
            ),
        ),
    ),
    **{
        f"memory: {method}": Claim(
            page=COSTS, pattern=rf"\| {name} \| {SPREAD} \| {NUMBER} \|", values=memory_row(method)
        )
        for method, name in (
            ("all-reduce", "all-reduce"), ("diloco", "diloco"),
            ("streaming-diloco, dense", "streaming-diloco, float32"), ("streaming-diloco", "streaming-diloco, E3M0"),
        )
    },
    **{
        f"codec: share at H {interval}": Claim(
            page=COSTS, pattern=rf"\| {interval} \| {PERCENT} \| {PERCENT} \|", values=share_of_codec(interval)
        )
        for interval in (10, 30, 100)
    },
    "wire: bytes at H 100": Claim(
        page=BENCHMARKS,
        pattern=rf"Four exchanges took {NUMBER} MB for {NUMBER} MB of payload, {NUMBER} to 1\. "
        rf"The all-reduce took {NUMBER} MB for {NUMBER} MB in 23 steps, {NUMBER} to 1\.",
        values=at_h_100,
    ),
    "chaos: replicas that differ": Claim(
        page=ELASTIC_RUNS,
        pattern=r"rounds in which replicas differ \| (\d+) of (\d+) \| (\d+) of (\d+) \|",
        values=of_chaos(lambda run: [str(len(run["desyncs"])), str(run["rounds_compared"])]),
    ),
    "chaos: times without a round": Claim(
        page=ELASTIC_RUNS,
        pattern=rf"30 s without a round \| (\d+), the longest {NUMBER} s \| (\d+), the longest {NUMBER} s \|",
        values=of_chaos(lambda run: [str(len(run["hangs"])), f"{run['longest_gap_s']:.1f}"]),
    ),
    "chaos: goodput": Claim(
        page=ELASTIC_RUNS,
        pattern=rf"that the replicas there could have trained \| {NUMBER} \| {NUMBER} \|",
        values=of_chaos(lambda run: [f"{run['goodput']:.3f}"]),
    ),
    "chaos: coming back with its own state": Claim(
        page=ELASTIC_RUNS,
        pattern=rf"its own state \| {NUMBER} s \| {NUMBER} s \({NUMBER} to {NUMBER}\) \| (\d) of (\d) \|",
        values=rejoins(
            1, "own", ("live_median_s", "0.01"), ("median_s", "0.1"), ("least_s", "0.1"), ("most_s", "0.1"),
            ("in_time", "1"), ("n", "1"),
        ),
    ),
    **{
        f"sites: {replicas}": Claim(
            page=ELASTIC_RUNS,
            pattern=rf"\| {replicas[0]} \+ {replicas[0]} \| \S+ MB \| {NUMBER} \| {NUMBER} \| {NUMBER} \| {NUMBER} \|",
            values=site_row(replicas),
        )
        for replicas in ("2+2", "3+3")
    },
    "elastic: own pace": Claim(
        page=ELASTIC,
        pattern=r"slow replicas were in (\d+) to (\d+) % of the means and the fast ones took at most (\d+) % longer",
        values=own_pace,
    ),
    "elastic: a slow wire": Claim(
        page=ELASTIC,
        pattern=rf"a round took \[{NUMBER} and {NUMBER} s in two runs\]\S* Without detours it took {NUMBER} and "
        rf"{NUMBER} s, and before the link was slow {NUMBER} and {NUMBER} s",
        values=slow_wire,
    ),
    "elastic: chaos": Claim(
        page=ELASTIC,
        pattern=r"the rest in any of (\d+) rounds\. - No time without rounds was longer than (\d+) s, and (\d+) % of",
        values=lambda results: [
            str(chaos(results)[1]["rounds_compared"]), f"{chaos(results)[1]['longest_gap_s']:.0f}",
            f"{100 * chaos(results)[1]['goodput']:.0f}",
        ],
    ),
    "elastic: coming back": Claim(
        page=ELASTIC,
        pattern=r"in a round again (\d+) s later with its own state, and (\d+) s later if it fetches "
        r"one over 20 Mbit/s",
        values=lambda results: [
            *rejoins(1, "own", ("median_s", "1"))(results),
            *rejoins(1, "fetched", ("median_s", "1"))(results),
        ],
    ),
    "elastic: coming back with a large state": Claim(
        page=ELASTIC,
        pattern=r"parameters and 50 Mbit/s it is (\d+) s and (\d+) s \(medians of two",
        values=lambda results: [
            *rejoins(2, "own", ("median_s", "1"))(results),
            *rejoins(2, "fetched", ("median_s", "1"))(results),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAIMS)
def test_a_headline_figure_is_that_of_the_stored_results(name: str) -> None:
    claim = CLAIMS[name]
    assert claim.groups((ROOT / claim.page).read_text()) == tuple(claim.values(Results(RESULTS)))


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_reads_every_figure_from_the_page_and_from_stored_results(name: str, tmp_path: Path) -> None:
    claim = CLAIMS[name]
    text = " ".join((ROOT / claim.page).read_text().split())
    (found,) = re.finditer(claim.pattern, text)
    for number in range(1, len(found.groups()) + 1):
        changed = found[number].replace(found[number][-1], "9" if found[number][-1] != "9" else "8")
        if re.search(r"\d$", found[number]):
            other = text[: found.start(number)] + changed + text[found.end(number) :]
            assert claim.groups(other) != found.groups()
    with pytest.raises(FileNotFoundError):
        claim.values(Results(tmp_path))


def test_the_table_of_losses_is_that_of_the_stored_results() -> None:
    table, *found = ladder(Results(RESULTS))
    assert all(row.is_tuned for row in found), "a best learning rate lies at the edge of its grid"
    assert table(found) in (ROOT / BENCHMARKS).read_text()


def test_the_table_of_fuzzed_parsers_is_that_of_the_stored_results() -> None:
    """The rows name every target, and what the docs say of all of them holds."""
    fuzz = runpy.run_path(str(ROOT / "benchmarks" / "fuzz.py"))
    lines = Results(RESULTS).lines("fuzz.jsonl")
    assert fuzz["table"](lines, SENDERS) in (ROOT / FUZZING).read_text()
    latest = {line["target"]: line for line in lines}
    for name, (_, _, is_authenticated) in SENDERS.items():
        assert is_authenticated or latest[name]["inputs"] >= 1_000_000, name
        assert name not in latest or latest[name]["result"] == "ok", name
