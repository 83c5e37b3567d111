"""Every default that a docs page quotes is the code's.

A quote is a pattern in a page whose groups are the values. A sentence with the word "default" that no quote covers
must be listed among those that quote no value, so a new one cannot go unheld.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from markdown_pages import DOCS, ROOT, pages

from thinwire.codecs import by_name
from thinwire.codecs.activation_code import ActivationCode
from thinwire.methods import RECIPES, recipe
from thinwire.split import connect
from thinwire.sync.fragments import Pattern
from thinwire.training.config import OPTIONS, SECTIONS, TrainConfig, resolve
from thinwire.training.parallel_config import DEFAULT_EXPERT_CODE

# Records of what was measured or decided, with the defaults of their day; docs/cli.md is generated.
RECORDS = ("benchmarks", "experiments", "decisions", "cli.md", "diagnosis/accuracy.md")
PLAIN = TrainConfig()
TITLES = {"iso-loco": "IsoLoCo", "streaming-diloco": "Streaming DiLoCo", "e3m0": "E3M0"}


def resolved(**options: Any) -> TrainConfig:
    return resolve(TrainConfig.of(**options), world_size=None, cores=2, home=ROOT)


def default_of(method: str, option: str) -> str:
    return f"{inspect.signature(recipe(method)).parameters[option].default:g}"


def outer_rate(method: str, *, replicas: int, part: str = "") -> str:
    update: Any = recipe(method)().update(replicas)
    optimizer = getattr(update, "optimizer", update)
    return f"{(getattr(optimizer, part) if part else optimizer).lr:g}"


def own_codec(method: str) -> str:
    exchange: Any = recipe(method)().exchanges(2)[0]
    return str(exchange.codec.name)


def bits(codec: str) -> str:
    return f"{8 * by_name(codec).payload_bytes(2**20) / 2**20:g}"


def interval(model: str) -> str:
    return str(resolved(model=model).sync.sync_interval)


def flag_default(option: str) -> Any:
    section, field = OPTIONS[option]
    return getattr(SECTIONS[section](), field)


# Page, pattern, values of its groups.
QUOTES: Sequence[tuple[str, str, Callable[[], Sequence[str]]]] = (
    ("README.md", r"The default method, (\w+), sent", lambda: [TITLES[PLAIN.sync.method]]),
    ("docs/one-machine.md", r"The method is (\w+), the model `(\w+)`", lambda: [
        TITLES[PLAIN.sync.method], PLAIN.model.name]),
    ("docs/one-machine.md", r"`nano` saves every (\d+) steps", lambda: [str(resolved().output.checkpoint_every)]),
    ("docs/choosing.md", r"Start from the defaults: method `([\w-]+)`, (\w+) with beta2 ([\d.]+), (\w+), tau (\d+)\.",
     lambda: [
         PLAIN.sync.method, {"adamw": "AdamW"}[str(resolved().optimizer.inner_optimizer)],
         f"{PLAIN.optimizer.beta2:g}", TITLES[own_codec(PLAIN.sync.method)],
         default_of(PLAIN.sync.method, "overlap_steps"),
     ]),
    ("docs/choosing.md", r"`--sync-interval` \|[^|]*\| (\d+) for nano, else (\d+) \|", lambda: [
        interval("nano"), interval("35m")]),
    ("docs/choosing.md", r"`--overlap-steps` \|[^|]*\| (\d+);", lambda: [
        default_of(PLAIN.sync.method, "overlap_steps")]),
    ("docs/choosing.md", r"`--layers-per-fragment` \|[^|]*\| (\d+) \|", lambda: [
        default_of(PLAIN.sync.method, "layers_per_fragment")]),
    ("docs/choosing.md", r"`--pace` \|[^|]*\| (\w+) \|", lambda: ["on" if flag_default("pace") else "off"]),
    ("docs/choosing.md", r"alpha, `--blend` \|[^|]*\| ([\d.]+); ([\d.]+) for streaming-diloco \|", lambda: [
        default_of("iso-loco", "blend"), f"{recipe('streaming-diloco')().update(2).blend:g}"]),
    ("docs/choosing.md", r"`--outer-lr` \|[^|]*\| IsoLoCo's hidden matrices ([\d.]+), from 8 replicas on ([\d.]+); "
     r"all else ([\d.]+), from 8 on ([\d.]+) \|", lambda: [
        outer_rate("iso-loco", replicas=count, part=part) for part in ("hidden", "rest") for count in (2, 8)]),
    ("docs/choosing.md", r"`--outer-momentum` \|[^|]*\| IsoLoCo's hidden matrices ([\d.]+), all else ([\d.]+) \|",
     lambda: [default_of("iso-loco", "outer_momentum"), default_of("iso-loco", "rest_momentum")]),
    ("docs/choosing.md", r"(\w+) sends the same bytes and ends lower, so it is the default", lambda: [
        TITLES[PLAIN.sync.method]]),
    ("docs/concepts/fragments.md", r"`layers_per_fragment` \(default (\d+)\)", lambda: [
        str(Pattern().layers_per_fragment)]),
    ("docs/diagnosis/act-on-findings.md", r"`(\w+)` \(default\)", lambda: [str(flag_default("on_finding"))]),
    ("docs/methods.md", r"Nesterov at ([\d.]+), or ([\d.]+) with 8 replicas and more, with momentum ([\d.]+)\.",
     lambda: [*(outer_rate("iso-loco", replicas=count, part="hidden") for count in (7, 8)),
              default_of("iso-loco", "outer_momentum")]),
    ("docs/methods.md", r"by default the (\w+) Aggregator", lambda: [
        str(inspect.signature(recipe("robust")).parameters["rule"].default).title()]),
    ("docs/methods.md", r"`thinwire train --model nano` takes an H of (\d+) and other models (\d+)", lambda: [
        interval("nano"), interval("35m")]),
    ("docs/methods.md", r"thinwire train takes (\w+) as its inner optimizer by default", lambda: [
        str(resolved(method="muloco").optimizer.inner_optimizer).title()]),
    ("docs/methods-claims.md", r"its default momentum of ([\d.]+) ends", lambda: [default_of("co2", "outer_momentum")]),
    ("docs/split.md", r"in ([\d.]+) bits forward and ([\d.]+) backward by default", lambda: [
        bits(ActivationCode().forward), bits(ActivationCode().backward)]),
    ("docs/split.md", r"`patience_s`, (\d+) s by default", lambda: [
        f"{inspect.signature(connect).parameters['patience_s'].default:.0f}"]),
    ("docs/train-experts.md", r"tokens in (\d) bits \(the default\)", lambda: [DEFAULT_EXPERT_CODE[-1]]),
)  # fmt: skip

# Sentences that name a default and quote no value of it.
WITHOUT_VALUE = (
    "With the default code, nano ended", "(10 % with the default code)", "So they are no default",
    "1.6 % above the default", "**Codes** are the default of", "that method with its defaults",
    "no default process group", "a default group of that replica's own", "Collectives of the default group",
    "(all but one by default)", "## Defaults", "Everything else has a default", "defaults of `--batch-size` and",
    "the default code of `--expert-code`", "The default gives every vector the median length",
    "every option, defaults filled in", "static rendezvous, the default", "default_root_dir", "default_rng",
    "default: the newest parameters", "equal to one process | the default", "larger means | default",
    "| default | why |", "its card holds the run's defaults", "A default that rests on numbers",
)  # fmt: skip


def held_pages() -> list[str]:
    names = (path.relative_to(ROOT).as_posix() for path in pages())
    return [name for name in names if not name.removeprefix("docs/").startswith(RECORDS)]


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def defaults_table() -> str:
    """Return the table of the methods that train on their own between exchanges."""
    lines = [
        "| method | H | tau | blend | codec | outer rate | from 8 replicas on | outer momentum |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in sorted(RECIPES):
        takes = inspect.signature(recipe(name)).parameters
        if "sync_interval" not in takes:
            continue
        update: Any = recipe(name)().update(2)
        part = "hidden" if name == "iso-loco" else ""
        rates = [outer_rate(name, replicas=count, part=part) if "outer_lr" in takes else "" for count in (2, 8)]
        cells = [
            name, default_of(name, "sync_interval"),
            default_of(name, "overlap_steps") if "overlap_steps" in takes else "",
            f"{update.blend:g}" if "blend" in takes else "", own_codec(name), rates[0],
            "the same" if rates[0] and rates[0] == rates[1] else rates[1],
            default_of(name, "outer_momentum") if "outer_momentum" in takes else "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


@pytest.mark.parametrize("number", range(len(QUOTES)), ids=[f"{page}-{n}" for n, (page, _, _) in enumerate(QUOTES)])
def test_a_quoted_default_is_the_code_s(number: int) -> None:
    page, pattern, values = QUOTES[number]
    found = re.findall(pattern, text_of(page))
    assert len(found) == 1, f"{page} has {len(found)} places like {pattern!r}"
    assert (found[0] if isinstance(found[0], tuple) else (found[0],)) == tuple(values())


def test_the_table_of_defaults_is_that_of_the_methods() -> None:
    table = defaults_table()
    assert table in (DOCS / "methods.md").read_text(), f"docs/methods.md needs this table:\n{table}"


def test_every_sentence_about_a_default_is_held_or_quotes_no_value() -> None:
    for page in held_pages():
        text = text_of(page)
        spans = [m.span() for of, pattern, _ in QUOTES if of == page for m in re.finditer(pattern, text)]
        spans += [m.span() for words in WITHOUT_VALUE for m in re.finditer(re.escape(words), text)]
        for found in re.finditer(r"(?i)default", text):
            near = text[max(0, found.start() - 80) : found.end() + 80]
            assert any(low <= found.start() < high for low, high in spans), f"{page} quotes a default: ...{near}..."
