"""Numbers of workers that a refusal names, and the leanest layouts, against trying all of them."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import load_job, parse_job
from picotron_ray.errors import LayoutError
from picotron_ray.planner.candidates import candidates
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.plan import for_devices
from picotron_ray.planner.recompute_search import leanest
from picotron_ray.planner.refusal import leanest_bytes, workers_that_do
from picotron_ray.planner.search import choose_layout

MODEL = {"layers": 6, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 260}


def small(**more: Any) -> Any:
    return parse_job({"model": MODEL, "data": {"sequence_length": 64, "global_batch": 8}, **more})


def does(job: Any, workers: int, profile: DeviceProfile) -> bool:
    try:
        choose_layout(job, workers, profile)
    except LayoutError:
        return False
    return True


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"layout": {"schedule": "auto"}},
        {"layout": {"recompute": "selective", "tp": 1}},
        {"layout": {"pp": 2, "schedule": "auto", "recompute": "none"}},
        {"model": {**MODEL, "moe": {"experts": 4, "intermediate_size": 32}}, "layout": {"ep": "auto"}},
    ],
    ids=str,
)
def test_the_leanest_is_that_of_all_candidates(more: dict[str, Any]) -> None:
    job = small(**more)
    for workers in (3, 6, 8):
        every = [memory_estimate(job, leanest(job, one)).total_bytes for one in candidates(job, workers)]
        assert leanest_bytes(job, workers) == min(every)


@pytest.mark.parametrize("node_size", [1, 4, 8])
@pytest.mark.parametrize("share", [0.7, 0.5, 0.34, 0.2])
def test_no_fewer_workers_would_do(share: float, node_size: int) -> None:
    job = small()
    profile = DeviceProfile(5e9, share * leanest_bytes(job, 1) / 0.9, 1e9, 1e-4)
    sizes = [count for count in range(2, 33) if count < node_size or count % node_size == 0]
    fewest = next((count for count in sizes if does(job, count, profile)), None)
    assert fewest is not None
    assert workers_that_do(job, 1, profile, node_size) == fewest


@pytest.mark.parametrize(
    ("name", "hardware_name", "gpus", "fewest"),
    [
        ("llama-3-8b", "a100-80g", 2, 3),
        ("llama-3-70b", "h100-80g", 8, 24),
        ("llama-3-70b", "h100-80g", 16, 24),
    ],
)
def test_the_number_that_would_do_is_the_smallest(
    name: str, hardware_name: str, gpus: int, fewest: int
) -> None:
    devices = hardware(hardware_name)
    job = for_devices(load_job(name, ["data.path=unread"]), 64)
    assert workers_that_do(job, gpus, devices.profile, devices.node_size) == fewest
    less = fewest - (1 if fewest <= 8 else 8)
    assert does(job, fewest, devices.profile)
    assert not does(job, less, devices.profile)
