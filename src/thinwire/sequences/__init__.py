"""Sequences that several ranks share: attention, forward and backward, so that little crosses a thin wire.

```python
attend = thinwire.sequences.attention(mesh["cp"], heads=16, kv_heads=4, policy="auto")
thinwire.sequences.share(model, attend)  # thinwire's decoder, or a transformers model
tokens = thinwire.sequences.own_tokens(batch, attend)
```

Names are loaded when they are first used: the planner imports the tables without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.sequences.block_tables import POLICIES, SequencePlan, sequence_plan
    from thinwire.sequences.linear_attention import LEAST_LOG_GATE, gated_attention, shared_gated_attention
    from thinwire.sequences.sharing import (
        SequenceAttention,
        SparseAttention,
        attention,
        own_tokens,
        share,
        sparse_attention,
    )
    from thinwire.sequences.state_scan import ScanPlan, scan_plan, scan_states

_HOMES = {
    "LEAST_LOG_GATE": "linear_attention", "ScanPlan": "state_scan", "gated_attention": "linear_attention",
    "scan_plan": "state_scan", "shared_gated_attention": "linear_attention", "scan_states": "state_scan",
    "POLICIES": "block_tables", "SequenceAttention": "sharing", "SequencePlan": "block_tables", "attention": "sharing",
    "own_tokens": "sharing", "sequence_plan": "block_tables", "share": "sharing",
    "SparseAttention": "sharing", "sparse_attention": "sharing",
}  # fmt: skip

__all__ = [
    "LEAST_LOG_GATE",
    "POLICIES",
    "ScanPlan",
    "SequenceAttention",
    "SequencePlan",
    "SparseAttention",
    "attention",
    "gated_attention",
    "own_tokens",
    "scan_plan",
    "scan_states",
    "sequence_plan",
    "share",
    "shared_gated_attention",
    "sparse_attention",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"thinwire.sequences.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'thinwire.sequences' has no attribute {name!r}")
