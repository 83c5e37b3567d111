"""Mixtures of experts whose experts lie on several ranks: the layer, and policies of what travels between the ranks.

```python
layer = thinwire.experts.ExpertLayer(dim=512, hidden=1024, num_experts=16, top_k=2)
thinwire.experts.parallelize(model, mesh["ep"])  # each rank keeps its experts
```

Names are loaded when they are first used: the planner imports the plan of streams without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.experts.balance import balance_loss
    from thinwire.experts.clustered_rows import Clusters, clusters
    from thinwire.experts.dispatch import Tokens, Weights, tokens, weights
    from thinwire.experts.layer import ExpertLayer, parallelize
    from thinwire.experts.narrow_rows import NarrowRows, low_rank
    from thinwire.experts.sharing import Dispatch, ExpertRanks
    from thinwire.experts.stream_plan import plan_streams
    from thinwire.experts.streams import step

_HOMES = {
    "Clusters": "clustered_rows", "Dispatch": "sharing", "ExpertLayer": "layer", "ExpertRanks": "sharing",
    "NarrowRows": "narrow_rows", "Tokens": "dispatch", "Weights": "dispatch", "balance_loss": "balance",
    "clusters": "clustered_rows", "low_rank": "narrow_rows", "parallelize": "layer", "plan_streams": "stream_plan",
    "step": "streams", "tokens": "dispatch", "weights": "dispatch",
}  # fmt: skip

__all__ = [
    "Clusters", "Dispatch", "ExpertLayer", "ExpertRanks", "NarrowRows", "Tokens", "Weights", "balance_loss", "clusters",
    "low_rank", "parallelize", "plan_streams", "step", "tokens", "weights",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"thinwire.experts.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'thinwire.experts' has no attribute {name!r}")
