"""Chunks: where tensors are cut and what is packed. The same state has the same chunks for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from picotron_ray.checkpoint.store.chunks import address_of, cells, decode, encode
from picotron_ray.checkpoint.store.shard_sources import Piece
from picotron_ray.checkpoint.store.upload import _cells, _packs
from picotron_ray.errors import CorruptError
from picotron_ray.layout.shards import Box, Shard

MIB = 2**20


@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ((), "float64", []),
        ((5,), "uint8", [5]),
        ((8 * MIB,), "uint8", [8 * MIB]),
        ((8 * MIB + 1,), "uint8", [8 * MIB, 1]),
        ((5, MIB), "float32", [2, 2, 1]),
        ((3, MIB), "float64", [1, 1, 1]),
        ((3, MIB + 1), "float64", [1, 1, 1]),  # a row is never cut
        ((8 * MIB, 0), "float64", [8 * MIB]),
        ((0, 4), "float64", []),
    ],
)
def test_cells_are_whole_rows_of_8_mib(shape: tuple[int, ...], dtype: str, rows: list[int]) -> None:
    found = cells(shape, dtype)
    if not shape:
        assert found == [Box((), ())]
        return
    starts = [sum(rows[:at]) for at in range(len(rows))]
    zeros = (0,) * (len(shape) - 1)
    wanted = [Box((at, *zeros), (n, *shape[1:])) for at, n in zip(starts, rows, strict=True)]
    assert found == wanted


def packed(sizes: dict[str, int]) -> list[list[str]]:
    """Names in each chunk that a slot of byte tensors makes."""
    shards = {name: Shard(name, "uint8", (n,), Box((0,), (n,))) for name, n in sizes.items()}
    view = SimpleNamespace(shards=[SimpleNamespace(shard=shard) for shard in shards.values()])
    source: Any = SimpleNamespace(
        views=[view], pieces=lambda names: {name: [Piece(shards[name], None)] for name in names}
    )
    return [[shard.name for shard, _ in pack] for pack in _packs(source)]


def test_cells_below_1_mib_share_chunks_of_4_mib() -> None:
    small = MIB - 1
    assert packed({"a": small, "b": small, "c": small, "d": small, "e": 4}) == [["a", "b", "c", "d", "e"]]
    assert packed({"a": small, "b": small, "c": small, "d": small, "e": 5}) == [["a", "b", "c", "d"], ["e"]]
    assert packed({"a": 3, "b": MIB, "c": 4}) == [["b"], ["a", "c"]]
    assert packed({"a": 4 * MIB, "b": 4 * MIB + 1}) == [["a"], ["b"]]
    # after a full chunk the next one is filled as far
    many = dict.fromkeys("abcdefgh", small) | {"i": 4}
    assert packed(many) == [["a", "b", "c", "d"], ["e", "f", "g", "h", "i"]]


def test_a_cell_that_no_node_has_whole_is_stored_in_parts() -> None:
    def piece(first: int, last: int) -> Piece:
        return Piece(Shard("w", "uint8", (10,), Box((first,), (last - first,))), (first, last))

    def found(*pieces: Piece) -> list[tuple[Box, list[Any]]]:
        return [(shard.box, [each.handle for each in parts]) for shard, parts in _cells(list(pieces))]

    assert found(piece(0, 4), piece(4, 10)) == [(Box((0,), (10,)), [(0, 4), (4, 10)])]
    assert found(piece(0, 4), piece(5, 10)) == [
        (Box((0,), (4,)), [(0, 4)]),
        (Box((5,), (5,)), [(5, 10)]),
    ]


def test_a_codec_is_undone_to_the_promised_length() -> None:
    raw = bytes(range(200)) * 3
    for codec in ("none", "zstd"):
        stored = encode(raw, codec)
        address = address_of(stored)
        assert decode(address, stored, codec, 600) == raw
        for wrong in (599, 601):
            with pytest.raises(CorruptError):
                decode(address, stored, codec, wrong)
    assert len(encode(raw, "zstd")) < 300
    stream = zstandard.ZstdCompressor().compressobj()  # whose header says no length
    stored = stream.compress(raw) + stream.flush()
    assert decode(address_of(stored), stored, "zstd", 600) == raw
    with pytest.raises(CorruptError, match=r"codec 'lz4' is unknown, expected one of \('none', 'zstd'\)"):
        decode(address_of(raw), raw, "lz4", 600)
