"""Parts of a model that travel, such as adapters or a prompt and a tail; the frozen rest never does.

| subset | tensors | paper |
| --- | --- | --- |
| `"lora"` | adapters: names with `lora_` | CELLM, arXiv 2407.20557, whose text equals FLASC, arXiv 2406.05233 |
| `"trained"` | parameters with `requires_grad` | prompt and tail of SFPrompt, arXiv 2407.17533 |
| patterns | names that match one of them, as a shell does | |

CELLM: `Uplink("top-k", density=1 / 4, error_feedback=False)` and `Downlink("top-k", density=1 / 4, sends="values")`,
the latter a masked model and no difference; tiers by `Uplink(tiers={"phone": 1 / 16})` and `tier="phone"` in a node's
config. SFPrompt's third phase sends prompt and tail, once up and once down a round; its first phase sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from thinwire.errors import refusal


def subset_state(model: nn.Module, subset: str | Sequence[str] = "trained") -> dict[str, Tensor]:
    """Return the tensors of a subset by name, in the order of the model; tied parameters once.

    Args:
        model: Whose parameters.
        subset: `"lora"`, `"trained"`, or patterns such as `["prompt.*", "tail.*"]`.

    Raises:
        ValueError: No parameter belongs to it.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> list(subset_state(model, ["1.*"]))
        ['1.weight', '1.bias']
    """
    patterns = ["*lora_*"] if subset == "lora" else [subset] if isinstance(subset, str) else subset
    found = {
        name: one.detach()
        for name, one in model.named_parameters()
        if (one.requires_grad if subset == "trained" else any(fnmatchcase(name, pattern) for pattern in patterns))
    }
    if not found:
        some = ", ".join(name for name, _ in list(model.named_parameters())[:3])
        raise refusal("no parameter belongs to the subset", got=subset, allowed=f"names such as {some}",
                      remedy='subset=["*"], or requires_grad on what is trained')  # fmt: skip
    return found


def load_subset(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the tensors of a subset; all others stay.

    Raises:
        ValueError: The model has no parameter of a name.
    """
    unknown = model.load_state_dict(dict(state), strict=False).unexpected_keys
    if unknown:
        raise refusal("the model has no such parameter", got=unknown[0], allowed="the names of subset_state",
                      remedy="the same model and subset on both sides")  # fmt: skip
