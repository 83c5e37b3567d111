"""Attention over sequences that ranks share, for a user's loop: `attention`, `share` and `own_tokens`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import MissingExtra, ThinwireError, excluded, refusal
from thinwire.sequences.block_attention import SharedAttention, SharedCall
from thinwire.sequences.block_tables import BlockTable, SequencePlan, sequence_plan, striped
from thinwire.sequences.linear_attention import shared_gated_attention
from thinwire.sequences.state_scan import scan_plan
from thinwire.transport.group_peers import RankPeers, check_agreement, exchange_all, peers_of

# Name in transformers' registry of attention functions.
_REGISTERED = "thinwire-sequences"


class SequenceAttention:
    """Causal attention of this rank's positions to those of all ranks; made by `attention`.

    Args:
        plan: Who computes what.
        peers: The ranks.

    Attributes:
        plan: As given.
        peers: As given.
    """

    def __init__(self, plan: SequencePlan, peers: RankPeers) -> None:
        self.plan, self.peers = plan, peers
        self._table = plan.table
        self._documents: Tensor | None = None
        sites = ",".join(map(str, plan.sites))
        heads = f"{plan.heads} heads, {plan.kv_heads} of keys"
        check_agreement(peers, f"{plan.policy} on {plan.num_ranks} ranks at sites {sites}, {heads}",
                        what="sequences", remedy="the same --cp and --cp-policy on all hosts")  # fmt: skip

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, layer: int | None = None
    ) -> Tensor:
        """Attend from this rank's positions to those of all ranks, up to each one's own.

        Args:
            query: (batch, heads, own positions, head_dim).
            key: (batch, kv_heads, own positions, head_dim); other ranks get it.
            value: As `key`.
            scale: Of the scores; 1 / sqrt(head_dim) by default.
            layer: Of the model, for errors.

        Returns:
            As `query`.

        Raises:
            ValueError: The shapes do not fit the plan.
            ThinwireError: A log-sum-exp is NaN.
            TransportError: A rank is gone or hangs.
        """
        if torch.is_autocast_enabled(query.device.type):  # as it does with torch's own attention
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        batch, _, positions, width = query.shape
        wanted = (batch, self.plan.kv_heads, positions, width)
        if query.shape[1] != self.plan.heads or key.shape != wanted or value.shape != wanted:
            raise refusal(
                "shared attention got other shapes than its plan has",
                got=f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}",
                allowed=f"{self.plan.heads} heads of queries, and {wanted} for keys and values",
                remedy="sequences.attention(..., heads=, kv_heads=) of this model",
            )  # fmt: skip
        documents = self._documents
        seq_len = positions * self.plan.num_ranks
        self.plan.slices(seq_len, self.peers.rank)
        if documents is not None and documents.shape != (batch, seq_len):
            raise refusal("documents are numbered for other sequences", got=tuple(documents.shape),
                          allowed=(batch, seq_len), remedy="set_documents before each batch")  # fmt: skip
        call = SharedCall(
            plan=self.plan, table=self._table_for(query, key), peers=self.peers, documents=documents, layer=layer,
            scale=1 / math.sqrt(width) if scale is None else scale,
        )  # fmt: skip
        attended: Tensor = SharedAttention.apply(query, key, value, call)  # type: ignore[no-untyped-call]
        return attended

    def scan(self, query: Tensor, key: Tensor, value: Tensor, log_gates: Tensor) -> Tensor:
        """Attend by gated linear attention, whose states alone travel; see `shared_gated_attention`.

        Raises:
            ValueError: The plan does not give each rank a part in their order, or sequences have several documents.
        """
        if self._documents is not None:
            raise excluded("linear attention", "documents in one row", why="its state is of all earlier positions",
                           remedy="a document a row")  # fmt: skip
        plan = scan_plan(
            ranks=self.plan.num_ranks, width=query.shape[3],
            state_bytes=query.shape[0] * self.plan.heads * query.shape[3] * value.shape[3] * value.itemsize,
        )  # fmt: skip
        return shared_gated_attention(query, key, value, log_gates, peers=self.peers, plan=plan)

    def set_documents(self, documents: Tensor | None) -> None:
        """Let positions attend to those of their own document alone, from the next call on.

        Keys of documents that a rank's queries do not belong to are not sent to it.

        Args:
            documents: Number of each position's document, (batch, all positions), the same on all ranks, also while the
                backward pass computes activations again; None for sequences of one document.
        """
        self._documents, self._table = documents, self.plan.table
        if documents is None:
            return
        self.plan.slices(documents.shape[1], self.peers.rank)
        parts = documents.chunk(len(self.plan.table.owners), 1)
        needed = {
            (row, column) for row, queries in enumerate(parts) for column, keys in enumerate(parts[: row + 1])
            if any(bool(torch.isin(q, k).any()) for q, k in zip(queries, keys, strict=True))
        }  # fmt: skip
        self._table = self.plan.table.only(needed)

    def _table_for(self, query: Tensor, key: Tensor) -> BlockTable:
        return self._table

    def own_positions(self, seq_len: int) -> Tensor:
        """Return the positions of each sequence that this rank works on, int64.

        Raises:
            ValueError: The length is not divided by the plan's parts; names the next one that is.
        """
        return torch.cat([torch.arange(own.start, own.stop) for own in self.plan.slices(seq_len, self.peers.rank)])

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """Return this rank's positions of whole sequences (batch, seq)."""
        return tokens[:, self.own_positions(tokens.shape[1]).to(tokens.device)]


class SparseAttention(SequenceAttention):
    """Attention of each part's queries to the earlier parts whose keys they score highest; made by `sparse_attention`.

    It approximates attention to all keys: keys that no query of a rank selects do not travel to it. A part's score is
    the largest product, of all sequences and heads, of its mean key and the mean query.

    Args:
        plan: Striped parts of all ranks.
        peers: The ranks.
        kept: Earlier parts that a part of queries meets at most, beside itself.

    Attributes:
        chosen: Table of the last call, with its blocks alone; None before it.
    """

    def __init__(self, plan: SequencePlan, peers: RankPeers, *, kept: int) -> None:
        super().__init__(plan, peers)
        self.chosen: BlockTable | None = None
        self._kept = kept

    def selection_bytes(self, *, batch: int, head_dim: int) -> int:
        """Return what a rank sends to each other one in a forward pass to agree: mean keys, and a byte a block."""
        parts = len(self.plan.table.owners)
        return parts // self.plan.num_ranks * (4 * batch * self.plan.kv_heads * head_dim + parts)

    @torch.no_grad()
    def _table_for(self, query: Tensor, key: Tensor) -> BlockTable:
        ranks, parts = self.plan.num_ranks, len(self.plan.table.owners)
        count, own = parts // ranks, self.peers.rank
        # (batch, heads, own parts, head_dim)
        queries, keys = (one.float().reshape(*one.shape[:2], count, -1, one.shape[3]).mean(3) for one in (query, key))
        # parts are dealt out in turn: part p is the p // ranks-th of rank p % ranks
        means = torch.stack(self._from_all(keys), 3).flatten(2, 3)
        grouped = queries.reshape(len(queries), keys.shape[1], -1, *queries.shape[2:])
        scores = (grouped @ means.unsqueeze(2).mT).amax((0, 1, 2)).cpu()
        allowed = torch.eye(parts, dtype=torch.bool)
        for block in self._table.blocks:
            allowed[block.row, block.column] = True
        earlier = allowed.tril(-1)[own::ranks]
        best = scores.masked_fill(~earlier, -math.inf).topk(min(self._kept, parts), dim=1).indices
        bits = (torch.zeros_like(earlier).scatter_(1, best, True) & earlier) | torch.eye(parts).bool()[own::ranks]
        # each rank says what its queries need, so that a rounding error cannot make two ranks differ
        rows = torch.stack(self._from_all(bits.to(torch.uint8)), 1).flatten(0, 1)
        if ((rows > allowed) | (rows.sum(1, keepdim=True) > self._kept + 1)).any() or not rows.diagonal().all():
            raise ThinwireError(
                f"rank {own} was told of blocks that are not to be; start the same thinwire on all hosts"
            )
        self.chosen = self._table.only({(row, column) for row, column in rows.nonzero().tolist()})
        return self.chosen

    def _from_all(self, own: Tensor) -> list[Tensor]:
        """Return a tensor of each rank, by rank."""
        own = own.contiguous()
        found = [own if rank == self.peers.rank else torch.empty_like(own) for rank in range(self.peers.size)]
        others = [rank for rank in range(self.peers.size) if rank != self.peers.rank]
        exchange_all(self.peers, dict.fromkeys(others, own), {rank: found[rank] for rank in others})
        return found


def sparse_attention(
    group: Any, *, heads: int, kv_heads: int | None = None, parts: int = 16, kept: int = 8,
    sites: Sequence[int] | None = None,
) -> SparseAttention:  # fmt: skip
    """Return sparse causal attention over sequences that the ranks of a group share; all ranks call it alike.

    Args:
        group: As for `attention`.
        heads: Of the queries.
        kv_heads: Of keys and values. Default: as many.
        parts: Of each rank; smaller parts are chosen more finely, and their means cost more bytes.
        kept: Earlier parts that a part of queries meets at most; with all of them attention is exact.
        sites: Number of each rank's site. Default: all are at one.

    Raises:
        ValueError: A number is too small, or ranks ask for different ones.

    Reference:
        arXiv 2510.18830: keys that no query selects need not cross.
    """
    for name, number in (("parts", parts), ("kept", kept)):
        if number < 1:
            raise refusal(f"sparse attention needs {name}", got=number, allowed="1 or more", remedy=f"{name}=8")
    whole = attention(group, heads=heads, kv_heads=kv_heads, policy="ring", sites=sites)
    plan = replace(
        whole.plan, policy=f"sparse, {kept} of {parts} parts a rank", table=striped(whole.plan.sites, parts=parts)
    )
    return SparseAttention(plan, whole.peers, kept=kept)


def attention(
    group: Any, *, heads: int, kv_heads: int | None = None, policy: str = "auto", sites: Sequence[int] | None = None,
    head_dim: int = 128,
) -> SequenceAttention:  # fmt: skip
    """Return causal attention over sequences that the ranks of a group share; all ranks call it alike.

    Args:
        group: One-dimensional `DeviceMesh`, such as `mesh["cp"]`, a process group, or `RankPeers`.
        heads: Of the queries.
        kv_heads: Of keys and values. Default: as many.
        policy: One of `sequences.POLICIES`.
        sites: Number of each rank's site. Default: all are at one.
        head_dim: Width of a head; `auto` compares bytes.

    Raises:
        ValueError: The policy does not fit ranks or heads, or ranks ask for different ones.
    """
    peers = peers_of(group)
    sites = (0,) * peers.size if sites is None else tuple(sites)
    if len(sites) != peers.size:
        raise refusal("each rank that shares sequences has one site", got=f"{len(sites)} sites",
                      allowed=f"{peers.size} numbers", remedy=",".join("0" * peers.size))  # fmt: skip
    plan = sequence_plan(policy, sites=sites, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    return SequenceAttention(plan, peers)


def own_tokens(tokens: Tensor, attend: SequenceAttention) -> Tensor:
    """Return this rank's positions of whole sequences (batch, seq), in the order of the plan."""
    return attend.own_tokens(tokens)


def share(model: nn.Module, attend: SequenceAttention) -> None:
    """Let a model work on this rank's positions of each sequence: thinwire's decoder, or one of transformers.

    A transformers model gets `position_ids` of `own_positions` in each call that has none.

    Raises:
        ValueError: The model's attention is not causal attention of all earlier positions, without dropout.
        MissingExtra: transformers is not installed.
    """
    taught: Any = model
    if hasattr(model, "share_sequences"):
        taught.share_sequences(attend)
        return
    if not hasattr(model, "set_attn_implementation"):
        raise refusal("sequences are shared by thinwire's decoders and transformers models", got=type(model).__name__,
                      allowed="both", remedy="attend(query, key, value) inside your own attention")  # fmt: skip
    _share_transformers(model, taught.config.get_text_config(), attend)


def _share_transformers(model: Any, config: Any, attend: SequenceAttention) -> None:
    try:
        from transformers import AttentionInterface
    except ImportError:
        raise MissingExtra.of("transformers", extra="hf") from None
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    for name in ("sliding_window", "alibi", "attention_chunk_size", "attn_logit_softcapping", "is_encoder_decoder"):
        if getattr(config, name, None):
            kinds.add(f"{name} {getattr(config, name)}")
    if kinds:
        raise excluded(", ".join(sorted(kinds)), "shared sequences", why="tables hold whole causal attention",
                       remedy="a model of full attention, such as Llama or Qwen")  # fmt: skip
    AttentionInterface.register(_REGISTERED, _attend_in_transformers)
    model.set_attn_implementation(_REGISTERED)
    if config._attn_implementation != _REGISTERED:
        raise refusal("the model does not call its attention through transformers' registry",
                      got=type(model).__name__, allowed="models such as Llama and Qwen",
                      remedy="attend(query, key, value) inside it")  # fmt: skip
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.shared_attention = partial(attend, layer=module.layer_idx)
    model.register_forward_pre_hook(partial(_with_positions, attend), with_kwargs=True)


def _with_positions(attend: SequenceAttention, model: nn.Module, args: Any, named: dict[str, Any]) -> Any:
    """Add the positions of this rank's tokens to a call of a transformers model."""
    tokens: Any = args[0] if args else named.get("input_ids", named.get("inputs_embeds"))
    mask = named.pop("attention_mask", None)
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        raise excluded("attention_mask", "shared sequences", why="tables hold whole causal attention",
                       remedy="padding at the end, without a mask")  # fmt: skip
    if named.get("labels") is not None and named.get("shift_labels") is None:
        raise excluded("labels alone", "shared sequences", why="the next token may lie on another rank",
                       remedy="shift_labels=attend.own_tokens(targets) beside labels")  # fmt: skip
    if named.get("position_ids") is None:
        own = attend.own_positions(tokens.shape[1] * attend.plan.num_ranks)
        named["position_ids"] = own.to(tokens.device).expand(len(tokens), -1)
    return args, {"use_cache": False, **named}


def _attend_in_transformers(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Stand in transformers' registry for its attention; returns (batch, own positions, heads, head_dim)."""
    given = [name for name in ("sliding_window", "softcap", "s_aux") if others.get(name) is not None]
    if dropout:
        raise excluded(f"attention dropout {dropout}", "shared sequences", why="ranks would drop out other scores",
                       remedy="attention_dropout=0.0")  # fmt: skip
    if given or attention_mask is not None:
        raise excluded(", ".join(given) or "a mask", "shared sequences", why="tables hold whole causal attention",
                       remedy="a model of full attention")  # fmt: skip
    layer: Any = module
    attended = layer.shared_attention(query, key, value, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None
