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
    from thinwire.integrations.flower.mod import client_mod
    from thinwire.integrations.flower.strategy import CompressedStrategy, wrap
    from thinwire.integrations.flower.updates import Downlink, Uplink

_HOMES = {
    "CompressedStrategy": "strategy",
    "Downlink": "updates",
    "Uplink": "updates",
    "client_mod": "mod",
    "wrap": "strategy",
}
__all__ = ["CompressedStrategy", "Downlink", "Uplink", "client_mod", "wrap"]


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
