"""Speed of codecs on a GPU beside the device's own copy, and the memory that they need at most.

A code reads or writes 4 bytes an element and its payload. `share` is the rate at which it moves these bytes, as a share
of the rate of a float32 copy of the same length, which reads and writes 8 bytes an element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from records import Part, finish, part_from_command_line

from thinwire.codecs import Codec, by_name
from thinwire.codecs.block_codec import Fused
from thinwire.codecs.e3m0 import _nearest, _values

CODECS = ("e3m0", "block-int8", "block-int4", "block-2bit", "e3m0-stochastic", "top-k", "chunked-top-k")
# what computes on the host, in part or as a whole, is not tried with more elements than this
ON_HOST = {"top-k": 100_000_000, "chunked-top-k": 100_000_000}


def copy_seconds(x: torch.Tensor, part: Part, *, repeats: int) -> float:
    """Return the time of a copy into memory that is already there."""
    target = torch.empty_like(x)
    return float(part.timed(lambda: target.copy_(x), repeats=repeats)["median"])


def measured(codec: Codec, x: torch.Tensor, part: Part, *, repeats: int) -> dict[str, Any]:
    """Time the copy and both ways of a code in turns, and return medians, shares and peaks."""
    copy_s = copy_seconds(x, part, repeats=repeats)
    payload = codec.encode(x)
    with part.peak_bytes() as peak:
        encoding = part.timed(lambda: codec.encode(x), repeats=repeats)
        encode_peak = peak()
    with part.peak_bytes() as peak:
        decoding = part.timed(lambda: codec.decode(payload, numel=x.numel()), repeats=repeats)
        decode_peak = peak()
    moved = 4 * x.numel() + payload.numel()
    rate = 8 * x.numel() / copy_s
    return {
        "elements": x.numel(), "copy_gb_per_s": rate / 1e9, "encode_s": encoding, "decode_s": decoding,
        "encode_share": moved / encoding["median"] / rate, "decode_share": moved / decoding["median"] / rate,
        "encode_peak_bytes_per_element": encode_peak / x.numel(),
        "decode_peak_bytes_per_element": decode_peak / x.numel(),
    }  # fmt: skip


def ways(x: torch.Tensor, part: Part) -> dict[str, Any]:
    """Compare the ways to run E3M0's core: operation by operation, compiled, and as a kernel of our own."""
    rows = torch.empty(x.numel() // 64, 33, dtype=torch.uint8, device=x.device)
    table, out = x.view(-1, 64), torch.empty_like(x).view(-1, 64)
    todo: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {"plain": (_nearest, _values)}
    if part.device.type == "cuda":
        from thinwire.codecs import e3m0_kernels  # imports Triton

        todo["compiled"] = Fused(_nearest), Fused(_values)
        todo["kernel"] = e3m0_kernels.encode, e3m0_kernels.decode
    found: dict[str, Any] = {"elements": x.numel()}
    copy_s = part.timed(lambda: out.copy_(table))["median"]
    rate = 8 * x.numel() / copy_s
    for name, (encode, decode) in todo.items():
        for way, work in (("encode", lambda: encode(table, rows)), ("decode", lambda: decode(rows, out))):  # noqa: B023
            seconds = part.timed(work)["median"]
            found[f"{name}_{way}_share"] = (4 * x.numel() + rows.numel()) / seconds / rate
    return found


def main() -> None:
    part = part_from_command_line("codec", __doc__ or "")
    sizes = (1_000, 100_000) if part.is_tiny else (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
    generator = torch.Generator(device=part.device).manual_seed(0)

    def sample(numel: int) -> torch.Tensor:
        return torch.randn(numel, device=part.device, generator=generator) * 1e-3

    part.measure("ways", lambda: ways(sample(sizes[-2] // 64 * 64), part))
    for name in CODECS:
        for numel in sizes:
            if numel <= ON_HOST.get(name, numel):
                part.measure(
                    f"{name} {numel}",
                    lambda name=name, numel=numel: measured(  # type: ignore[misc]
                        by_name(name), sample(numel), part, repeats=2 if name in ON_HOST else 7
                    ),
                )
    finish(part)


if __name__ == "__main__":
    main()
