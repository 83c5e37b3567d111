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

from thinwire.errors import MissingExtra, PayloadError, ThinwireError, excluded, refusal
from thinwire.integrations.flower.orthogonal import sketches_of
from thinwire.integrations.flower.updates import (
    ArrayLayout,
    Arrays,
    Bytes,
    Downlink,
    UpdateCode,
    Uplink,
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
_INNER_MODS = ("LocalDpMod.__call__", "fixedclipping_mod", "adaptiveclipping_mod")
_SECURE_MODS, _SECURE_RECORD = ("secaggplus_mod", "secagg_mod"), "secaggplus_configs"


def record_of(arrays: Arrays) -> Any:
    """Return arrays as Flower's record."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def arrays_of(record: Any, **limits: int) -> Arrays:
    """Return the arrays of Flower's record, read by `read_array`."""
    return {name: read_array(array.data, **limits) for name, array in record.items()}


def only_arrays(content: Any, *, beside: str = "") -> tuple[str, Any]:
    """Return the key and the one ArrayRecord of a message, but for one with the key `beside`, or raise PayloadError."""
    found = [(key, record) for key, record in content.array_records.items() if key != beside]
    if len(found) != 1:
        raise PayloadError(f"a message with {len(found)} ArrayRecords, expected one")
    return found[0]


def client_mod(uplink: Uplink) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """Return a mod for `ClientApp(mods=[...])`; the strategy must be wrapped by `wrap` with the same uplink.

    It comes first among the mods: clipping and noise must see plain arrays, before they are coded.
    """

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        category = message.metadata.message_type.partition(".")[0]
        settings = message.content.config_records.get(RECORD)
        _check_mods(message.content)
        if settings is None:
            if category != "train":
                return call_next(message, context)
            raise ThinwireError("the client codes its updates and the server does not expect it; wrap the strategy: "
                                "strategy = thinwire.integrations.flower.wrap(strategy, uplink)")  # fmt: skip
        return _Visit(uplink=uplink, settings=settings, context=context, message=message).reply(call_next)

    return mod


def _check_mods(content: Any) -> None:
    frame, names = sys._getframe(2), list[str]()
    while frame is not None:
        names.append(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    if _SECURE_RECORD in content.config_records or any(name in _SECURE_MODS for name in names):
        raise excluded("secaggplus_mod", "client_mod", why="masked arrays are added up, and coded bytes do not add up",
                       remedy="mods=[secaggplus_mod], with a strategy that is not wrapped")  # fmt: skip
    for name in names:
        if name in _INNER_MODS:
            name = name.partition(".")[0]
            raise refusal(f"{name} comes before client_mod, and would see coded bytes", got=f"{name} first",
                          allowed="client_mod first", remedy="mods=[client_mod(uplink), ...]")  # fmt: skip


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
        key, record = only_arrays(self.message.content, beside="bases")
        arrays = self._received(record)
        if arrays is None:
            return Message(RecordDict({RECORD: ConfigRecord({"held": 0})}), reply_to=self.message)
        kept = {name: one for name, one in self.message.content.items() if name != RECORD}
        self.message.content = RecordDict({**kept, key: record_of(arrays)})
        answer = call_next(self.message, self.context)
        if answer.has_error() or not self.message.metadata.message_type.startswith("train"):
            return answer
        key, record = only_arrays(answer.content)
        row = self._coded(arrays_of(record), arrays)
        answer.content = RecordDict({**answer.content, key: ArrayRecord({ROW: Array(row)})})
        return answer

    @property
    def _own(self) -> dict[str, Any]:
        return dict(self.context.state.config_records.get(_STATE, {}))

    def _received(self, record: Any) -> Arrays | None:
        """Return the global arrays; None where their differences do not refer to what this client holds."""
        state, base, layout = self.context.state, int(self.settings["from"]), self.settings.get("layout")
        if not self.settings["down"]:
            return arrays_of(record)
        if base < 0:
            arrays = arrays_of(record)
        elif layout is None and (_HELD not in state or int(self._own.get("version", 0)) != base):
            return None
        else:
            held = arrays_of(state[_HELD]) if layout is None else {}
            found = ArrayLayout.of(held) if layout is None else ArrayLayout.from_text(str(layout))
            code = UpdateCode(Downlink.from_text(str(self.settings["down"])), found)
            arrays = follow(code, held, read_row(record[ROW].data), version=base, target=int(self.settings["version"]))
        state[_HELD] = record_of(arrays)
        state[_STATE] = ConfigRecord({**self._own, "version": int(self.settings["version"])})
        return arrays

    def _coded(self, arrays: Arrays, base: Arrays) -> Bytes:
        layout, state, round = ArrayLayout.of(base), self.context.state, int(self.settings["round"])
        tier, version = str(self.context.node_config.get("tier", "")), int(self.settings["version"])
        code = UpdateCode(self.uplink.of_tier(tier), layout, self.uplink.tag)
        residual, flags = None, 0
        if self.uplink.error_feedback and not code.sends_values:
            residual, flags = self._residual(code, round)
        down = str(self.settings["down"])
        tiers = sorted(Downlink.from_text(down).tiers) if down else []
        flags += 2 * (tiers.index(tier) + 1) if tier in tiers else 0
        row, sent = code.encode(
            arrays, layout.flat(base), sender=self.context.node_id % 2**32, version=round, base_version=version,
            residual=residual, flags=flags,
        )  # fmt: skip
        if residual is not None:
            sent_row = row if bool(sent.isfinite().all()) else row[:0]
            state[_RESIDUAL] = ArrayRecord({"residual": Array(residual.numpy()), "sent": Array(sent_row)})
            more = {"residual_round": round, "residual_base": version, "layout": code.note.hex()}
            state[_STATE] = ConfigRecord({**self._own, **more})
        return row

    def _residual(self, code: UpdateCode, round: int) -> tuple[torch.Tensor, int]:
        """Return what did not count yet, and 1 if an old residual was dropped.

        The last update is a part of it where the server did not count it: it was refused, or its reply was lost.
        """
        state, own = self.context.state, self._own
        fresh = torch.zeros(code.layout.numel)
        if _RESIDUAL not in state:
            return fresh, 0
        found, last = read_array(state[_RESIDUAL]["residual"].data), int(own.get("residual_round", round))
        is_near = 0 < round - last <= self.uplink.residual_rounds
        if not is_near or own.get("layout") != code.note.hex() or found.shape != fresh.shape:
            return fresh, 1
        residual, row = torch.from_numpy(found.copy()), read_row(state[_RESIDUAL]["sent"].data)
        if len(row) and int(self.settings["counted"]) != last:
            widest = UpdateCode(self.uplink.of_tier(), code.layout, code.tag)  # the tier may have changed since
            sender, base = self.context.node_id % 2**32, int(own["residual_base"])
            residual += widest.read(row, sender=sender, version=last, base_version=base).vector
        return residual, 0


def sketch_reply(message: Any, context: Any, model: nn.Module, batches: Iterable[torch.Tensor]) -> Any:
    """Return the answer to `CompressedStrategy.end_task`, from `@app.query("sketch")`.

    The message's arrays are loaded into the client's model; the batches are inputs of the task that ends.
    """
    state = {name: torch.from_numpy(array.copy()) for name, array in arrays_of(message.content["arrays"]).items()}
    model.load_state_dict(state, strict=False)
    bases, settings = arrays_of(message.content["bases"]), message.content["sketch"]
    seed = derive_seed(int(settings["seed"]), context.node_id)
    columns = int(settings["columns"]) or None
    found, samples = sketches_of(model, batches, bases=bases, seed=seed, columns=columns)
    metrics = MetricRecord({"num-examples": samples})
    return Message(RecordDict({"sketch": record_of(found), "metrics": metrics}), reply_to=message)
