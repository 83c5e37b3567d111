"""Cards of the workloads: what shows of each before torch is imported."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from thinwire.errors import unknown_name
from thinwire.runlog.measures import Measures


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCard:
    """Name, units and options of a workload.

    Attributes:
        name: As `--workload` takes it.
        measures: What is counted and measured.
        options: Options of `thinwire train` that are of some workloads only, and of this one.
        keeps_ranks: Whether the ranks of a replica can share its model.
        source: MODULE:NAME of the `Workload`.
    """

    name: str
    source: str
    measures: Measures
    options: tuple[str, ...] = ()
    keeps_ranks: bool = False

    def load(self) -> Any:
        """Import the `Workload`, and torch with it."""
        module, _, name = self.source.partition(":")
        return getattr(importlib.import_module(module), name)


LANGUAGE = WorkloadCard(
    name="language", source="thinwire.workloads.language.workload:LANGUAGE_MODELLING",
    measures=Measures(),
    options=(
        "model", "data", "init_from", "lora", "seq_len", "vocab_size", "recompute", "tokenizer", "sequences", "plan",
    ),
    keeps_ranks=True,
)  # fmt: skip
_CARDS = {card.name: card for card in (LANGUAGE,)}
# Options that not every workload has.
WORKLOAD_OPTIONS = tuple(sorted({name for card in _CARDS.values() for name in card.options}))


def card_of(name: str) -> WorkloadCard:
    """Return the card of a workload.

    Raises:
        ValueError: There is no such workload; names the nearest ones.
    """
    if name not in _CARDS:
        raise unknown_name("--workload", name, _CARDS)
    return _CARDS[name]
