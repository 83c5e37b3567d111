"""Layer of experts with a router, and its parallelization: each rank keeps its part of the experts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from thinwire.errors import NonFiniteError, refusal
from thinwire.experts.dispatch import Tokens, Weights
from thinwire.experts.narrow_rows import NarrowRows
from thinwire.experts.sharing import Dispatch, ExpertRanks
from thinwire.transport.group_peers import RankPeers, peers_of
from thinwire.transport.shards import is_a, local_shard, own_rows

Over = Literal["micro-batch", "ranks", "global-batch"]


class ExpertLayer(nn.Module):
    """A mixture of experts in place of an MLP: a router sends each token to its best experts, none is dropped.

    Args:
        dim: Width of the tokens.
        hidden: Inner width of an expert, an MLP with GELU and without biases.
        num_experts: Of the layer, on all ranks together.
        top_k: Experts of each token. Their softmax shares are divided by their sum where they are several.
        dispatch: What travels between the ranks that share the experts, or `low_rank`. Default: tokens, uncoded.

    Attributes:
        router: From tokens to a logit for each expert.
        up: (experts, hidden, dim); after `parallelize` a DTensor of which this rank has its experts.
        down: (experts, dim, hidden), likewise.
        dispatch: What travels.
        narrow, widen: Projections of tokens on their way out and back, with `low_rank`, whose experts are as narrow.
        routed: Of the latest pass, probabilities (tokens, experts), with their gradient, and choices (tokens, k).
        step_counts: Choices of each expert in the step so far, inside of `step`, as the balance loss counts them.
        own_counts: The same, of this rank's tokens alone.
        copies: Weights of other ranks' experts, by number, inside of `step`.
        streams_from: Choices of each rank in the step before, (ranks, experts), where weights are streamed.

    Raises:
        ValueError: A size is below 1, or a token cannot choose so many experts.

    Example:
        >>> layer = ExpertLayer(dim=8, hidden=16, num_experts=4, top_k=2)
        >>> layer(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])

    Reference:
        arXiv 1701.06538, equations 1 and 3 to 5 without noise; softmax before the choice as in arXiv 2101.03961.
    """

    def __init__(
        self, dim: int, hidden: int, num_experts: int, top_k: int = 2, *, dispatch: Dispatch | NarrowRows | None = None
    ) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("hidden", hidden), ("num_experts", num_experts)):
            if size < 1:
                raise refusal(f"{name} is too small", got=size, allowed="1 or more", remedy=f"{name}=8")
        if not 1 <= top_k <= num_experts:
            raise refusal("a token chooses among the experts there are", got=f"top_k {top_k} of {num_experts} experts",
                          allowed=f"1 to {num_experts}", remedy=f"top_k={min(2, num_experts)}")  # fmt: skip
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.narrow = self.widen = None
        width = dim
        if isinstance(dispatch, NarrowRows):
            width, dispatch = dispatch.width(dim), dispatch.dispatch
            self.narrow, self.widen = nn.Linear(dim, width, bias=False), nn.Linear(width, dim, bias=False)
        self.dispatch: Dispatch = Tokens() if dispatch is None else dispatch
        self.up = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, hidden))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        self.name = "expert layer"
        self.peers: RankPeers | None = None
        self.routed: tuple[Tensor, Tensor] | None = None
        self.step_counts: Tensor | None = None
        self.own_counts: Tensor | None = None
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.streams_from: Tensor | None
        self.register_buffer("streams_from", None)
        self._ranks: ExpertRanks | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the latest pass out of copies: it is part of a graph."""
        return {**self.__dict__, "routed": None, "_ranks": None, "copies": {}}

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the weighted sum of what its experts make of each token, (..., dim).

        Raises:
            NonFiniteError: A logit of the router is NaN or infinite.
            TransportError: A rank is gone or hangs.
        """
        rows = tokens.reshape(-1, tokens.shape[-1])
        shares, chosen = self.route(rows)
        if self.own_counts is not None:  # a layer that is computed again counts twice, as its tokens travel twice
            self.own_counts += chosen.flatten().bincount(minlength=self.num_experts)
        ranks = self.ranks(rows.device)
        ranks.copies.clear()
        ranks.copies.update({expert: partial(self._apply_copy, copy) for expert, copy in self.copies.items()})
        narrowed = rows if self.narrow is None else self.narrow(rows)
        found = ranks.apply(narrowed, chosen, shares, dispatch=self.dispatch)
        return (found if self.widen is None else self.widen(found)).view(tokens.shape)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares (tokens, k) and the experts (tokens, k) of tokens (tokens, dim)."""
        logits = self.router(rows)
        if not torch.isfinite(logits).all():
            rank = 0 if self.peers is None else self.peers.rank
            raise NonFiniteError(
                f"{self.name}: logits of the router hold NaN or infinity on rank {rank}; lower the learning rate, or "
                f"look at the data"
            )
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        shares, chosen = probabilities.topk(self.top_k)
        self.routed = probabilities, chosen
        # one share alone would be 1, and the router would learn nothing
        return (shares / shares.sum(-1, keepdim=True) if self.top_k > 1 else shares), chosen

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Apply this rank's experts to rows (rows, dim) that are sorted by expert."""
        # by unbind, whose gradient is one stack; an expert without rows takes part, since others wait for its gradient
        weights = zip(_own(self.up, self.peers).unbind(), _own(self.down, self.peers).unbind(), strict=True)
        parts = zip(torch.split(rows, list(counts)), weights, strict=True)
        return torch.cat([_apply_expert(part, up, down) for part, (up, down) in parts])

    def weights_of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the weights of an expert, by its number among this rank's or all, without a gradient."""
        own = local_shard(self.up), local_shard(self.down)
        return own[0][expert % len(own[0])], own[1][expert % len(own[1])]

    def _apply_copy(self, copy: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
        return _apply_expert(rows, *(_own(weight, self.peers) for weight in copy))

    def ranks(self, device: torch.device) -> ExpertRanks:
        """Return the experts and the ranks that share them."""
        made = self._ranks  # a model may have been called before its experts were shared
        if made is None or made.device != device or made.peers is not self.peers:
            made = ExpertRanks(name=self.name, num_experts=self.num_experts, compute=self.compute,
                               device=device, peers=self.peers)  # fmt: skip
            self._ranks = made
        return made


def _apply_expert(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(rows, up)), down)


class _Mean(torch.autograd.Function):
    """Passes a value on, and divides its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.parts, None


def _own(weight: Tensor, peers: RankPeers | None) -> Tensor:
    """Return this rank's experts of a weight (experts, ...).

    An expert sums gradients of the losses of all ranks. They are divided by the ranks, since data parallelism takes the
    mean of all other gradients.
    """
    sharded: Any = weight
    local: Tensor = sharded.to_local() if is_a("torch.distributed.tensor", "DTensor", weight) else weight
    if peers is None or peers.size == 1:
        return local
    mean: Tensor = _Mean.apply(local, peers.size)  # type: ignore[no-untyped-call]
    return mean


def parallelize(model: nn.Module, group: Any, *, dispatch: Dispatch | None = None) -> None:
    """Share the experts of each layer over ranks that hold the same model: rank r keeps the r-th of equal parts.

    Gradients of experts are the mean over the ranks' losses, as FSDP2's and DDP's are. Ranks may have unlike numbers of
    tokens, but each calls the model as often as the others, forward and backward.

    Args:
        model: With layers of `ExpertLayer`, or a mixture of experts of transformers, such as Mixtral or Qwen-MoE.
        group: One-dimensional `DeviceMesh`, such as `mesh["ep"]`, process group, or `RankPeers`. With a mesh experts
            become DTensors, `Shard(0)`: checkpoints and the exchange between replicas know their whole shapes.
        dispatch: What travels, in all layers. Default: what each layer has; tokens, uncoded, in a transformers model.

    Raises:
        ValueError: There is no layer of experts, its experts are not divided by the ranks, or ranks differ.
    """
    found = {name: module for name, module in model.named_modules() if _has_experts(module)}
    if not found:
        raise refusal("the model has no layer of experts that ranks could share", got=type(model).__name__,
                      allowed="ExpertLayer, or mixtures of transformers", remedy="--model moe-nano")  # fmt: skip
    if isinstance(dispatch, NarrowRows):
        raise refusal("low_rank is a part of a layer's weights", got="low_rank after the layer was made",
                      allowed="a policy such as tokens()", remedy="ExpertLayer(dispatch=low_rank())")  # fmt: skip
    peers, shared = peers_of(group), []
    for name, module in found.items():
        if isinstance(module, ExpertLayer):
            module.name, module.peers = name or module.name, peers
            module.dispatch = dispatch or module.dispatch
            _prepare_streams(module, peers, layers=len(found))
            module.ranks(module.up.device).check(f"top_k {module.top_k}, {_details(module, module.dispatch)}")
            shared.append([(module, "up"), (module, "down")])
        elif isinstance(dispatch, Weights):
            raise refusal("weights are streamed in ExpertLayer alone", got=type(module).__name__, allowed="tokens",
                          remedy="dispatch=experts.tokens()")  # fmt: skip
        else:
            _share_transformers(module, name, peers, dispatch or Tokens())
            shared.append([(module, key) for key, _ in module.named_parameters()])
    for owner, key in (one for of_layer in shared for one in of_layer):  # after all checks
        whole = getattr(owner, key)
        part = own_rows(whole, group, rank=peers.rank, size=peers.size)
        setattr(owner, key, nn.Parameter(part, requires_grad=whole.requires_grad))


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module is a layer of experts, or one of transformers: stacked weights, and a call of choices."""
    if isinstance(module, ExpertLayer):
        return True
    count = getattr(module, "num_experts", None)
    weights = [weight.shape[:1] for weight in module.parameters(recurse=False)]
    is_stack = bool(weights) and all(shape == (count,) for shape in weights)
    return is_stack and list(signature(module.forward).parameters) == ["hidden_states", "top_k_index", "top_k_weights"]


def _details(module: nn.Module, dispatch: Dispatch) -> str:
    """Describe what messages follow from; a rank with others would wait, or compute nonsense."""
    weights = ", ".join(f"{name} {tuple(one.shape)} {one.dtype}" for name, one in module.named_parameters())
    travelling = getattr(dispatch, "dispatch", getattr(dispatch, "tokens", dispatch))
    code = getattr(getattr(travelling, "code", None), "name", None)
    return f"{type(dispatch).__name__}, code {code}, chunks {getattr(travelling, 'chunks', 1)}, {weights}"


def _prepare_streams(layer: ExpertLayer, peers: RankPeers, *, layers: int) -> None:
    """Let a layer whose weights are streamed remember the ranks' choices; refuse copies beyond the memory limit."""
    policy = layer.dispatch
    if not isinstance(policy, Weights) or peers.size == 1:
        return
    copy_bytes = 2 * layers * sum(weight.nbytes for weight in layer.weights_of(0))  # the gradient too
    if copy_bytes * policy.most_streamed > policy.most_bytes:
        fewest = max(1, policy.most_bytes // copy_bytes)
        raise refusal(
            f"copies of streamed experts are over the memory limit in {layers} layers",
            got=f"{policy.most_streamed} x {copy_bytes} bytes", allowed=f"most_bytes={policy.most_bytes}",
            remedy=f"weights(most_streamed={fewest}, most_bytes={max(policy.most_bytes, fewest * copy_bytes)})",
        )  # fmt: skip
    layer.streams_from = torch.zeros(peers.size, layer.num_experts, dtype=torch.int64, device=layer.up.device)


def _share_transformers(module: Any, name: str, peers: RankPeers, dispatch: Dispatch) -> None:
    """Let experts of transformers work on the rows that all ranks send to this rank's; the router stays as it is."""
    own = copy.copy(module)  # its weights are given with each call; no part of the model
    own._parameters = dict(module._parameters)
    own.num_experts = module.num_experts // peers.size

    def compute(rows: Tensor, counts: Sequence[int]) -> Tensor:
        weights = {key: _own(weight, peers) for key, weight in module.named_parameters()}
        # where no token comes the weights take part too, since others wait for this rank's backward pass
        anchor = torch.stack([weight.flatten()[:0].sum() for weight in weights.values()]).sum().to(rows.dtype)
        if not len(rows):
            return rows + anchor
        chosen = torch.arange(own.num_experts, device=rows.device).repeat_interleave(
            torch.tensor(counts, device=rows.device)
        )[:, None]
        made: Tensor = functional_call(own, weights, (rows, chosen, rows.new_ones(chosen.shape)))
        return made + anchor

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return ranks.apply(hidden_states, top_k_index, top_k_weights, dispatch=dispatch)

    device = next(module.parameters()).device
    ranks = ExpertRanks(name=name, num_experts=module.num_experts, compute=compute, device=device, peers=peers)
    ranks.check(_details(module, dispatch))
    module.forward = forward
