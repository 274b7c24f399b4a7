"""What the benchmarks would run, and what they refuse, without running it."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.bench.common.statistics import KillFigures, summary
from picotron_ray.bench.recovery import bench as recovery
from picotron_ray.bench.recovery.peers import torchft
from picotron_ray.bench.throughput import bench as throughput
from picotron_ray.bench.throughput.bench import RATIOS, SIDES, chosen_sides, job_for_throughput, ratios
from picotron_ray.errors import ConfigError


def test_recovery_job_is_what_the_peers_can_train(tmp_path: Path) -> None:
    job = recovery.job_for_recovery(tmp_path)
    workers = job.cluster.max_workers
    assert workers == 4
    assert job.checkpoint.interval_steps == 20
    assert job.data.global_batch % workers == 0  # Replica feeds equal shares
    assert job.data.global_batch % (workers - 1) == 0
    assert (job.layout.tp, job.layout.pp, job.layout.zero) == (1, 1, 0)


def test_all_frameworks_settle_and_draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them trains two intervals between checkpoints, and draws moments and victims by the seed."""
    asked: list[tuple[Any, ...]] = []
    kills = [KillFigures(0.1, 0.1, 0.1, 2.0, 1.0, 0, 0, 7)]

    def measured(subject: Any, runs: int, settle_steps: int, draw: Any, say: Any) -> tuple[Any, float]:
        asked.append((runs, settle_steps, draw.random(), say))
        return kills, 0.5

    class RayTrain:
        def __init__(self, folder: Path, job: Any, step_s: float) -> None:
            assert (folder.name, job.name, step_s) == ("ray_train", "bench-recovery", 0.5)

    ours = SimpleNamespace(kill_run_workers=measured)
    monkeypatch.setitem(sys.modules, "picotron_ray.bench.recovery.picotron_ray", ours)
    monkeypatch.setattr(recovery, "kill_workers", measured)
    monkeypatch.setitem(recovery.PEERS, "ray_train", RayTrain)
    found = recovery.bench(1, 3, ["ray_train"], print)
    assert asked == [(1, 40, random.Random(3).random(), print)] * 2
    assert found["ours"] == found["ray_train"] == summary(kills, 0.5)
    assert (found["torchft"], found["ratio_total"]) == (None, 1.0)
    assert (found["job"]["workers"], list(found["job"]["settings"])) == (4, ["ray_train"])


def test_throughput_jobs_differ_in_snapshots_alone(tmp_path: Path) -> None:
    jobs = [job_for_throughput(tmp_path, interval, 3).model_dump() for _, interval in SIDES.values()]
    intervals = {job["snapshot"].pop("interval_steps") for job in jobs}
    assert {"auto", 1} < intervals
    assert all(job == jobs[0] for job in jobs)
    assert jobs[0]["layout"]["dp"] * jobs[0]["layout"]["micro_batch"] == jobs[0]["data"]["global_batch"]


def test_ratios_are_medians_of_ratios_within_a_round() -> None:
    fast, slow = dict.fromkeys(SIDES, 10.0), dict.fromkeys(SIDES, 5.0)  # the machine drifts
    found = ratios([fast, slow, {**fast, "service": 9.0}, {**slow, "every_step": 4.0}])
    assert found["ratio_service_vs_torchrun"] == 1.0
    assert found["iqr"]["ratio_service_vs_torchrun"] == pytest.approx([0.975, 1.0])
    assert found["iqr"]["ratio_service_vs_torchrun_every_step"] == pytest.approx([0.95, 1.0])
    assert set(found) == {*RATIOS, "iqr"}
    few = ratios([{"service": 1.0, "torchrun": 2.0}])
    assert few == {"ratio_service_vs_torchrun": 0.5, "iqr": {"ratio_service_vs_torchrun": [0.5, 0.5]}}


def test_sides_are_chosen_or_refused() -> None:
    assert chosen_sides("torchrun, service") == ["service", "torchrun"]
    for names in ("service", "service,torchrun,horovod", "every_step,snapshots_off"):
        with pytest.raises(ConfigError, match="--sides: saw"):
            chosen_sides(names)


def test_peers_are_chosen_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recovery.chosen_peers("none") == []
    assert recovery.chosen_peers("ray_train") == ["ray_train"]
    with pytest.raises(ConfigError, match="saw 'deepspeed', expected some of ray_train, torchft, or none"):
        recovery.chosen_peers("deepspeed")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchft" else find(name))
    with pytest.raises(ConfigError, match=r"torchft is not installed: install the extra bench"):
        recovery.chosen_peers("ray_train,torchft")


def test_torchft_runs_under_the_settings_that_are_compared() -> None:
    assert torchft.SETTINGS["lighthouse"] == {
        "min_replicas": 1,
        "join_timeout_ms": 200,
        "quorum_tick_ms": 50,
        "heartbeat_timeout_ms": 1000,
    }


def test_json_goes_to_a_file_or_to_stdout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def bench(pairs: int, workers: int, sides: list[str], say: Any) -> dict[str, Any]:
        say("a round")
        machine = {"cores": 2, "processor": "Z80", "memory_gib": 1.0}
        return {"machine": machine, "job": {"workers": 2}, "iqr": {}, "pairs": [{}] * pairs}

    monkeypatch.setattr("picotron_ray.bench.throughput.bench.bench", bench)
    target = tmp_path / "found.json"
    runner = CliRunner()
    written = runner.invoke(cli.app, ["bench", "throughput", "--pairs", "3", "--json", str(target)])
    assert written.exit_code == 0
    assert written.stdout.startswith("3 rounds, 2 workers")
    assert len(json.loads(target.read_text())["pairs"]) == 3
    printed = runner.invoke(cli.app, ["bench", "throughput", "--json", "-"])
    assert len(json.loads(printed.stdout)["pairs"]) == 20
    assert "a round" in printed.stderr


def test_an_unknown_peer_ends_the_command_before_anything_starts() -> None:
    result = CliRunner().invoke(cli.app, ["bench", "recovery", "--peers", "horovod"])
    assert result.exit_code == 2
    assert "saw 'horovod'" in result.stderr


def test_options_reach_the_benchmarks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from picotron_ray.bench.mfu.run import MfuOptions

    asked: list[tuple[Any, ...]] = []

    def bench(*arguments: Any) -> dict[str, Any]:
        *words, say = arguments
        asked.append(tuple(words))
        say("under way")
        return {"found": len(asked)}

    monkeypatch.setattr("picotron_ray.bench.recovery.bench.bench", bench)
    monkeypatch.setattr("picotron_ray.bench.throughput.bench.bench", bench)
    monkeypatch.setattr("picotron_ray.bench.mfu.run.bench", bench)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {pid, 2, 5})
    for lines in ("common.report.recovery_lines", "common.report.throughput_lines", "mfu.report.lines"):
        monkeypatch.setattr(
            f"picotron_ray.bench.{lines}", lambda found: ["a line", f"found {found['found']}"]
        )
    target = tmp_path / "found.json"
    for words in (
        "recovery --peers none",
        "recovery --runs 2 --seed 3 --peers ray_train --json -",
        "throughput",
        "throughput --pairs 1 --workers 4 --sides plain,service --json -",
        "mfu tiny",
        f"mfu tiny steps=3 --workers 2 --steps 4 --warmup 0 --rounds 6 --ablate --peers none"
        f" --peak-tflops 9 --json {target}",
    ):
        result = CliRunner().invoke(cli.app, ["bench", *words.split()])
        assert result.exit_code == 0
        assert result.stderr == "under way\n"
        as_json = words.endswith("-")
        shown = f'{{"found": {len(asked)}}}\n' if as_json else f"a line\nfound {len(asked)}\n"
        assert result.stdout == shown
    every = ["every_step", "service", "torchrun", "plain", "snapshots_off"]
    assert asked == [
        (10, 0, []),
        (2, 3, ["ray_train"]),
        (20, 2, every),
        (1, 4, ["service", "plain"]),
        ("tiny", [], MfuOptions(1, 10, 3, 5, False, "plain", None, None, None)),
        ("tiny", ["steps=3"], MfuOptions(2, 4, 0, 6, True, "none", None, None, 9.0)),
    ]
    assert target.read_text() == json.dumps({"found": 6}, indent=2) + "\n"


@pytest.mark.parametrize(
    "words", ["recovery --peers horovod", "throughput --sides service", "mfu tiny --peers horovod"]
)
def test_a_refusal_is_json_where_the_result_would_be(words: str, tmp_path: Path) -> None:
    for target in ("-", str(tmp_path / "found.json"), None):
        options = [] if target is None else ["--json", target]
        result = CliRunner().invoke(cli.app, ["bench", *words.split(), *options])
        assert result.exit_code == 2
        assert result.stdout == "" or target == "-"
        if target == "-":
            assert json.loads(result.stdout)["exit_code"] == 2


def test_one_core_is_left_to_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers in ((1, 1), (2, 1), (3, 2), (8, 7)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: range(cores) if pid == 0 else ())
        assert throughput.default_workers() == workers


def test_the_throughput_job_has_no_end_and_sixteen_rows_a_worker(tmp_path: Path) -> None:
    job = job_for_throughput(tmp_path, 7, 3)
    assert (job.layout.micro_batch, job.data.global_batch, job.snapshot.interval_steps) == (16, 48, 7)
    assert (job.layout.tp, job.layout.pp, job.layout.zero, job.cluster.device) == (1, 1, 0, "cpu")
    assert (job.cluster.min_workers, job.cluster.max_workers) == (3, 3)
    assert job.steps == job.checkpoint.interval_steps == job.evaluate.interval_steps == 1_000_000
    assert (job.chaos, job.storage.url) == ((), str(tmp_path))
