"""A strict reader of Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import json
import math
import re

_NAME, _TEXT = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r'"(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_NAME}={_TEXT},?)*)\}})? (-?[0-9.e+-]+)")
Sample = tuple[str, frozenset[tuple[str, str]]]


def read(text: str) -> tuple[dict[Sample, float], dict[str, str]]:
    """Read the text format as its rules say: each metric once, its type before its samples, no sample twice."""
    samples: dict[Sample, float] = {}
    types: dict[str, str] = {}
    helped: set[str] = set()
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name in helped - types.keys() and kind in ("gauge", "counter")
            assert (kind == "counter") == name.endswith("_total")
            types[name] = kind
        elif line.startswith("# HELP "):
            name, says = line.removeprefix("# HELP ").split(" ", 1)
            assert name not in helped | types.keys() and says.endswith(".")
            helped.add(name)
        else:
            found = _SAMPLE.fullmatch(line)
            assert found is not None, line
            pairs = re.findall(rf"({_NAME})=({_TEXT})", found[2] or "")
            labels = frozenset((name, json.loads(told, strict=False)) for name, told in pairs)
            assert len(labels) == len(pairs) and found[1] == list(types)[-1]
            assert (found[1], labels) not in samples
            samples[found[1], labels] = float(found[3])
            assert math.isfinite(samples[found[1], labels])
    assert helped == set(types) == {name for name, _ in samples}
    text.encode()
    return samples, types
