"""Draw the ladder of experts as SVG: `python scripts/expert_ladder.py docs/assets/expert-ladder.svg`.

The lines are the formulas that `thinwire plan --inside` prints.
"""

from __future__ import annotations

import sys
from pathlib import Path

from thinwire.charts import Axis, Chart, ChartSeries, image_file, line_chart
from thinwire.site.expert_costs import ExpertShape, ladder
from thinwire.units import format_bytes

# 64 experts of inner width 1,408 at width 2,048, of which a token visits 6
EXPERTS = ExpertShape(count=64, per_token=6, parameters=2 * 2048 * 1408, width=2048, layers=1)
LABELS = ("tokens", "4-bit tokens", "weights", "pseudo-gradients")


def _short(count: float) -> str:
    """Return a power of ten, as 1k."""
    return f"{count / 1e6:g}M" if count >= 1e6 else f"{count / 1e3:g}k"


def drawing() -> str:
    """Return the SVG."""
    tokens = [2.0**power for power in range(10, 22)]
    rungs = [ladder(EXPERTS, tokens=count) for count in tokens]
    series = tuple(
        ChartSeries(name=rungs[0][number].what, label=label, colour=number,
                    points=tuple((count, found[number].num_bytes) for count, found in zip(tokens, rungs, strict=True)))
        for number, label in enumerate(LABELS)
    )  # fmt: skip
    # two sites: an expert gets the tokens of the other one
    even = EXPERTS.break_even_tokens() * EXPERTS.count / EXPERTS.per_token
    return image_file(line_chart(Chart(
        title="What a site sends for one layer of experts in a step, two sites",
        x=Axis(label="tokens of a site in a step", write=_short, scale="log"),
        y=Axis(label="bytes", write=format_bytes, scale="log"), series=series,
        marker=(even, f"{even / 1000:.0f}k: f an expert"),
    )))  # fmt: skip


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawing())
