"""Split training between two owners: one keeps texts and labels, the other a model's middle layers.

```python
body = thinwire.split.connect("thinwire://10.0.0.1:29500", secret="job.secret")  # thinwire split serve runs there
model = thinwire.split.around(model, head=2, tail=2, body=body)
model(input_ids=ids, labels=ids).loss.backward()  # the loop stays the user's
```

Activations cross the wire in both directions, coded. They are not private: whoever has the middle layers can learn
much of the texts from them.
"""

from __future__ import annotations

from thinwire.split.client import RemoteBody, connect
from thinwire.split.parts import around, middle_layers
from thinwire.split.prompts import SoftPrompt, el2n_scores, hardest, split_round_bytes
from thinwire.split.server import BodyServer

__all__ = [
    "BodyServer",
    "RemoteBody",
    "SoftPrompt",
    "around",
    "connect",
    "el2n_scores",
    "hardest",
    "middle_layers",
    "split_round_bytes",
]
