"""Compressed updates of many small clients under Flower, which runs clients, sampling, retries and transport.

```python
up = thin.Uplink("top-k", density=0.01, values="clusters")
app = ClientApp(mods=[thin.client_mod(up)])          # the client app is unchanged
strategy = thin.wrap(FedAvg(), up, down=thin.Downlink("e3m0"))
```

Names are loaded when they are first used: what codes updates needs no Flower.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.integrations.flower.mod import client_mod, sketch_reply
    from thinwire.integrations.flower.orthogonal import OrthogonalTasks
    from thinwire.integrations.flower.sign_masks import MajoritySigns, mask_state, sign_mask
    from thinwire.integrations.flower.strategy import CompressedStrategy, wrap
    from thinwire.integrations.flower.subset import load_subset, subset_state
    from thinwire.integrations.flower.updates import Downlink, Uplink

_HOMES = ("updates", "subset", "orthogonal", "sign_masks", "mod", "strategy")  # the first ones need no Flower
__all__ = [
    "CompressedStrategy", "Downlink", "MajoritySigns", "OrthogonalTasks", "Uplink", "client_mod", "load_subset",
    "mask_state", "sign_mask", "sketch_reply", "subset_state", "wrap",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (importlib.import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(vars(home)[name] for home in homes if name in vars(home))
