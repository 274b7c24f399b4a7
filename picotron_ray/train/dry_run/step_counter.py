"""Bytes, operators, operations between ranks and reads of the host, counted operator by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from picotron_ray.train.dry_run.call_order import Call
from picotron_ray.train.dry_run.calls import call_of
from picotron_ray.train.dry_run.even_routes import known_result
from picotron_ray.train.dry_run.host_reads import HostReads
from picotron_ray.train.dry_run.living_bytes import LivingBytes

NO_KERNELS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("detach", "lift_fresh", "_local_scalar_dense", "record_stream", "_unsafe_view", "promote_types"),
}
"""Operators of torch that launch nothing, besides views."""


class StepCounter(TorchDispatchMode):
    """Count what a rank does until `begin_step` is called again.

    Args:
        axes: of the layout, by the names of groups.

    Fields:
        bytes: of living storages, over all steps.
        calls: operations between ranks, in order.
        kernels: numbers of operators that launch at least one kernel, by name.
        reads: of the host.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self.bytes, self.reads = LivingBytes(), HostReads()
        self.calls: list[Call] = []
        self.kernels: Counter[str] = Counter()
        self._axes = axes

    def begin_step(self) -> None:
        """Forget what was counted, but for bytes of storages."""
        self.calls.clear()
        self.kernels.clear()
        self.reads.found.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # of a tensor that is made of others, its parts come by here
        kwargs = kwargs or {}
        self.reads.see(func)
        call = call_of(func, args, kwargs, self._axes)
        if call is not None:
            self.calls.append(call)
        elif launches(func):
            self.kernels[func._schema.name] += 1
        known = known_result(func, args, kwargs)
        if known is not None:
            return known
        found = func(*args, **kwargs)
        if func.namespace == "fsdp":  # storages have grown for it
            self.bytes.read_again()
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.bytes.show(leaf.untyped_storage())
        return found


def launches(func: Any) -> bool:
    """Tell whether an operator launches a kernel: no view, no allocation, none of torch's bookkeeping."""
    namespace, _, name = func._schema.name.partition("::")
    return namespace not in ("prim", "profiler", "c10d", "_c10d_functional") and not (
        func.is_view or name in NO_KERNELS
    )
