"""Train one model over thin wires.

```python
import thinwire

transport = thinwire.connect()
optimizer = thinwire.DistributedOptimizer(
    model, inner, method=thinwire.methods.streaming_diloco(sync_interval=100), transport=transport
)
for batch in batches[transport.replica :: transport.num_replicas]:  # each replica's own share
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.close(final_exchange=True)  # puts the last steps into the global parameters
```

Names are loaded when they are first used, so that the parts without torch stay quick to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinwire.version import __version__

if TYPE_CHECKING:
    from thinwire import codecs, experts, lab, methods, sequences, split
    from thinwire.codecs.activation_code import ActivationCode
    from thinwire.codecs.channel_bits import AdaptiveBits
    from thinwire.errors import ThinwireError
    from thinwire.integrations.tracking import is_lead, metrics, replica_folder, tracker_names
    from thinwire.publish.publisher import WeightPublisher
    from thinwire.publish.subscriber import WeightSubscriber
    from thinwire.recording.torch_recorder import watch
    from thinwire.sync.method import Method
    from thinwire.sync.multi_optimizer import MultiOptimizer, split_model
    from thinwire.sync.optimizer import DistributedOptimizer
    from thinwire.training.elastic.own_loop import ElasticOptimizer, join
    from thinwire.transport.coded_stage import CodedStage
    from thinwire.transport.connect import connect
    from thinwire.transport.faulty import FaultyTransport
    from thinwire.transport.loopback import LoopbackTransport, LoopbackWorld, run_replicas
    from thinwire.transport.recording import RecordingTransport
    from thinwire.workloads.language.streamed import streamed

_HOMES = {
    "ActivationCode": "thinwire.codecs.activation_code",
    "AdaptiveBits": "thinwire.codecs.channel_bits",
    "CodedStage": "thinwire.transport.coded_stage",
    "DistributedOptimizer": "thinwire.sync.optimizer",
    "ElasticOptimizer": "thinwire.training.elastic.own_loop",
    "FaultyTransport": "thinwire.transport.faulty",
    "MultiOptimizer": "thinwire.sync.multi_optimizer",
    "LoopbackTransport": "thinwire.transport.loopback",
    "LoopbackWorld": "thinwire.transport.loopback",
    "Method": "thinwire.sync.method",
    "RecordingTransport": "thinwire.transport.recording",
    "ThinwireError": "thinwire.errors",
    "WeightPublisher": "thinwire.publish.publisher",
    "WeightSubscriber": "thinwire.publish.subscriber",
    "connect": "thinwire.transport.connect",
    "is_lead": "thinwire.integrations.tracking",
    "join": "thinwire.training.elastic.own_loop",
    "metrics": "thinwire.integrations.tracking",
    "replica_folder": "thinwire.integrations.tracking",
    "run_replicas": "thinwire.transport.loopback",
    "split_model": "thinwire.sync.multi_optimizer",
    "streamed": "thinwire.workloads.language.streamed",
    "tracker_names": "thinwire.integrations.tracking",
    "watch": "thinwire.recording.torch_recorder",
}
_MODULES = ("codecs", "experts", "lab", "methods", "sequences", "split")

__all__ = [
    "ActivationCode", "AdaptiveBits", "CodedStage", "DistributedOptimizer", "ElasticOptimizer", "FaultyTransport",
    "LoopbackTransport", "LoopbackWorld", "Method", "MultiOptimizer", "RecordingTransport", "ThinwireError",
    "WeightPublisher", "WeightSubscriber", "__version__", "codecs", "connect", "experts", "is_lead", "join", "lab",
    "methods", "metrics", "replica_folder", "run_replicas", "sequences", "split", "split_model", "streamed",
    "tracker_names", "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name in _MODULES:
        return importlib.import_module(f"thinwire.{name}")
    if name in ("DistributedOptimizer", "join"):
        importlib.import_module("thinwire.methods")  # registers the names that its `method` may be
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    import difflib

    near = difflib.get_close_matches(name, __all__, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}{hint}")
