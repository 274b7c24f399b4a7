"""Operations between ranks, as torch's dispatcher is asked for them: group, type, sizes, bytes sent."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from picotron_ray.comm import torch_groups
from picotron_ray.comm.operation_record import batch_size
from picotron_ray.train.dry_run.call_order import Call

GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_out")
PASSES = {
    "allreduce_": 2, "allreduce_coalesced_": 2, "all_reduce": 2, "all_reduce_": 2,
    "allgather_": 1, "_allgather_base_": 1, **dict.fromkeys(GATHERS, 1),
    "reduce_scatter_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_tensor": 1,
    "alltoall_": 1, "alltoall_base_": 1, "all_to_all_single": 1,
}  # fmt: skip
"""Of a ring: each sends (n - 1)/n of the whole buffer (Thakur et al. 2005, section 4)."""
SENDS, RECEIVES = ("send",), ("recv_", "recv_any_source_")
_FROM_ANY = "recv_any_source_"
UNNAMED = ("wait_tensor", "barrier", "monitored_barrier_")
"""What moves no tensor."""


class Group(NamedTuple):
    """A communicator: axis of the layout (empty: the world), and its ranks."""

    axis: str
    ranks: tuple[int, ...]


def call_of(func: Any, args: Any, kwargs: Any, axes: Mapping[str, str]) -> Call | None:
    """Return what an operator asks other ranks for; None: it asks nothing.

    Args:
        axes: of the layout, by the names of groups.
    """
    namespace, _, name = func._schema.name.partition("::")
    if namespace not in ("c10d", "_c10d_functional") or name in UNNAMED:
        return None
    group, title = _group(namespace, args, kwargs)
    tensors = [leaf for leaf in tree_leaves(args[1:2] if name in _TAKE_SECOND else args[:1]) if _is(leaf)]
    ranks = tuple(dist.get_process_group_ranks(group))
    message = name in SENDS or name in RECEIVES
    return Call(
        axis=axes.get(title, ""),
        ranks=ranks,
        kind=name,
        sizes=json.dumps([list(tensor.shape) for tensor in tensors]),
        message=message,
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        sent_bytes=_sent_bytes(name, args, len(ranks)),
        peer=ranks[args[2]] if message and name != _FROM_ANY else -1,
        batch=batch_size(sys._getframe()) if message else 1,
    )


_TAKE_SECOND = {
    *("allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_"),
    *("alltoall_", "alltoall_base_"),
}
"""Operators whose first argument is what they fill."""


def _is(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _group(namespace: str, args: Any, kwargs: Any) -> tuple[dist.ProcessGroup, str]:
    """Return an operator's group and the name under which it was asked for."""
    if namespace == "c10d":
        objects = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.ScriptObject)]
        group = next(dist.ProcessGroup.unbox(one) for one in objects if "ProcessGroup" in str(one._type()))
        return group, group.group_name
    title = next(arg for arg in reversed(args) if isinstance(arg, str))
    return torch_groups.resolve(title), title


def _sent_bytes(name: str, args: Any, ranks: int) -> int:
    """Bytes that one rank sends; of a broadcast, a gather to one or the like as one message's."""
    if name in RECEIVES:
        return 0
    sizes = [
        sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(arg) if _is(leaf)) for arg in args[:2]
    ]
    whole = sizes[0] * ranks if name in GATHERS else max(sizes)
    return PASSES[name] * whole * (ranks - 1) // ranks if name in PASSES else whole
