"""Chunks: immutable objects named by the hash of their stored bytes, and where tensors are cut into them.

A tensor is cut into cells of whole rows, about 8 MiB each; the cut depends on its global shape and
dtype alone, not on any layout, so the same state has the same chunks after a re-mesh. Cells of less
than 1 MiB are packed with their neighbours (canonical order) into chunks of up to 4 MiB: a small model is
a handful of objects. Where no single node holds a whole cell, its parts become chunks of their own.

The address is the blake3 of the *stored* bytes (after the codec), so any object can be checked without
its manifest; the manifest holds the xxh3_128 of the raw bytes of every shard, so a codec that misbehaves
is noticed too.
"""

from __future__ import annotations

from typing import Any

import zstandard
from blake3 import blake3

from picotron_ray.errors import CorruptError
from picotron_ray.layout.shards import DTYPE_BYTES, Box

CELL_BYTES = 8 << 20
SMALL_BYTES = 1 << 20
PACK_BYTES = 4 << 20
CODECS = ("none", "zstd")


def cells(shape: tuple[int, ...], dtype: str) -> list[Box]:
    """Cut a tensor into its grid: boxes of whole rows of its first dimension."""
    if not shape:
        return [Box((), ())]
    rows, rest = shape[0], shape[1:]
    row_bytes = Box(rest, rest).numel * DTYPE_BYTES[dtype]
    step = max(1, CELL_BYTES // max(row_bytes, 1))
    zeros = (0,) * len(rest)
    return [Box((at, *zeros), (min(step, rows - at), *rest)) for at in range(0, rows, step)]


def chunk_key(address: str) -> str:
    return f"chunks/{address[:2]}/{address}"


def address_of(stored: bytes) -> str:
    """Address of stored bytes: their blake3, hexadecimal."""
    return blake3(stored).hexdigest()


def encode(raw: Any, codec: str) -> bytes:
    """Encode raw bytes as they are stored; lossless."""
    if codec == "zstd":
        # A level of its own, not the library's: another one would store every chunk anew under another name.
        return zstandard.ZstdCompressor(level=3).compress(raw)
    return bytes(raw)


def decode(address: str, stored: bytes, codec: str, raw_bytes: int) -> bytes:
    """Check stored bytes against their address and undo the codec.

    Raises:
        CorruptError: they do not match, or do not decode to ``raw_bytes`` bytes.
    """
    key = chunk_key(address)
    if address_of(stored) != address:
        raise CorruptError(f"chunk {key}: {len(stored)} bytes do not match their address", where=key)
    raw = stored
    if codec == "zstd":
        try:
            if zstandard.frame_content_size(stored) not in (raw_bytes, -1):  # it is allocated at once
                raise zstandard.ZstdError(f"its header does not say {raw_bytes} bytes")
            raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)
        except zstandard.ZstdError as error:
            raise CorruptError(f"chunk {key} does not decompress: {error}", where=key) from error
    elif codec != "none":
        raise CorruptError(f"chunk {key}: codec {codec!r} is unknown, expected one of {CODECS}", where=key)
    if len(raw) != raw_bytes:
        raise CorruptError(f"chunk {key} holds {len(raw)} bytes, expected {raw_bytes}", where=key)
    return raw
