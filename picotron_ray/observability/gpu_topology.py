"""GPUs of this machine as NVML shows them: who shares NVLink and PCIe, and who is busy.

``nvml`` is the module ``pynvml``, or what stands in for it in tests.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

from picotron_ray.errors import ConfigError


class GpuView(NamedTuple):
    """One GPU: UUID, product name, memory, NUMA node, and pids of processes that compute on it."""

    uuid: str
    name: str
    memory_bytes: int
    numa: int
    busy: tuple[int, ...]


class GpuInventory(NamedTuple):
    """GPUs of one machine, and their groups by UUID. A GPU without peers is in no group."""

    gpus: tuple[GpuView, ...]
    nvlink: tuple[tuple[str, ...], ...]
    pcie: tuple[tuple[str, ...], ...]


def inventory(nvml: Any) -> GpuInventory:
    """Ask the driver; empty where there is none."""
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return GpuInventory((), (), ())
    gpus = tuple(_view(nvml, handle) for handle in handles)
    nvlink, pcie = [], []
    for (one, here), (other, there) in combinations(zip(gpus, handles, strict=True), 2):
        with contextlib.suppress(nvml.NVMLError):
            status = nvml.nvmlDeviceGetP2PStatus(here, there, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if status == nvml.NVML_P2P_STATUS_OK:
                nvlink.append((one.uuid, other.uuid))
        with contextlib.suppress(nvml.NVMLError):
            nearest = nvml.nvmlDeviceGetTopologyCommonAncestor(here, there)
            if nearest <= nvml.NVML_TOPOLOGY_HOSTBRIDGE:
                pcie.append((one.uuid, other.uuid))
    order = [gpu.uuid for gpu in gpus]
    return GpuInventory(gpus, _joined(nvlink, order), _joined(pcie, order))


def _view(nvml: Any, handle: Any) -> GpuView:
    numa, busy = 0, ()
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        numa = int(nvml.nvmlDeviceGetNumaNodeId(handle))
    with contextlib.suppress(nvml.NVMLError):
        busy = tuple(found.pid for found in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return GpuView(
        _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)), memory, numa, busy
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _joined(pairs: list[tuple[str, str]], order: list[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of what pairs connect, each and all in ``order``."""
    groups: list[set[str]] = []
    for pair in pairs:
        touched = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touched] + [set(pair).union(*touched)]
    return tuple(
        sorted((tuple(sorted(group, key=order.index)) for group in groups), key=lambda g: order.index(g[0]))
    )


def gpus_here() -> GpuInventory:
    """GPUs of this machine; none where it has no driver."""
    import pynvml

    return inventory(pynvml)


def busy_lines(by_host: Mapping[str, GpuInventory]) -> list[str]:
    """A line for each GPU on which processes compute, with its host and their pids."""
    return [
        f"{gpu.name} {gpu.uuid} of {host} (pids {', '.join(map(str, gpu.busy))})"
        for host, found in by_host.items()
        for gpu in found.gpus
        if gpu.busy
    ]


def slowest_link(found: GpuInventory) -> Literal["loopback", "nvlink", "pcie"]:
    """The slowest link that a group of all GPUs of a machine goes over; loopback where it has none.

    >>> slowest_link(GpuInventory((), (), ()))
    'loopback'
    """
    if not found.gpus:
        return "loopback"
    return "nvlink" if any(len(group) == len(found.gpus) for group in found.nvlink) else "pcie"


LINKED = ("nvlink", "pcie")


def check_topology(text: str, where: str, seen: Sequence[GpuInventory]) -> None:
    """Compare a topology file, ``{"nvlink": [[UUID, ...], ...], "pcie": [...]}``, with the driver's groups.

    Raises ConfigError, one line: no such JSON, or the first group that one has and the other has not.
    """
    try:
        asked = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"--topology: {where}: saw text that is not JSON; {SHAPE}") from None
    if not isinstance(asked, dict) or not asked or not set(asked) <= set(LINKED):
        raise ConfigError(f"--topology: {where}: saw another form; {SHAPE}")
    for kind, groups in asked.items():
        if not isinstance(groups, list) or not all(
            isinstance(group, list) and all(isinstance(uuid, str) for uuid in group) for group in groups
        ):
            raise ConfigError(f"--topology: {where}: {kind}: saw another form; {SHAPE}")
        ours = {frozenset(group) for group in groups}
        theirs = {frozenset(group) for found in seen for group in getattr(found, kind)}
        for odd in sorted(map(sorted, ours ^ theirs))[:1]:
            side, other = ("the file", "NVML") if frozenset(odd) in ours else ("NVML", "the file")
            raise ConfigError(
                f"--topology: {where}: {kind}: saw group {' '.join(odd)} in {side} and not in {other},"
                " expected the same groups; mend the file, or leave it out and NVML is used"
            )


SHAPE = 'expected {"nvlink": [[UUID, ...], ...], "pcie": [[UUID, ...], ...]}'
