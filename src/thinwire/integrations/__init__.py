"""Integrations with training libraries that people already use; each module needs its own library.

| module | for |
| --- | --- |
| `thinwire.integrations.hf` | transformers' `Trainer`, TRL's `SFTTrainer`, PEFT |
| `thinwire.integrations.lightning` | `lightning.Trainer` |
| `thinwire.integrations.titan` | torchtitan's `OptimizersContainer` |
| `thinwire.integrations.dcp` | torch.distributed.checkpoint |
| `thinwire.integrations.data` | shares of data sets |
| `thinwire.integrations.tracking` | numbers for experiment trackers |
| `thinwire.integrations.ray` | elastic replicas as Ray actors |
"""

from __future__ import annotations
