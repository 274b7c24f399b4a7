"""``bench gpu``: what it refuses, how a result is put together, and its rehearsal over gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from picotron_ray.bench.gpu import bench
from picotron_ray.bench.gpu.bench import (
    Devices,
    GpuOptions,
    assembled,
    bench_service,
    earlier_parts,
    place_of,
    run_parts,
    work_of,
)
from picotron_ray.bench.gpu.recovery import ranks_of, step_figures
from picotron_ray.bench.gpu.report import lines
from picotron_ray.bench.gpu.tests_part import summed_up
from picotron_ray.comm.device_claim import claim_index
from picotron_ray.errors import ConfigError, NoDeviceError, PicotronError

ROOT = Path(__file__).resolve().parents[3]
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="one" time="1.25"/>
<testcase classname="tests.gpu.test_a" name="two" time="0.5">
<failure message="assert 1 == 2">...</failure></testcase>
<testcase classname="tests.gpu.test_a" name="three" time="0">
<skipped message="needs 8 devices, saw 4"/></testcase>
</testsuite></testsuites>"""


def test_without_a_device_there_is_one_line_and_a_code_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path), "VENV": str(Path(sys.executable).parents[1])}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [ROOT / ".ci" / "gpu"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == NoDeviceError.exit_code == 5
    assert done.stderr == (
        "error: bench gpu: saw no CUDA device; give --cpu to rehearse every part over gloo\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_what_is_asked_for_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GpuOptions(tmp_path, parts="kill, tests").chosen == ("tests", "kill")
    with pytest.raises(ConfigError, match="--parts: saw 'x', expected all, or some of tests, mfu"):
        bench.bench(GpuOptions(tmp_path, cpu=True, parts="kill,x"), print)
    with pytest.raises(ConfigError, match=r"--out: saw .*none, expected a folder that exists"):
        bench.bench(GpuOptions(tmp_path / "none", cpu=True), print)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert place_of(GpuOptions(tmp_path)) == Devices("cuda", "NVIDIA H200", 2)
    with pytest.raises(ConfigError, match="--workers: saw 3, expected at most the 2 GPUs"):
        place_of(GpuOptions(tmp_path, workers=3))


def test_a_part_that_fails_or_is_left_out_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise ValueError("no\nroom")

    def refused() -> dict[str, Any]:
        raise PicotronError("bench gpu: too small")

    told: list[str] = []
    kills = {"total_s": {"median": 0.5}, "kills": [{}]}
    works: dict[str, bench.Work] = {
        "tests": lambda: summed_up(JUNIT),
        "mfu": fails,
        "snapshots": refused,
        "kill": lambda: kills,
        "service": "Ray is not installed",
    }
    place, options = Devices("cuda", "NVIDIA H200", 2), GpuOptions(tmp_path)
    kept: list[set[str]] = []
    parts = run_parts(works, told.append, lambda found: kept.append(set(found)))
    found = assembled(place, options, parts)
    assert [len(names) for names in kept] == [1, 2, 3, 4, 5], "after each part"
    assert json.loads(json.dumps(found)) == found
    assert found["left_out"] == {"service": "Ray is not installed"}
    assert found["failed"] == {
        "tests": "1 tests failed",
        "mfu": "ValueError: no",
        "snapshots": "bench gpu: too small",
    }
    assert (found["device"]["name"], found["rehearsal"]) == ("NVIDIA H200", False)
    assert "kill: done" in told
    assert "service: left out: Ray is not installed" in told
    head, *shown = lines(found)
    assert head.startswith("2 x NVIDIA H200 on ")
    assert [line.split()[0] for line in shown] == list(works)
    assert "1 passed, 1 skipped" in shown[0]


def test_a_report_of_tests_is_counted() -> None:
    assert summed_up(JUNIT) == {
        "passed": 1,
        "failed": {"tests.gpu.test_a::two": "assert 1 == 2"},
        "skipped": {"needs 8 devices, saw 4": 1},
        "seconds": 1.8,
    }


def test_without_ray_the_service_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, place = GpuOptions(tmp_path, cpu=True), Devices("cpu", "cpu", 2)
    assert callable(work_of("service", options, place, tmp_path, print))
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else plain(name))
    assert work_of("service", options, place, tmp_path, print) == "Ray is not installed"
    assert callable(work_of("kill", options, place, tmp_path, print))


@pytest.mark.parametrize(
    ("code", "said", "why"),
    [(3, "", "ended with 3: error: no"), (0, '{"status": "finished", "failures": []}', "that lost a worker")],
)
def test_a_run_that_did_not_do_its_part_is_a_failure(
    code: int, said: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **named: Any) -> Any:
        return subprocess.CompletedProcess(command, code, said, "error: no\n")

    monkeypatch.setattr(bench.subprocess, "run", run)
    with pytest.raises(PicotronError, match=why):
        bench_service(bench.REHEARSAL, Devices("cpu", "cpu", 2), tmp_path)


def test_figures_of_steps_are_the_slowest_ranks() -> None:
    def answer(step_s: float, copies: list[dict[str, float]]) -> dict[str, Any]:
        began = [(number, 100.0 + number * step_s) for number in range(8)]
        return {"began_s": began, "wait_s": step_s, "snapshot_s": 1.0, "skipped": 2, "copies": copies}

    copies = [{"copy_s": 0.4, "exposed_s": 0.1, "host_wait_s": 0.0}]
    found = step_figures([answer(0.25, copies), answer(0.5, [])])
    assert found["step_s"] == pytest.approx(0.5)
    assert found["copies"] == {**copies[0], "overlap": 0.75}
    assert step_figures([answer(0.5, [])])["copies"] is None


def test_each_process_has_a_device_of_its_own() -> None:
    """The first one here; in another process the next, until none is left."""
    owner = os.getpid()
    assert claim_index(owner, 2) == claim_index(owner, 2) == 0
    code = f"from picotron_ray.comm.device_claim import claim_index; print(claim_index({owner}, 2))"
    done = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)]
    assert [each.stdout for each in done] == ["1\n"]
    with pytest.raises(PicotronError, match="saw 0 GPUs, all taken"):
        claim_index(owner + 1_000_000, 0)


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_a_rehearsal_goes_through_every_part(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path), "VENV": str(Path(sys.executable).parents[1])}
    command = [ROOT / ".ci" / "gpu", "--cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert file.name == "cpu-x2.json"
    assert found["rehearsal"] is True
    assert (found["failed"], found["left_out"]) == ({}, {})
    assert set(found["parts"]) == set(bench.PARTS)
    assert found["parts"]["tests"]["found"]["passed"] > 5
    assert found["parts"]["mfu"]["found"]["peers_left_out"].keys() == {"picotron", "torchtitan"}
    assert found["parts"]["kill"]["found"]["kills"][0]["resume_step"] > 0
    assert found["parts"]["service"]["found"]["failures"]


def test_parts_that_are_not_asked_for_stay(tmp_path: Path) -> None:
    file, parts = tmp_path / "one.json", {"mfu": {"status": "done"}, "kill": {"status": "failed", "why": "x"}}
    place = Devices("cuda", "NVIDIA H200", 1)
    asked = GpuOptions(tmp_path, quick=True, parts="kill,tests")
    assert earlier_parts(file, asked) == {}
    file.write_text(json.dumps(assembled(place, GpuOptions(tmp_path, quick=True), parts)))
    assert earlier_parts(file, asked) == {"mfu": {"status": "done"}}
    for text in ("{", "{}", "[]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="which is no result of bench gpu"):
            earlier_parts(file, asked)


def test_parts_take_jobs_of_their_recipes(tmp_path: Path) -> None:
    """A recipe's schedule is longer than a benchmark."""
    for sizes in (bench.ON_GPUS, bench.QUICK):
        words = bench.small_overrides(sizes, tmp_path)
        with ranks_of(sizes.small, words, "cpu", steps=20) as (job, _):
            assert job.steps == 20
