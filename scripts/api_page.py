"""Hook of mkdocs: the page of the public names of the package, made from their docstrings."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import thinwire

HEADER = """\
# thinwire

The names of `import thinwire`. All other modules are below [Reference](index.md).

| name | is |
| --- | --- |
"""
# The order of a reader: first what a training script calls.
ORDER = (
    "connect", "DistributedOptimizer", "MultiOptimizer", "split_model", "methods", "Method", "codecs", "metrics",
    "is_lead", "replica_folder", "tracker_names", "join",
    "ElasticOptimizer", "ActivationCode", "AdaptiveBits", "CodedStage", "split", "sequences", "experts", "streamed",
    "WeightPublisher", "WeightSubscriber", "watch", "lab", "run_replicas", "LoopbackWorld", "LoopbackTransport",
    "FaultyTransport", "RecordingTransport", "ThinwireError", "__version__",
)  # fmt: skip
PAGE = "reference/thinwire.md"
_COLUMNS = 80
PAGES = {
    "codecs": "codecs.md",
    "lab": "lab.md",
    "methods": "methods.md",
    "sequences": "sequences.md",
    "experts": "experts.md",
    "split": "split.md",
}


def about(name: str) -> str:
    """Return the first sentence of a name's docstring."""
    value = getattr(thinwire, name)
    if isinstance(value, str):
        return "The version of the installed package."
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def section(name: str) -> str:
    """Return the part of the page about one name."""
    value: Any = getattr(thinwire, name)
    is_error = value is thinwire.ThinwireError
    lines = [f"## `{name}`", "", f"{about(name)}"]
    if isinstance(value, ModuleType):
        return "\n".join([*lines, "", f"All of it: [thinwire.{name}]({PAGES[name]}).", ""])
    if callable(value) and not is_error:
        lines += ["", "```text", _call(name, value), "```"]
    arguments = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", inspect.getdoc(value) or "", re.M | re.S)
    if arguments and not isinstance(value, str):
        lines += ["", "| argument | meaning |", "| --- | --- |"]
        lines += [
            f"| `{found[1]}` | {' '.join(found[2].split()).replace('|', chr(92) + '|')} |"
            for found in re.finditer(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", arguments[1], re.M | re.S)
        ]
    if inspect.isclass(value) and not is_error:
        own = [
            f"| `{key}` | {' '.join((inspect.getdoc(one) or '').split(chr(10) * 2)[0].split())} |"
            for key, one in vars(value).items()
            if not key.startswith("_") and (callable(one) or isinstance(one, property)) and one.__doc__
        ]
        lines += ["", "| member | does |", "| --- | --- |", *own] if own else []
    return "\n".join([*lines, ""])


def _call(name: str, value: Any) -> str:
    signature = inspect.signature(value)
    parameters, is_starred = [], False
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not is_starred:
            parameters.append("*")
            is_starred = True
        default = "" if one.default is one.empty else f"={_shown(one.default)}"
        parameters.append(("**" if one.kind is one.VAR_KEYWORD else "") + one.name + default)
    call = f"thinwire.{name}({', '.join(parameters)})"
    return call if len(call) <= _COLUMNS else f"thinwire.{name}(\n    {(',' + chr(10) + '    ').join(parameters)},\n)"


def _shown(default: Any) -> str:
    return getattr(default, "__qualname__", repr(default))


def text() -> str:
    """Return the page."""
    rows = "".join(f"| [`{name}`](#{name.lower()}) | {about(name)} |\n" for name in ORDER)
    return HEADER + rows + "\n" + "\n".join(section(name) for name in ORDER)


def on_page_markdown(markdown: str, *, page: Any, **others: Any) -> str:
    """Put the names into their page; called by mkdocs."""
    return text() if page.file.src_uri == PAGE else markdown
