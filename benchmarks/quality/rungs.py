"""Rungs of the quality ladder: what is trained, for how long, and which methods compete.

The rules are held here: at least 20 tokens a parameter, at least 80 rounds, one epoch, the same beta2 on all sides, and
a learning rate for each side whose best value lies inside its grid (`ladder.py` widens a grid until it does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

SEEDS = (0, 1, 2)
SYNC_INTERVAL = 30
BASELINE = "data-parallel"
LEAST_TOKENS_PER_PARAMETER, LEAST_ROUNDS = 20, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A model, its data and its length.

    Attributes:
        tokenizer: `bytes` or `bpe`.
        vocab_size: Wanted tokens of the tokenizer.
        seq_len: Tokens a window.
        windows: Windows a step, all replicas together.
        steps: Inner steps.
        num_parameters: Of the model, which a run checks.
        lrs: Grid of learning rates to begin with, by kind of entry; see `Entry.grid`.
        save_every: Steps between two states from which a run goes on; 0 for none.
    """

    name: str
    dim: int
    layers: int
    heads: int
    tokenizer: str
    vocab_size: int
    seq_len: int
    windows: int
    steps: int
    num_parameters: int
    lrs: Mapping[str, tuple[float, ...]]
    save_every: int = 0
    beta2: float = 0.99
    weight_decay: float = 0.1
    warmup_share: float = 0.05
    data: str = "stdlib"
    eval_windows: int = 2048

    def __post_init__(self) -> None:
        """Refuse a rung that breaks the rules."""
        per_parameter = self.tokens / self.num_parameters
        if per_parameter < LEAST_TOKENS_PER_PARAMETER:
            raise ValueError(
                f"rung {self.name} trains on {per_parameter:.1f} tokens a parameter; allowed at least "
                f"{LEAST_TOKENS_PER_PARAMETER}; try more steps"
            )
        if self.steps // SYNC_INTERVAL < LEAST_ROUNDS:
            raise ValueError(
                f"rung {self.name} has {self.steps // SYNC_INTERVAL} rounds; allowed at least {LEAST_ROUNDS}; try more "
                f"steps"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a run."""
        return self.steps * self.windows * self.seq_len


RUNGS: Mapping[str, Rung] = MappingProxyType(
    {
        "A": Rung(
            name="A", dim=64, layers=2, heads=2, tokenizer="bytes", vocab_size=257, seq_len=64, windows=16, steps=2600,
            num_parameters=115_136,
            lrs={"all": (3e-3, 6e-3, 1e-2), "local": (1.5e-3, 3e-3, 6e-3), "sgd": (0.05, 0.1, 0.2),
                 "sign": (5e-4, 1e-3, 2e-3)},
        ),
        "B": Rung(
            name="B", dim=96, layers=4, heads=3, tokenizer="bpe", vocab_size=512, seq_len=128, windows=16, steps=4830,
            num_parameters=492_096,
            lrs={"all": (2.5e-3, 5e-3, 1e-2), "local": (1.25e-3, 2.5e-3, 5e-3)}, save_every=600,
        ),
        "G1": Rung(
            name="G1", dim=384, layers=6, heads=6, tokenizer="bpe", vocab_size=8192, seq_len=512, windows=96,
            steps=5640, num_parameters=13_765_248,
            lrs={"all": (8e-3, 1.6e-2, 3e-2), "local": (4e-3, 8e-3, 1.6e-2)}, save_every=200,
        ),
        "G2": Rung(
            name="G2", dim=512, layers=6, heads=8, tokenizer="bpe", vocab_size=32_000, seq_len=1024, windows=128,
            steps=5430, num_parameters=35_265_792, lrs={"all": (1.08e-2,), "local": (5.2e-3,)}, save_every=100,
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A competitor.

    Attributes:
        method: A method of thinwire.
        replicas: Numbers of replicas that it runs with.
        options: Arguments of the method; a codec by its name.
        inner: An inner optimizer of `thinwire train`: `adamw`, `muon` or `plain-sgd`.
        grid: Key of `Rung.lrs`.
        share_of: The replica trains alone, with the share of the batch that one of so many has.
        budgets: Shares of the rung's steps, with schedules of their own; more than 1 only for the baseline.
        rungs: Where it runs.
        follows: An entry whose learning rate it takes: a point of a curve.
        seeds: Seeds of an entry that follows another.
        mean_of: The loss is that of the mean of so many last global values, one every `SYNC_INTERVAL` steps, which
            costs no bytes; 0 for that of the last one.
    """

    name: str
    method: str
    replicas: tuple[int, ...] = (2, 4, 8)
    options: Mapping[str, Any] = field(default_factory=dict)
    inner: str = "adamw"
    grid: str = "local"
    share_of: tuple[int, ...] = ()
    budgets: tuple[float, ...] = (1.0,)
    rungs: str = "A"
    follows: str = ""
    seeds: int = 1
    mean_of: int = 0


_STREAMING = {"sync_interval": SYNC_INTERVAL, "overlap_steps": 1, "codec": "e3m0"}
_ISO = _STREAMING | {"blend": 0.0, "outer_lr": 1.8, "outer_momentum": 0.7}
_AT_ONCE = {"sync_interval": SYNC_INTERVAL}

ENTRIES: tuple[Entry, ...] = (
    Entry(name=BASELINE, method="all-reduce", replicas=(1,), grid="all", budgets=(1.0, 0.5, 0.7, 1.4),
          rungs="A B G1 G2"),
    Entry(name="iso-loco", method="iso-loco", options=_ISO, rungs="A B G1 G2"),
    Entry(name="streaming-diloco", method="streaming-diloco", options=_STREAMING, rungs="A B G1 G2"),
    Entry(name="streaming-diloco, blend 0", method="streaming-diloco", options=_STREAMING | {"blend": 0.0},
          replicas=(2, 4)),
    Entry(name="iso-loco, momentum 0.8", method="iso-loco", options=_ISO | {"outer_momentum": 0.8}),
    Entry(name="iso-loco, blend 0.5", method="iso-loco", options=_ISO | {"blend": 0.5}, replicas=(2, 4)),
    Entry(name="diloco", method="diloco", options=_AT_ONCE, replicas=(2, 4, 8, 1)),
    Entry(name="iso-loco, float32", method="iso-loco", options=_ISO | {"codec": "float32"},
          replicas=(2,)),
    Entry(name="streaming-diloco, float32", method="streaming-diloco", options=_STREAMING | {"codec": "float32"},
          replicas=(2,)),
    Entry(name="iso-loco, one replica", method="iso-loco", options=_ISO, replicas=(1,),
          rungs="A B"),
    Entry(name="data-parallel, Muon", method="all-reduce", replicas=(1,), inner="muon", grid="all", rungs="A B"),
    Entry(name="iso-loco, Muon inside", method="iso-loco", inner="muon",
          options=_ISO | {"outer_lr": 1.0, "outer_momentum": 0.6}, replicas=(2, 4)),
    Entry(name="streaming-diloco, Muon inside", method="streaming-diloco", inner="muon",
          options=_STREAMING | {"outer_lr": 0.7, "outer_momentum": 0.6}, replicas=(2, 4)),
    Entry(name="data-parallel, Muon, mean of 16 values", method="all-reduce", replicas=(1,), inner="muon", mean_of=16,
          follows="data-parallel, Muon", seeds=3),
    # in two bits at half the interval: the bytes of E3M0
    Entry(name="muloco, H 16, mean of 16 values", method="muloco", replicas=(2, 4), inner="muon", mean_of=16,
          follows="data-parallel, Muon", seeds=3, options={"sync_interval": 16}),
    *(
        Entry(name=f"iso-loco, {word} {value}", method="iso-loco", replicas=(2,), follows="iso-loco",
              options=_ISO | {option: value})
        for word, option, values in (
            ("H", "sync_interval", (10, 100, 300)), ("tau", "overlap_steps", (3, 5, 10)), ("blend", "blend", (0.25,)),
        )
        for value in values
    ),
    Entry(name="SNOO", method="diloco", replicas=(1,), grid="all",
          options={"sync_interval": 100, "outer_lr": 0.8, "outer_momentum": 0.75}),
    Entry(name="muloco, fragments and overlap", method="muloco", inner="muon", replicas=(2, 4),
          options=_AT_ONCE | {"overlap_steps": 1, "num_fragments": None}),
    Entry(name="local-sgd", method="local-sgd", options=_AT_ONCE),
    Entry(name="streaming-sparse-loco", method="streaming-sparse-loco", options=_AT_ONCE | {"overlap_steps": 1},
          replicas=(2, 4)),
    *(
        Entry(name=f"iso-loco, {word}", method="iso-loco", replicas=(2,),
              options=_ISO | {"error_feedback": 1.0} | options)
        for word, options in (
            ("E3M0 with error feedback", {}),
            ("2 bits", {"codec": "block-2bit"}),
            ("2 bits, H 120", {"codec": "block-2bit", "sync_interval": 120}),
            ("1 bit", {"codec": "sign"}),
            ("1 bit, H 60", {"codec": "sign", "sync_interval": 60}),
        )
    ),
    *(
        Entry(name=f"iso-loco, Muon inside, {word}", method="iso-loco", inner="muon", replicas=(2,), rungs="A B",
              options=_ISO | {"outer_lr": 1.0, "outer_momentum": 0.6, "error_feedback": 1.0} | options)
        for word, options in (
            ("2 bits, H 120", {"codec": "block-2bit", "sync_interval": 120}),
            ("2 bits, H 240", {"codec": "block-2bit", "sync_interval": 240}),
            ("1 bit, H 60", {"codec": "sign", "sync_interval": 60}),
            ("1 bit, H 120", {"codec": "sign", "sync_interval": 120}),
        )
    ),
    # with 10 to 20 rounds less outer momentum ends lower
    Entry(name="iso-loco, Muon inside, 2 bits, H 240, less momentum", method="iso-loco", inner="muon", replicas=(2,),
          rungs="A B", grid="all",
          options=_ISO | {"codec": "block-2bit", "sync_interval": 240, "error_feedback": 1.0, "outer_lr": 1.0,
                          "outer_momentum": 0.4, "rest_lr": 1.0, "rest_momentum": 0.4}),
    Entry(name="iso-loco, outer rate 2.4", method="iso-loco", options=_ISO | {"outer_lr": 2.4}, replicas=(2, 4, 8),
          rungs="A B", follows="iso-loco"),
    *(
        Entry(name=method, method=method, replicas=(2,), options=options)
        for method, options in (
            ("decoupled-diloco", _AT_ONCE | {"overlap_steps": 3}), ("sparse-loco", _AT_ONCE), ("eager", _AT_ONCE),
            ("slowmo", _AT_ONCE), ("co2", _AT_ONCE), ("noloco", _AT_ONCE),
        )
    ),
    # as the digits tuned it: benchmarks/methods/claims.py
    Entry(name="co2, H 10, momentum 0.2", method="co2", replicas=(2,),
          options={"sync_interval": 10, "outer_momentum": 0.2}),
    Entry(name="muloco", method="muloco", inner="muon", options=_AT_ONCE, replicas=(2,)),
    *(
        Entry(name=method, method=method, replicas=(2,), options=options, grid="all")
        for method, options in (
            ("power-sgd", {}), ("ef21", {"codec": "top-k"}), ("zero-one-adam", {}), ("robust", {}),
            ("one-bit-adam", {"warmup_steps": 390}), ("one-bit-lamb", {"warmup_steps": 390}),
        )
    ),
    # methods that carry momentum themselves; their rates are those of SGD
    Entry(name="dgc", method="dgc", inner="plain-sgd", replicas=(2,), grid="sgd",
          options={"density": 0.001, "warmup_steps": 520}),
    Entry(name="demo", method="demo", inner="plain-sgd", replicas=(2,), grid="sign"),
    Entry(name="one replica alone", method="all-reduce", replicas=(1,), share_of=(2, 4, 8)),
)  # fmt: skip
