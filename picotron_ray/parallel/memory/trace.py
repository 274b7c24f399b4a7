"""Trace of the memory of one step: every storage from its birth to its end, by class, to the byte.

While the trace is entered, each operator's results are looked up by their storage, and their end is heard of.
Values and their order are untouched, whatever the device. What a storage is for follows from its life:

===========  ==========================================================================================
weights      there before the step, of the model
gradient     gradients and the buckets that they lie in
optimizer    moments and error feedback
activation   made outside a backward pass and ended within one: what the backward pass needed
temporary    all else: workspaces made of tensors, gathered weights, recomputed activations, updates
===========  ==========================================================================================

FSDP changes the size of a storage without an operator, by ``UntypedStorage.resize_``, which is listened to.
So the trace's own work grows with what is made, not with what lives. Not seen: what is inside kernels, the
allocator's rounding, and code that torch.compile made, which runs no operators.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from picotron_ray.config.schema.memory import MEMORY_CLASSES


class SizeChange(NamedTuple):
    """A change of one storage's size: when, in seconds of the trace, which, and by how many bytes."""

    at_s: float
    life: int
    nbytes: int


@dataclass(slots=True)
class _StorageLife:
    size: int = 0
    kind: str = ""  # a class that is known from outside
    forward: bool = True
    ended_in_backward: bool = False


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Memory of one traced step, in bytes of tensors.

    Fields:
        peak_bytes: alive at most.
        by_class: what was alive at that moment, by `MEMORY_CLASSES`.
        most: of each class by itself, at its own highest moment.
        timeline: seconds, and bytes by `MEMORY_CLASSES`, after every change.
        phases: seconds at which each phase of the step began.
    """

    peak_bytes: int
    by_class: dict[str, int]
    most: dict[str, int]
    timeline: list[tuple[float, tuple[int, ...]]]
    phases: list[tuple[float, str]]


class MemoryTrace(TorchDispatchMode):
    """Records one step.

    Args:
        known: tensors that are there already, by class.
    """

    def __init__(self, known: Mapping[str, Iterable[Tensor]]) -> None:
        super().__init__()
        self._began = time.perf_counter()
        self._lives: list[_StorageLife] = []
        self._numbers: dict[int, int] = {}  # of living storages, by address
        self._ends: dict[int, Any] = {}
        self._changes: list[SizeChange] = []
        self._plain_resize: Any = None  # torch's own, while this trace listens to it
        self._phases: list[tuple[float, str]] = []
        self._over = False
        for kind, tensors in known.items():
            for tensor in tensors:
                self._lives[self._register(tensor.untyped_storage())].kind = kind

    def phase(self, name: str) -> None:
        """Hear which phase of the step begins."""
        self._phases.append((self._now(), name))

    def __enter__(self) -> MemoryTrace:
        if self._plain_resize is None:
            plain = self._plain_resize = torch.UntypedStorage.resize_

            def resize(storage: torch.UntypedStorage, size: int) -> Any:
                found = plain(storage, size)
                self._resized(storage)
                return found

            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._plain_resize is not None:
            torch.UntypedStorage.resize_ = self._plain_resize  # type: ignore[method-assign]
            self._plain_resize = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # of a tensor that is made of others, its parts come by here
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if (
                isinstance(leaf, Tensor)
                and leaf.device.type != "meta"
                and type(leaf).__name__ != "FakeTensor"
            ):
                self._register(leaf.untyped_storage())
        return found

    def account(self, after: Mapping[str, Iterable[Tensor]]) -> MemoryAccount:
        """End the trace.

        Args:
            after: tensors that are there after the step, by class, as far as that was not known before.
        """
        self._over = True
        for end in self._ends.values():  # or what lives on would keep the trace alive
            end.detach()
        for kind, tensors in after.items():
            for tensor in tensors:
                number = self._numbers.get(tensor.untyped_storage()._cdata)
                if number is not None and not self._lives[number].kind:
                    self._lives[number].kind = kind
        totals, most = dict.fromkeys(MEMORY_CLASSES, 0), dict.fromkeys(MEMORY_CLASSES, 0)
        peak, at_peak, live = 0, dict(totals), 0
        timeline = []
        kinds = [_kind(life) for life in self._lives]
        for change in self._changes:
            kind = kinds[change.life]
            totals[kind] += change.nbytes
            live += change.nbytes
            most[kind] = max(most[kind], totals[kind])
            if live > peak:
                peak, at_peak = live, dict(totals)
            timeline.append((change.at_s, tuple(totals.values())))
        return MemoryAccount(peak, at_peak, most, timeline, self._phases)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _register(self, storage: torch.UntypedStorage) -> int:
        key, size = storage._cdata, storage.nbytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._lives)
            backward = torch._C._current_graph_task_id() != -1
            self._lives.append(_StorageLife(forward=not backward))
            self._ends[number] = weakref.finalize(storage, self._end, key, number)
        self._resize(number, size)
        return number

    def _resize(self, number: int, size: int) -> None:
        life = self._lives[number]
        if size != life.size:
            self._changes.append(SizeChange(self._now(), number, size - life.size))
            life.size = size

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Hear that a storage has another size; one that was not counted is from now on."""
        if storage.device.type != "meta" and (storage.nbytes() or storage._cdata in self._numbers):
            self._register(storage)

    def _end(self, key: int, number: int) -> None:
        if self._over:
            return
        del self._ends[number]
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._lives[number].ended_in_backward = torch._C._current_graph_task_id() != -1
        self._resize(number, 0)


def _kind(life: _StorageLife) -> str:
    if life.kind:
        return life.kind
    return "activation" if life.forward and life.ended_in_backward else "temporary"
