"""Run the readers of foreign bytes under a fuzzer that follows which lines they run (atheris: pip install atheris).

python benchmarks/fuzz.py TARGET --seconds 60 [--corpus FOLDER]

An input that ends otherwise than by being read or refused stops it, is named, and is written to the present folder.
Targets are those of `tests/hostile_inputs.py`. What it finds goes into the tests as a case of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    try:
        import atheris
    except ImportError:
        raise SystemExit("the fuzzer is not installed: pip install atheris") from None
    with atheris.instrument_imports(include=["thinwire"]):
        from tests.hostile_inputs import TARGETS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, default=None)
    options = parser.parse_args()
    target, seeds = TARGETS[options.target]
    corpus = options.corpus or Path(tempfile.mkdtemp(prefix=f"fuzz-{options.target}-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = [sys.argv[0], str(corpus), f"-max_total_time={options.seconds}", "-max_len=8192", "-rss_limit_mb=4096"]
    atheris.Setup([*words, "-timeout=10", "-print_final_stats=1"], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
