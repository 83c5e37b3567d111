"""The bandwidth tables of two papers, computed on thinwire's simulator, beside what they print.

`python benchmarks/simulate/tables.py` prints markdown and stores the numbers, in a minute or two. The papers' numbers
stand in `published.json`, with their sources.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from layered_step import (
    SCALING_METHODS,
    SCALING_MODELS,
    STREAMING_METHODS,
    STREAMING_MODELS,
    UTILISATIONS,
    LayeredMethod,
    LayeredModel,
    StepOrder,
    bandwidth_grid,
    compute_utilisation,
    grid_label,
    printed_deviations,
    reaching,
)

PUBLISHED = Path(__file__).parent / "published.json"
RESULTS = Path(__file__).parents[1] / "results" / "simulate_tables.json"
Rows = Mapping[str, Mapping[str, list[str]]]


def cells(
    rows: Rows, models: Mapping[str, LayeredModel], methods: Mapping[str, LayeredMethod], *,
    order: StepOrder | None = None, is_first_reaching: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return each row of a table with the bandwidths found and their deviations, in places of the grid."""
    grid, found = bandwidth_grid(), []
    for model, printed in rows.items():
        for method, row in printed.items():
            places = reaching(models[model], methods[method], order=order)
            found.append({
                "model": model, "method": method, "printed": row,
                "found": [grid_label(grid[max(0, place - 1)]) for place in places],
                "first_reaching_gbit_per_s": [round(grid[p] / 1e9, 3) if p < len(grid) else None for p in places],
                "deviations": printed_deviations([place + is_first_reaching for place in places], row),
            })  # fmt: skip
    return found


def num_exact(found: list[dict[str, Any]]) -> int:
    return sum(deviation == 0 for row in found for deviation in row["deviations"])


def variants(rows: Rows) -> dict[str, Any]:
    """Return for each reading of what the paper leaves open how many of the cells come out."""

    def changed(**settings: Any) -> dict[str, LayeredMethod]:
        return {
            name: replace(method, **settings) if method.layers_per_fragment else method
            for name, method in STREAMING_METHODS.items()
        }

    def floors(num_layers: int) -> dict[str, LayeredMethod]:
        return changed(gap_steps=100 // (num_layers // 3))

    def floors_with_embedding(num_layers: int) -> dict[str, LayeredMethod]:
        return changed(gap_steps=100 // (num_layers // 3 + 1))

    lighter = {
        name: replace(m, bits_per_parameter=m.bits_per_parameter * 5 / 6) for name, m in STREAMING_METHODS.items()
    }
    whole = StepOrder(has_first_gradient=True)
    tried: dict[str, dict[str, Any]] = {
        "as found": {},
        "weights before activations": {"order": StepOrder(weights_first=True)},
        "the first layer computes the gradient of its input": {"order": whole},
        "the next step waits for all reductions": {"order": StepOrder(waits_for_all=True)},
        "early layers first on the wire": {"order": StepOrder(early_layers_first=True)},
        "consecutive layers in a fragment": {"methods": changed(is_strided=False)},
        "floor(H / P) steps between fragments": {"methods_for": floors},
        "floor(H / (P + 1)) steps between fragments": {"methods_for": floors_with_embedding},
        "DiLoCo once in H + 10 steps, as in table 6": {
            "methods": {**STREAMING_METHODS, "DiLoCo": LayeredMethod(sync_interval=110)}
        },
        "printed is the first bandwidth that reaches": {"is_first_reaching": True},
        "the same, with 5/6 of the bits": {"is_first_reaching": True, "methods": lighter},
        "the same, and the first layer's gradient": {"is_first_reaching": True, "methods": lighter, "order": whole},
    }
    results = {}
    for name, settings in tried.items():
        methods_for = settings.pop("methods_for", None)
        methods = settings.pop("methods", STREAMING_METHODS)
        found = []
        for model, printed in rows.items():
            chosen = methods_for(STREAMING_MODELS[model].num_layers) if methods_for else methods
            found += cells({model: printed}, STREAMING_MODELS, chosen, **settings)
        deviations = [deviation for row in found for deviation in row["deviations"]]
        results[name] = {"exact": num_exact(found), "worst": max(map(abs, deviations)), "cells": len(deviations)}
    return results


def windows(rows: Rows) -> list[dict[str, Any]]:
    """Return how many DiLoCo cells of table 6 come out if a row is one exchange in `H + extra` steps."""
    printed_s = {"Llama3 405B": 26.0, "DeepSeek-V3 671B": 20.0}
    results = []
    for model, short_s in printed_s.items():
        for step_s in (short_s, SCALING_MODELS[model].step_s):
            models = {model: replace(SCALING_MODELS[model], step_s=step_s)}
            for extra in (0, 5, 8, 9, 10, 11, 12, 15):
                methods = {
                    name: replace(method, sync_interval=method.sync_interval - 10 + extra)
                    for name, method in SCALING_METHODS.items()
                    if name.startswith("DiLoCo")
                }
                diloco = {name: row for name, row in rows[model].items() if name.startswith("DiLoCo")}
                found = cells({model: diloco}, models, methods)
                exact = {"exact": num_exact(found), "cells": len(found) * len(UTILISATIONS)}
                results.append({"model": model, "step_s": step_s, "extra_steps": extra, **exact})
    return results


def hours(volume: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return table 1's hours at 1 Gbit/s from its hours without a limit, and its bytes for a step and a parameter."""
    model, results = STREAMING_MODELS["1B"], []
    for row in volume:
        utilisation = compute_utilisation(model, STREAMING_METHODS[row["method"]], bandwidth_bits_per_s=1e9)
        num_steps = row["hours_without_limit"] * 3600 / model.compute_s
        results.append({
            **row, "utilisation": utilisation, "found_hours_at_1_gbit_per_s": row["hours_without_limit"] / utilisation,
            "steps": num_steps, "bytes_per_parameter_and_step": row["terabytes"] * 1e12 / num_steps / 1e9,
        })  # fmt: skip
    return results


def show(found: list[dict[str, Any]]) -> None:
    print("| model | method | " + " | ".join(f"{100 * wanted:.0f} %" for wanted in UTILISATIONS) + " |")
    print("| --- | --- |" + " --- |" * len(UTILISATIONS))
    for row in found:
        written = [
            printed if not deviation else f"{printed} (here {here}, {deviation:+d})"
            for printed, here, deviation in zip(row["printed"], row["found"], row["deviations"], strict=True)
        ]
        print(f"| {row['model']} | {row['method']} | " + " | ".join(written) + " |")
    print(f"\n{num_exact(found)} of {len(found) * len(UTILISATIONS)} cells at the same place of the grid.\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    settings = parser.parse_args()
    published = json.loads(PUBLISHED.read_text())
    streaming = published["utilisation"]["streaming"]["rows"]
    results = {
        "streaming": cells(streaming, STREAMING_MODELS, STREAMING_METHODS),
        "scaling": cells(published["utilisation"]["scaling"]["rows"], SCALING_MODELS, SCALING_METHODS),
        "variants": variants(streaming),
        "windows": windows(published["utilisation"]["scaling"]["rows"]),
        "hours": hours(published["volume"]["rows"]),
    }
    for name in ("streaming", "scaling"):
        print(f"{published['utilisation'][name]['source']}\n")
        show(results[name])
    print("| reading of table 4 | cells that come out | worst deviation |\n| --- | --- | --- |")
    for name, result in results["variants"].items():
        print(f"| {name} | {result['exact']} of {result['cells']} | {result['worst']} |")
    print("\n| model | step, s | steps beside H | cells that come out |\n| --- | --- | --- | --- |")
    for row in results["windows"]:
        print(f"| {row['model']} | {row['step_s']} | {row['extra_steps']} | {row['exact']} of {row['cells']} |")
    print("\n| method | tokens | hours without a limit | at 1 Gbit/s, printed | here | terabytes |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in results["hours"]:
        print(
            f"| {row['method']} | {row['tokens'] / 1e9:.0f}B | {row['hours_without_limit']} "
            f"| {row['hours_at_1_gbit_per_s']} | {row['found_hours_at_1_gbit_per_s']:.4g} | {row['terabytes']} |"
        )
    settings.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
