"""Costs of experts: what crosses a border for each way to train them, and messages of expert parallelism inside a site.

The ways form a ladder, from most to least traffic: tokens, tokens of fewer bits, expert weights once a step,
pseudo-gradients every H steps, or nothing. All of them are counted as the bytes that a site sends for one layer in a
step, with tokens spread evenly over the experts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from thinwire.codec_specs import DEFAULT_EXPERT_CODE, activation_bytes, activation_codecs
from thinwire.site.site_file import Site

# Rungs that a plan may choose on a border: experts that train apart are another model.
TOKENS, CODED_TOKENS, WEIGHTS, PSEUDO_GRADIENTS, NOTHING = range(1, 6)
# Of pseudo-gradients: usual steps between two exchanges, and the usual code.
USUAL_INTERVAL, USUAL_CODEC = 100, "e3m0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Experts of a model, as far as their cost follows from them."""

    count: int  # experts of a layer
    per_token: int  # experts that a token visits
    parameters: float  # of one expert
    width: int  # numbers of a token that travel: the model's width, or fewer
    layers: int  # layers that have experts
    # whether each expert may be cut by tensor parallelism, and the layers by stages: torchtitan does, ours do not
    is_cut: bool = True
    bits: float = 16.0  # of a number on its way inside a site, the mean of both passes

    @property
    def layer_parameters(self) -> float:
        """Parameters of the experts of a layer."""
        return self.count * self.parameters

    @property
    def idle_parameters(self) -> float:
        """Parameters of a layer that a token does not visit."""
        return (self.count - self.per_token) * self.parameters

    def break_even_tokens(self, *, crossings: int = 2) -> float:
        """Return the remote tokens of an expert in a step from which its weights are fewer bytes than its tokens.

        Both are in 16 bits. A token crosses four times, to the expert and back in both passes. The weights cross and
        their gradient comes back; a third time where the weights are dropped and fetched again for the backward pass.

        Example:
            >>> experts = ExpertShape(count=64, per_token=6, parameters=2 * 2048 * 1408, width=2048, layers=1)
            >>> experts.break_even_tokens(), experts.break_even_tokens(crossings=3)
            (1408.0, 2112.0)
        """
        return crossings * self.parameters / (4 * self.width)

    def visits(self, tokens: float) -> float:
        """Return the tokens that each expert receives of so many, spread evenly."""
        return tokens * self.per_token / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A way to train experts over a border."""

    number: int  # on the ladder
    what: str  # what crosses
    num_bytes: float  # that a site sends for one layer in a step


def ladder(
    experts: ExpertShape, *, tokens: float, sites: int = 2, interval: int = USUAL_INTERVAL, codec: str = USUAL_CODEC,
    code: tuple[str, str] = activation_codecs(DEFAULT_EXPERT_CODE),
) -> tuple[Rung, ...]:  # fmt: skip
    """Return the five rungs.

    Args:
        experts: Of the model.
        tokens: Of one site in a step.
        sites: That share the experts, or that each hold all of them (pseudo-gradients).
        interval: Steps between two exchanges of pseudo-gradients.
        codec: Their codec, one of those that activations have.
        code: Codecs of coded tokens and of their gradients.

    Example:
        >>> experts = ExpertShape(count=64, per_token=6, parameters=2 * 2048 * 1408, width=2048, layers=1)
        >>> [round(rung.num_bytes / 1e6) for rung in ladder(experts, tokens=2**19)]
        [25770, 6845, 738, 2, 0]
    """
    away = 1 - 1 / sites
    visits = tokens * experts.per_token * away  # numbers of a token leave, and come back
    weights = experts.layer_parameters * away

    def of_tokens(names: tuple[str, str]) -> float:
        return 2 * sum(activation_bytes(name, visits * experts.width) for name in names)

    return (
        Rung(number=TOKENS, what="tokens in 16 bits", num_bytes=of_tokens(("bfloat16", "bfloat16"))),
        Rung(number=CODED_TOKENS, what=f"tokens in {'/'.join(dict.fromkeys(code))}", num_bytes=of_tokens(code)),
        Rung(number=WEIGHTS, what="expert weights, once a step", num_bytes=2 * 2 * weights),
        Rung(
            number=PSEUDO_GRADIENTS, what=f"pseudo-gradients in {codec}, every {interval} steps",
            num_bytes=2 * activation_bytes(codec, weights) / interval,
        ),
        Rung(number=NOTHING, what="nothing: experts trained apart", num_bytes=0.0),
    )  # fmt: skip


def chosen_rung(rungs: Sequence[Rung], *, may_stream: bool, holds_all: bool) -> Rung:
    """Return the rung with the fewest bytes of those that train the same model.

    Args:
        rungs: The ladder.
        may_stream: Whether each site has memory for copies of the others' experts.
        holds_all: Whether each site has memory for all experts and their states.
    """
    left_out = {NOTHING, *(() if may_stream else (WEIGHTS,)), *(() if holds_all else (PSEUDO_GRADIENTS,))}
    return min((rung for rung in rungs if rung.number not in left_out), key=lambda rung: rung.num_bytes)


def activation_unit_bytes(experts: ExpertShape, *, width: int, layers: int, unit_bytes: float) -> float:
    """Return what a block keeps a token and unit of width, on average, where experts stand for its MLP.

    Each visit keeps a token on its way there and back, and what stands between an expert's products, in 16 bits; an
    MLP of four times the width keeps 18 bytes (arXiv 2205.05198).
    """
    visit = 4 * experts.width / width + 2 * experts.parameters / (experts.width * width)
    return unit_bytes + (experts.per_token * visit - 18) * experts.layers / layers


def all_to_all_s(site: Site, groups: Sequence[Sequence[int]], *, bits: float, lanes: int = 1) -> tuple[float, float]:
    """Return the seconds of an all-to-all of even parts in all groups at once, and the longest latency on its way.

    Messages that leave a node or reach it share its card, and those between two sites the line between them.

    Args:
        site: Nodes and links.
        groups: The node of each member.
        bits: That a member holds, its own part among them.
        lanes: Equal groups on the same nodes.
    """
    size = len(groups[0])
    busy_s: dict[tuple[str, int, int], float] = defaultdict(float)  # of a device, a node's card or a line between sites
    latency_s = 0.0
    for members in map(Counter, groups):
        for (one, own), (other, others) in product(members.items(), repeat=2):
            if one == other and own == 1:
                continue
            link = site.link(one, other)
            latency_s = max(latency_s, link.latency_s)
            if one == other:  # every pair of devices has the node's bandwidth
                message_s = (own - 1) * bits / size / link.bandwidth_bits_per_s
                busy_s["device", one, one] = max(busy_s["device", one, one], message_s)
                continue
            message_s = own * others * lanes * bits / size / link.bandwidth_bits_per_s
            busy_s["from", one, one] += message_s
            busy_s["to", other, other] += message_s
            if site.site_of[one] != site.site_of[other]:
                busy_s["line", site.site_of[one], site.site_of[other]] += message_s
    return max(busy_s.values(), default=0.0), latency_s
