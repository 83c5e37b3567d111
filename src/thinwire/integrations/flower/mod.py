"""Client's side of compressed updates: a mod that decodes the global model, and codes what the app returns.

A client keeps in `context.state` what the next round needs: its residual and, under a coded downlink, the version of
the model that it holds. A residual belongs to a layout and a round; it is dropped where either is too far away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from thinwire.errors import MissingExtra, PayloadError, ThinwireError, refusal
from thinwire.integrations.flower.orthogonal import sketches_of
from thinwire.integrations.flower.updates import (
    ArrayLayout,
    Arrays,
    Downlink,
    UpdateCode,
    Uplink,
    code_from_text,
    follow,
    read_array,
    read_row,
)
from thinwire.shared_random import derive_seed

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
except ImportError as error:
    raise MissingExtra.of("flwr", extra="flower") from error

# What the tests have passed with; other versions are not refused, only untried.
TRIED_VERSIONS = {"flwr": "1.42"}
RECORD, ROW = "thinwire", "thinwire"
_RESIDUAL, _HELD, _STATE = "thinwire.residual", "thinwire.held", "thinwire.state"
# Flower's mods that must come after this one: they clip, mask or add noise to plain arrays.
_INNER_MODS = ("LocalDpMod.__call__", "fixedclipping_mod", "adaptiveclipping_mod", "secaggplus_mod")
MOST_ARRAY_BYTES = 1 << 36


def record_of(arrays: Arrays) -> Any:
    """Return arrays as Flower's record."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def arrays_of(record: Any, *, most_bytes: int = MOST_ARRAY_BYTES) -> Arrays:
    """Return the arrays of Flower's record.

    Raises:
        PayloadError: One is no .npy file, or claims more than is there.
    """
    return {name: read_array(array.data, most_bytes=most_bytes) for name, array in record.items()}


def only_arrays(content: Any) -> tuple[str, Any]:
    """Return the key and the one ArrayRecord of a message.

    Raises:
        PayloadError: There is none, or there are several.
    """
    found = content.array_records
    if len(found) != 1:
        raise PayloadError(f"a message with {len(found)} ArrayRecords, expected one")
    [(key, record)] = found.items()
    return key, record


def client_mod(uplink: Uplink) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """Return a mod for `ClientApp(mods=[...])`; the strategy must be wrapped by `wrap` with the same uplink.

    It comes first among the mods: clipping and noise must see plain arrays, before they are coded.

    Args:
        uplink: What this client sends.
    """

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        category = message.metadata.message_type.partition(".")[0]
        settings = message.content.config_records.get(RECORD)
        if settings is None:
            if category != "train":
                return call_next(message, context)
            raise ThinwireError("the client codes its updates and the server does not expect it; wrap the strategy: "
                                "strategy = thinwire.integrations.flower.wrap(strategy, uplink)")  # fmt: skip
        _check_order()
        return _Visit(uplink=uplink, settings=settings, context=context, message=message).reply(call_next)

    return mod


def _check_order() -> None:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_qualname in _INNER_MODS:
            name = frame.f_code.co_qualname.partition(".")[0]
            raise refusal(f"{name} comes before client_mod, and would see coded bytes", got=f"{name} first",
                          allowed="client_mod first", remedy="mods=[client_mod(uplink), ...]")  # fmt: skip
        frame = frame.f_back  # type: ignore[assignment]


@dataclass(kw_only=True)
class _Visit:
    """One message at one client."""

    uplink: Uplink
    settings: Any
    context: Any
    message: Any

    def reply(self, call_next: Callable[[Any, Any], Any]) -> Any:
        """Return the app's reply, coded."""
        if self.settings["up"] != self.uplink.text():
            raise refusal("client and server have different uplinks", got=f"{self.uplink.text()} at the client",
                          allowed=f"{str(self.settings['up'])[:500]} at the server",
                          remedy="the same Uplink for client_mod and wrap")  # fmt: skip
        key, record = only_arrays(self.message.content)
        arrays = self._received(record)
        if arrays is None:
            return Message(RecordDict({RECORD: ConfigRecord({"held": 0})}), reply_to=self.message)
        kept = {name: one for name, one in self.message.content.items() if name not in (RECORD, key)}
        self.message.content = RecordDict({key: record_of(arrays), **kept})
        answer = call_next(self.message, self.context)
        if answer.has_error() or not self.message.metadata.message_type.startswith("train"):
            return answer
        key, record = only_arrays(answer.content)
        row = self._coded(arrays_of(record), arrays)
        others = {name: one for name, one in answer.content.items() if name != key}
        answer.content = RecordDict({key: ArrayRecord({ROW: Array(row)}), **others})
        return answer

    def _received(self, record: Any) -> Arrays | None:
        """Return the global arrays; None where their differences do not refer to what this client holds."""
        version, state = int(self.settings["version"]), self.context.state
        if not self.settings["down"]:
            return arrays_of(record)
        if self.settings["is_whole"]:
            arrays = arrays_of(record)
        else:
            own, layout, held = state.config_records.get(_STATE, {}), self.settings.get("layout"), {}
            if layout is None:
                if _HELD not in state or int(own.get("version", 0)) != self.settings["from"]:
                    return None
                held = arrays_of(state[_HELD])
            found = ArrayLayout.of(held) if layout is None else ArrayLayout.from_text(
                str(layout), most_bytes=MOST_ARRAY_BYTES
            )  # fmt: skip
            code = UpdateCode(code_from_text(Downlink, str(self.settings["down"])), found)
            row = read_row(record[ROW].data, most_bytes=MOST_ARRAY_BYTES)
            arrays = follow(code, held, row, version=int(self.settings["from"]), target=version)
        state[_HELD] = record_of(arrays)
        state[_STATE] = ConfigRecord({**state.config_records.get(_STATE, {}), "version": version})
        return arrays

    def _coded(self, arrays: Arrays, base: Arrays) -> Any:
        layout, state, round = ArrayLayout.of(base), self.context.state, int(self.settings["round"])
        tier = self.context.node_config.get("tier", "")
        code = UpdateCode(self.uplink.of_tier(tier), layout, self.uplink.tag)
        residual, has_dropped = None, False
        if self.uplink.error_feedback and not code.sends_values:
            residual, has_dropped = self._residual(code, round)
        row, _ = code.encode(
            arrays, layout.flat(base), sender=self.context.node_id % 2**32, version=round,
            base_version=int(self.settings["version"]), residual=residual, has_dropped=has_dropped,
        )  # fmt: skip
        if residual is not None:
            state[_RESIDUAL] = ArrayRecord({"residual": Array(residual.numpy())})
            more = {"residual_round": round, "layout": code.note.hex()}
            state[_STATE] = ConfigRecord({**state.config_records.get(_STATE, {}), **more})
        return row

    def _residual(self, code: UpdateCode, round: int) -> tuple[torch.Tensor, bool]:
        """Return what was not sent yet, and whether an old residual was dropped."""
        state = self.context.state
        own = state.config_records.get(_STATE, {})
        fresh = torch.zeros(code.layout.numel)
        if _RESIDUAL not in state:
            return fresh, False
        found = read_array(state[_RESIDUAL]["residual"].data, most_bytes=MOST_ARRAY_BYTES)
        is_near = 0 < round - int(own.get("residual_round", round)) <= self.uplink.residual_rounds
        if not is_near or own.get("layout") != code.note.hex() or found.shape != fresh.shape:
            return fresh, True
        return torch.from_numpy(found.copy()), False


def sketch_reply(message: Any, context: Any, model: nn.Module, batches: Iterable[torch.Tensor]) -> Any:
    """Return the answer to `CompressedStrategy.end_task`, from `@app.query("sketch")`.

    Args:
        message: The query; its arrays are loaded into the model.
        context: Of the app.
        model: The client's model.
        batches: Inputs of the task that ends.
    """
    state = {name: torch.from_numpy(array.copy()) for name, array in arrays_of(message.content["arrays"]).items()}
    model.load_state_dict(state, strict=False)
    bases, settings = arrays_of(message.content["bases"]), message.content["sketch"]
    seed = derive_seed(int(settings["seed"]), context.node_id)
    columns = int(settings["columns"]) or None
    found, samples = sketches_of(model, batches, bases=bases, seed=seed, columns=columns)
    metrics = MetricRecord({"num-examples": samples})
    return Message(RecordDict({"sketch": record_of(found), "metrics": metrics}), reply_to=message)
