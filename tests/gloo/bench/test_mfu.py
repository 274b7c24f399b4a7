"""``bench mfu`` as users run it, on a model of seconds; and its clocks under a pipeline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs import bench_jobs

FEW = ("--rounds", "1", "--steps", "2", "--warmup", "1")


@pytest.mark.slow  # most of it is torchrun's start
def test_switches_and_the_plain_loop(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "picotron_ray.cli", "bench", "mfu", "tiny", "cluster.device=cpu"),
            *(f"data.source=text data.path={__file__} data.held_out_fraction=0.5".split()),
            *("--ablate", *FEW, "--json", str(target)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    assert found["job"]["layout"].startswith("dp1-tp1-pp1")
    assert {"precision=bf16", "kernels.attention=math", "layout.recompute=full"} < set(found["ablation"])
    assert list(found["peers"]) == ["plain"]
    assert "layout.zero=3" in found["refused"]
    assert set(found["breakdown"]["phases"]) == {"data", "forward", "backward", "reduce", "clip", "optimizer"}
    shares = [phase["share"] for phase in found["breakdown"]["phases"].values()]
    assert sum(shares) == pytest.approx(1.0)
    steps = [step for run in found["rounds"]["base"] for step in run["steps_s"]]
    assert len(steps) == found["steps"] == 2
    assert found["tokens_per_s"]["median"] == pytest.approx(8 * 32 * 2 / sum(steps))
    rate, peak = found["tokens_per_s"]["median"], found["peak"]["flops_per_s"]
    assert found["mfu"] == pytest.approx(rate * found["formula"]["flops_per_token"] / peak)
    assert 2**26 < found["peak_bytes"] < 2**31
    alone, with_snapshots = found["loop"]["loop, no snapshots"], found["loop"]["loop, snapshots"]
    assert (alone["snapshots"], alone["steps"], alone["interval_steps"]) == (0, 2, None)
    assert with_snapshots["snapshots"] >= 1
    assert with_snapshots["steps"] >= 2
    assert with_snapshots["snapshot_s"] > 0
    assert "MFU " in done.stdout
    assert "x 1.000 of those without" not in done.stdout
    assert "loop, snapshots" in done.stdout
    assert "measured: the fastest 1024 x 1024 fp32 matrix product" in done.stdout


NAMED = {"comm.gradients=int8": (60, 1), "layout.micro_batch=8": (8, 3)}
"""Switch → steps of a segment, and rounds."""


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("switch", NAMED)
def test_one_switch_saves_bytes_or_memory(tmp_path: Path, switch: str) -> None:
    """30 % of the bytes for 2 % of the loss; 30 % of a step's memory for a tenth of the speed."""
    target, (steps, rounds) = tmp_path / "found.json", NAMED[switch]
    options = f"--workers 2 --peers none --ablate --only {switch} --steps {steps} --rounds {rounds}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "picotron_ray.cli", "bench", "mfu", "quickstart", "chaos=[]"),
            *("cluster.device=cpu", *options.split(), "--json", str(target)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith(f"  {switch}")))
    found = json.loads(target.read_text())["ablation"][switch]
    if switch.startswith("comm."):
        assert found["over_base"]["sent_bytes"] < 0.7
        assert found["over_base"]["loss"] == pytest.approx(1.0, abs=0.02)
    else:
        assert found["memory_ratio"] < 0.7
        assert found["ratio"]["median"] >= 0.9


@pytest.mark.deep
def test_two_workers_by_the_engine_and_the_plain_loop(pool: Pool) -> None:
    for ours, plain, phases in pool.run(2, bench_jobs.segments, ["layout.zero=3"]):
        assert [len(found["steps_s"]) for found in (ours, plain)] == [2, 2]
        assert set(phases["phases_s"]) == {"data", "forward", "backward", "reduce", "clip", "optimizer"}


def test_the_loop_of_workers_takes_its_snapshots(pool: Pool) -> None:
    """Both ways in one process, one of them twice: slots and initial weights stay."""
    zero, *others = pool.run(2, bench_jobs.by_the_loop, ["snapshot.interval_steps=2"])
    alone, with_snapshots, again = zero
    assert len(alone["steps_s"]) == 3
    assert alone["loop"]["snapshots"] == 0
    for found in (with_snapshots, again):
        assert len(found["steps_s"]) == 4, "two whole intervals"
        assert found["loop"]["snapshots"] == 2
    for rank in others:
        assert [found["steps_s"] for found in rank] == [[], [], []], "rank 0 times"


def test_bubble_is_what_a_stage_waits(pool: Pool) -> None:
    """Two stages, two micro-batches: each rank waits a while, whatever it computes."""
    for _, found in pool.run(2, bench_jobs.segments, ["layout.pp=2", "layout.micro_batch=4"]):
        seconds = found["phases_s"]
        assert {"forward", "backward", "bubble", "reduce", "clip", "optimizer"} <= set(seconds)
        assert seconds["bubble"] > 0.1 * (seconds["forward"] + seconds["backward"])


STRICT = [  # every setting of AdamW shows in three steps
    *("optimizer.weight_decay=5", "optimizer.eps=1e-3", "optimizer.clip_norm=0.1", "optimizer.beta1=0.5"),
    *(
        "optimizer.learning_rate=0.01",
        "optimizer.schedule.warmup_steps=2",
        "optimizer.decay_embeddings=false",
    ),
]


@pytest.mark.parametrize(
    ("workers", "overrides", "micro_batches"),
    [
        (1, ["layout.micro_batch=8"], 1),
        (1, ["layout.micro_batch=2", "optimizer.clip_norm=null"], 4),
        (2, ["layout.micro_batch=2"], 2),
    ],
    ids=str,
)
def test_the_plain_loop_trains_as_the_engine_does(
    workers: int, overrides: list[str], micro_batches: int, pool: Pool
) -> None:
    for found in pool.run(workers, bench_jobs.beside_the_engine, [*STRICT, *overrides]):
        assert found["apart"] < 1e-5
        assert found["losses"]["plain"] == pytest.approx(found["losses"]["engine"], rel=1e-4)
        assert found["phases"] == {
            "engine": [*["forward", "backward"] * micro_batches, "reduce", "clip", "optimizer"] * 3,
            "plain": [],
        }
