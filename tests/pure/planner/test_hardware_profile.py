"""A probe's profile: fits by hand, a file's mistakes in one line, and plans made with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.device_profile import HALF_A_SUM
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.hardware_profile import (
    CollectivePoint,
    HardwareProfile,
    MatmulPoint,
    MessagePoint,
    link_fit,
    load_profile,
    matmul_fit,
    message_fit,
    outliers,
)
from picotron_ray.planner.plan import plan
from picotron_ray.planner.plan_text import plan_lines
from picotron_ray.planner.profile_text import profile_lines


def products(flops: float, half: float, dtype: str = "fp32") -> list[dict[str, Any]]:
    """Points that lie on the curve."""
    return [
        {"dtype": dtype, "m": 512, "n": n, "k": n, "flops_s": flops / (1 + half / min(n, 512))}
        for n in (32, 128, 512, 1024)
    ]


def profile(**changes: Any) -> dict[str, Any]:
    return {
        "name": "here",
        "device": "cpu",
        "device_name": "CPU core",
        "peak_flops": 0.0,
        "memory_bytes": 4e9,
        "memory_bytes_s": 1e10,
        "host_bytes_s": 1e10,
        "host_link_bytes_s": 0.0,
        "block_s": 1e-3,
        "matmuls": products(5e10, 40.0),
        "attention": [
            {"dtype": "fp32", "rows": 2, "heads": 4, "sequence": 128, "head_dim": 64,
             "forward_flops_s": 2e10, "backward_flops_s": 1e10}
        ],
        "collectives": [
            {"link": "loopback", "ranks": 2, "size": size, "seconds": 2 * (size / 2 / 1e9 + 1e-4)}
            for size in (2**10, 2**20, 2**25)
        ],
        "nodes": [
            {"host": "a", "workers": 2, "cores": 2, "numa_nodes": 1, "ram_bytes": 8 * 2**30,
             "shm_bytes": 2**30, "disk_bytes_s": 1e8}
        ],
        **changes,
    }  # fmt: skip


def stored(folder: Path, **changes: Any) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps(profile(**changes)))
    return path


def test_products_lie_on_the_curve_that_is_fitted() -> None:
    points = [MatmulPoint(**point) for point in products(5e10, 40.0)]
    assert matmul_fit(points) == pytest.approx((5e10, 40.0))
    assert matmul_fit([]) == (0.0, 0.0)
    falling = [MatmulPoint(dtype="fp32", m=512, n=n, k=n, flops_s=1e12 / n) for n in (32, 64, 128)]
    assert matmul_fit(falling) == (1e12 / 64, 0.0), "no such curve: the median rate"


def test_links_are_a_latency_and_a_bandwidth() -> None:
    """An all-reduce is two passes of (ranks - 1) / ranks of the bytes, log2(ranks) latencies each."""
    points = [
        CollectivePoint(
            link="loopback", ranks=ranks, size=size,
            seconds=2 * (size * (ranks - 1) / ranks / 2e9 + math.log2(ranks) * 3e-5),
        )
        for ranks in (2, 4, 8)
        for size in (2**10, 2**16, 2**24)
    ]  # fmt: skip
    fitted = link_fit(points)
    assert fitted is not None
    assert fitted == pytest.approx((2e9, 3e-5))
    assert link_fit([]) is None
    assert link_fit(points[:1]) is not None


def test_a_profile_becomes_what_the_cost_model_takes(tmp_path: Path) -> None:
    found = load_profile(stored(tmp_path)).device_profile("fp32")
    assert (found.flops, found.matmul_half) == pytest.approx((5e10, 40.0))
    assert (found.link_bytes_s, found.latency_s) == pytest.approx((1e9, 1e-4))
    assert (found.attention_flops, found.attention_backward_flops) == (2e10, 1e10)
    assert found.kernel_s == 1e-3
    assert found.software.overlap == "none", "gloo shares the cores that compute"
    with pytest.raises(ConfigError, match=r"no matrix products in bf16 .* expected \['fp32'\]"):
        load_profile(stored(tmp_path)).device_profile("bf16")


def test_gathers_and_scatters_cost_what_was_timed_of_them(tmp_path: Path) -> None:
    """gloo's all-gather of a kilobyte takes as long as its all-reduce, not half of it."""

    def points(kind: str, per_byte: float, latency_s: float) -> list[dict[str, object]]:
        return [
            {
                "kind": kind, "link": "loopback", "ranks": 2, "size": size,
                "seconds": (2 if kind == "all_reduce" else 1) * (size / 2 * per_byte + latency_s),
            }
            for size in (2**10, 2**17, 2**24)
        ]  # fmt: skip

    sums = points("all_reduce", 1e-9, 1e-4)
    parts = [*points("all_gather", 2e-9, 2e-4), *points("reduce_scatter", 3e-9, 4e-4)]
    plain = load_profile(stored(tmp_path, collectives=sums)).device_profile("fp32")
    timed = load_profile(stored(tmp_path, collectives=[*sums, *parts])).device_profile("fp32")
    assert (plain.gather, plain.scatter) == (HALF_A_SUM, HALF_A_SUM)
    assert timed.gather == pytest.approx((2, 2))
    assert timed.scatter == pytest.approx((3, 4))
    job = load_job("tiny")
    layouts = Layout(tp=2, micro_batch=1), Layout(dp=2, zero=3, micro_batch=1), Layout(dp=2, micro_batch=1)
    costs = [[step_cost(job, layout, profile) for profile in (plain, timed)] for layout in layouts]
    (tp, tp_timed), (zero, zero_timed), (dp, dp_timed) = costs
    assert 2.5 * tp.tensor_s < tp_timed.tensor_s < 3 * tp.tensor_s, "four of each"
    assert 7 / 3 * zero.data_s < zero_timed.data_s < 3 * zero.data_s, "one or two gathers, one scatter"
    assert dp_timed.data_s == dp.data_s, "a sum is a sum"


def test_workers_share_the_cores_of_one_machine(tmp_path: Path) -> None:
    """Two workers had a core each: four have half of one, one has no more than one."""
    two = hardware(str(stored(tmp_path)), "fp32")
    rates = {count: two.of_devices(count).profile for count in (1, 2, 4)}
    assert rates[4].flops == pytest.approx(rates[2].flops / 2)
    assert rates[1].flops == rates[2].flops
    assert rates[4].memory_bytes == pytest.approx(rates[2].memory_bytes / 2)
    assert rates[4].kernel_s == pytest.approx(2 * rates[2].kernel_s)
    assert rates[4].latency_s == pytest.approx(2 * rates[2].latency_s)
    assert [rates[count].crowd for count in (1, 2, 4)] == [1, 1, 2]
    job = load_job("tiny")
    line = Layout(pp=2, micro_batch=1)
    rows = job.data.global_batch
    alone, shared = (step_cost(job, line, rates[count]) for count in (2, 4))
    assert alone.bubble_s == pytest.approx(alone.compute_s / rows)
    assert shared.bubble_s == 0.0, "while one waits, the others have its core"
    steps = [plan(job, count, two, buys=False).best.cost.total_s for count in (2, 4)]
    assert steps[1] > 0.95 * steps[0], "more workers than cores buy nothing"


def test_a_plan_takes_the_file(tmp_path: Path) -> None:
    here = hardware(str(stored(tmp_path)), "auto")
    found = plan(load_job("tiny"), 2, here)
    assert found.job.cluster.device == "cpu"
    assert found.job.precision == "fp32"
    assert found.best.layout.world_size <= 2
    assert found.hardware.origin == "measured on CPU core, 1 node"
    first = next(plan_lines(found))
    assert first.startswith(f"2 CPU workers as in {tmp_path}/profile.json on 1 node (measured on")


def test_devices_of_a_file_are_not_called_by_its_name(tmp_path: Path) -> None:
    path = stored(tmp_path, device="cuda", device_name="H100", matmuls=products(5e14, 40.0, "bf16"))
    found = hardware(str(path), "bf16")
    assert (found.said(1), found.said(16)) == (f"1 GPU as in {path}", f"16 GPUs as in {path}")
    with pytest.raises(ConfigError, match=rf"; \d+ GPUs as in {path} would do"):
        plan(load_job("llama-3-8b", ["data.path=unread"]), 8, found)


def test_a_probe_says_what_it_found_and_what_to_type_next(tmp_path: Path) -> None:
    messages = [{"link": "loopback", "size": n, "seconds": 1e-5 + n / 2e9} for n in (10**3, 10**6)]
    both = [*products(5e10, 40.0), *products(2e10, 40.0, "bf16")]
    found = load_profile(stored(tmp_path, messages=messages, matmuls=both, cuts=["left out: fp64"]))
    assert list(profile_lines(found, "my here.json")) == [
        "matrix products of large shapes: bf16 0.02 TFLOP/s, fp32 0.05 TFLOP/s a worker",
        "memory: 10 GB/s a worker, 10 GB/s one thread of the host",
        "a message over loopback: 10 us and 2 GB/s",
        "left out: fp64",
        "written to my here.json; next: picotron-ray plan CONFIG --gpus 2 --hardware 'my here.json'",
    ]
    (*_, last) = profile_lines(found, "here")
    assert last.endswith("--hardware here, once its name ends in .json")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "{",
            "saw no JSON (EOF while parsing an object at line 1 column 1), expected a profile; give",
        ),
        (json.dumps(profile(version=2)), "version: saw 2, expected 1; give a file of `picotron-ray probe`"),
        (json.dumps(profile(matmuls=[])), "matmuls: saw 0 values, expected at least 2 items; give a file"),
        (json.dumps(profile(memory_bytes=-1)), "memory_bytes: saw -1, expected greater than 0; give"),
        (json.dumps(profile(colour="red")), "colour: saw an unknown key, expected none of that name; give"),
        (json.dumps({**profile(), "block_s": "fast"}), "block_s: saw fast, expected number; give a file"),
        (json.dumps({"version": 1}), "name: saw nothing, expected that key; give a file"),
        ("[]", "saw 0 values, expected an object; give a file"),
    ],
    ids=range(8),
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        hardware(str(path))
    assert f"--hardware: {path}: {line}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        hardware(str(tmp_path / "none.json"))


def test_messages_are_a_latency_and_a_bandwidth_of_each_link() -> None:
    sizes = (2**10, 2**14, 2**20, 2**25)
    points = [{"link": "pcie", "size": n, "seconds": 2e-5 + n / 4e9} for n in sizes]
    points += [{"link": "cross_node", "size": n, "seconds": 8e-5 + n / 1e9} for n in sizes]
    found = HardwareProfile.model_validate_json(json.dumps(profile(messages=points)))
    assert {link: str(fit) for link, fit in found.links().items()} == {
        "pcie": "20 us and 4 GB/s",
        "cross_node": "80 us and 1 GB/s",
    }
    one = message_fit([MessagePoint(link="pcie", size=1000, seconds=1e-3)])
    assert one == (0.0, 1e6)
    assert HardwareProfile.model_validate_json(json.dumps(profile())).links() == {}


def test_the_link_inside_a_node_is_the_profiles(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    points = [{"link": "pcie", "ranks": 2, "size": n, "seconds": 1e-4 + n / 1e9} for n in (2**10, 2**20)]
    path.write_text(json.dumps(profile(collectives=points)))
    assert hardware(str(path), "fp32").link == "pcie"
    assert hardware("h100-80g").link == "nvlink"


def test_slow_workers_are_named() -> None:
    assert outliers({"a": 10.0, "b": 9.0, "c": 7.0}) == ("c: 78 % of the median rate of matrix products",)
    assert outliers({"a": 10.0}) == ()


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    found = load_profile(stored(tmp_path))
    (tmp_path / "again.json").write_text(found.model_dump_json())
    assert (
        load_profile(tmp_path / "again.json") == found == HardwareProfile.model_validate(found.model_dump())
    )


def test_workers_of_several_cpu_nodes_share_each_machine_alone(tmp_path: Path) -> None:
    nodes = [{**profile()["nodes"][0], "host": host} for host in "abcdefgh"]
    eight = hardware(str(stored(tmp_path, nodes=nodes)), "fp32").of_devices(16)
    two = hardware(str(stored(tmp_path)), "fp32").of_devices(2)
    assert eight.profile.crowd == 1
    assert (eight.profile.flops, eight.profile.memory_bytes) == (two.profile.flops, two.profile.memory_bytes)
    assert eight.node_sizes(16) == (2,) * 8
