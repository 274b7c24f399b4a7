"""Health of this machine's NVIDIA GPUs, as their driver tells it (NVML)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """One GPU. A figure that it does not tell is None.

    Fields:
        ecc_errors: uncorrected memory errors since the driver was loaded.
        rows_failed: a damaged memory row could not be replaced.
        pending: memory rows or pages wait for a reset of the GPU to be replaced.
        celsius: temperature; ``slow_celsius``: where it slows down.
        slowed: it runs slower now for heat or power, by the hardware's own decision.
        used_bytes: memory that somebody holds now, of ``memory_bytes``.
    """

    uuid: str
    name: str
    ecc_errors: int | None = None
    rows_failed: bool | None = None
    pending: bool | None = None
    celsius: int | None = None
    slow_celsius: int | None = None
    slowed: bool | None = None
    used_bytes: int | None = None
    memory_bytes: int | None = None


def gpu_health() -> tuple[list[GpuHealth], str]:
    """Look at every GPU: their health and the driver's version, or ([], why) where NVML cannot be used.

    Raises:
        RuntimeError: a driver is installed, but does not work.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return [], f"no NVIDIA driver ({error})"
        raise RuntimeError(f"the NVIDIA driver does not work: {error}") from error
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        return [_health(pynvml, handle) for handle in handles], _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        raise RuntimeError(f"a GPU does not answer its driver: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def _health(nvml: Any, gpu: Any) -> GpuHealth:
    def read(call: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return call(gpu, *arguments)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise

    memory = read(nvml.nvmlDeviceGetMemoryInfo)
    rows = read(nvml.nvmlDeviceGetRemappedRows)  # corrected, uncorrected, pending, failed
    reasons = read(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    hardware = nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
    return GpuHealth(
        uuid=_text(nvml.nvmlDeviceGetUUID(gpu)),
        name=_text(nvml.nvmlDeviceGetName(gpu)),
        ecc_errors=read(
            nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        rows_failed=None if rows is None else bool(rows[3]),
        pending=None if rows is None else bool(rows[2]),
        celsius=read(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        slow_celsius=read(nvml.nvmlDeviceGetTemperatureThreshold, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        slowed=None if reasons is None else bool(reasons & hardware),
        used_bytes=None if memory is None else int(memory.used),
        memory_bytes=None if memory is None else int(memory.total),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
