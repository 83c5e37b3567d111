"""Gated linear attention in chunks, in plain torch: of one process, or of ranks that scan its states.

S_t = diag(a_t) S_{t-1} + k_t^T v_t, and o_t = q_t S_t, with gates a_t in (0, 1] for each key channel.

Reference:
    arXiv 2312.06635, section 4; shared as in arXiv 2507.01004.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import refusal
from thinwire.sequences.state_scan import ScanPlan, scan_states
from thinwire.transport.group_peers import RankPeers

# Products of a chunk's gates are divided by each other: exp(16 * 5) is still a float32.
_CHUNK, LEAST_LOG_GATE = 16, -5.0


def gated_attention(query: Tensor, key: Tensor, value: Tensor, log_gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attend from a state of zero on.

    Args:
        query: (batch, heads, positions, d_k).
        key: As `query`.
        value: (batch, heads, positions, d_v).
        log_gates: As `query`, from `LEAST_LOG_GATE` to 0, in float32 or bfloat16.

    Returns:
        Output (batch, heads, positions, d_v), state after the last position (batch, heads, d_k, d_v), and the sum of
        the gates' logarithms up to each position, as `query`.

    Raises:
        ValueError: A gate is out of its range.
    """
    least, most = (float(one) for one in log_gates.detach().aminmax())
    if not LEAST_LOG_GATE <= least <= most <= 0:
        raise refusal("logarithms of gates are out of their range", got=f"{least:g} to {most:g}",
                      allowed=f"{LEAST_LOG_GATE:g} to 0", remedy="log_gates.clamp(LEAST_LOG_GATE, 0)")  # fmt: skip
    state = value.new_zeros((*query.shape[:2], query.shape[3], value.shape[3]))
    outputs, sums = [], []
    before = torch.zeros_like(log_gates[:, :, :1])
    for rows in zip(*(torch.split(one, _CHUNK, 2) for one in (query, key, value, log_gates)), strict=True):
        queries, keys, values, logs = rows
        along = logs.cumsum(2)
        grown, last = queries * along.exp(), along[:, :, -1:]
        scores = (grown @ (keys * (-along).exp()).mT).tril()
        outputs.append(scores @ values + grown @ state)
        state = last.exp().mT * state + (keys * (last - along).exp()).mT @ values
        sums.append(before + along)
        before = sums[-1][:, :, -1:]
    return torch.cat(outputs, 2), state, torch.cat(sums, 2)


def shared_gated_attention(
    query: Tensor, key: Tensor, value: Tensor, log_gates: Tensor, *, peers: RankPeers, plan: ScanPlan
) -> Tensor:
    """Attend over sequences whose consecutive parts lie on the ranks in their order; shapes as in `gated_attention`."""
    output, state, sums = gated_attention(query, key, value, log_gates)
    incoming = scan_states(state, sums[:, :, -1].exp(), peers=peers, plan=plan)
    return output + (query * sums.exp()) @ incoming
