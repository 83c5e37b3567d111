"""The private names of torch that thinwire uses, and the versions with which they were tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire import compat
from thinwire.errors import TransportError
from thinwire.transport.collective_hooks import CollectiveHooks


def test_the_tests_run_with_a_version_that_is_told_to_be_tried() -> None:
    assert torch.__version__.startswith(compat.TRIED_VERSIONS)
    assert compat.missing_names() == []


def test_a_torch_without_a_name_is_refused_with_the_name_and_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_NAMES", (*compat._NAMES, "DispatchKeySet.no_such_name"))
    with pytest.raises(TransportError, match=r"lacks torch\._C\.DispatchKeySet\.no_such_name; .* with torch 2\.13"):
        CollectiveHooks(None)  # type: ignore[arg-type]


def test_every_operator_that_is_watched_is_there_and_names_its_group() -> None:
    for operator in ("allreduce_", "broadcast_", "send", "recv_", "barrier", "_reduce_scatter_base_"):
        assert operator in compat.group_operators()
        assert "process_group" in compat.positions(operator)


def _trained(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any], int]:
    """Return parameters, state and calls of a hook after some steps, with a schedule, a closure and a state loaded."""
    weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12, dtype=torch.float32).view(3, 4))
    optimizer, hooks = kind([weight], **options), []
    optimizer.register_step_post_hook(lambda *unused: hooks.append(1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**3).sum() + weight.square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        loss = optimizer.step(closure)
        assert loss is not None
        schedule.step()
    again = kind([weight], **options)
    again.load_state_dict(optimizer.state_dict())
    closure()
    again.step()
    return weight.detach(), again.state_dict(), len(hooks)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.1, "fused": True}),
        (torch.optim.AdamW, {"lr": 0.1, "fused": True, "weight_decay": 0.1}),
        (torch.optim.Muon, {"lr": 0.1}),
    ],
)
def test_an_eager_optimizer_computes_the_bits_of_torchs(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    (mine, state, hooks), (other, known, calls) = (_trained(one, options) for one in (compat.eager(kind), kind))
    assert torch.equal(mine, other) and hooks == calls == 3
    assert state["param_groups"] == known["param_groups"]
    for name, value in known["state"][0].items():
        assert torch.equal(torch.as_tensor(state["state"][0][name]), torch.as_tensor(value)), name
    made = compat.eager(kind)([torch.nn.Parameter(torch.ones(2, 2))], **options)
    assert isinstance(made, kind) and type(made).__name__ == kind.__name__
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        made.add_param_group({"params": made.param_groups[0]["params"]})


def test_a_work_that_cannot_answer_has_not_failed() -> None:
    class Answer:
        def __init__(self, answer: Any) -> None:
            self._answer = answer

        def exception(self) -> Any:
            if isinstance(self._answer, TypeError | AttributeError):
                raise self._answer
            return self._answer

    # over nccl, torch 2.11 gives one of the latter two
    for silent in (None, TypeError("Unable to convert function return value to a Python type"), object()):
        assert compat.failure_of(Answer(silent)) == ""
    assert compat.failure_of(Answer(RuntimeError("a rank is gone"))) == "a rank is gone"


def test_torch_has_the_function_that_only_makes_an_optimizers_state() -> None:
    from torch.distributed.checkpoint import state_dict

    seen: list[bool] = []

    class Seen(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append(compat.is_making_state())

    optimizer = Seen([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    state_dict._init_optim_state(optimizer)
    optimizer.step()
    assert seen == [True, False]
