"""Fragments, the sets of parameters that are exchanged together, as partitions of parameter names.

A model is a row of repeated blocks, and what is not in a block: embedding, final norm, head. The blocks are
distributed over fragments; the rest forms one more (arXiv 2501.18512, section 2.2 and figure 2).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParameters:
    """The names of a model's trainable parameters, by block.

    Attributes:
        blocks: The names of each block, blocks in the model's order.
        rest: The names that are in no block.
    """

    blocks: tuple[tuple[str, ...], ...]
    rest: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Assignment of blocks to fragments.

    Args:
        order: `"strided"`: fragment p of n holds the blocks p, p + n, p + 2n, ...; `"sequential"`: neighbours.
        layers_per_fragment: Blocks a fragment (the last ones may hold one less); used where `num_fragments` is None.
        num_fragments: All fragments together, the one for the rest among them; 1 puts everything into one.
        most_fragments: A limit on them, where `num_fragments` is None: blocks are then dealt out to fewer.

    Raises:
        ValueError: A number is below 1.
    """

    order: Literal["strided", "sequential"] = "strided"
    layers_per_fragment: int = 3
    num_fragments: int | None = None
    most_fragments: int | None = None

    def __post_init__(self) -> None:
        if self.order not in ("strided", "sequential"):
            raise ValueError(f"order must be 'strided' or 'sequential', got {self.order!r}")
        if self.layers_per_fragment < 1:
            raise ValueError(f"layers_per_fragment must be at least 1, got {self.layers_per_fragment}")
        if self.num_fragments is not None and self.num_fragments < 1:
            raise ValueError(f"num_fragments must be at least 1, got {self.num_fragments}")
        if self.most_fragments is not None and self.most_fragments < 2:
            raise ValueError(f"most_fragments must be at least 2, got {self.most_fragments}; num_fragments may be 1")

    def partition(self, parameters: BlockParameters) -> tuple[tuple[str, ...], ...]:
        """Deal the parameters out: every name in exactly one fragment, block fragments first, the rest last.

        Raises:
            ValueError: More fragments are asked for than there are blocks and the rest, or there is no parameter.

        Example:
            >>> three = BlockParameters(blocks=(("a",), ("b",), ("c",)), rest=("head",))
            >>> Pattern(layers_per_fragment=2).partition(three)
            (('a', 'c'), ('b',), ('head',))
        """
        blocks = [block for block in parameters.blocks if block]
        has_rest = bool(parameters.rest)
        if not blocks and not has_rest:
            raise ValueError("the model has no trainable parameter; unfreeze some before it is wrapped")
        limit = max(1, len(blocks) + has_rest)
        if self.num_fragments is not None and self.num_fragments > limit:
            raise ValueError(
                f"num_fragments must be at most {limit} for this model ({len(blocks)} blocks"
                f"{' and the rest' if has_rest else ''}), got {self.num_fragments}"
            )
        if self.num_fragments == 1 or not blocks:
            return ((*(name for block in blocks for name in block), *parameters.rest),)
        if self.num_fragments is not None:
            num_groups = self.num_fragments - has_rest
        else:
            num_groups = -(-len(blocks) // self.layers_per_fragment)
            if self.most_fragments is not None:
                num_groups = min(num_groups, self.most_fragments - has_rest)
        cuts = [group * len(blocks) // num_groups for group in range(num_groups + 1)]
        if self.order == "strided":
            groups = [blocks[group::num_groups] for group in range(num_groups)]
        else:
            groups = [blocks[start:end] for start, end in pairwise(cuts)]
        fragments = tuple(tuple(name for block in group for name in block) for group in groups)
        return (*fragments, parameters.rest) if has_rest else fragments


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# The attribute of a compiled module that holds the original one, and so a part of the names below it.
_COMPILED = "_orig_mod"


def plain_name(name: str) -> str:
    """Return a tensor's or module's name as it is in the model before `torch.compile`.

    Example:
        >>> plain_name("_orig_mod.layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by name, the same names whether or not it or parts of it are compiled."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def _uncompiled(module: nn.Module) -> nn.Module:
    original = getattr(module, _COMPILED, module)
    return original if isinstance(original, nn.Module) else module


def find_blocks(model: nn.Module) -> BlockParameters:
    """Sort a model's trainable parameters into repeated blocks and the rest.

    Blocks are the modules of one class that stand, at least two of them, in `ModuleList`s, `ModuleDict`s or
    `Sequential`s, and hold more parameters than those of any other class. Where nothing repeats, the blocks are the
    model's own children. A tensor that is used in two places (a tied head) belongs to the first place only; frozen
    parameters belong nowhere, since they never change.

    Args:
        model: Any module.

    Returns:
        The names, as `parameters_by_name` gives them.
    """
    trainable = {name: p.numel() for name, p in parameters_by_name(model).items() if p.requires_grad}
    children = (name for name, _ in _uncompiled(model).named_children())
    prefixes = _repeated_modules(model, trainable) or list(children)
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
            name = plain_name(f"{container_name}.{child_name}" if container_name else child_name)
            kind = type(_uncompiled(child))
            is_nested = any(name.startswith(outer + ".") for outer in by_class[kind])
            if not is_nested and _size(name, trainable):
                by_class[kind].append(name)
    candidates = [names for names in by_class.values() if len(names) >= 2]
    # equal sizes: the outer class wins, since it comes first in named_modules
    return max(candidates, key=lambda names: sum(_size(name, trainable) for name in names), default=[])


def _size(prefix: str, trainable: dict[str, int]) -> int:
    return sum(numel for name, numel in trainable.items() if name.startswith(prefix + "."))
