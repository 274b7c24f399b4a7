"""The pods of deploy/ have room for the run that they ship: its own plan asks for no more than they have."""

from __future__ import annotations

import time

import pytest

from picotron_ray.layout.layout import Layout
from picotron_ray.planner.cluster_size import OBJECT_STORE_BYTES, ClusterSize, cluster_size
from picotron_ray.planner.goals import goal_of, plan_for
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.plan import for_devices
from picotron_ray.planner.snapshot_room import slot_estimate
from tests.support.deploy.pods import DRAIN, container_of, hook_s, quantity
from tests.support.deploy.policy import the_job
from tests.support.deploy.render import OPTIONS, Object, cluster_spec, ray_objects, render, tool

rendered = pytest.mark.skipif(tool() is None, reason="neither kubectl nor kustomize is installed")
UPLOAD_BYTES_PER_S = 250e6
"""A node's to object storage; a fifth of what a card of 10 Gbit/s carries."""


@pytest.fixture(scope="module")
def size() -> ClusterSize:
    """What the shipped GPU run asks for on the two pods that its cluster starts with."""
    job, device = the_job(render("gpu")), hardware("h100-80g", "bf16")
    goal = goal_of("throughput", None, None, None, None)
    return cluster_size(plan_for(for_devices(job, 16, device.device), 16, device, goal, time.perf_counter))


def problems(objects: list[Object], size: ClusterSize) -> list[str]:
    """What the pods of a rendered overlay lack for a plan."""
    found = []
    (ray,) = ray_objects(objects)
    for group in cluster_spec(ray)["workerGroupSpecs"]:
        box, spec = container_of(group["template"]), group["template"]["spec"]
        limits = {name: quantity(value) for name, value in box["resources"]["limits"].items()}
        shm = sum(
            quantity(volume["emptyDir"]["sizeLimit"]) for volume in spec["volumes"] if volume["name"] == "shm"
        )
        drain = float(next(word["value"] for word in box["env"] if word["name"] == DRAIN))
        commit_s = size.commit_bytes / size.nodes / UPLOAD_BYTES_PER_S
        for name, has, needs in (
            ("CPUs", limits["cpu"], size.workers_per_node * size.cpus_per_worker),
            ("GPUs", limits["nvidia.com/gpu"], size.workers_per_node),
            ("memory", limits["memory"], size.host_bytes),
            ("/dev/shm", shm, size.shm_bytes),
            ("grace beyond hook and drain", spec["terminationGracePeriodSeconds"] - hook_s(box), drain + 1),
        ):
            if has < needs:
                found.append(f"{group['groupName']}: {name} {has}, the plan asks for {needs}")
        if drain < commit_s and "spot" not in group["groupName"]:
            found.append(f"{group['groupName']}: drains for {drain:g} s, a commit takes {commit_s:.0f}")
    return found


@rendered
@pytest.mark.parametrize("overlay", ["gpu", "gpu/cluster", *OPTIONS])
def test_pods_hold_the_plan_of_their_run(size: ClusterSize, overlay: str) -> None:
    assert (size.nodes, size.workers_per_node) == (2, 8)
    assert problems(render(overlay), size) == []


@rendered
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("resources", "limits", "memory"), "64Gi", "memory"),
        (("resources", "limits", "cpu"), "8", "CPUs"),
        (("env", 0, "value"), "5", "a commit takes"),
        (("env", 0, "value"), "119.5", "grace"),
    ],
)
def test_a_pod_that_is_too_small_is_found(
    size: ClusterSize, path: tuple[str | int, ...], value: str, said: str
) -> None:
    objects = render("gpu")
    node = container_of(cluster_spec(ray_objects(objects)[0])["workerGroupSpecs"][0]["template"])
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    assert any(said in problem for problem in problems(objects, size))


@rendered
def test_the_cpu_pods_hold_the_slots_of_their_run() -> None:
    objects = render("cpu")
    job = the_job(objects)
    (group,) = cluster_spec(ray_objects(objects)[0])["workerGroupSpecs"]
    workers = int(quantity(container_of(group["template"])["resources"]["limits"]["cpu"]))
    (shm,) = (v["emptyDir"]["sizeLimit"] for v in group["template"]["spec"]["volumes"] if v["name"] == "shm")
    alone = slot_estimate(job, Layout(micro_batch=1))
    assert quantity(shm) >= workers * job.snapshot.slots * alone + int(
        group["rayStartParams"]["object-store-memory"]
    )
    assert int(group["rayStartParams"]["object-store-memory"]) < OBJECT_STORE_BYTES
