"""All-Scan of linear attention's states: what crosses from one rank to the next does not grow with the sequence.

Rank r turns the state S that comes in into `decay * S + local`, and hands it on. A state is (batch, heads, d_k, d_v), a
decay (batch, heads, d_k). The chain sends a state in pieces along d_k, so that ranks overlap; the gather sends all
states to all later ranks; the tree doubles its stride. The backward pass is the same scan from the last rank.

Reference:
    ZeCO, arXiv 2507.01004, section 3; the gather is LASP-2's, arXiv 2502.07563.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.errors import refusal, unknown_name
from thinwire.files import short
from thinwire.transport.group_peers import RankPeers

SCANS = ("auto", "chain", "gather", "tree")
# Of any number that a plan is made of.
_MOST = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPlan:
    """Order in which states travel.

    Attributes:
        kind: chain, gather or tree.
        pieces: Of a state, in a chain.
    """

    kind: str
    pieces: int = 1

    def seconds(self, *, ranks: int, state_bytes: float, latency_s: float, bytes_per_s: float) -> float:
        """Return how long a scan of states takes over links of a latency and a rate."""
        whole_s = state_bytes / bytes_per_s
        if self.kind == "chain":
            # the last piece leaves after the others, and then passes each rank
            return (self.pieces + ranks - 2) * (latency_s + whole_s / self.pieces)
        if self.kind == "gather":
            return latency_s + (ranks - 1) * whole_s
        return (1 + math.ceil(math.log2(max(1, ranks - 1)))) * (latency_s + whole_s)

    def sent_numbers(self, *, rank: int, ranks: int, state: int, decay: int, reverse: bool = False) -> int:
        """Return how many numbers a rank sends in a scan, of states and decays of so many numbers."""
        behind = rank if reverse else ranks - 1 - rank
        if self.kind == "chain":
            return state * (behind > 0)
        if self.kind == "gather":
            return behind * (state + decay)
        # nothing comes in at the first rank, so it hands nothing on after the first message
        strides = _strides(ranks) if behind < ranks - 1 else []
        return (state + decay) * ((behind > 0) + sum(behind >= stride for stride in strides))


def scan_plan(
    kind: str = "auto",
    *,
    ranks: int,
    width: int,
    state_bytes: float,
    latency_s: float = 0.02,
    bytes_per_s: float = 12.5e6,
) -> ScanPlan:
    """Return the plan of a scan; `auto` takes that of the shortest time.

    Args:
        kind: One of `SCANS`.
        ranks: That share a sequence.
        width: d_k, the most pieces of a state.
        state_bytes: Of a layer's state.
        latency_s: Of the slowest link between neighbours; 20 ms by default.
        bytes_per_s: Its rate; 100 Mbit/s by default.

    Raises:
        ValueError: There is no such kind, or a number is out of its range.

    Example:
        >>> scan_plan(ranks=8, width=64, state_bytes=5e5).kind  # latencies add up along a chain
        'tree'
        >>> scan_plan(ranks=8, width=64, state_bytes=5e8)
        ScanPlan(kind='chain', pieces=64)
    """
    if kind not in SCANS:
        raise unknown_name("scan of states", kind, SCANS)
    least = {"ranks": (ranks, 1), "width": (width, 1), "state_bytes": (state_bytes, 0), "latency_s": (latency_s, 0),
             "bytes_per_s": (bytes_per_s, 1)}  # fmt: skip
    for name, (value, lowest) in least.items():
        if not lowest <= value <= _MOST:
            raise refusal(f"{name} is out of range", got=short(value), allowed=f"{lowest} to {_MOST:g}",
                          remedy=f"{name}={lowest or 0.02:g}")  # fmt: skip
    best = math.sqrt(max(0, ranks - 2) * state_bytes / bytes_per_s / latency_s) if latency_s else width
    chain = ScanPlan(kind="chain", pieces=min(width, max(1, round(best))))
    plans = {"chain": chain, "gather": ScanPlan(kind="gather"), "tree": ScanPlan(kind="tree")}
    if kind != "auto":
        return plans[kind]
    how = {"ranks": ranks, "state_bytes": state_bytes, "latency_s": latency_s, "bytes_per_s": bytes_per_s}
    return min(plans.values(), key=lambda plan: plan.seconds(**how))  # type: ignore[arg-type]


def scan_states(local: Tensor, decay: Tensor, *, peers: RankPeers, plan: ScanPlan) -> Tensor:
    """Return the state that comes in at this rank: zero at the first one.

    Args:
        local: State of this rank's positions from zero on, (batch, heads, d_k, d_v).
        decay: Product of its gates, (batch, heads, d_k).
        peers: The ranks, in the order of their positions.
        plan: The same on all ranks.

    Raises:
        ValueError: The shapes do not fit, or there are more pieces than d_k.
        TransportError: A rank is gone or hangs.
    """
    if decay.shape != local.shape[:3] or plan.pieces > local.shape[2]:
        raise refusal("a scan needs a decay for each key channel of the state, and as many pieces at most",
                      got=f"{tuple(decay.shape)}, {tuple(local.shape)} and {plan.pieces} pieces",
                      allowed="(batch, heads, d_k) and (batch, heads, d_k, d_v)",
                      remedy=f"pieces={min(plan.pieces, local.shape[2])}")  # fmt: skip
    incoming: Tensor = _Scan.apply(local, decay, peers, plan)  # type: ignore[no-untyped-call]
    return incoming


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, decay: Tensor, peers: RankPeers, plan: ScanPlan) -> Tensor:
        incoming = _SCANS[plan.kind](local, decay, peers, plan, 1)
        ctx.save_for_backward(incoming, decay)
        ctx.peers, ctx.plan = peers, plan
        return incoming

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        incoming, decay = ctx.saved_tensors
        # gradient of the state that this rank hands on
        outgoing = _SCANS[ctx.plan.kind](grad, decay, ctx.peers, ctx.plan, -1)
        return outgoing, (incoming * outgoing).sum(-1), None, None


def _chain(local: Tensor, decay: Tensor, peers: RankPeers, plan: ScanPlan, way: int) -> Tensor:
    before, after = peers.rank - way, peers.rank + way
    found, sends = [], []
    arriving = [piece.new_zeros(piece.shape) for piece in local.tensor_split(plan.pieces, 2)]
    receives = []
    if 0 <= before < peers.size:
        receives = [peers.exchange([], [(before, piece)])[0] for piece in arriving]
    pieces = zip(arriving, local.tensor_split(plan.pieces, 2), decay.tensor_split(plan.pieces, 2), strict=True)
    for number, (incoming, own, gates) in enumerate(pieces):
        if receives:
            receives[number]()
        found.append(incoming)
        if 0 <= after < peers.size:
            sends.append(peers.exchange([(after, (gates.unsqueeze(-1) * incoming + own).contiguous())], [])[1])
    for wait in sends:
        wait()
    return torch.cat(found, 2)


def _gather(local: Tensor, decay: Tensor, peers: RankPeers, plan: ScanPlan, way: int) -> Tensor:
    order = range(peers.size)[::way]
    place = order.index(peers.rank)
    own = _joined(local, decay)
    buffers = [(rank, torch.empty_like(own)) for rank in order[:place]]
    received, sent = peers.exchange([(rank, own) for rank in order[place + 1 :]], buffers)
    received()
    state = torch.zeros_like(local)
    for _, buffer in buffers:
        theirs, gates = _cut(buffer, local)
        state = gates.unsqueeze(-1) * state + theirs
    sent()
    return state


def _tree(local: Tensor, decay: Tensor, peers: RankPeers, plan: ScanPlan, way: int) -> Tensor:
    place = peers.rank if way == 1 else peers.size - 1 - peers.rank
    found = torch.zeros_like(local), torch.ones_like(decay)
    outgoing = _joined(local, decay)
    # each rank takes its neighbour's state first, then those of strides 1, 2, 4 before what it has
    for stride in (0, *_strides(peers.size)):
        distance = max(1, stride)
        sends = [(peers.rank + way * distance, outgoing)] if place + distance < peers.size else []
        has_source = place - distance >= (1 if stride else 0)
        buffers = [(peers.rank - way * distance, torch.empty_like(outgoing))] if has_source else []
        if stride and place == 0:
            sends = []  # nothing comes in at the first rank
        received, sent = peers.exchange(sends, buffers)
        received()
        if buffers:
            state, gates = _cut(buffers[0][1], local)
            if not stride:
                found = state, gates
            else:
                found = found[0] + found[1].unsqueeze(-1) * state, found[1] * gates
        sent()
        outgoing = _joined(*found)
    return found[0]


def _strides(ranks: int) -> list[int]:
    return [2**n for n in range(max(0, ranks - 2).bit_length())]


def _joined(state: Tensor, decay: Tensor) -> Tensor:
    return torch.cat((state.flatten(), decay.flatten()))


def _cut(joined: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    state, decay = joined[: like.numel()], joined[like.numel() :]
    return state.view(like.shape), decay.view(like.shape[:3])


_SCANS = {"chain": _chain, "gather": _gather, "tree": _tree}
