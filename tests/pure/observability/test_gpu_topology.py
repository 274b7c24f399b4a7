"""GPUs as NVML shows them: groups, busy ones, and a topology file against them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.observability.gpu_topology import (
    GpuInventory,
    GpuView,
    busy_lines,
    check_topology,
    inventory,
    slowest_link,
)


class FakeNvml:
    """NVML of a machine of four GPUs: NVLink joins 0-1 and 2-3, one PCIe switch joins 0-2."""

    NVMLError = OSError
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_TOPOLOGY_HOSTBRIDGE = 2, 0, 30

    def __init__(self, busy: int | None = None) -> None:
        self._busy = busy

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, _: int) -> int:
        return 0 if one // 2 == other // 2 else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 20 if {one, other} == {0, 2} else 50

    def nvmlDeviceGetNumaNodeId(self, handle: int) -> int:
        return handle // 2

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=77)] if handle == self._busy else []

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:
        return SimpleNamespace(total=80)

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetName(self, _: int) -> str:
        return "A100"


def test_nvml_tells_the_groups() -> None:
    seen = inventory(FakeNvml())
    assert seen.nvlink == (("GPU-0", "GPU-1"), ("GPU-2", "GPU-3"))
    assert seen.pcie == (("GPU-0", "GPU-2"),)
    assert [gpu.numa for gpu in seen.gpus] == [0, 0, 1, 1]


def test_a_busy_gpu_is_named() -> None:
    assert busy_lines({"a": inventory(FakeNvml())}) == []
    assert busy_lines({"a": inventory(FakeNvml(busy=3))}) == ["A100 GPU-3 of a (pids 77)"]


def test_no_driver_means_no_gpus() -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise OSError

    assert inventory(NoDriver()) == GpuInventory((), (), ())


def test_a_topology_file_must_say_what_nvml_says() -> None:
    seen = [inventory(FakeNvml())]
    check_topology('{"nvlink": [["GPU-1", "GPU-0"], ["GPU-2", "GPU-3"]]}', "t.json", seen)
    check_topology(json.dumps({"pcie": [["GPU-0", "GPU-2"]]}), "t.json", seen)
    with pytest.raises(ConfigError, match="saw group GPU-0 GPU-1 in NVML and not in the file") as refused:
        check_topology('{"nvlink": [["GPU-2", "GPU-3"]]}', "t.json", seen)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"nvswitch": []}', '{"nvlink": 3}', '{"nvlink": [[1]]}'])
def test_what_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--topology: t\.json: "):
        check_topology(text, "t.json", ())


@pytest.mark.parametrize(
    ("nvlink", "expected"),
    [((("a", "b", "c"),), "nvlink"), ((("a", "b"),), "pcie"), ((), "pcie")],
)
def test_one_gpu_off_nvlink_sends_a_group_of_all_over_pcie(
    nvlink: tuple[tuple[str, ...], ...], expected: str
) -> None:
    gpus = tuple(GpuView(name, "H100", 80, 0, ()) for name in "abc")
    assert slowest_link(GpuInventory(gpus, nvlink, (("a", "b", "c"),))) == expected
    assert slowest_link(GpuInventory((), (), ())) == "loopback"
