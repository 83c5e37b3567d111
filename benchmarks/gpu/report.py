"""Table of docs/benchmarks.md from the results of `run.py`.

python benchmarks/gpu/report.py                      # of the stored results
python benchmarks/gpu/report.py DIR/results.jsonl    # of a run of your own
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "gpu.jsonl"
MISSING = "not run yet"
Lines = dict[tuple[str, str], dict[str, Any]]


def read(path: Path) -> Lines:
    """Return the last line of each part and key; one that is done stays."""
    found: Lines = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        line = json.loads(text)
        if line["state"] == "done" or found.get((line["part"], line["key"]), line)["state"] != "done":
            found[line["part"], line["key"]] = line
    return found


def rows(lines: Lines) -> list[tuple[str, str, str]]:
    """Return part, what was measured, and the value."""

    def row(part: str, key: str, what: str, text: Callable[[dict[str, Any]], str]) -> tuple[str, str, str]:
        line = lines.get((part, key))
        return part, what, MISSING if line is None else "failed" if line["state"] != "done" else text(line)

    own = lines.get(("wire", "150m none"), {})
    share = "encode, decode, share of a copy's rate"
    found = [
        ("exact", "codecs: same bytes and decoded bits as on a CPU", how_many(lines, "codec ")),
        row("exact", "activation codes", "codes of activations, learned widths, a delta memory: same bytes", yes),
        row("exact", "integer products", "IsoLoCo's spectrum and products by integers: same bits", yes),
        ("exact", "methods, ten steps: replicas and a resumed run agree bit for bit", how_many(lines, "method ")),
        ("exact", "methods: largest distance from the CPU, as a share of the way moved", largest_distance(lines)),
        row("exact", "kill and resume", "`thinwire train` killed and resumed: same bits", yes),
    ]
    for name in ("e3m0", "block-int8", "block-int4", "block-2bit"):
        for numel, words in ((100_000_000, "1e8"), (1_000_000_000, "1e9")):
            found.append(row("codec", f"{name} {numel}", f"`{name}`, {words} elements: {share}", shares))
    found.append(row("codec", "top-k 100000000", f"`top-k`, 1e8 elements: {share}", shares))
    for name in ("150m", "1b"):
        key = f"wrapped {name}"
        found += [
            row("step", key, f"{name}: wrapped step between rounds, and with rounds in flight", overheads),
            row("step", key, f"{name}: a launch or an apply adds, median", of_a_round),
            row("step", key, f"{name}: all steps of H 30, rounds included", lambda x: f"{x['whole_overhead']:+.0%}"),
            row("step", key, f"{name}: peak memory, measured and planned", memory),
        ]
    found.append(row("step", "copies", "copies to the GPU from pinned and from pageable memory", copies))
    for rate, words in (("1gbit", "1 Gbit/s"), ("100mbit", "100 Mbit/s")):
        what = f"150m, two processes, {words}: share of own speed"
        found.append(row("wire", f"150m {rate}", what, lambda x: f"{own['train_s'] / x['train_s']:.2f}"))
    return [
        *found,
        row("watch", "recorded", "one rank on nccl, each call has its end: a step without and with recording", watched),
        row("watch", "dump", "Flight Recorder's dump of a forced time-out", lambda x: f"{len(x['findings'])} findings"),
        row(
            "watch",
            "two ranks",
            "two ranks on one GPU of one host",
            lambda x: "works" if x["works"] else "refused by nccl",
        ),
        row("inside", "fsdp2", "FSDP2 of one rank: largest difference", lambda x: f"{x['largest_difference']:g}"),
        row("inside", "generate", "`thinwire generate`: same text as on a CPU", lambda x: str(x["same_text"])),
        row("inside", "planned step", "planned step of 400m from the speed of 150m", lambda x: f"{x['error']:+.0%}"),
        *(
            row("ranks", layout, f"two ranks, {layout}: losses beside one rank's", distance)
            for layout in (
                "sharded",
                "tensors",
                "sequences",
                "pipeline",
                "pipeline over the wire",
                "pipeline in 8 and 4 bits",
            )
        ),
        row("ranks", "experts", "two ranks, experts of a layer: output and gradients beside one rank's", distance),
        row("ranks", "linear", "one rank, linear attention: losses beside a CPU's", distance),
        (
            "sequence",
            "shared attention, all policies: largest distance in float64; in bfloat16, and torch's",
            tables(lines),
        ),
        row(
            "sequence",
            "attention",
            "a block of 16,384 positions, both passes: time beside torch's attention",
            beside_torch,
        ),
        row(
            "sequence",
            "streamed gradients",
            "streamed backward: distance in float64, float32 (plain: in brackets)",
            gradients,
        ),
        *(
            row(
                "sequence",
                f"streamed {name} {length}",
                f"{name}, {length:,} tokens, streamed: time and peak memory, of checkpointing's",
                of_checkpointing,
            )
            for name, length in (("150m", 16_384), ("150m", 65_536), ("1b", 32_768))
        ),
        row("sequence", "longest", "150m, longest sequence in 16 GB: plain, checkpointing, streamed", longest),
        row("loss", "data-parallel", "G1 in short, data-parallel: loss", loss),
        row("loss", "iso-loco", "G1 in short, IsoLoCo with two replicas: loss", loss),
        *(
            row("loss", f"{rung} {name}", f"{rung}, {words}: loss", loss)
            for rung in ("G1", "G2")
            for name, words in (("data-parallel", "data-parallel"), ("iso-loco", "IsoLoCo with two replicas"))
        ),
    ]


def tables(lines: Lines) -> str:
    """Return the largest distances of shared attention over all policies."""
    kinds = {
        kind: [x for (part, key), x in lines.items() if part == "sequence" and key.startswith("tables") and kind in key]
        for kind in ("float64", "bfloat16")
    }
    if not all(kinds.values()):
        return MISSING
    if any(line["state"] != "done" for found in kinds.values() for line in found):
        return "failed"
    exact, short, own = (max(x[name] for x in kinds[kind]) for kind, name in
                         (("float64", "off"), ("bfloat16", "off"), ("bfloat16", "own_off")))  # fmt: skip
    return f"{exact:.0e}; {short:.1e}, {own:.1e}"


def distance(line: dict[str, Any]) -> str:
    return f"{line['off']:.1e}"


def beside_torch(line: dict[str, Any]) -> str:
    return f"{line['ours_s']['median'] / line['torchs_s']['median']:.2f}"


def gradients(line: dict[str, Any]) -> str:
    return f"{line['float64']:.0e}, {line['float32']:.1e} ({line['float32_plain']:.1e})"


def of_checkpointing(line: dict[str, Any]) -> str:
    return f"{line['time_ratio']:.2f}, {line['streamed_peak_bytes'] / line['checkpoint_peak_bytes']:.2f}"


def longest(line: dict[str, Any]) -> str:
    return ", ".join(f"{line[kind]:,}" for kind in ("plain", "checkpoint", "streamed"))


def how_many(lines: Lines, prefix: str) -> str:
    """Return how many of the keys with a prefix are done, of those that were tried."""
    tried = [line["state"] for (part, key), line in lines.items() if part == "exact" and key.startswith(prefix)]
    return f"{tried.count('done')} of {len(tried)}" if tried else MISSING


def largest_distance(lines: Lines) -> str:
    off = {key[7:]: line["off"] for (_, key), line in lines.items() if key.startswith("method ") and "off" in line}
    worst = max(off, key=lambda name: off[name], default="")
    return f"{off[worst]:.1e} ({worst})" if off else MISSING


def yes(line: dict[str, Any]) -> str:
    return "yes"


def copies(line: dict[str, Any]) -> str:
    return f"{line['pinned_to_device_gb_per_s']:.0f}, {line['pageable_to_device_gb_per_s']:.1f} GB/s"


def shares(line: dict[str, Any]) -> str:
    return f"{line['encode_share']:.2f}, {line['decode_share']:.2f}"


def overheads(line: dict[str, Any]) -> str:
    return f"{line['between_overhead']:+.2%}, {line['in_flight_overhead']:+.2%}"


def of_a_round(line: dict[str, Any]) -> str:
    steps = line["steps_s"]
    return f"{steps['round']['median'] - steps['plain']['median']:.2f} s to a step of {steps['plain']['median']:.3f} s"


def memory(line: dict[str, Any]) -> str:
    return f"{line['peak_bytes'] / 1e9:.1f} GB, {line['planned_bytes'] / 1e9:.1f} GB"


def watched(line: dict[str, Any]) -> str:
    text: str = line["last_line"]
    times = text.partition("a step takes ")[2].partition(" with recording")[0]
    return times.replace(" without and ", ", ")


def loss(line: dict[str, Any]) -> str:
    return f"{line['loss']:.2f} after {line['steps']} steps, {line['share']:.1%} of the rung"


def table(lines: Lines) -> str:
    """Return the table in Markdown."""
    text = ["| part | what | value |", "| --- | --- | --- |"]
    return "\n".join([*text, *(f"| {part} | {what} | {value} |" for part, what, value in rows(lines))])


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1]) if sys.argv[1:] else RESULTS)))
