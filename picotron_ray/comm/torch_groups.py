"""torch's registry of process groups, which has no public interface: names, living groups, abort of all.

``tests/gloo/comm/test_torch_interfaces.py`` fails where torch changes it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d


def register(name: str, group: ProcessGroup) -> None:
    """Let collectives find ``group`` under ``name`` too, until `unregister` or the default group ends."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


def unregister(name: str) -> None:
    """Let collectives find no group under ``name`` any more."""
    torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]


def resolve(name: str) -> ProcessGroup:
    """Return the group that collectives find under ``name``. Raises RuntimeError where there is none."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def living_groups() -> list[ProcessGroup]:
    """List the groups of this process, the default one included."""
    return list(distributed_c10d._world.pg_map)


def known_name(group: ProcessGroup) -> str:
    """Return the name that torch has given a group."""
    return str(distributed_c10d._world.pg_names[group])


def known_ranks(group: ProcessGroup) -> list[int]:
    """Return the ranks of the default group that are in a group, in its order."""
    ranks = distributed_c10d._world.pg_group_ranks[group]
    return sorted(ranks, key=lambda rank: ranks[rank])


def store_of(group: ProcessGroup) -> Any:
    """Return the store that a group has met in."""
    return distributed_c10d._get_process_group_store(group)


def abort_all() -> None:
    """Abort every communicator of this process (NCCL). May block; may raise RuntimeError."""
    distributed_c10d._abort_process_group()


def recorded_operations(places: bool) -> Iterator[dict[str, Any]]:
    """Yield the entries of torch's flight recorders, of NCCL's where there is one and of gloo's.

    Args:
        places: with the places in the code from which they were called.
    """
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(torch._C._distributed_c10d, name, None)  # a build without NCCL has but one
        if dump is not None:
            yield from pickle.loads(dump(includeStackTraces=places)).get("entries", ())
