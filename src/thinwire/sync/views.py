"""Views: the vectors that are exchanged, gradients before the inner step or pseudo-gradients after it.

A pseudo-gradient is the difference to the global parameters: the value that all replicas agree on, in host memory, one
vector a fragment. Vectors are float32, and float64 where a fragment holds float64 parameters: what is sent is float32
either way, but as the difference to a value that all replicas hold exactly.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import nn

from thinwire.errors import CheckpointError
from thinwire.sync.fragments import Pattern, find_blocks, parameters_by_name
from thinwire.sync.schedule import Round
from thinwire.sync.weight_copies import WeightCopies, copies_of
from thinwire.transport.shards import (
    flatten,
    gradient_shard,
    is_sharded,
    local_shard,
    own_part,
    real_shard,
    unflatten_into,
    whole_tensor,
)

# Elements of each tensor by which a model that was not loaded is known, and the error that other dtypes may make.
_SAMPLE, _TOLERANCE = 4, 2.0**-6
# Elements from which a vector is worth a thread, or pages that the GPU may read by itself.
_LARGE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpan:
    """Place of a hidden matrix in a fragment's vector, which may hold one shard of it.

    Attributes:
        start: Of its first element.
        shape: Of what the vector holds.
        parameter: The whole parameter, (r, c); a DTensor where the vector holds a shard.
    """

    start: int
    shape: torch.Size
    parameter: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + self.shape.numel()

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the whole matrix, (r, c); all ranks that hold a shard must call it together."""
        shard = vector[self.start : self.end].view(self.shape)
        return shard if self.shape == self.parameter.shape else whole_tensor(shard, like=self.parameter)

    def scatter(self, matrix: torch.Tensor, vector: torch.Tensor) -> None:
        """Write this rank's shard of a whole matrix into the vector."""
        shard = matrix if self.shape == self.parameter.shape else own_part(matrix, like=self.parameter)
        vector[self.start : self.end].view(self.shape).copy_(shard)


class GlobalParameters:
    """Global values of a model's fragments, next to the model's own (local) parameters.

    Args:
        model: The replica's model; its parameters are the local values.
        fragments: The names of each fragment's parameters.
        has_values: False where local and global values are always the same, so that no second copy is kept.
        copies: What the inner optimizer keeps of the weights: masters stand for parameters, companions lie behind them.

    Attributes:
        fragments: The names, by fragment.
        parameters: The model's own parameters, by fragment.
        values: On the CPU, one `(numel,)` vector a fragment (of this rank's shards); empty without values.
    """

    def __init__(
        self, model: nn.Module, fragments: Sequence[Sequence[str]], *, has_values: bool = True,
        copies: WeightCopies | None = None,
    ) -> None:  # fmt: skip
        by_name = parameters_by_name(model)
        self.fragments = tuple(tuple(names) for names in fragments)
        self.parameters = [[by_name[name] for name in names] for names in self.fragments]
        self._by_name = by_name
        self._copies = WeightCopies() if copies is None else copies
        # what each tensor of a fragment's vector belongs to: the parameters, then those that have a companion
        companions = self._copies.companions
        self._owners = [[*owned, *(p for p in owned if id(p) in companions)] for owned in self.parameters]
        self._has_values = has_values
        self._hidden = {name for block in find_blocks(model).blocks for name in block}
        # then a shard is the tensor itself: no look at each, at every step
        self._are_plain = not self._copies.masters and all(
            type(tensor) is nn.Parameter and not tensor.is_complex() for owned in self._owners for tensor in owned
        )
        self._embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        self.values: list[torch.Tensor] = []
        self._checksums: dict[int, _Checksum] = {}
        self.read_locals()

    def read_locals(self) -> None:
        """Take the model's present parameters as the global ones."""
        if self._has_values:
            vectors = [self.read(fragment) for fragment in range(self.num_fragments)]
            # a model on the meta device has shapes and no values: it is asked for what its rounds would send
            self.values = [
                vector if vector.is_meta else pinned(vector.cpu()) if vector.is_cuda else vector.cpu()
                for vector in vectors
            ]

    def sample(self) -> torch.Tensor:
        """Return the first elements of the model's own tensors: float32, one-dimensional, on the CPU."""
        return flatten([real_shard(p).flatten()[:_SAMPLE] for owned in self.parameters for p in owned]).cpu().float()

    def is_loaded(self, sample: torch.Tensor) -> bool:
        """Return whether the model holds the values that a sample is of, or the global ones."""
        own = self.sample()
        if own.shape != sample.shape:
            return True  # of other fragments, which are refused by themselves
        close = partial(torch.allclose, own, atol=_TOLERANCE, rtol=_TOLERANCE, equal_nan=True)
        if close(sample) or not self._has_values:
            return close(sample)
        with self.in_model():
            return close(self.sample())

    def beside(self, value: torch.Tensor) -> torch.Tensor:
        """Return zeros for a vector of the same size beside a global value, in the same kind of memory."""
        zeros = torch.zeros_like(value)
        return pinned(zeros) if any(p.is_cuda for tensors in self.parameters for p in tensors) else zeros

    def forget_locals(self) -> bool:
        """Set the local parameters to the global values, and return whether they were kept apart.

        For a replica that continues from the state of another: what that one has trained since the last exchange stays
        that one's, or it would be counted twice.
        """
        for fragment in range(len(self.values)):
            self.blend_into_locals(fragment, blend=0.0)
        return bool(self.values)

    def locals(self, fragment: int) -> list[torch.Tensor]:
        """Return a fragment's tensors in the model (this rank's shards, as `real_shard`s), to read and to write."""
        own = self.parameters[fragment]
        masters, companions = self._copies.masters, self._copies.companions
        if self._are_plain and not companions:
            return [parameter.detach() for parameter in own]
        found = [_present(masters[id(p)](), p) if id(p) in masters else p for p in own]
        found += [_present(companions[id(p)](), p) for p in own if id(p) in companions]
        return [real_shard(tensor) for tensor in found]

    def shapes(self, fragment: int) -> tuple[torch.Size, ...]:
        """Return the shapes of what this rank holds of a fragment's tensors, in the order of its vectors."""
        return tuple(tensor.shape for tensor in self.locals(fragment))

    def held_dtypes(self, fragment: int) -> tuple[torch.dtype, ...]:
        """Return the dtypes in which a fragment's tensors are kept, in the order of its vectors."""
        return tuple(tensor.dtype for tensor in self.locals(fragment))

    def read(self, fragment: int) -> torch.Tensor:
        """Return a fragment's local value: float32 or float64, `(numel,)`, a new tensor on the model's device."""
        return flatten(self.locals(fragment), dtype=self.dtype(fragment))

    def dtype(self, fragment: int) -> torch.dtype:
        """Return the dtype of a fragment's vectors: float64 where a parameter is, float32 else."""
        is_wide = any(p.dtype in (torch.float64, torch.complex128) for p in self.parameters[fragment])
        return torch.float64 if is_wide else torch.float32

    def need_float32(self, why: str) -> None:
        """Refuse float64 parameters where rounds carry parameters themselves, which float32 would round.

        Raises:
            ValueError: There are some; names the first.
        """
        for fragment, names in enumerate(self.fragments):
            if self.dtype(fragment) == torch.float64:
                name = next(n for n in names if self._by_name[n].dtype in (torch.float64, torch.complex128))
                raise ValueError(
                    f"{why}, in float32, which would round {name} of {self._by_name[name].dtype}; convert the model "
                    f"with model.float(), or take a method that sends differences, such as streaming_diloco()"
                )

    def write(self, fragment: int, value: torch.Tensor) -> None:
        """Set a fragment's local value from such a vector."""
        unflatten_into(value, self.locals(fragment))
        self._set_from_masters(fragment)

    def _set_from_masters(self, fragment: int) -> None:
        for parameter in self.parameters[fragment]:
            read = self._copies.masters.get(id(parameter))
            if read is not None:
                local_shard(parameter).copy_(local_shard(_present(read(), parameter)))

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a copy of one of the model's tensors, on the CPU; also one that is in no fragment."""
        return self._by_name[name].detach().cpu().clone()

    def write_whole(self, name: str, value: torch.Tensor) -> None:
        """Set one of the model's tensors; also one that is in no fragment."""
        with torch.no_grad():
            self._by_name[name].copy_(value)

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds less than the whole of a tensor."""
        return any(is_sharded(p) for tensors in self.parameters for p in tensors)

    @property
    def num_fragments(self) -> int:
        return len(self.fragments)

    def numel(self, fragment: int) -> int:
        """Return how many elements this rank holds of a fragment."""
        return sum(shape.numel() for shape in self.shapes(fragment))

    def hidden_matrices(self, fragment: int) -> tuple[MatrixSpan, ...]:
        """Return the matrices of the model's blocks, without embeddings, in the order of a fragment's vector."""
        found, start = [], 0
        names = {id(p): name for name, p in zip(self.fragments[fragment], self.parameters[fragment], strict=True)}
        for parameter, shape in zip(self._owners[fragment], self.shapes(fragment), strict=True):
            is_matrix = parameter.dim() == 2 and not parameter.is_complex()
            if is_matrix and names[id(parameter)] in self._hidden and id(parameter) not in self._embeddings:
                found.append(MatrixSpan(start=start, shape=shape, parameter=parameter))
            start += shape.numel()
        return tuple(found)

    def pseudo_gradient(self, fragment: int) -> torch.Tensor:
        """Return global minus local: float32, `(numel,)`, a new tensor on the local parameters' device."""
        local = self.read(fragment)
        # the copy to the device is the only piece of the global value there, and lives as long as this call
        return local.neg_().add_(self.values[fragment].to(local.device, non_blocking=True)).to(torch.float32)

    def trained(self, fragment: int) -> torch.Tensor:
        """Return local minus global, seen from the global value in the parameters' own dtypes; see `read`.

        So what was not trained is exactly zero.
        """
        local = self.read(fragment)
        held = zip(self.shapes(fragment), self.held_dtypes(fragment), strict=True)
        start = [torch.empty(shape, dtype=dtype, device=local.device) for shape, dtype in held]
        unflatten_into(self.values[fragment].to(local.device), start)
        return local.sub_(flatten(start, device=local.device, dtype=local.dtype))

    def blend_into_locals(self, fragment: int, *, blend: float, value: torch.Tensor | None = None) -> None:
        """Set the local parameters to `blend * local + (1 - blend) * global`.

        Args:
            fragment: Which.
            blend: Weight of the local value.
            value: The global value, where a copy of it is on the device already.
        """
        tensors = self.locals(fragment)
        device = tensors[0].device if tensors else torch.device("cpu")
        target = (self.values[fragment] if value is None else value).to(device)
        if blend > 0:
            # local + (1 - blend) * (global - local): exact where local and global are equal
            target = torch.lerp(flatten(tensors, dtype=target.dtype), target, 1 - blend)
        unflatten_into(target, tensors)
        self._set_from_masters(fragment)

    def reference_hash(self, fragment: int) -> int:
        """Return a 32-bit checksum of a fragment's global value (CRC-32 of its bytes)."""
        value, begun = self.values[fragment], self._checksums.get(fragment)
        if begun is not None and begun.is_of(value):
            return begun.result()
        return checksum(value)

    def begin_checksum(self, fragment: int) -> None:
        """Compute a large fragment's checksum in a thread: its next round needs it, and a gigabyte takes 0.3 s."""
        if self.values[fragment].numel() >= _LARGE:
            self._checksums[fragment] = _Checksum(self.values[fragment])

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the global values into the model, and the local ones back at the end, bit for bit."""
        if not self._has_values:
            yield
            return
        kept = [[tensor.clone() for tensor in self.locals(fragment)] for fragment in range(self.num_fragments)]
        try:
            for fragment in range(self.num_fragments):
                self.blend_into_locals(fragment, blend=0.0)
            yield
        finally:
            for fragment, values in enumerate(kept):
                for tensor, value in zip(self.locals(fragment), values, strict=True):
                    tensor.copy_(value)
                self._set_from_masters(fragment)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {str(fragment): value for fragment, value in enumerate(self.values)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the values.

        Raises:
            CheckpointError: The number of fragments or a size differs; names what was found and expected.
        """
        if set(state) != set(self.state_dict()):
            raise CheckpointError(
                f"the checkpoint holds a global value for {len(state)} fragments, this run has {len(self.values)}; "
                f"resume with its model and its layers_per_fragment"
            )
        for fragment, value in enumerate(self.values):
            saved = state[str(fragment)]
            if saved.shape != value.shape:
                raise CheckpointError(
                    f"the checkpoint's global value of fragment {fragment} has {saved.numel()} elements, this run's "
                    f"{value.numel()}; resume with its model, and as many ranks a replica"
                )
            value.copy_(saved)


class _Checksum:
    """The checksum of a vector, computed in a thread; it holds until the vector is written to.

    Args:
        vector: Contiguous, on the CPU.
    """

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector, self._version = vector, vector._version
        self._found = 0
        self._thread = threading.Thread(target=self._compute, name="thinwire-checksum", daemon=True)
        self._thread.start()

    def is_of(self, vector: torch.Tensor) -> bool:
        return vector is self._vector and vector._version == self._version

    def result(self) -> int:
        self._thread.join()
        return self._found

    def _compute(self) -> None:
        self._found = checksum(self._vector)


def pinned(vector: torch.Tensor) -> torch.Tensor:
    """Lock a large vector's pages into memory, so that a GPU copies it seven times as fast; return it.

    torch's own allocator of such memory rounds sizes up to powers of two. A host that allows no more locked pages
    copies more slowly, and nothing else changes.
    """
    if vector.numel() >= _LARGE:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = vector.data_ptr()
        if int(runtime.cudaHostRegister(address, vector.nbytes, 0)) == 0:
            weakref.finalize(vector, runtime.cudaHostUnregister, address)
    return vector


def _present(found: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    return parameter if found is None else found


def checksum(vector: torch.Tensor) -> int:
    """Return the CRC-32 of a contiguous CPU vector's bytes, 0 for an empty one."""
    return zlib.crc32(vector.numpy().data.cast("B")) if vector.numel() else 0


class BoundView(Protocol):
    """A view on one replica's model."""

    @property
    def parameters(self) -> GlobalParameters: ...

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        """Return the shapes of the tensors that `read` gives, one behind the other."""

    def read(self, round: Round) -> torch.Tensor:
        """Return what is sent in a round: float32, one-dimensional, a new tensor on the model's device."""

    def read_last(self, fragment: int) -> torch.Tensor:
        """Return what is sent of a fragment in the final exchange; see `read`."""

    def reference_hash(self, round: Round) -> int:
        """Return a hash of the global value that `read` refers to, 0 where none is sent in this round."""


class View(Protocol):
    """The choice of what is exchanged, as a value; `bind` attaches it to a model."""

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundView:
        """Find the fragments in a model and return the view on it.

        Args:
            model: The replica's model.
            inner: Its optimizer, for views on what that remembers.

        Raises:
            ValueError: The model or the optimizer does not fit.
        """


_UNBOUND: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PseudoGradient:
    """Global minus local parameters, by fragment. One sign, everywhere.

    Args:
        fragments: How the model is cut.
        parameters: The fragments with their global values; `bind` sets them.
    """

    fragments: Pattern = field(default_factory=Pattern)
    parameters: GlobalParameters = field(default=_UNBOUND, repr=False, compare=False)

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> Self:
        return replace(self, parameters=self.cut(model, inner))

    def cut(self, model: nn.Module, inner: torch.optim.Optimizer | None) -> GlobalParameters:
        """Return the model's fragments with their global values.

        Raises:
            ValueError: The inner optimizer would undo what rounds write into the model.
        """
        copies = copies_of(inner)
        copies.check()
        return GlobalParameters(model, self.fragments.partition(find_blocks(model)), copies=copies)

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        return self.parameters.shapes(fragment)

    def read(self, round: Round) -> torch.Tensor:
        return self.parameters.pseudo_gradient(round.fragment)

    def read_last(self, fragment: int) -> torch.Tensor:
        return self.parameters.pseudo_gradient(fragment)

    def reference_hash(self, round: Round) -> int:
        return self.parameters.reference_hash(round.fragment)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPseudoGradient(PseudoGradient):
    """The pseudo-gradient against a global value that is the replica's own; see `PseudoGradient`.

    The final exchange is about the local parameters themselves: their mean is the same on all replicas, while a mean
    of differences to values that differ would not be.
    """

    def cut(self, model: nn.Module, inner: torch.optim.Optimizer | None) -> GlobalParameters:
        parameters = PseudoGradient.cut(self, model, inner)
        parameters.need_float32("this method's last exchange sends the parameters themselves")
        return parameters

    def read_last(self, fragment: int) -> torch.Tensor:
        return self.parameters.read(fragment)

    def reference_hash(self, round: Round) -> int:
        return 0  # replicas hold different values, and that is meant


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradients of all trainable parameters, as one fragment.

    A replica whose batch left a parameter without gradient counts as zero in the mean; a parameter that got none on any
    replica keeps none. One flag a parameter travels with the gradients to mark that.

    Args:
        hash_interval: Every how many steps the parameters are hashed to prove that replicas agree; 0 for never.
        is_split: Whether matrices (tensors of two dimensions and more) travel in channel 0, and the rest with the flags
            in channel 1: codes that drop most of a matrix would hurt biases and norms for few bytes.
    """

    hash_interval: int = 50
    is_split: bool = False

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundGradient:
        names = Pattern(num_fragments=1).partition(find_blocks(model))[0]
        return BoundGradient(self, model, names)


class BoundGradient:
    """See `Gradient`."""

    def __init__(self, spec: Gradient, model: nn.Module, names: tuple[str, ...]) -> None:
        by_name = parameters_by_name(model)
        tensors = [by_name[name] for name in names]
        self._channels = [tensors]
        if spec.is_split:
            self._channels = [[t for t in tensors if t.dim() >= 2], [t for t in tensors if t.dim() < 2]]
        self._tensors = [tensor for channel in self._channels for tensor in channel]
        self._sparse = {id(m.weight) for m in model.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
        self._hash_interval = spec.hash_interval
        self._arrived: list[torch.Tensor] = []
        # every replica holds the global values in its own parameters already: no second copy
        self.parameters = GlobalParameters(model, [names], has_values=False)

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        shapes = [real_shard(tensor).shape for tensor in self._channels[channel]]
        if self._is_last(channel):
            shapes.append(torch.Size([len(self._tensors)]))
        return tuple(shapes)

    def read(self, round: Round) -> torch.Tensor:
        # behind the last channel's, one flag a parameter: 1 where it has a gradient
        tensors = self._channels[round.channel]
        found = [gradient_shard(tensor) for tensor in tensors]
        self._sparse |= {id(t) for t in tensors if t.grad is not None and t.grad.layout == torch.sparse_coo}
        if self._is_last(round.channel):
            found.append(torch.tensor([0.0 if t.grad is None else 1.0 for t in self._tensors]))
        return flatten(found, device=real_shard(self._tensors[0]).device)

    def read_last(self, fragment: int) -> torch.Tensor:
        raise NotImplementedError("gradients are exchanged at every step; nothing is left for a final exchange")

    def write(self, round: Round, mean: torch.Tensor) -> None:
        """Put mean gradients into the parameters' `.grad`, once the last channel's have come with the flags."""
        self._arrived.append(mean)
        if not self._is_last(round.channel):
            return
        flags = mean[mean.numel() - len(self._tensors) :].tolist()
        parts = [
            part
            for channel, flat in zip(self._channels, self._arrived, strict=True)
            for part in parts_like(flat, channel)
        ]
        self._arrived = []
        for parameter, part, flag in zip(self._tensors, parts, flags, strict=True):
            if flag == 0:  # this replica's own may be there where it and others sent nothing
                parameter.grad = None
                continue
            if parameter.grad is None or parameter.grad.layout != torch.strided:
                parameter.grad = torch.zeros_like(parameter)
            real_shard(parameter.grad).copy_(part)
            if id(parameter) in self._sparse:  # its optimizer takes rows alone
                parameter.grad = parameter.grad.to_sparse(1)

    def reference_hash(self, round: Round) -> int:
        if not self._hash_interval or round.launch_step % self._hash_interval or round.channel:
            return 0
        return checksum(flatten(self.parameters.locals(0)).cpu())

    def _is_last(self, channel: int) -> bool:
        return channel == len(self._channels) - 1


def parts_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the part of a vector that each tensor's shard has in it, in the shard's shape; they share its memory."""
    start = 0
    for tensor in tensors:
        shape = real_shard(tensor).shape
        yield flat[start : start + shape.numel()].view(shape)
        start += shape.numel()
