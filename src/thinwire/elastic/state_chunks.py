"""A state cut in chunks with a hash each, and one hash over all of them: what others can check as it comes.

`root` is SHA-256 over a header (a magic, the state's bytes and the chunk's bytes) and the SHA-256 of every chunk, one
after the other. Who knows the root, the state's size and the chunks' size can check the list of hashes, and with it
every chunk by itself, from whoever it comes.
"""

from __future__ import annotations

import hashlib
import struct

import torch

from thinwire.transport.blob_store import BlobStore
from thinwire.transport.wire.framing import MOST_NAME_BYTES

HASH_BYTES = 32
# Over wires of 2 and 10 Mbit/s this takes 1.07 to 1.13 of the ideal time, a quarter of it up to 1.55, and four times as
# much gains nothing (benchmarks/transport/state_chunks.py).
CHUNK_BYTES = 1 << 18
MOST_CHUNKS = 1 << 20
_HEADER = struct.Struct("<4sIQQ")
_MAGIC = b"TWST"
_VERSION = 1
_MOST_DIGITS = len(str(MOST_CHUNKS))


def num_chunks_of(num_bytes: int, *, chunk_bytes: int) -> int:
    """Return how many chunks a state has.

    Raises:
        ValueError: A size is out of range.

    Example:
        >>> num_chunks_of(1_000_001, chunk_bytes=1000), num_chunks_of(0, chunk_bytes=1000)
        (1001, 0)
    """
    if num_bytes < 0 or chunk_bytes < 1:
        raise ValueError(
            f"a state has at least 0 bytes and its chunks at least 1, got {num_bytes} in chunks of {chunk_bytes}"
        )
    num_chunks = -(-num_bytes // chunk_bytes)
    if num_chunks > MOST_CHUNKS:
        raise ValueError(f"a state has at most {MOST_CHUNKS} chunks, got {num_chunks}; take larger chunks")
    return num_chunks


def hashes_name(name: bytes) -> bytes:
    """Return the name of the blob with a state's hashes.

    Raises:
        ValueError: The state's name is empty, or too long.

    Example:
        >>> hashes_name(b"state/12")
        b'state/12/hashes'
    """
    _check_name(name)
    return name + b"/hashes"


def chunk_name(name: bytes, index: int) -> bytes:
    """Return the name of the blob with a chunk.

    Args:
        name: Of the state.
        index: The chunk, counted from 0.

    Raises:
        ValueError: The state's name is empty, or too long.

    Example:
        >>> chunk_name(b"state/12", 7)
        b'state/12/7'
    """
    _check_name(name)
    return b"%s/%d" % (name, index)


def root_of(hashes: bytes, *, num_bytes: int, chunk_bytes: int) -> bytes:
    """Return the hash that stands for a state.

    Args:
        hashes: Of the chunks, 32 bytes each.
        num_bytes: Of the state.
        chunk_bytes: Of each chunk but the last, which may be smaller.

    Returns:
        32 bytes.
    """
    header = _HEADER.pack(_MAGIC, _VERSION, num_bytes, chunk_bytes)
    return hashlib.sha256(header + hashes).digest()


def publish_state(library: BlobStore, name: bytes, vector: torch.Tensor, *, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Let others fetch a state; its bytes are not copied, so they must not change until it is withdrawn.

    Args:
        library: Of this replica.
        name: Of the state: it never stands for another one.
        vector: uint8, `(num_bytes,)`, contiguous, on the CPU.
        chunk_bytes: Of a chunk. All bytes are read for checksum and hash before this returns.

    Returns:
        The root: 32 bytes that whoever fetches it must know from somebody it trusts.

    Raises:
        ValueError: The vector is of another kind, the name is too long, or something is published under it already.
    """
    num_chunks = num_chunks_of(vector.numel(), chunk_bytes=chunk_bytes)
    hashes = bytearray()
    published: list[bytes] = []
    try:
        for index in range(num_chunks):
            chunk = vector[index * chunk_bytes : (index + 1) * chunk_bytes]
            library.publish(chunk_name(name, index), chunk, is_bulk=True)
            published.append(chunk_name(name, index))
            hashes += hashlib.sha256(chunk.numpy().data).digest()
        listed = torch.frombuffer(hashes, dtype=torch.uint8) if hashes else torch.empty(0, dtype=torch.uint8)
        library.publish(hashes_name(name), listed)
    except BaseException:
        for blob in published:
            library.withdraw(blob)
        raise
    return root_of(bytes(hashes), num_bytes=vector.numel(), chunk_bytes=chunk_bytes)


def withdraw_state(library: BlobStore, name: bytes, *, num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Let others fetch a state no longer; who asks for a part of it is told that it is gone.

    Args:
        library: Of this replica.
        name: Of the state.
        num_bytes: As it was published.
        chunk_bytes: As it was published.
    """
    library.withdraw(hashes_name(name))
    for index in range(num_chunks_of(num_bytes, chunk_bytes=chunk_bytes)):
        library.withdraw(chunk_name(name, index))


def _check_name(name: bytes) -> None:
    most = MOST_NAME_BYTES - 1 - max(_MOST_DIGITS, len(b"hashes"))
    if not 1 <= len(name) <= most:
        raise ValueError(f"the name of a state has 1 to {most} bytes, got {len(name)}")
