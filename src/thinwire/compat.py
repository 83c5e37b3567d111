"""The names of torch that are not promised to stay, in one place; all else uses torch's public ones.

Every call of a process group, whether Python's or DDP's own C++, passes torch's dispatcher as an operator of `c10d`.
A kernel at a key that all these operators leave empty sees each of them and hands it on. That takes the operators'
names, a process group and a `Work` out of their boxes, and a `Work` whose wait is ours.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Container, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

# What the tests have passed with; other versions are not refused, only untried.
TRIED_VERSIONS = ("2.13",)
_NAMESPACE = "c10d"
_KEY = "BackendSelect"
_NAMES = (
    "_dispatch_get_all_op_names", "DispatchKeySet.remove", f"DispatchKey.{_KEY}",
    "_distributed_c10d.ProcessGroup.unbox", "_distributed_c10d.Work.unbox", "_distributed_c10d.PythonCallbackWork",
)  # fmt: skip

_Kind = TypeVar("_Kind", bound=Optimizer)
Around = Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]


def num_usable_gpus() -> int:
    """Return how many GPUs CUDA itself finds; this starts CUDA, which then reads CUDA_VISIBLE_DEVICES no more."""
    return int(torch._C._cuda_getDeviceCount())


def num_collectives(group: Any) -> int | None:
    """Return how many calls a process group has had, by torch's own number; None where its backend has none."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def missing_names() -> list[str]:
    """Return what this build of torch lacks of what is used here.

    Example:
        >>> missing_names()
        []
    """
    return [f"torch._C.{names}" for names in _NAMES if not _has(torch._C, names)]


def _has(found: Any, names: str) -> bool:
    for name in names.split("."):
        found = getattr(found, name, None)
    return found is not None


def group_operators() -> frozenset[str]:
    """Return the names of the dispatcher's operators that process groups call.

    Example:
        >>> "allreduce_" in group_operators()
        True
    """
    known = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return frozenset(name for space, _, name in known if space == _NAMESPACE)


def positions(operator: str) -> dict[str, int]:
    """Return where each argument of an operator of process groups stands, by its name.

    Example:
        >>> positions("send")
        {'tensors': 0, 'process_group': 1, 'dst': 2, 'tag': 3}
    """
    found = getattr(getattr(torch.ops, _NAMESPACE), operator).default
    return {argument.name: at for at, argument in enumerate(found._schema.arguments)}


def intercept(operators: Sequence[str], around: Around) -> Callable[[], None]:
    """Let a function stand around every call of some operators of process groups, from whichever thread or language.

    Args:
        operators: Of `group_operators`.
        around: Called with the operator's name, its arguments and a function that goes on with the call; returns what
            the call shall return.

    Returns:
        A function that takes it away again.
    """
    library: Any = torch.library.Library(_NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    key = getattr(torch._C.DispatchKey, _KEY)
    for name in operators:
        library.impl(name, _kernel(name, key, around), _KEY, with_keyset=True)
    restore: Callable[[], None] = library._destroy
    return restore


def _kernel(name: str, key: Any, around: Around) -> Callable[..., Any]:
    go_on = getattr(getattr(torch.ops, _NAMESPACE), name).default.redispatch

    def kernel(keyset: Any, *arguments: Any) -> Any:
        return around(name, arguments, lambda: go_on(keyset.remove(key), *arguments))

    return kernel


def unboxed_group(argument: Any) -> Any:
    """Return the process group in an argument of an operator."""
    return torch._C._distributed_c10d.ProcessGroup.unbox(argument)


def unboxed_work(result: Any) -> Any:
    """Return the `Work` that an operator returned, alone or last of several."""
    return torch._C._distributed_c10d.Work.unbox(result[-1] if isinstance(result, tuple) else result)


def gathering_groups(distributed: ModuleType) -> Container[Any] | None:
    """Return the process groups whose calls are just now gathered into one, as `batch_isend_irecv` does on nccl.

    Such a call's `Work`, where it has one, knows nothing of the call's end.

    Returns:
        What holds a group for as long as this goes on; none where this build of torch does not tell.
    """
    world = getattr(getattr(distributed, "distributed_c10d", None), "_world", None)
    return getattr(world, "pg_coalesce_state", None)


def pipeline_runtime(schedules: ModuleType) -> tuple[Any, Any, Any]:
    """Return torch's runtime of pipelines by order tables, the class of a table's actions, and their kinds.

    Args:
        schedules: `torch.distributed.pipelining.schedules`, which only the transport may name.
    """
    found: Any = schedules
    return found._PipelineScheduleRuntime, found._Action, found._ComputationType


def flash_attention(query: Any, key: Any, value: Any, *, scale: float, is_causal: bool) -> tuple[Any, Any]:
    """Return output and log-sum-exp of torch's flash attention on a GPU; fewer heads of keys are repeated."""
    keys, values = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    found = torch.ops.aten._scaled_dot_product_flash_attention.default(
        query, keys, values, 0.0, is_causal, False, scale=scale
    )
    return found[0].to(torch.float32), found[1]


def flash_attention_backward(
    grad: Any, query: Any, key: Any, value: Any, output: Any, log_sums: Any, *, scale: float, is_causal: bool
) -> tuple[Any, Any, Any]:
    """Return the gradients of `flash_attention`'s inputs for the output and log-sum-exp of whole rows.

    The kernel takes log-sum-exps for contiguous without a look: those of some rows of several heads are not.
    """
    groups = query.shape[1] // key.shape[1]
    keys, values = (one.repeat_interleave(groups, 1) for one in (key, value))
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # seed and offset of a dropout of 0
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        grad.to(query.dtype).contiguous(), query, keys, values, output.to(query.dtype), log_sums.contiguous(), None,
        None, query.shape[2], key.shape[2], 0.0, is_causal, unused, unused, scale=scale,
    )  # fmt: skip
    return (found[0], *(one.unflatten(1, (-1, groups)).sum(2) for one in found[1:3]))


def failure_of(work: Any) -> str:
    """Return why a `Work` that has ended failed; an empty text where it did not, or does not say.

    torch says once in a process, on stderr, that this question is to go away.
    """
    try:
        error = work.exception()
    except (AttributeError, NotImplementedError, TypeError):  # no such question, or no Python type for its answer
        return ""
    except Exception as raised:  # a build that raises what it was asked for
        error = raised
    # some builds answer with an object that holds no exception
    return (str(error) or type(error).__name__) if isinstance(error, BaseException) else ""


def duration_s(work: Any) -> float | None:
    """Return how long a `Work` that has ended was in its call on the GPU; none where torch does not time calls."""
    try:
        return max(0.0, float(work._get_duration()) / 1000)
    except (AttributeError, RuntimeError):  # as torch says that the backend cannot, or that timing is off
        return None


def is_making_state() -> bool:
    """Return whether torch's checkpoint functions are calling an optimizer's `step`, only to make its state.

    They call it with learning rates and gradients of zero, and tell the optimizer nothing of it.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    maker = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frame = None if maker is None else sys._getframe()
    while frame is not None and frame.f_code is not maker:
        frame = frame.f_back
    return frame is not None


def with_wait(result: Any, wait: Callable[[timedelta], bool]) -> Any:
    """Return what an operator returned with a `Work` whose wait calls a function.

    Args:
        result: A boxed `Work`, alone or last of several.
        wait: Called with the limit, which is 0 for none; returns True or raises.
    """
    work = torch._C._distributed_c10d.PythonCallbackWork(wait).boxed()
    return (*result[:-1], work) if isinstance(result, tuple) else work


class EagerOptimizer(Optimizer):
    """The base of optimizers that are never compiled themselves.

    torch asks its compiler to leave an optimizer's bookkeeping alone, and imports it for that: more than a second and
    some 70 MB for each process, where nothing is compiled.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


def eager(kind: type[_Kind]) -> type[_Kind]:
    """Return an optimizer's class that computes the same and leaves torch's compiler unimported.

    Example:
        >>> made = eager(torch.optim.SGD)([torch.ones(2, requires_grad=True)], lr=0.5)
        >>> isinstance(made, torch.optim.SGD), type(made).__name__
        (True, 'SGD')
    """
    plain = inspect.unwrap(kind.step)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        with torch.set_grad_enabled(bool(self.defaults.get("differentiable"))):
            return plain(self, closure)

    return cast("type[_Kind]", type(kind.__name__, (EagerOptimizer, kind), {"step": step, "_eager_of": kind}))


def kind_of(optimizer: Optimizer) -> type[Optimizer]:
    """Return an optimizer's class, and torch's own where it was made by `eager`.

    Example:
        >>> kind_of(eager(torch.optim.SGD)([torch.ones(2)])) is torch.optim.SGD
        True
    """
    return cast("type[Optimizer]", getattr(type(optimizer), "_eager_of", type(optimizer)))
