"""Global parameters: the value that all replicas agree on, in host memory, one vector a fragment.

Vectors are float32, and float64 where a fragment holds float64 parameters: what is sent is float32 either way, but as
the difference to a value that all replicas hold exactly.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from thinwire.errors import CheckpointError
from thinwire.sync.fragments import find_blocks, parameters_by_name
from thinwire.sync.weight_copies import WeightCopies
from thinwire.transport.shards import (
    flatten,
    is_sharded,
    local_shard,
    own_part,
    real_shard,
    unflatten_into,
    whole_tensor,
)


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
        """Return the place after its last element."""
        return self.start + self.shape.numel()

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the whole matrix, (r, c); all ranks that hold a shard must call it together."""
        shard = vector[self.start : self.end].view(self.shape)
        return shard if self.shape == self.parameter.shape else whole_tensor(shard, like=self.parameter)

    def scatter(self, matrix: torch.Tensor, vector: torch.Tensor) -> None:
        """Write this rank's shard of a whole matrix into the vector."""
        shard = matrix if self.shape == self.parameter.shape else own_part(matrix, like=self.parameter)
        vector[self.start : self.end].view(self.shape).copy_(shard)


# Elements of each tensor by which a model that was not loaded is known, and the error that other dtypes may make.
_SAMPLE, _TOLERANCE = 4, 2.0**-6
# Elements from which a vector is worth a thread, or pages that the GPU may read by itself.
_LARGE = 2**20


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
        """The number of fragments."""
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
        """Return the values by fragment."""
        return {str(fragment): value for fragment, value in enumerate(self.values)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the values.

        Raises:
            CheckpointError: The number of fragments or a size differs.
        """
        load_vectors(state, self.values, what="global value")


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
        """Return whether this is the vector, and was not written to since: torch counts that."""
        return vector is self._vector and vector._version == self._version

    def result(self) -> int:
        """Return the checksum; it takes as long as the thread still does."""
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


def load_vectors(state: dict[str, torch.Tensor], into: Sequence[torch.Tensor], *, what: str) -> None:
    """Copy saved per-fragment vectors into those of the running model.

    Raises:
        CheckpointError: The number of vectors or a size differs; names what was found and expected.
    """
    if set(state) != {str(index) for index in range(len(into))}:
        raise CheckpointError(
            f"the checkpoint holds a {what} for {len(state)} fragments, this run has {len(into)}; resume with its "
            f"model and its layers_per_fragment"
        )
    for index, target in enumerate(into):
        saved = state[str(index)]
        if saved.shape != target.shape:
            raise CheckpointError(
                f"the checkpoint's {what} of fragment {index} has {saved.numel()} elements, this run's "
                f"{target.numel()}; resume with its model, and as many ranks a replica"
            )
        target.copy_(saved)


def load_waiting(state: dict[str, torch.Tensor], parameters: GlobalParameters, *, what: str) -> dict[int, torch.Tensor]:
    """Return saved vectors of some fragments, which wait for what comes with the next outer step.

    Raises:
        CheckpointError: There is no such fragment, or its size is another.
    """
    for fragment, vector in state.items():
        if fragment not in parameters.state_dict() or vector.shape != parameters.values[int(fragment)].shape:
            raise CheckpointError(
                f"the checkpoint's {what} of fragment {fragment} has {vector.numel()} elements and fits none of this "
                f"run's {parameters.num_fragments} fragments; resume with its model"
            )
    return {int(fragment): vector.clone() for fragment, vector in state.items()}
