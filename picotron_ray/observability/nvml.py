"""NVIDIA GPUs of this machine, read through NVML at each scrape.

GPUs are named by their UUID, which survives a reboot and a change of slots. A machine without the driver
has no GPU and no series; a figure that a GPU does not know (power of a virtual one, say) has none either.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from picotron_ray.observability.exporter import Sample
from picotron_ray.observability.gpu_readings import COUNTED, HURTS, LIFETIME, READINGS, FaultEvents

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
    """GPUs that NVML shows; opened once, at the first reading. Any thread may read."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] | None = None  # by UUID
        self._faults: FaultEvents | None = None
        self._counts: dict[tuple[str, str], tuple[float, float]] = {}  # by metric and GPU: first, newest

    def samples(self) -> Iterator[Sample]:
        """Measure every GPU."""
        import pynvml

        faults = self._fault_counts()
        for uuid, handle in self._open().items():
            for reading in READINGS:
                try:
                    values = reading.read(pynvml, handle)
                except (pynvml.NVMLError, AttributeError) as error:  # the second: an older library
                    log.debug("%s of GPU %s: %s", reading.metric, uuid, error)
                    continue
                for label, value in values.items():
                    labels = {reading.label: label} if reading.label else {}
                    yield Sample(reading.metric, value, {"gpu": uuid, **labels})
            if faults is not None:
                yield Sample("picotron_gpu_xid_errors_total", faults.get(uuid, 0), {"gpu": uuid})

    def health(self) -> dict[str, float]:
        """Sum up what tells of sick GPUs: how many of them are throttled, and their errors from now on.

        A GPU that does not tell its errors this time counts with those that it told last.
        """
        found: dict[str, float] = {}
        throttled: dict[str, bool] = {}
        for sample in self.samples():
            name, gpu, value = sample.name, sample.labels["gpu"], sample.value
            assert isinstance(value, int | float)
            if name == "picotron_gpu_throttling":
                hurts = bool(value) and sample.labels["reason"] in HURTS
                throttled[gpu] = throttled.get(gpu, False) or hurts
            elif name in COUNTED:
                first = value if name in LIFETIME else 0.0
                self._counts[name, gpu] = self._counts.get((name, gpu), (first,))[0], value
        for (name, _), (first, newest) in list(self._counts.items()):
            found[COUNTED[name]] = found.get(COUNTED[name], 0.0) + max(0.0, newest - first)
        return {**found, "throttled_gpus": float(sum(throttled.values()))} if throttled else found

    def _fault_counts(self) -> dict[str, int] | None:
        """Critical errors (XID) of each GPU since this process began to watch; None: they are not told."""
        handles = self._open()
        if self._faults is None:
            self._faults = FaultEvents(handles)
        return self._faults.counts()

    def utilizations(self) -> dict[str, float]:
        """Share of the last sampling period in which a kernel ran, by UUID, of each GPU that tells."""
        import pynvml

        found = {}
        for uuid, handle in self._open().items():
            with contextlib.suppress(pynvml.NVMLError):
                found[uuid] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
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
