"""Experts trained apart, combined afterwards: nothing travels while they train, then a finished checkpoint.

```python
experts = thinwire.inference.open_experts("experts")  # a folder that `thinwire experts add` has filled
mixture = experts.ensemble(prior="updating")
mixture.logits(tokens)  # log-probabilities of the token after each position
```
"""

from __future__ import annotations

from thinwire.ensembles.budget import ExpertBudget, divide_budget
from thinwire.ensembles.expert_set import CachedPrior, Expert, ExpertSet

__all__ = ["CachedPrior", "Expert", "ExpertBudget", "ExpertSet", "divide_budget"]
