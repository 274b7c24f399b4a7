"""Bytes of living storages, and bytes that collectives send, counted operator by operator."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from picotron_ray.comm import torch_groups
from picotron_ray.train.dry_run.even_routes import exchanged, known_result


class ByteCounter(TorchDispatchMode):
    """Count the bytes of all living storages, and those that collectives send.

    Fields:
        live, peak: bytes now, and at most.
        sent: bytes sent by axis, until the caller clears it.
    """

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sent: dict[str, int] = defaultdict(int)
        self._axes = axes
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = known_result(func, args)
        if known is not None:
            return known
        self._count_sent(func, args, kwargs)
        counts = exchanged(func, args)
        found = func(*args, **kwargs)
        if counts is not None:
            args[0].constant = counts
        if func.namespace == "fsdp":  # storages have grown for it
            self._read_again()
            self.peak = max(self.peak, self.live)
        for leaf in tree_leaves(found):
            local = getattr(leaf, "_local_tensor", leaf)  # a DTensor's own storage has no bytes
            if isinstance(local, Tensor) and local.device.type != "meta":
                self._register(local.untyped_storage())
        return found

    def alive(self, storages: set[int]) -> int:
        """Bytes of ``storages`` that are alive now."""
        return sum(self._known[key][0] for key in storages if key in self._known)

    def _register(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            if self._known[key][0] == size:
                return
        else:
            weakref.finalize(storage, self._end, key)
        self.live += size - (self._known[key][0] if key in self._known else 0)
        self._known[key] = size, weakref.ref(storage)
        if self.live > self.peak:
            self._read_again()
            self.peak = max(self.peak, self.live)

    def _read_again(self) -> None:
        """Look at the size of every storage: FSDP resizes them without an operator."""
        for key, (_, reference) in list(self._known.items()):
            storage = reference()
            if storage is not None:
                self._known[key] = storage.nbytes(), reference
        self.live = sum(size for size, _ in self._known.values())

    def _end(self, key: int) -> None:
        if key in self._known:
            self.live -= self._known.pop(key)[0]

    def _count_sent(self, func: Any, args: Any, kwargs: Any) -> None:
        kind = func.namespace
        if kind not in ("c10d", "_c10d_functional"):
            return
        found = _sent(func._schema.name.split("::")[1], kind, args, kwargs)
        if found is not None:
            name, size = found
            self.sent[self._axes.get(name, name)] += size


SENT = {
    "allreduce_": 2, "allreduce_coalesced_": 2, "all_reduce": 2, "all_reduce_": 2,
    "allgather_": 1, "_allgather_base_": 1, "all_gather_into_tensor": 1, "all_gather_into_tensor_out": 1,
    "reduce_scatter_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_tensor": 1,
    "alltoall_": 1, "alltoall_base_": 1, "all_to_all_single": 1, "send": 0,
}  # fmt: skip


def _sent(name: str, kind: str, args: Any, kwargs: Any) -> tuple[str, int] | None:
    """Return the name of a collective's group and the bytes that a rank sends; None if it sends nothing."""
    if name not in SENT:
        return None
    groups = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.ScriptObject)]
    title: Any
    if kind == "c10d":
        group = next(dist.ProcessGroup.unbox(one) for one in groups if "ProcessGroup" in str(one._type()))
        title, ranks = group.group_name, group.size()
    else:
        title = next(arg for arg in reversed(args) if isinstance(arg, str))
        ranks = torch_groups.resolve(title).size()
    size = _whole_bytes(name, args, ranks)
    return title, size if name == "send" else SENT[name] * size * (ranks - 1) // ranks


def _whole_bytes(name: str, args: Any, ranks: int) -> int:
    """Bytes of the whole buffer of a collective: what is gathered, or given to a reduction."""
    sizes = [
        sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(arg) if isinstance(leaf, Tensor))
        for arg in args[:2]
    ]
    if name in ("all_gather_into_tensor", "all_gather_into_tensor_out"):
        return sizes[0] * ranks
    return max(sizes)
