"""GPUs as NVML shows them, by a library that knows two of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from picotron_ray.observability.catalogue import CATALOGUE
from picotron_ray.observability.exporter import Sample
from picotron_ray.observability.nvml import Card, Gpus
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs, 0 and 1, of which 1 does not know its power; holds how often the library was opened."""
    calls: list[int] = []

    def power(gpu: int) -> int:
        if gpu:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 250_500  # milliwatts

    def errors(gpu: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC)
        return 3 + gpu

    def fields(gpu: int, asked: list[tuple[int, int]]) -> list[Any]:
        """NVLink is known of GPU 0 alone, and there no recovery errors."""
        unknown = pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL
        return [
            SimpleNamespace(nvmlReturn=int(gpu == 1 or field == unknown), value=SimpleNamespace(ullVal=place))
            for place, (field, _) in enumerate(asked, 1)
        ]

    events = [SimpleNamespace(device=1, eventData=79), SimpleNamespace(device=1, eventData=31)]

    def next_event() -> Any:
        if not events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return events.pop()

    found: dict[str, Any] = {
        "nvmlInit": lambda: calls.append(1),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda gpu: (b"GPU-a", "GPU-b")[gpu],
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=75 - gpu, memory=20 + gpu),
        "nvmlDeviceGetClockInfo": lambda gpu, kind: 1000 * kind + gpu,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: (0x4, 0x40 | 0x1)[gpu],
        "nvmlDeviceGetFieldValues": fields,
        "nvmlEventSetCreate": lambda: "set",
        "nvmlDeviceRegisterEvents": lambda gpu, kind, events: None,
        "nvmlEventSetWait_v2": lambda events, timeout_ms: next_event(),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=10 + gpu, total=80),
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 40 + gpu + sensor,
        "nvmlDeviceGetPowerUsage": power,
        "nvmlDeviceGetTotalEccErrors": errors,
        "nvmlDeviceGetName": lambda gpu: (b"NVIDIA H100", "NVIDIA H100")[gpu],
        "nvmlDeviceGetCudaComputeCapability": lambda gpu: (9, gpu),
    }
    for name, call in found.items():
        monkeypatch.setattr(pynvml, name, call)
    return calls


def test_each_gpu_shows_what_it_knows(opened: list[int]) -> None:
    gpus = Gpus()
    figures = {
        ("utilization_ratio", "GPU-a"): 0.75, ("utilization_ratio", "GPU-b"): 0.74,
        ("memory_used_bytes", "GPU-a"): 10, ("memory_used_bytes", "GPU-b"): 11,
        ("memory_size_bytes", "GPU-a"): 80, ("memory_size_bytes", "GPU-b"): 80,
        ("temperature_celsius", "GPU-a"): 40, ("temperature_celsius", "GPU-b"): 41,
        ("power_watts", "GPU-a"): 250.5,
        ("ecc_errors_total", "GPU-a"): 3.0, ("ecc_errors_total", "GPU-b"): 4.0,
        ("memory_utilization_ratio", "GPU-a"): 0.2, ("memory_utilization_ratio", "GPU-b"): 0.21,
        ("xid_errors_total", "GPU-a"): 0, ("xid_errors_total", "GPU-b"): 2,
    }  # fmt: skip
    wanted = [Sample(f"picotron_gpu_{name}", value, {"gpu": gpu}) for (name, gpu), value in figures.items()]

    def order(sample: Sample) -> tuple[str, str]:
        return sample.name, sample.labels["gpu"]

    found = list(gpus.samples())
    plain = [sample for sample in found if set(sample.labels) == {"gpu"}]
    assert sorted(plain, key=order) == sorted(wanted, key=order)
    assert {CATALOGUE[sample.name].labels for sample in plain} == {("gpu",)}
    labelled = {
        (sample.name.removeprefix("picotron_gpu_"), *sample.labels.values()): sample.value
        for sample in found
        if sample not in plain and sample.value
    }
    assert labelled == {
        ("clock_hertz", "GPU-a", "sm"): 1e9,
        ("clock_hertz", "GPU-a", "memory"): 2e9,
        ("clock_hertz", "GPU-b", "sm"): 1.001e9,
        ("clock_hertz", "GPU-b", "memory"): 2.001e9,
        ("throttling", "GPU-a", "sw_power_cap"): 1.0,
        ("throttling", "GPU-b", "hw_thermal"): 1.0,
        ("nvlink_bytes_total", "GPU-a", "sent"): 1024.0,
        ("nvlink_bytes_total", "GPU-a", "received"): 2048.0,
        ("nvlink_errors_total", "GPU-a", "crc"): 1.0,
        ("nvlink_errors_total", "GPU-a", "replay"): 2.0,
    }
    gpu_names = {name for name, metric in CATALOGUE.items() if name.startswith("picotron_gpu_")}
    assert {sample.name for sample in found} == gpu_names
    assert gpus.health() == {"ecc_errors_total": 0.0, "xid_errors_total": 2, "throttled_gpus": 1.0}
    assert gpus.cards() == [Card("NVIDIA H100", (9, 0), 80), Card("NVIDIA H100", (9, 1), 80)]
    assert len(opened) == 1


def test_a_gpus_errors_count_from_the_first_reading_on_and_stay_where_a_reading_fails(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: dict[int, int | None] = {0: None, 1: 4}

    def read(gpu: int, *kind: int) -> int:
        found = errors[gpu]
        if found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return found

    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEccErrors", read)
    gpus, told = Gpus(), []
    for changed in ({}, {0: 7}, {1: 5}, {1: None}, {0: 9}, {1: 5}):
        errors |= changed
        told.append(gpus.health()["ecc_errors_total"])
    assert told == [0, 0, 1, 1, 3, 3]


def test_a_gpu_that_does_not_tell_its_memory_is_a_gpu(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(gpu: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", refuse)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", refuse)
    assert Gpus().cards() == [Card("", (9, 0), 0), Card("", (9, 1), 0)]
    assert NodeFacts([Card("", (9, 0), 0), Card("", (9, 0), 80)]).device_bytes == 80


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse() -> None:
        tried.append(1)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    gpus = Gpus()
    assert (list(gpus.samples()), gpus.cards(), len(tried)) == ([], [], 1)
