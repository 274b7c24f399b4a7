"""Readings of one GPU through NVML: which metric each is, and how it is asked for.

``nvml`` is the module ``pynvml``, or what stands in for it in tests. A reading that a GPU or its driver does
not know raises, and has no series.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

log = logging.getLogger(__name__)
Read = Callable[[Any, Any], Mapping[str, float]]
ALL_LINKS = 0xFFFFFFFF
"""NVLink's number of a field that is over all links of a GPU."""
THROTTLE = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Reasons for lower clocks, as NVML's bits name them; idle GPUs and clocks set on purpose are none."""
HURTS = {"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"}
"""Reasons of a GPU that is unwell. A power cap is how most run at full load."""
COUNTED = {
    "picotron_gpu_ecc_errors_total": "ecc_errors_total",
    "picotron_gpu_xid_errors_total": "xid_errors_total",
}
"""Figures of a telemetry window by the metric whose sum they are."""

LIFETIME = ("picotron_gpu_ecc_errors_total",)
"""Those of them that count from the GPU's first day on; the others count what comes."""


class Reading(NamedTuple):
    """One metric of a GPU. ``read`` gives its values by ``label``; without a label there is one."""

    metric: str
    read: Read
    label: str = ""


def _one(read: Callable[[Any, Any], float]) -> Read:
    return lambda nvml, gpu: {"": read(nvml, gpu)}


def _ecc_errors(nvml: Any, gpu: Any) -> float:
    kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
    return float(nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, counter))


def _clocks(nvml: Any, gpu: Any) -> dict[str, float]:
    kinds = {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}
    return {name: 1e6 * nvml.nvmlDeviceGetClockInfo(gpu, kind) for name, kind in kinds.items()}


def _throttling(nvml: Any, gpu: Any) -> dict[str, float]:
    reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
    return {name: float(bool(reasons & bit)) for name, bit in THROTTLE.items()}


def _fields(nvml: Any, gpu: Any, fields: Mapping[str, int]) -> dict[str, float]:
    """Values of NVML's fields over all links; those that are not told are left out."""
    asked = [(field, ALL_LINKS) for field in fields.values()]
    values = nvml.nvmlDeviceGetFieldValues(gpu, asked)
    told = zip(fields, values, strict=True)
    found = {name: float(value.value.ullVal) for name, value in told if value.nvmlReturn == nvml.NVML_SUCCESS}
    if not found:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return found


def _nvlink_bytes(nvml: Any, gpu: Any) -> dict[str, float]:
    names = {
        "sent": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        "received": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    }
    return {name: 1024 * kib for name, kib in _fields(nvml, gpu, names).items()}


def _nvlink_errors(nvml: Any, gpu: Any) -> dict[str, float]:
    names = {
        "crc": nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        "replay": nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        "recovery": nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    }
    return _fields(nvml, gpu, names)


READINGS = (
    Reading(
        "picotron_gpu_utilization_ratio", _one(lambda n, g: n.nvmlDeviceGetUtilizationRates(g).gpu / 100)
    ),
    Reading(
        "picotron_gpu_memory_utilization_ratio",
        _one(lambda n, g: n.nvmlDeviceGetUtilizationRates(g).memory / 100),
    ),
    Reading("picotron_gpu_memory_used_bytes", _one(lambda n, g: n.nvmlDeviceGetMemoryInfo(g).used)),
    Reading("picotron_gpu_memory_size_bytes", _one(lambda n, g: n.nvmlDeviceGetMemoryInfo(g).total)),
    Reading(
        "picotron_gpu_temperature_celsius",
        _one(lambda n, g: n.nvmlDeviceGetTemperature(g, n.NVML_TEMPERATURE_GPU)),
    ),
    Reading("picotron_gpu_power_watts", _one(lambda n, g: n.nvmlDeviceGetPowerUsage(g) / 1000)),
    Reading("picotron_gpu_ecc_errors_total", _one(_ecc_errors)),
    Reading("picotron_gpu_clock_hertz", _clocks, "clock"),
    Reading("picotron_gpu_throttling", _throttling, "reason"),
    Reading("picotron_gpu_nvlink_bytes_total", _nvlink_bytes, "direction"),
    Reading("picotron_gpu_nvlink_errors_total", _nvlink_errors, "kind"),
)


class FaultEvents:
    """Critical errors of GPUs that the driver tells as they happen (XID), counted from now on."""

    MOST_READ = 1000

    def __init__(self, handles: Mapping[str, Any]) -> None:
        """
        Args:
            handles: NVML's, by UUID.
        """
        import pynvml

        self._nvml, self._lock = pynvml, threading.Lock()
        self._counts: dict[str, int] = {}
        self._set: Any = None
        with contextlib.suppress(pynvml.NVMLError, AttributeError):
            events = pynvml.nvmlEventSetCreate()
            for uuid, handle in handles.items():
                with contextlib.suppress(pynvml.NVMLError):  # one that tells none
                    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                    self._counts[uuid] = 0
            self._set = events if self._counts else None

    def counts(self) -> dict[str, int] | None:
        """Errors by UUID; None where no GPU tells them. A new one is logged with its number."""
        if self._set is None:
            return None
        with self._lock:
            for _ in range(self.MOST_READ):
                try:
                    event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
                except self._nvml.NVMLError:  # there is no other
                    break
                uuid = self._nvml.nvmlDeviceGetUUID(event.device)
                uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
                self._counts[uuid] = self._counts.get(uuid, 0) + 1
                log.warning("GPU %s: critical error XID %d", uuid, event.eventData)
            return dict(self._counts)
