"""The page of what each paper claims and what stored results show of it.

python benchmarks/methods/claims_page.py docs/methods-claims.md    # write the page; no path: print it

A verdict follows from the numbers: "shown" where every measure holds its limit, "shown in part" where some do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import claims
import compare

from thinwire.methods import RECIPES, about

sys.path.append(str(Path(__file__).parents[1] / "quality"))
import ladder
from rungs import BASELINE, RUNGS

ATTACKS = Path(__file__).parents[1] / "results" / "attacks.jsonl"
_LEVEL_PERCENT = 0.5  # a loss this little above the baseline's counts as the same
_SCATTER_PERCENT = 1.5  # about what two seeds of one setting differ by
_LEVEL_POINTS = -0.6  # two of the 360 test images
HEAD = """# What the papers claim, and what shows here

<!-- written by benchmarks/methods/claims_page.py from stored results; do not edit -->

Each method stands beside the kind of baseline that its own paper has. Both sides have a learning rate of their own
whose best value lies inside a grid; on the digits outer options are tuned too where the page says so. A verdict is
computed from the numbers beside it: *shown* where all of them hold, *shown in part* where some do, *not shown here*
where none does but that of bytes. *Few seeds* stands where a difference is as small as that of two seeds, and has not
three of them yet.

```sh
python benchmarks/methods/claims.py      # digits: what is not stored yet
python benchmarks/quality/ladder.py A    # text: what is not stored yet
python benchmarks/methods/claims_page.py docs/methods-claims.md
```

- **Text** is rung A of the [ladder](benchmarks.md#loss): 115,200 parameters, H 30, two replicas where no number stands.
  Differences are of the validation loss; above zero the method's is higher. Up to 0.5 % counts as the same.
- **Digits** are scikit-learn's 8 x 8 images and a small convnet: 300 steps of 16 images a replica, H 10. There are two
  replicas, or four for DIMAT and the methods with AdamW inside. One test image is 0.28 points of accuracy. Up to two
  images less count as the same.
- Differences are medians over paired seeds, with their ends. Models this small say little of large ones, and a claim
  about speed is [another table](benchmarks/methods.md#text).

"""


class Evidence(Protocol):
    """One measured difference."""

    def found(self, stored: Stored) -> Finding | None:
        """Return what the results show, or None where they lack a side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A measured difference in words, whether it holds its limit, and whether so small a one needs more seeds.

    Fewer bytes alone show nothing: the loss must hold too.
    """

    words: str
    holds: bool
    needs_seeds: bool = False
    is_of_bytes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Results of the ladder, of the digits and of the attacks."""

    text: Mapping[str, Mapping[str, Any]]
    digits: Sequence[Mapping[str, Any]]
    attacks: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls) -> Stored:
        text = {ladder.key_of(line): line for line in ladder.read(ladder.RESULTS)}
        return cls(text=text, digits=compare.read(claims.RESULTS), attacks=compare.read(ATTACKS))

    def text_side(self, name: str, replicas: int) -> dict[int, Mapping[str, Any]]:
        """Return an entry's lines at its best rate by seed; none before its grid is complete."""
        losses = {key: line["loss"] for key, line in self.text.items()}
        rung = RUNGS["A"]
        for count in (replicas, 1):
            for side in ladder.sides(rung, only=[name], replicas=[count]):
                if (rate := side.settled_lr(losses)) is not None:
                    keys = {seed: ladder.key_of(side.settings(lr=rate, seed=seed)) for seed in claims.SEEDS}
                    return {seed: self.text[key] for seed, key in keys.items() if key in self.text}
        return {}

    def digits_side(self, name: str) -> dict[int, Mapping[str, Any]]:
        """Return a side's lines at its best rate and variant by seed."""
        lines = {claims.key_of(line): line for line in self.digits}
        wanted = claims.SIDES[name].winners(claims.losses_of(self.digits))
        return {one["seed"]: lines[key] for one in wanted if (key := claims.key_of(one)) in lines}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Validation loss of an entry of the ladder against another's, in percent; at most `limit`."""

    entry: str
    base: str = BASELINE
    replicas: int = 2
    limit: float = _LEVEL_PERCENT

    def found(self, stored: Stored) -> Finding | None:
        mine, other = (stored.text_side(name, self.replicas) for name in (self.entry, self.base))
        gaps = [100 * (mine[seed]["loss"] / other[seed]["loss"] - 1) for seed in mine if seed in other]
        if not gaps:
            return None
        where = "text" if self.replicas == 2 else f"text, {self.replicas} replicas"
        words = f"{where}: {_spread(gaps, unit=' %')} against {self.base}"
        middle = statistics.median(gaps)
        needs_seeds = len(gaps) < len(claims.SEEDS) and abs(middle - self.limit) < _SCATTER_PERCENT
        return Finding(words=words, holds=middle <= self.limit, needs_seeds=needs_seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBytes:
    """How many times fewer bytes an entry of the ladder sends than another; at least `least` times."""

    entry: str
    least: float
    base: str = BASELINE

    def found(self, stored: Stored) -> Finding | None:
        mine, other = (stored.text_side(name, 2) for name in (self.entry, self.base))
        if not mine or not other:
            return None
        dense = RUNGS["A"].steps * 4 * mine[0]["num_parameters"]  # two replicas, float32
        ratio = (other[0]["sent_bytes"] or dense) / mine[0]["sent_bytes"]
        return Finding(
            words=f"{ratio:.3g} times fewer bytes than {self.base}", holds=ratio >= self.least, is_of_bytes=True
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Accuracy of a side against another's in points, at least `limit`; or its loss in percent, at most `limit`."""

    side: str
    base: str
    limit: float = _LEVEL_POINTS
    measure: str = "accuracy"

    def found(self, stored: Stored) -> Finding | None:
        mine, other = stored.digits_side(self.side), stored.digits_side(self.base)
        seeds = [seed for seed in mine if seed in other]
        if not seeds:
            return None
        needs_seeds = len(seeds) < len(claims.SEEDS)
        against = f"against {self.base.removesuffix(', wide').removesuffix(', apart')}"
        if self.measure == "val_loss":
            gaps = [100 * (mine[seed]["val_loss"] / other[seed]["val_loss"] - 1) for seed in seeds]
            words = f"digits: loss {_spread(gaps, unit=' %', form='{:+.0f}')} {against}"
            return Finding(words=words, holds=statistics.median(gaps) <= self.limit, needs_seeds=needs_seeds)
        gaps = [100 * (mine[seed][self.measure] - other[seed][self.measure]) for seed in seeds]
        own = 100 * statistics.median(line[self.measure] for line in mine.values())
        what = "accuracy after the first merge" if self.measure == "first_accuracy" else "accuracy"
        words = f"digits: {what} {own:.1f} %, {_spread(gaps, unit=' points', form='{:+.1f}')} {against}"
        return Finding(words=words, holds=statistics.median(gaps) >= self.limit, needs_seeds=needs_seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitsBytes:
    """How many times fewer bytes a side sends, counted in the last third of the steps; at least `least` times."""

    side: str
    base: str
    least: float
    when: str = ""

    def found(self, stored: Stored) -> Finding | None:
        mine, other = stored.digits_side(self.side), stored.digits_side(self.base)
        if not mine or not other:
            return None
        ratio = other[0]["late_bits"] / mine[0]["late_bits"]
        return Finding(words=f"{ratio:.3g} times fewer bytes{self.when}", holds=ratio >= self.least, is_of_bytes=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attacks:
    """In how many attacks a robust rule is more accurate than another; more than half."""

    rule: str
    base: str

    def found(self, stored: Stored) -> Finding | None:
        accuracies: dict[tuple[str, str], list[float]] = {}
        for line in stored.attacks:
            accuracies.setdefault((line["rule"], line["attack"]), []).append(line["accuracy"])
        attacks = sorted({attack for rule, attack in accuracies if rule == self.rule and attack != "none"})
        if not attacks:
            return None
        best = sum(
            statistics.median(accuracies[self.rule, attack]) > statistics.median(accuracies[self.base, attack])
            for attack in attacks
        )
        words = f"digits: more accurate than the {self.base} in {best} of {len(attacks)} attacks"
        return Finding(words=words, holds=2 * best > len(attacks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A method's claim with what was measured.

    Attributes:
        claim: The paper's, in one line; empty for an idea of ours.
        baseline: The paper's own kind.
        evidence: What was compared.
        why: The likely cause where it does not show, or what the comparison leaves open.
    """

    claim: str
    baseline: str
    evidence: Sequence[Evidence] = field(default=())
    why: str = ""

    def verdict(self, found: Sequence[Finding]) -> str:
        if not self.claim:
            return "no claim"
        if all(one.is_of_bytes for one in found):
            return "not measured"
        if all(one.holds for one in found) and len(found) == len(self.evidence):
            return "shown, few seeds" if any(one.needs_seeds for one in found) else "shown"
        shows = any(one.holds for one in found if not one.is_of_bytes)
        return "shown in part" if shows else "not shown here"


def _spread(values: Sequence[float], *, unit: str, form: str = "{:+.2f}") -> str:
    middle = form.format(statistics.median(values)) + unit
    if len(values) == 1:
        return f"{middle} (1 seed)"
    return f"{middle} ({form.format(min(values))} to {form.format(max(values))}, {len(values)} seeds)"


CLAIMS: Mapping[str, Claim] = {
    "local-sgd": Claim(
        claim="as good as SGD with many times fewer rounds", baseline="SGD with momentum",
        evidence=[Digits(side="local-sgd", base="SGD with momentum")],
    ),
    "diloco": Claim(
        claim="as good as training that exchanges at every step, for 500 times fewer bytes", baseline="AdamW",
        evidence=[Text(entry="diloco"), TextBytes(entry="diloco", least=500)],
        why="H is 30 here, not 500; the fit of arXiv 2503.09799 gives +1.6 % at this size.",
    ),
    "streaming-diloco": Claim(
        claim="the loss of DiLoCo and of training that exchanges at every step, at 100 times less bandwidth",
        baseline="DiLoCo, AdamW",
        evidence=[Text(entry="streaming-diloco", base="diloco"), Text(entry="streaming-diloco"),
                  TextBytes(entry="streaming-diloco", least=100)],
        why="DiLoCo has the same gap to AdamW at this size.",
    ),
    "iso-loco": Claim(
        claim="lower loss than DiLoCo, the more so with more replicas", baseline="Streaming DiLoCo in the same code",
        evidence=[Text(entry="iso-loco", base="streaming-diloco", replicas=n, limit=0.0) for n in (2, 4, 8)],
    ),
    "decoupled-diloco": Claim(
        claim="the loss of DiLoCo, though slow and lost replicas are not waited for", baseline="Streaming DiLoCo",
        evidence=[Text(entry="decoupled-diloco", base="streaming-diloco")],
        why="all replicas were in time here; slow ones are measured in [elastic runs](benchmarks/elastic.md).",
    ),
    "eager": Claim(
        claim="the loss of DiLoCo while an exchange takes a whole interval", baseline="DiLoCo",
        evidence=[Digits(side="eager", base="diloco"), Text(entry="eager", base="diloco")],
        why="on the digits outer rate and momentum were tuned on both sides, on text neither. Half of each step, "
        "and more with more replicas, is an interval old, and these runs have few intervals.",
    ),
    "muloco": Claim(
        claim="below DiLoCo, and next to Muon at every step; 2 bits with error feedback lose nothing",
        baseline="DiLoCo, Muon",
        evidence=[Text(entry="muloco", base="diloco", limit=0.0), Text(entry="muloco", base="data-parallel, Muon")],
        why="the paper's models have 150 million parameters and more.",
    ),
    "sparse-loco": Claim(
        claim="lower loss than DiLoCo at 1 to 3 % of the elements in 2 bits", baseline="DiLoCo",
        evidence=[Text(entry="sparse-loco", base="diloco", limit=0.0), Digits(side="sparse-loco", base="diloco")],
        why="64 of 4,096 elements are few for matrices this small (likely); the paper has 512 million parameters. "
        "On text neither outer rate, decay nor density was tuned.",
    ),
    "streaming-sparse-loco": Claim(
        claim="", baseline="Streaming DiLoCo",
        evidence=[Text(entry="streaming-sparse-loco", base="streaming-diloco")],
        why="an idea of ours: the exchange of sparse-loco in the schedule of streaming-diloco.",
    ),
    "power-sgd": Claim(
        claim="the accuracy of SGD with momentum for many times fewer bytes", baseline="SGD with momentum",
        evidence=[Digits(side="power-sgd", base="SGD with momentum"),
                  DigitsBytes(side="power-sgd", base="SGD with momentum", least=5)],
    ),
    "dgc": Claim(
        claim="the accuracy of SGD with momentum for 270 to 600 times fewer bytes", baseline="SGD with momentum",
        evidence=[Digits(side="dgc, wide", base="SGD with momentum, wide"),
                  DigitsBytes(side="dgc, wide", base="SGD with momentum, wide", least=270, when=" after its warm-up")],
        why="on text it ends 37 % above AdamW; SGD with momentum itself was [20 % "
        "above](benchmarks/methods.md#text) on the larger nano.",
    ),
    "demo": Claim(
        claim="the loss of AdamW for far fewer bytes", baseline="AdamW",
        evidence=[Text(entry="demo"), TextBytes(entry="demo", least=10)],
        why="more coefficients a chunk were not tried.",
    ),
    "ef21": Claim(
        claim="lower loss than error feedback at the same bytes, with larger steps", baseline="SGD, error feedback",
        evidence=[Digits(side="ef21", base="error feedback (EF14)", measure="val_loss", limit=0.0),
                  Digits(side="ef21", base="SGD")],
        why="the paper's theorem is for whole gradients; here they are of 16 images. Its variant with momentum "
        "was not run. Text beside AdamW (58 % above) says nothing of it.",
    ),
    "masha1": Claim(
        claim="fewer bytes than uncompressed extragradient on variational inequalities", baseline="SGD",
        evidence=[Digits(side="masha1", base="SGD")],
        why="a classifier is no variational inequality; the paper's bilinear problem is in tests only.",
    ),
    "masha2": Claim(
        claim="the same with contractive codes and error feedback", baseline="SGD",
        evidence=[Digits(side="masha2", base="SGD")],
        why="see masha1.",
    ),
    "robust": Claim(
        claim="the Flag Aggregator is more accurate than other robust rules under attack", baseline="trimmed mean",
        evidence=[Attacks(rule="flag", base="trimmed-mean")],
        why="only one of the attacks harms even the plain mean on this task.",
    ),
    "slowmo": Claim(
        claim="lower loss than local SGD at the same bytes", baseline="local SGD",
        evidence=[Digits(side="slowmo", base="local-sgd", measure="val_loss", limit=0.0),
                  Text(entry="slowmo", base="local-sgd", limit=0.0)],
    ),
    "co2": Claim(
        claim="the accuracy of SGD and the loss of AdamW while an exchange takes a whole interval",
        baseline="SGD with momentum, AdamW",
        evidence=[Digits(side="co2", base="SGD with momentum"), Text(entry="co2")],
        why="on the digits interval, momentum, penalty and clipping were tuned too: its default momentum of 0.5 "
        "ends far higher than 0.2. On text only the rate was tuned, at 0.5; 0.2 was not run there.",
    ),
    "noloco": Claim(
        claim="converges as fast as DiLoCo or up to 4 % faster, in exchanges of pairs", baseline="DiLoCo",
        evidence=[Text(entry="noloco", base="diloco", limit=0.0), Digits(side="noloco", base="diloco")],
        why="two replicas on text are one pair, on the digits there are two; outer rate and momentum were tuned "
        "there on both sides. [Latencies](benchmarks/methods.md#latencies) with many replicas are measured "
        "apart.",
    ),
    "one-bit-adam": Claim(
        claim="the loss of Adam for up to 5 times fewer bytes", baseline="Adam",
        evidence=[Text(entry="one-bit-adam"), TextBytes(entry="one-bit-adam", least=5)],
    ),
    "zero-one-adam": Claim(
        claim="the loss of Adam for up to 87 % fewer bytes than 1-bit Adam", baseline="Adam, 1-bit Adam",
        evidence=[Text(entry="zero-one-adam"), TextBytes(entry="zero-one-adam", base="one-bit-adam", least=1 / 0.13)],
        why="its intervals grow with the steps, and 2,600 are few.",
    ),
    "one-bit-lamb": Claim(
        claim="the accuracy of LAMB for up to 4.6 times fewer bytes", baseline="LAMB",
        evidence=[Digits(side="one-bit-lamb", base="LAMB"), TextBytes(entry="one-bit-lamb", least=4.6)],
    ),
    "dimat": Claim(
        claim="higher accuracy than plain averages (CDSGD) of models trained apart, most of all at the start",
        baseline="averages with the neighbours",
        evidence=[
            Digits(side="dimat, apart", base="plain averages, apart", measure="first_accuracy", limit=0.1),
            Digits(side="dimat, apart", base="plain averages, apart", limit=0.1),
        ],
        why="four replicas in a ring, each trained alone for 100 steps first.",
    ),
}  # fmt: skip


def page(stored: Stored) -> str:
    """Return the page's text."""
    order = ("shown", "shown, few seeds", "shown in part", "not shown here", "not measured", "no claim")
    rows: list[tuple[int, str]] = []
    reasons: list[str] = []
    for name in RECIPES:
        if name == "all-reduce":
            continue
        claim = CLAIMS[name]
        found = [one for evidence in claim.evidence if (one := evidence.found(stored)) is not None]
        verdict = claim.verdict(found)
        measured = "; ".join(f"{one.words}" for one in found) or "-"
        cells = (f"`{name}`", about(name).paper, claim.claim or "none", claim.baseline, measured, f"**{verdict}**")
        rows.append((order.index(verdict), f"| {' | '.join(cells)} |"))
        if claim.why:
            reasons.append(f"- **{name}**: {claim.why}")
    table = [
        "| method | paper | its claim | its baseline | measured | verdict |", "| --- | --- | --- | --- | --- | --- |",
        *(row for _, row in sorted(rows, key=lambda one: one[0])),
    ]  # fmt: skip
    return HEAD + "\n".join(table) + "\n\n## Why, and what is left open\n\n" + "\n".join(reasons) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", help="the page; printed by default")
    options = parser.parse_args()
    text = page(Stored.read())
    if options.path is None:
        print(text, end="")
    else:
        options.path.write_text(text)


if __name__ == "__main__":
    main()
