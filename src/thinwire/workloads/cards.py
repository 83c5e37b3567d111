"""Cards of the workloads: what shows of each before torch is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from thinwire.errors import MissingExtra, refusal, unknown_name
from thinwire.runlog.measures import Measures, Metric

# Default of --batch-size, where a workload has none of its own: sequences of one replica's step.
BATCH_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCard:
    """Name, units and options of a workload.

    Attributes:
        source: MODULE:NAME of the `Workload`.
        measures: What is counted and measured.
        model: Name of the model, where no option names one; `data` likewise.
        lr: Default of `--lr` for AdamW; None by the model.
        needs: Module that it imports, the package of it, and the extra of thinwire with it.
        options: Options of `thinwire train` that are of some workloads only, and of this one.
        keeps_ranks: Whether the ranks of a replica can share its model.
    """

    name: str
    source: str
    measures: Measures
    model: str = ""
    data: str = ""
    batch_size: int = BATCH_SIZE
    lr: float | None = None
    needs: tuple[str, str, str] | None = None
    options: tuple[str, ...] = ()
    keeps_ranks: bool = False

    def check_installed(self) -> None:
        """Refuse a workload whose package is missing, without importing it."""
        if self.needs is not None and importlib.util.find_spec(self.needs[0]) is None:
            raise MissingExtra.of(self.needs[1], extra=self.needs[2])

    def load(self) -> Any:
        return _imported(self.source)


LANGUAGE = WorkloadCard(
    name="language", source="thinwire.workloads.language.workload:LANGUAGE_MODELLING",
    measures=Measures(),
    options=(
        "model", "data", "init_from", "lora", "seq_len", "vocab_size", "recompute", "keep_attention",
        "stream_backward", "tokenizer", "sequences", "plan",
    ),
    keeps_ranks=True,
)  # fmt: skip
DIGITS = WorkloadCard(
    name="digits", source="thinwire.workloads.digits.workload:DIGIT_CLASSIFICATION",
    measures=Measures(samples="images", metric=Metric(name="accuracy", unit="%")), model="digits-convnet",
    data="digits", batch_size=32, lr=3e-3, needs=("sklearn", "scikit-learn", "digits"),
)  # fmt: skip
_CARDS = {card.name: card for card in (LANGUAGE, DIGITS)}
# Options that not every workload has.
WORKLOAD_OPTIONS = tuple(sorted({name for card in _CARDS.values() for name in card.options}))


def card_of(name: str) -> WorkloadCard:
    """Return the card of a workload, by its name or as MODULE:NAME of a `Workload`, whose module is imported.

    Raises:
        ValueError: There is no such workload; names the nearest ones.
    """
    if name in _CARDS:
        return _CARDS[name]
    module, sign, _ = name.partition(":")
    if not sign:
        raise unknown_name("--workload", name, _CARDS, others="MODULE:NAME of your own")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module beside the command is found, as with python -m
    try:
        found: WorkloadCard = _imported(name).card
        return found
    except (ImportError, AttributeError) as error:
        raise refusal(f"--workload {name} cannot be imported", got=f"{type(error).__name__}: {error}",
                      allowed="MODULE:NAME of a thinwire.workloads.workload.Workload",
                      remedy=f"python -c 'import {module}'") from error  # fmt: skip


def _imported(source: str) -> Any:
    module, _, name = source.partition(":")
    return getattr(importlib.import_module(module), name)
