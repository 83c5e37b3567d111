"""Write a figure of finished runs as one SVG file that stands alone: for the README and the docs.

    python scripts/picture.py runs/demo runs/all-reduce --names "Streaming DiLoCo" all-reduce --out docs/assets/loss.svg

The figure is the one of `thinwire compare`: validation loss of the global parameters against bytes sent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from thinwire.charts import image_file
from thinwire.monitor.report.figures import figures_of_runs
from thinwire.runlog.run_folder import read_run


def picture(runs: list[Path], names: list[str]) -> str:
    """Return the SVG of the figure, as an image file."""
    records = {name: read_run(path) for name, path in zip(names, runs, strict=True)}
    return image_file(figures_of_runs(records)[1].svg)


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--names", nargs="+", help="what the runs are called in the figure")
    parser.add_argument("--out", type=Path, required=True, help="the SVG file")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(picture(options.runs, options.names or [run.name for run in options.runs]))


if __name__ == "__main__":
    main()
