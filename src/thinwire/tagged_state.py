"""State as data: dataclasses whose fields say who holds the same value, and one save, load, adopt and transfer for all.

| tag | who holds the value | a replica that takes another one's place | other replicas take part |
| --- | --- | --- | --- |
| `same` | all replicas alike | takes it over | keeps it |
| `own` | this replica alone | begins without | keeps it |
| `owner` | those that hold it under the present number of replicas | begins without | begins without |

Fields without a tag are references and caches; they are neither saved nor taken over. A tagged field holds a tensor, a
list of numbers, another state, a list of tensors or of states, or a dict of tensors by number. A dict holds what waits
for something; its field names by `like` a list of tensors that its entries have the shapes of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from thinwire.errors import CheckpointError

_TAG = "thinwire"


def same(what: str, **options: Any) -> Any:
    """Return a field that all replicas hold alike; `what` names it in errors and to users."""
    return _field("same", what, options)


def own(what: str, **options: Any) -> Any:
    """Return a field that is true for this replica alone."""
    return _field("own", what, options)


def owner(what: str, **options: Any) -> Any:
    """Return a field that is true for the present set of replicas alone."""
    return _field("owner", what, options)


def _field(tag: str, what: str, options: dict[str, Any]) -> Any:
    like = options.pop("like", None)
    return dataclasses.field(metadata={_TAG: (tag, what, like)}, **options)


def save(state: Any) -> dict[str, Any]:
    """Return a state's tagged fields: nested dicts of tensors, which it shares.

    Example:
        >>> @dataclasses.dataclass
        ... class Counted:
        ...     sums: list[torch.Tensor] = same("sum")
        ...     counts: list[int] = same("number of sums")
        >>> save(Counted([torch.ones(2)], [3]))
        {'sums': {'0': tensor([1., 1.])}, 'counts': tensor([3])}
    """
    return {name: _saved(getattr(state, name)) for name, *_ in _tagged(state)}


def load(state: Any, saved: Mapping[str, Any]) -> None:
    """Restore what `save` returned.

    Raises:
        CheckpointError: It does not fit; then nothing is changed.
    """
    _check(state, saved)
    for name, *_ in _tagged(state):
        _put(state, name, saved[name])


def adopt(state: Any, saved: Mapping[str, Any], *, is_own: bool, has_same_members: bool = False) -> list[str]:
    """Take over what still holds of a state that was saved under another set of replicas, and reset the rest.

    Args:
        state: This replica's.
        saved: What `save` returned there.
        is_own: Whether this replica saved it.
        has_same_members: Whether the same replicas take part.

    Returns:
        What was reset, a line each.

    Raises:
        CheckpointError: It does not fit; then nothing is changed.
    """
    _check(state, saved)
    kept = {"same": True, "own": is_own, "owner": is_own and has_same_members}
    lines = []
    for name, tag, what, _ in _tagged(state):
        if kept[tag]:
            _put(state, name, saved[name])
        else:
            _reset(getattr(state, name), state, name)
            lines.append(what)
    return lines


def reset(state: Any) -> None:
    """Set all tagged fields to what they were at first: zeros, and nothing that waits."""
    for name, *_ in _tagged(state):
        _reset(getattr(state, name), state, name)


def transfer(state: Any) -> dict[str, torch.Tensor]:
    """Return copies of the tensors that all replicas hold alike, by the path to each, for a replica that joins."""
    return {path: tensor.clone() for path, tensor in _shared_tensors(state)}


def take_over(state: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Take over what `transfer` returned on another replica.

    Raises:
        CheckpointError: It does not fit; then nothing is changed.
    """
    into = dict(_shared_tensors(state))
    wrong = [path for path in {*into, *tensors} if path not in into or path not in tensors]
    wrong += [path for path in into if path not in wrong and into[path].shape != tensors[path].shape]
    if wrong:
        raise CheckpointError(f"the state's {sorted(wrong)[0]} does not fit; all replicas must run the same method")
    for path, tensor in tensors.items():
        into[path].copy_(tensor)


def _tagged(state: Any) -> Iterator[tuple[str, str, str, str | None]]:
    for field in dataclasses.fields(state):
        if _TAG in field.metadata:
            yield (field.name, *field.metadata[_TAG])


def _saved(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return save(value)
    if isinstance(value, dict):
        return {str(key): _saved(one) for key, one in value.items()}
    if _has_numbers(value):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value[0], float) else torch.int64)
    if isinstance(value, list):
        return {str(index): _saved(one) for index, one in enumerate(value)}
    return value


def _has_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)


def _check(state: Any, saved: Mapping[str, Any]) -> None:
    """Refuse what does not fit a state, before anything is changed."""
    tagged = {name: (what, like) for name, _, what, like in _tagged(state)}
    if set(saved) != set(tagged):
        found, here = (", ".join(sorted(names)) or "nothing" for names in (saved, tagged))
        raise CheckpointError(f"the checkpoint keeps {found} here, this run {here}; resume with its method")
    for name, (what, like) in tagged.items():
        sizes = getattr(state, like) if like else getattr(state, name)
        _check_value(getattr(state, name), saved[name], what=what, sizes=sizes)


def _check_value(value: Any, saved: Any, *, what: str, sizes: Any) -> None:
    if dataclasses.is_dataclass(value):
        _check(value, saved)
    elif isinstance(value, dict):
        for key, one in saved.items():
            _check_shape(one, sizes[int(key)].shape if int(key) < len(sizes) else None, what=f"{what} {key}")
    elif _has_numbers(value) or (isinstance(value, list) and isinstance(saved, torch.Tensor)):
        if value and len(saved) not in (0, len(value)):  # they may come later than the state
            raise CheckpointError(
                f"the checkpoint's {what} has {len(saved)} numbers, this run's {len(value)}; resume with its model"
            )
    elif isinstance(value, list):
        if len(value) != len(saved):
            raise CheckpointError(
                f"the checkpoint holds {len(saved)} times what is called {what}, this run {len(value)} times; resume "
                f"with its method and model, and its layers_per_fragment"
            )
        for key, (one, other) in enumerate(zip(value, saved.values(), strict=True)):
            _check_value(one, other, what=f"{what} {key}", sizes=())
    else:
        _check_shape(saved, value.shape, what=what)


def _check_shape(saved: Any, shape: torch.Size | None, *, what: str) -> None:
    if not isinstance(saved, torch.Tensor) or saved.shape != shape:
        found = tuple(saved.shape) if isinstance(saved, torch.Tensor) else "no tensor"
        here = "none" if shape is None else tuple(shape)
        raise CheckpointError(
            f"the checkpoint's {what} has the shape {found}, this run's {here}; resume with its model, and as many "
            f"ranks a replica"
        )


def _put(state: Any, name: str, saved: Any) -> None:
    value = getattr(state, name)
    if dataclasses.is_dataclass(value):
        load(value, saved)
    elif isinstance(value, dict):
        like = next(like for field, _, _, like in _tagged(state) if field == name)
        sizes = getattr(state, str(like))
        setattr(state, name, {int(key): one.to(sizes[int(key)].device, copy=True) for key, one in saved.items()})
    elif _has_numbers(value) or (isinstance(value, list) and isinstance(saved, torch.Tensor)):
        setattr(state, name, saved.tolist() if isinstance(saved, torch.Tensor) else [])
    elif isinstance(value, list):
        for one, other in zip(value, saved.values(), strict=True):
            load(one, other) if dataclasses.is_dataclass(one) else one.copy_(other)
    else:
        value.copy_(saved)


def _reset(value: Any, state: Any, name: str) -> None:
    if dataclasses.is_dataclass(value):
        reset(value)
    elif isinstance(value, dict):
        value.clear()
    elif isinstance(value, torch.Tensor):
        value.zero_()
    elif _has_numbers(value):
        setattr(state, name, [type(one)(0) for one in value])
    else:
        for one in value:
            _reset(one, state, name)


def _shared_tensors(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, tag, *_ in _tagged(state):
        value = getattr(state, name)
        if dataclasses.is_dataclass(value):
            yield from _shared_tensors(value, f"{path}{name}.")
        elif tag == "same":
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            if isinstance(value, torch.Tensor):
                yield f"{path}{name}", value
            yield from ((f"{path}{name}.{key}", one) for key, one in items if isinstance(one, torch.Tensor))
