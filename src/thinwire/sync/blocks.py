"""Detection of a model's repeated blocks, whatever their names are."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from thinwire.sync.fragments import BlockParameters

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(model: nn.Module) -> BlockParameters:
    """Sort a model's trainable parameters into repeated blocks and the rest.

    Blocks are the modules of one class that stand, at least two of them, in `ModuleList`s, `ModuleDict`s or
    `Sequential`s, and hold more parameters than those of any other class. Where nothing repeats, the blocks are the
    model's own children. A tensor that is used in two places (a tied head) belongs to the first place only; frozen
    parameters belong nowhere, since they never change.

    Args:
        model: Any module.

    Returns:
        The names, as `model.named_parameters()` gives them.
    """
    trainable = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    prefixes = _repeated_modules(model, trainable) or [name for name, _ in model.named_children()]
    blocks: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    rest: list[str] = []
    for name in trainable:
        owner = next((prefix for prefix in prefixes if name.startswith(prefix + ".")), None)
        (rest if owner is None else blocks[owner]).append(name)
    return BlockParameters(blocks=tuple(tuple(names) for names in blocks.values() if names), rest=tuple(rest))


def _repeated_modules(model: nn.Module, trainable: dict[str, int]) -> list[str]:
    by_class: dict[type[nn.Module], list[str]] = defaultdict(list)
    for container_name, container in model.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        for child_name, child in container.named_children():
            name = f"{container_name}.{child_name}" if container_name else child_name
            is_nested = any(name.startswith(outer + ".") for outer in by_class[type(child)])
            if not is_nested and _size(name, trainable):
                by_class[type(child)].append(name)
    candidates = [names for names in by_class.values() if len(names) >= 2]
    # equal sizes: the outer class wins, since it comes first in named_modules
    return max(candidates, key=lambda names: sum(_size(name, trainable) for name in names), default=[])


def _size(prefix: str, trainable: dict[str, int]) -> int:
    return sum(numel for name, numel in trainable.items() if name.startswith(prefix + "."))
