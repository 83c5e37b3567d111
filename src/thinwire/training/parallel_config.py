"""Degrees of parallelism inside a replica: their options, and what does not go with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from thinwire.codec_specs import DEFAULT_EXPERT_CODE, activation_codecs
from thinwire.errors import excluded, refusal
from thinwire.options import flag, option
from thinwire.sequences.block_tables import POLICIES, sequence_plan
from thinwire.units import parse_bytes
from thinwire.workloads.cards import BATCH_SIZE
from thinwire.workloads.language.presets import PRESETS, base_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Ranks of each replica; the product of all degrees but ep is their number. `--plan` of a site sets them.

    Experts are shared among the ranks of dp_shard and cp, which `--ep` alone makes as many as it says.
    """

    dp_replicate: int = option(1, least=1)
    """Copies of the sharded states inside each replica."""
    dp_shard: int = option(1, least=1)
    """Shards of the states inside each replica (FSDP2)."""
    cp: int = option(1, least=1)
    """Ranks that share each sequence (context parallelism)."""
    cp_policy: str = option("auto", choices=POLICIES)
    """Sharing of attention over --cp ranks: what travels, and who computes; auto chooses by bytes and balance."""
    cp_sites: str | None = option(None)
    """Site of each --cp rank, such as 0,0,1,1, where they are at several: keys cross a border seldom."""
    ep: int = option(1, least=1)
    """Ranks that share the experts of a mixture of experts; they divide --dp-shard x --cp. Alone it sets --dp-shard."""
    expert_code: str = option(DEFAULT_EXPERT_CODE)
    """Codecs of tokens and their gradients between ranks of --ep, such as block-int8/block-int4; none: uncoded."""
    stream_experts: int = option(0, least=0)
    """Experts of a layer that a rank of --ep gets copies of for a step, if its tokens would be more bytes (FSSDP)."""
    balance_over: str = option("ranks", choices=("micro-batch", "ranks", "global-batch"))
    """Whose tokens balance experts in the loss: of each pass, of all ranks' passes, or of the step's passes so far."""
    tp: int = option(1, least=1)
    """Ranks that share each layer (tensor parallelism)."""
    pp: int = option(1, least=1)
    """Pipeline stages of each replica (1F1B)."""
    interleave: int = option(1, least=1)
    """Chunks of layers on each pipeline stage; above 1 the schedule is interleaved 1F1B."""
    eagerness: int = option(1, least=1)
    """Forward passes ahead of 1F1B for each later pipeline stage, to hide latency; many are GPipe."""
    activation_code: str | None = option(None)
    """Codecs of activations and their gradients between pipeline stages, such as block-int8/block-int4."""
    activation_memory: str | None = option(None)
    """Most bytes of each side of a border for the last visit of each window, such as 2GB: differences to it cross."""
    stage_sites: str | None = option(None)
    """Site of each pipeline stage, such as 0,0,1,1: messages inside a site are not coded. Default: all are coded."""
    skip: float = option(0.0, least=0, below=1, usual=0.25)
    """Share of the pipeline stages that each micro-batch skips. Experimental: a smaller plain model was as good."""
    zero_stage: int = option(2, least=1)
    """ZeRO stage of the shards: 1, 2 (gradients in shards too) or 3 (parameters too); a pipeline has 1."""
    unsharded_layers: int = option(0, least=0)
    """Layers, the last ones, whose parameters stay together all through a step, with --zero-stage 3."""
    recompute_layers: int = option(0, least=0)
    """Layers of each pipeline stage whose activations are computed again in the backward pass."""

    def __post_init__(self) -> None:
        """Let `--ep` alone stand for as many shards."""
        if self.ep > 1 and self.dp_shard == self.cp == 1:
            object.__setattr__(self, "dp_shard", self.ep)

    @property
    def ranks(self) -> int:
        """Ranks of one replica."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks of one replica that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def path_length(self) -> int:
        """Stages that a micro-batch visits."""
        return round(self.pp * (1 - self.skip))

    @property
    def most_memory_bytes(self) -> int:
        """`activation_memory` in bytes.

        Raises:
            ValueError: It is no size.
        """
        return int(parse_bytes(self.activation_memory or "0"))

    @property
    def sites(self) -> tuple[int, ...] | None:
        """`stage_sites` as numbers.

        Raises:
            ValueError: It is no list of whole numbers, one a stage.
        """
        return _site_numbers("--stage-sites", self.stage_sites, count=self.pp, of="pipeline stage")

    @property
    def sites_of_cp(self) -> tuple[int, ...] | None:
        """`cp_sites` as numbers.

        Raises:
            ValueError: It is no list of whole numbers, one a rank of cp.
        """
        return _site_numbers("--cp-sites", self.cp_sites, count=self.cp, of="rank of --cp")


def _site_numbers(option: str, given: str | None, *, count: int, of: str) -> tuple[int, ...] | None:
    if given is None:
        return None
    parts = given.split(",")
    if len(parts) != count or not all(part.isascii() and part.isdecimal() and len(part) < 7 for part in parts):
        raise refusal(f"{option} must number the site of each {of}", got=repr(given[:60]),
                      allowed=f"{count} whole numbers joined by commas",
                      remedy=f"{option} " + ",".join("0" * count))  # fmt: skip
    return tuple(map(int, parts))


ONE_RANK = ParallelConfig()
EXPERIMENTAL_SKIP = "--skip is experimental: a plain model of as many layers as a micro-batch visits was as good"
# Options that a replica of several ranks cannot have, and why.
_NOT_PARALLEL = {
    "elastic": "its replicas have --ranks-per-replica",
    "lora": "adapters were not tried with sharded models", "compile": "it was not tried with sharded models",
}  # fmt: skip

_NOT_SKIPPING = {
    "elastic": "elastic replicas exchange whole fragments at one rank; with one replica, a lost stage is skipped",
    "secret": "messages on paths take gloo, which does not encrypt",
}  # fmt: skip


def parallel_problems(config: Any) -> list[ValueError]:
    """Return what is wrong with the degrees of a `TrainConfig`; what the model decides is checked with it."""
    own = config.parallel
    if min(own.dp_replicate, own.dp_shard, own.cp, own.tp, own.pp) < 1 or (config.data.micro_batch or 1) < 1:
        return []  # refused as too small
    checks = [
        (own.pp == 1 and own.interleave > 1,
         refusal("--interleave is for pipelines", got=own.interleave, allowed="1 where --pp is 1",
                 remedy="--interleave 1")),
        (own.zero_stage > 3,
         refusal("--zero-stage is too large", got=own.zero_stage, allowed="1 to 3", remedy="--zero-stage 3")),
        (own.zero_stage == 3 and own.pp > 1,
         excluded("--zero-stage 3", "--pp", remedy="--zero-stage 1",
                  why="its schedules keep parameters and gradients whole between micro-batches")),
        (own.unsharded_layers and own.zero_stage != 3,
         refusal("--unsharded-layers is for --zero-stage 3; below it all are unsharded", got=own.unsharded_layers,
                 allowed="0", remedy="--zero-stage 3, or to leave --unsharded-layers out")),
        (own.unsharded_layers and own.zero_stage == 3 and own.pp == 1 and own.dp_shard * own.cp == 1,
         refusal("--unsharded-layers has no use without shards", got="--dp-shard 1", allowed="2 or more shards",
                 remedy="--dp-shard 2, or to leave --unsharded-layers out")),
    ]  # fmt: skip
    problems = [*(problem for is_wrong, problem in checks if is_wrong), *_stage_problems(own), *_cp_problems(own)]
    problems += _expert_problems(config)
    return problems if own.ranks == 1 else [*problems, *_bad_with_ranks(config)]


def _stage_problems(own: ParallelConfig) -> list[ValueError]:
    """Check what stages exchange, and in which order they work."""
    problems = []
    for name in ("eagerness", "activation_code", "activation_memory", "stage_sites", "skip"):
        if own.pp == 1 and getattr(own, name) != getattr(ONE_RANK, name):
            problems.append(
                refusal(f"{flag(name)} is for pipelines", got=getattr(own, name), allowed="2 or more --pp",
                        remedy=f"--pp 2, or to leave {flag(name)} out")
            )  # fmt: skip
    if own.interleave > 1 and own.eagerness > 1:
        problems.append(excluded("--eagerness", "--interleave", why="an interleaved pipeline has one order",
                                 remedy="--interleave 1"))  # fmt: skip
    if own.pp > 1:
        try:
            _ = own.sites, own.activation_code is None or activation_codecs(own.activation_code), own.most_memory_bytes
        except ValueError as error:
            problems.append(error)
    for name, why in (("stage_sites", "says where messages are coded"), ("activation_memory", "is what a code needs")):
        if own.pp > 1 and getattr(own, name) is not None and own.activation_code is None:
            problems.append(
                refusal(f"{flag(name)} {why}", got="no --activation-code", allowed="both, or neither",
                        remedy="--activation-code block-int8/block-int4")
            )  # fmt: skip
    return [*problems, *_skip_problems(own)] if own.skip and own.pp > 1 else problems


def _skip_problems(own: ParallelConfig) -> list[ValueError]:
    """Check what micro-batches that skip stages do not go with."""
    usual = ParallelConfig(pp=own.pp, skip=own.skip, activation_code=own.activation_code)
    reasons = {
        "interleave": "a path visits a stage once", "eagerness": "the paths decide the order of passes",
        "stage_sites": "a path may cross any border, so all messages are coded",
        "activation_memory": "a window takes another path each time",
        **dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp"), "a stage is one rank"),
    }  # fmt: skip
    problems = [excluded("--skip", flag(name), why=why, remedy=f"to leave {flag(name)} out")
                for name, why in reasons.items() if getattr(own, name) != getattr(usual, name)]  # fmt: skip
    if not 1 < own.path_length < own.pp:
        few = max(3, own.pp)
        problems.append(refusal("--skip must leave two stages or more, and skip one", got=f"{own.skip:g} of {own.pp}",
                                allowed=f"paths of 2 to {few - 1} of {few} stages",
                                remedy=f"--pp {few} --skip {1 / few:.2f}"))  # fmt: skip
    return problems


def _cp_problems(own: ParallelConfig) -> list[ValueError]:
    """Check how ranks share sequences."""
    problems = [
        refusal(f"{flag(name)} is for ranks that share sequences", got=getattr(own, name), allowed="2 or more --cp",
                remedy=f"--cp 2, or to leave {flag(name)} out")
        for name in ("cp_policy", "cp_sites") if own.cp == 1 and getattr(own, name) != getattr(ONE_RANK, name)
    ]  # fmt: skip
    if problems or own.cp_policy not in POLICIES:
        return problems
    try:
        sites = own.sites_of_cp or (0,) * own.cp
        if own.cp_policy not in ("auto", "heads", "heads+sites"):  # the model's heads decide of those
            sequence_plan(own.cp_policy, sites=sites, heads=1)
    except ValueError as error:
        problems.append(error)
    return problems


def _expert_problems(config: Any) -> list[ValueError]:
    """Check what goes with a mixture of experts, and how ranks share its experts."""
    own, name, shards = config.parallel, config.model.name, config.parallel.dp_shard * config.parallel.cp
    count = PRESETS[base_name(name)].num_experts if base_name(name) in PRESETS else 0
    if not count:
        return [
            refusal(f"{flag(option)} is for mixtures of experts", got=f"--model {name}", allowed="moe-nano, moe-35m",
                    remedy=f"--model moe-nano, or to leave {flag(option)} out")
            for option in ("ep", "expert_code", "stream_experts", "balance_over")
            if getattr(own, option) != getattr(ONE_RANK, option)
        ]  # fmt: skip
    others = {
        "tp": (own.tp > 1, "ranks share whole experts"),
        "pp": (own.pp > 1, "its loss needs the routers of all layers"),
        "compile": (config.model.compile, "its sizes change with each batch"),
        "stream_backward": (config.model.stream_backward is not None, "it was not tried"),
        "ranks_per_replica": (config.elastic.ranks_per_replica > 1, "its ranks share no experts"),
    }
    checks = [
        *((is_given, excluded(f"--model {name}", flag(option), why=why, remedy=f"to leave {flag(option)} out"))
          for option, (is_given, why) in others.items()),
        *((own.ep == 1 and getattr(own, option) != getattr(ONE_RANK, option),
           refusal(f"{flag(option)} is for ranks that share experts", got=getattr(own, option),
                   allowed="2 or more --ep", remedy=f"--ep 2, or to leave {flag(option)} out"))
          for option in ("expert_code", "stream_experts")),
        (count % own.ep > 0,
         refusal("--ep does not divide the experts of the model", got=f"{own.ep} ranks, {count} experts",
                 allowed=f"divisors of {count}", remedy=f"--ep {math.gcd(count, own.ep)}")),
        (shards % own.ep > 0,
         refusal("--ep does not divide the ranks that share states and sequences", got=f"{own.ep} of {shards} ranks",
                 allowed=f"divisors of --dp-shard x --cp, which is {shards}",
                 remedy=f"--dp-shard {own.ep}, or --ep {math.gcd(shards, own.ep)}")),
    ]  # fmt: skip
    problems = [problem for is_wrong, problem in checks if is_wrong]
    try:
        _ = own.expert_code == "none" or activation_codecs(own.expert_code)
    except ValueError as error:
        problems.append(error)
    return problems


def _bad_with_ranks(config: Any) -> list[ValueError]:
    """Check what else is given where a replica has several ranks."""
    own = config.parallel
    which = next(flag(name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp") if config.option(name) > 1)
    is_halved = own.cp_policy in ("auto", "zigzag") and not config.model.name.startswith("linear-")
    seq_len, parts = config.model.seq_len or 0, own.cp * (1 + is_halved)
    batch = config.data.batch_size or BATCH_SIZE
    is_small = batch < own.data_ranks and config.data.sequences == "windows"  # documents fill passes by their lengths
    checks = [
        *((config.option(name), excluded(flag(name), which, why=why, remedy=f"to leave {flag(name)} out"))
          for name, why in ({**_NOT_PARALLEL, **_NOT_SKIPPING} if own.skip else _NOT_PARALLEL).items()),
        (config.model.name.startswith("hf:"),
         excluded(which, f"--model {config.model.name}", why="it shards thinwire's own models",
                  remedy="a preset or a size, such as --model 35m")),
        (config.optimizer.inner_optimizer == "muon",
         excluded("--inner-optimizer muon", which, why="it needs whole matrices", remedy="--inner-optimizer adamw")),
        (own.pp > 1 and config.model.autocast != "none",
         excluded("--autocast", "--pp", why="its schedule runs both passes in one call",
                  remedy="to leave --autocast out")),
        (own.pp > 1 and config.run.secret is not None and own.activation_code is None,
         refusal("--secret with --pp encrypts what a code carries between stages", got="no --activation-code",
                 allowed="both", remedy="--activation-code float32, or block-int8/block-int4")),
        (config.run.secret is not None and (config.run.advertise or config.run.port_range),
         excluded("--advertise and --port-range", which, why="gloo joins a replica's ranks, on any port",
                  remedy="to leave them out")),
        (own.cp > 1 and seq_len % parts,
         refusal(f"--cp cuts each sequence into {parts} equal parts", got=f"{seq_len} tokens",
                 allowed=f"multiples of {parts}", remedy=f"--seq-len {max(1, -(-seq_len // parts)) * parts}")),
        (own.activation_memory is not None and batch % (own.data_ranks * (config.data.micro_batch or 1)),
         refusal("--activation-memory needs whole micro-batches", got=f"--batch-size {batch}",
                 allowed=f"multiples of {own.data_ranks * (config.data.micro_batch or 1)}",
                 remedy="--micro-batch 1")),
        (is_small,
         refusal("--batch-size has no sequence for some of the ranks", got=batch,
                 allowed=f"{own.data_ranks} or more", remedy=f"--batch-size {own.data_ranks}")),
    ]  # fmt: skip
    problems = [problem for is_wrong, problem in checks if is_wrong]
    per_rank = -(-batch // own.data_ranks)
    num_passes = -(-per_rank // (config.data.micro_batch or per_rank))
    if num_passes < own.pp and not problems:
        fewest = own.pp * own.data_ranks
        problems.append(
            refusal("--pp needs as many micro-batches as stages", got=num_passes, allowed=f"{own.pp} or more",
                    remedy="--micro-batch 1" + (f" and --batch-size {fewest}" if batch < fewest else ""))
        )  # fmt: skip
    elif own.interleave > 1 and num_passes % own.pp and not is_small:
        problems.append(
            refusal("--interleave needs as many micro-batches as --pp, or a multiple", got=num_passes,
                    allowed=f"multiples of {own.pp}", remedy="--micro-batch 1, or --interleave 1")
        )  # fmt: skip
    return problems
