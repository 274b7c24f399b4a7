"""Conversion between live tensors and canonical shards; the only module here that imports torch.

Restoring uses the planner of torch's distributed checkpoint (DCP), which cuts any stored boxes into
any wanted boxes, over our own ``StorageReader``. DCP's driver function, its metadata pickle and its
files are not used: no process group is involved (a restore cannot hang) and nothing is unpickled. Every
stored piece that is touched is checked against its digest as a whole, before a byte of it is copied.

Restoring 360 tensors (120 weights and their moments) of a (dp 2, tp 2) state from four slots took
29 ms on a busy 2-core machine, 80 us a tensor; half of it is DCP's planner.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from picotron_ray.checkpoint.store.shard_sources import Piece, ShardSource
from picotron_ray.errors import StorageError
from picotron_ray.layout.shards import Box, Shard, region, uncovered, whole

ERROR_FEEDBACK = "error_feedback"
"""First part of the names of tensors that a stored state need not have: none was kept when it was written."""
WEIGHT_AVERAGE = "ema"
"""First part of the names of averaged weights. A stored state without them stands for averages that begin."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Encoded(Protocol):
    """Live tensor kept in another form; its canonical values come and go in the host's memory."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype:
        """Type of the canonical values."""

    def __getitem__(self, rows: slice) -> Encoded:
        """Return those rows, in the same form."""

    def decoded(self) -> torch.Tensor:
        """The values, on the CPU, contiguous."""

    def encode(self, values: torch.Tensor) -> None:
        """Take over values of the whole tensor, on the CPU."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One rank's box of a canonical tensor.

    Fields:
        shard: its name and box in the uncut model.
        tensor: the live local storage, of the box's shape (never a DTensor), or what stands for it.
        primary: exactly one state group (``Layout.state_group``) is primary for each box: False on tp
            ranks other than 0 for tensors that tp replicates.
        still: whether nothing changes it within a generation: a frozen weight.
    """

    shard: Shard
    tensor: torch.Tensor | Encoded
    primary: bool = True
    still: bool = False

    def values(self) -> torch.Tensor:
        """The canonical values: the live storage itself, or made from what stands for it."""
        return self.tensor.detach() if isinstance(self.tensor, torch.Tensor) else self.tensor.decoded()


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def buffers(
    state: Iterable[StateTensor], *, moving: bool = False
) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]] | None]:
    """Yield the bytes of each tensor, for ``SlotFile.write``; on CPU without a copy where contiguous.

    With ``moving``, None stands for those that are still, which the slot has already. A tensor that is
    encoded, or not on the CPU, is copied; its copy lives until the next one is asked for.
    """
    for entry in state:
        if moving and entry.still:
            yield None
        elif entry.shard.box.numel:
            yield entry.values().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        else:
            yield np.empty(0, dtype=np.uint8)


def look_for_nonfinite(state: Iterable[StateTensor]) -> Callable[[], str | None]:
    """Look for a tensor that holds NaN or infinity; what is returned says its name, or None.

    A device is asked now, about its tensors as they are in the order of the current stream, and the answer is
    waited for when it is read. The host's are looked at then. Encoded ones and integers are not looked at.

    A norm is not finite where a value is not, and is far quicker than a look at each value. On the host that
    is the sum of squares, which may overflow too, so that the values are looked at where it says so. Of a
    device it is the largest value, which is as quick there and says it for certain.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for entry in state:
        tensor = entry.tensor
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), []).append((entry.shard.name, tensor.detach()))
    looks: list[Callable[[], str | None]] = []
    for (device, _), found in alike.items():
        looks.append(partial(_overflowing, found) if _on_host(device) else _largest_values(found))
    return lambda: next((name for look in looks if (name := look()) is not None), None)


def _on_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _overflowing(found: Sequence[tuple[str, torch.Tensor]]) -> str | None:
    norms = torch.stack(torch._foreach_norm([tensor for _, tensor in found]))
    for (name, tensor), finite in zip(found, norms.isfinite().tolist(), strict=True):
        if not finite and not tensor.isfinite().all():
            return name
    return None


def _largest_values(found: Sequence[tuple[str, torch.Tensor]]) -> Callable[[], str | None]:
    finite = torch.stack(torch._foreach_norm([tensor for _, tensor in found], float("inf"))).isfinite()
    names = [name for name, _ in found]
    return lambda: next((name for name, good in zip(names, finite.tolist(), strict=True) if not good), None)


def restore(
    state: Sequence[StateTensor], source: ShardSource, moved: Callable[[], None] = lambda: None
) -> None:
    """Fill the live tensors in place from a source, whatever layout wrote it.

    No collective is used. Error feedback that the source lacks becomes zero; an average of weights that it
    lacks begins as the weights. Where it raises, the tensors are partly overwritten: initialise or restore
    again before use.

    Args:
        moved: called after each piece that was read.

    Raises:
        CorruptError: a stored piece does not match its digest (``.where`` names the slot or chunk).
        StorageError: a tensor is missing, has another shape or dtype, or is not wholly covered.
    """
    wanted: dict[str, list[StateTensor]] = {}
    for entry in state:
        if entry.shard.box.numel:
            wanted.setdefault(entry.shard.name, []).append(entry)
    stored = source.pieces(wanted)
    for name in [name for name in wanted if name.startswith(f"{ERROR_FEEDBACK}/") and not stored.get(name)]:
        for entry in wanted.pop(name):
            assert isinstance(entry.tensor, torch.Tensor)
            entry.tensor.zero_()
    for name in [name for name in wanted if name.startswith(f"{WEIGHT_AVERAGE}/") and not stored.get(name)]:
        plain = name.partition("/")[2]
        stored[name] = stored.get(plain) or source.pieces([plain]).get(plain, [])
    _check(wanted, stored)
    planner, reader = _BoxPlanner(wanted, moved), _PieceReader(source, stored)
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    source.finish()


def uncut(shards: Iterable[Shard], source: ShardSource) -> dict[str, torch.Tensor]:
    """Read whole tensors onto the CPU, by name; one shard of each tells its shape and dtype.

    Raises as ``restore`` does.
    """
    state = []
    for shard in shards:
        tensor = torch.empty(shard.global_shape, dtype=getattr(torch, shard.dtype))
        box = whole(shard.global_shape)
        state.append(StateTensor(replace(shard, box=box), tensor))
    restore(state, source)
    return {entry.shard.name: entry.values() for entry in state}


def _check(wanted: dict[str, list[StateTensor]], stored: dict[str, list[Piece]]) -> None:
    for name, entries in wanted.items():
        pieces = stored.get(name)
        if not pieces:
            raise StorageError(f"the stored state has no tensor {name}; was it written by another model?")
        boxes = [piece.shard.box for piece in pieces]
        for entry in entries:
            _check_same(entry, pieces[0].shard)
            missing = uncovered(entry.shard.box, boxes)
            if missing:
                raise StorageError(
                    f"the stored state covers only part of {name}: {missing[0].size} at {missing[0].offset}"
                    " is missing; a slot or upload part was left out"
                )


def _check_same(entry: StateTensor, stored: Shard) -> None:
    want = entry.shard
    if (want.global_shape, want.dtype) != (stored.global_shape, stored.dtype):
        raise StorageError(
            f"tensor {want.name}: stored as {stored.dtype}{list(stored.global_shape)}, expected"
            f" {want.dtype}{list(want.global_shape)}; the model or precision changed"
        )
    if tuple(entry.tensor.shape) != want.box.size or dtype_name(entry.tensor.dtype) != want.dtype:
        raise StorageError(
            f"tensor {want.name}: live storage is {dtype_name(entry.tensor.dtype)}{list(entry.tensor.shape)},"
            f" expected {want.dtype}{list(want.box.size)}"
        )


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))


class _BoxPlanner(DefaultLoadPlanner):
    """DCP's load planner, told of boxes directly instead of through DTensors.

    The values of an encoded tensor are gathered beside it, until they are complete: reads come tensor by
    tensor, so that few are under way at a time.
    """

    def __init__(self, wanted: dict[str, list[StateTensor]], moved: Callable[[], None]) -> None:
        super().__init__()
        self._wanted, self._moved = wanted, moved
        self._gathered: dict[tuple[str, int], torch.Tensor] = {}
        self._missing: Counter[tuple[str, int]] = Counter()

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, entries in self._wanted.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [_chunk(entry.shard.box) for entry in entries]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        self._missing.update(_wanted_at(item.dest_index) for item in items)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        name, number = _wanted_at(index)
        live = self._wanted[name][number].tensor
        if isinstance(live, torch.Tensor):
            return live.detach()
        if (name, number) not in self._gathered:
            self._gathered[name, number] = torch.empty(live.shape, dtype=live.dtype)
        return self._gathered[name, number]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        name, number = _wanted_at(read_item.dest_index)
        self._missing[name, number] -= 1
        live = self._wanted[name][number].tensor
        if not isinstance(live, torch.Tensor) and not self._missing[name, number]:
            live.encode(self._gathered.pop((name, number)))
        self._moved()


class _PieceReader(StorageReader):
    """Hands the pieces of a source to DCP's planner."""

    def __init__(self, source: ShardSource, stored: dict[str, list[Piece]]) -> None:
        self._source = source
        self._stored = stored

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: a reader serves one restore."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        raise NotImplementedError("the pieces of a source have no checkpoint id")

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, pieces[0].shard.dtype)),
                    torch.Size(pieces[0].shard.global_shape),
                    [_chunk(piece.shard.box) for piece in pieces],
                )
                for name, pieces in self._stored.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing to set up: the pieces are known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Order the reads by stored piece, so that each is fetched and checked once."""
        ordered = sorted(plan.items, key=_stored_at)
        self._source.prepare([self._stored[name][at] for name, at in dict.fromkeys(map(_stored_at, ordered))])
        return LoadPlan(ordered)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for at, items in groupby(plan.items, key=_stored_at):
            piece = self._stored[at[0]][at[1]]
            cut = self._source.cutter(piece)
            for item in items:
                base = piece.shard.box.offset
                offset = tuple(a + b for a, b in zip(item.storage_offsets, base, strict=True))
                box = Box(offset, tuple(item.lengths))
                target = planner.resolve_tensor(item)
                for part, elements in cut(box):
                    _copy(target[region(part, box)], elements)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _wanted_at(index: MetadataIndex) -> tuple[str, int]:
    """Name of a wanted tensor, and which of this rank's boxes of it."""
    return index.fqn, index.index or 0


def _stored_at(item: ReadItem) -> tuple[str, int]:
    """Name and number of the stored piece that an item reads."""
    return item.storage_index.fqn, item.storage_index.index or 0


def _copy(target: torch.Tensor, elements: np.ndarray[Any, Any]) -> None:
    """Copy bit patterns into a tensor of the same shape, on any device."""
    bits = target.view(_BITS[target.element_size()])
    if bits.device.type == "cpu":
        view = bits.numpy()
        np.copyto(view, elements.view(view.dtype))
        return
    copy_to_device(bits, elements)


def copy_to_device(bits: torch.Tensor, elements: np.ndarray[Any, Any]) -> None:
    """Fill device memory from a private copy: numpy's read-only maps cannot back a tensor."""
    private = torch.from_numpy(np.array(elements, order="C").reshape(-1).view(np.uint8))
    bits.copy_(private.view(bits.dtype).reshape(bits.shape))
