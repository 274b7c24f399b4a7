"""NVIDIA GPUs of this machine, read through NVML at each scrape.

GPUs are named by their UUID, which survives a reboot and a change of slots. A machine without the driver
has no GPU and no series; a figure that a GPU does not know (power of a virtual one, say) has none either.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from picotron_ray.observability.exporter import Sample

log = logging.getLogger(__name__)


class Card(NamedTuple):
    """One GPU: its product name, CUDA compute capability (major, minor), and memory.

    A name that it does not tell is empty, and so is its memory 0: GPUs with unified memory have none of their
    own, and parts of one need a privilege to be asked.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int


def visible(cards: list[Card], environment: Mapping[str, str] = os.environ) -> list[Card]:
    """Those of this machine's cards that ``CUDA_VISIBLE_DEVICES`` leaves to its processes, and to a Ray.

    >>> cards = [Card("a", (9, 0), 0), Card("b", (9, 0), 0)]
    >>> [card.name for card in visible(cards, {"CUDA_VISIBLE_DEVICES": "1,7"})]
    ['b']
    """
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return cards
    names = [] if asked in ("", "NoDevFiles") else asked.split(",")
    if all(name.strip().isdigit() for name in names):
        return [cards[int(name)] for name in names if int(name) < len(cards)]
    return cards[: len(names)]  # by UUID: which of them is not asked


class Gpus:
    """GPUs that NVML shows; opened once, at the first reading."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] | None = None  # by UUID

    def samples(self) -> Iterator[Sample]:
        """Measure every GPU."""
        import pynvml

        for uuid, handle in self._open().items():
            for name, read in _READERS.items():
                try:
                    value = read(pynvml, handle)
                except pynvml.NVMLError as error:
                    log.debug("%s of GPU %s: %s", name, uuid, error)
                else:
                    yield Sample(name, value, {"gpu": uuid})

    def utilizations(self) -> dict[str, float]:
        """Share of the last sampling period in which a kernel ran, by UUID, of each GPU that tells."""
        import pynvml

        found = {}
        for uuid, handle in self._open().items():
            with contextlib.suppress(pynvml.NVMLError):
                found[uuid] = _READERS["picotron_gpu_utilization_ratio"](pynvml, handle)
        return found

    def cards(self) -> list[Card]:
        """Describe each GPU that tells what it is."""
        import pynvml

        found = []
        for uuid, handle in self._open().items():
            try:
                major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            except pynvml.NVMLError as error:
                log.debug("compute capability of GPU %s: %s", uuid, error)
                continue
            name, memory_bytes = "", 0
            with contextlib.suppress(pynvml.NVMLError):
                name = _text(pynvml.nvmlDeviceGetName(handle))
            with contextlib.suppress(pynvml.NVMLError):
                memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            found.append(Card(name, (int(major), int(minor)), memory_bytes))
        return found

    def _open(self) -> dict[str, Any]:
        import pynvml

        if self._handles is None:
            try:
                pynvml.nvmlInit()
                count = pynvml.nvmlDeviceGetCount()
                handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
                self._handles = {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
            except pynvml.NVMLError as error:
                log.debug("no GPU is watched: %s", error)
                self._handles = {}
        return self._handles


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _ecc_errors(nvml: Any, handle: Any) -> float:
    kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
    return float(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))


_READERS: dict[str, Callable[[Any, Any], float]] = {
    "picotron_gpu_utilization_ratio": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "picotron_gpu_memory_used_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "picotron_gpu_memory_size_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "picotron_gpu_temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(
        gpu, nvml.NVML_TEMPERATURE_GPU
    ),
    "picotron_gpu_power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "picotron_gpu_ecc_errors_total": _ecc_errors,
}
