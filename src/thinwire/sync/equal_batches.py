"""Detection of replicas that train on equal batches, by a hash of their first inputs that travels with the rounds.

Where the model itself is not called, as in Lightning, which calls what it holds, gradients are hashed in their place.
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from thinwire.averaging.round_context import RoundNote
from thinwire.sync.weight_copies import tensors_in
from thinwire.transport.base import Envelope, OwnedTransport, Pending, Received, Transport
from thinwire.transport.shards import local_shard
from thinwire.transport.streams import ROUNDS

# Forward passes whose inputs are hashed: by chance no two shares of data begin alike for so long.
_NUM_BATCHES = 8
# Elements of each input that count: the time for it stays far below that of a forward pass.
_MOST_ELEMENTS = 1 << 16
_MOST_NESTED = 64
# Gradients that count, of the last parameters: an embedding's are zero almost everywhere.
_MOST_GRADIENTS = 8


class EqualBatchesWarning(UserWarning):
    """Two replicas train on the same batches, so that one of them adds nothing."""


class EqualBatches:
    """Hashes the inputs of a model's first training passes, and warns once where another replica's are equal.

    Inputs that never change are no sign: an experiment may train on one batch.

    Args:
        model: The replica's model; its hook is removed after the first passes.
        replica: The replica's number.

    Attributes:
        data_hash: Hash of the first batches, 0 before all of them have been seen.
    """

    def __init__(self, model: nn.Module, *, replica: int) -> None:
        self._model, self._replica = model, replica
        self._seen: list[int] = []
        self._has_inputs = self._has_gradients = False  # of this step
        self.data_hash = 0
        self._equal: int | None = None
        self._has_warned = False
        self._hook = model.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def on_data_hash(self, replica: int, found: int) -> None:
        """Compare another replica's hash; called from any thread."""
        if found == self.data_hash and self._replica < replica:  # one of the two warns
            self._equal = replica

    def warn(self, *, stacklevel: int) -> None:
        if self._equal is None or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"replicas {self._replica} and {self._equal} train on equal batches, so one of them adds nothing; give "
            f"each its own: batches[transport.replica :: transport.num_replicas], or split_dataset(dataset, transport) "
            f"or the sampler ReplicaSampler(dataset, transport) of thinwire.integrations.data; where data is drawn, "
            f"a seed with transport.replica in it",
            EqualBatchesWarning, stacklevel=stacklevel + 1,
        )  # fmt: skip

    def close(self) -> None:
        self._hook.remove()

    def watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure of a step, after whose first call the gradients are hashed."""

        def call() -> Any:
            result = closure()
            self.on_gradients()
            return result

        return call

    def on_gradients(self) -> None:
        """Hash the gradients of a step once, before they are averaged; nothing where the inputs were hashed."""
        if len(self._seen) >= _NUM_BATCHES or self._has_inputs or self._has_gradients:
            return
        self._has_gradients = True
        found = [p.grad for p in self._model.parameters() if p.grad is not None and not p.grad.is_sparse]
        if found:
            self._add(found[-_MOST_GRADIENTS:])

    def on_step_end(self) -> None:
        self._has_inputs = self._has_gradients = False

    def _on_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not model.training or not torch.is_grad_enabled():
            return
        self._has_inputs = True
        self._add(tensors_in((args, kwargs), depth=_MOST_NESTED))

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        found = 0
        with contextlib.suppress(RuntimeError, TypeError):  # a tensor without values, as in a transform of functions
            for tensor in tensors:
                first = local_shard(tensor.detach()).reshape(-1)[:_MOST_ELEMENTS].cpu().contiguous()
                found = zlib.crc32(first.view(torch.uint8).numpy().data, found)
        self._seen.append(found)
        if len(self._seen) == _NUM_BATCHES:
            self.close()
            if len(set(self._seen)) > 1:
                self.data_hash = zlib.crc32(b"".join(one.to_bytes(4, "little") for one in self._seen))


class HashedRounds(OwnedTransport):
    """An owner's transport whose rounds carry the hash of this replica's batches, and hand on those of the others."""

    def __init__(self, inner: Transport, batches: EqualBatches) -> None:
        super().__init__(inner)
        self._batches = batches

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        note = envelope.note
        if envelope.stream is ROUNDS and self._batches.data_hash:
            note = replace(RoundNote.of(envelope), data_hash=self._batches.data_hash).pack()
        return self.inner.send(payload, to=to, envelope=replace(envelope, owner=self.owner, note=note))

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        pending = self.inner.receive(source=source, envelope=replace(envelope, owner=self.owner))
        return _HashedRound(pending, source, self._batches) if envelope.stream is ROUNDS else pending


class _HashedRound:
    """A receive that hands on the hash in its message."""

    def __init__(self, inner: Pending, source: int, batches: EqualBatches) -> None:
        self._inner, self._source, self._batches = inner, source, batches

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, *, deadline_s: float) -> Received | None:
        received = self._inner.wait(deadline_s=deadline_s)
        if received is not None and (found := RoundNote.of(received).data_hash):
            self._batches.on_data_hash(self._source, found)
        return received
