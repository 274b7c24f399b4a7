"""Kill points drawn by seed over every phase: the same losses in fp64, an exact ledger, logs that replay."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.runtime.ray_cluster.names import event_folder
from tests.support.runs.ray_runs import check_ledger, in_one_process, losses, run, storage_of, tiny_job
from tests.support.runs.replays import check_replay
from tests.support.selection import also_deep

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(600)]

STEPS_PER_KILL = 16
STEP_PHASES = ("data", "forward", "backward", "reduce", "clip", "sync", "optimizer", "snapshot")
RECOVERY_PHASES = ("rendezvous", "build", "restore", "flush")


def steps_for(kills: int) -> int:
    return 40 + kills * STEPS_PER_KILL


def draw_faults(seed: int, kills: int) -> tuple[dict[str, Any], ...]:
    """Kills: in steps, in the recovery from them, and of the coordinator in the midst of a commit."""
    draw, steps = random.Random(seed), steps_for(kills)
    faults: list[dict[str, Any]] = []
    for number in range(kills - 1):
        # the first and the last kill cannot be in a recovery: none comes before, or after
        plain = number % 2 == 0 or number == kills - 2
        phase = draw.choice(STEP_PHASES if plain else (*STEP_PHASES, *RECOVERY_PHASES))
        step = 5 + number * STEPS_PER_KILL + draw.randrange(8)
        # rank 0 exists in every world; later there may be no other
        target = f"worker:{draw.randrange(3) if number == 0 else 0}"
        faults.append({"fault": "kill", "target": target, "step": step, "phase": phase})
    step = draw.randrange(steps // 4, steps // 2)
    return (*faults, {"fault": "kill", "target": "coordinator", "step": step, "phase": "commit"})


@pytest.mark.parametrize(("seed", "kills"), [(0, 3), *also_deep((0, 8), (1, 25), (2, 25))])
def test_kills_leave_no_trace(seed: int, kills: int, tmp_path: Path) -> None:
    faults, steps = draw_faults(seed, kills), steps_for(kills)
    elastic = {"max_failures_without_progress": 50, "first_step_timeout_s": 30.0}
    layout = {"zero": 3 if seed % 2 else 0, "pp": 1}
    job = tiny_job(
        f"kills-{seed}", tmp_path, steps=steps, chaos=faults, elastic=elastic, layout=layout,
        checkpoint={"interval_steps": 20}, cluster={"max_workers": 3},
    )  # fmt: skip
    run(job, timeout_s=500)
    struck = {entry.key for entry in storage_of(job).list("chaos/")}
    assert struck == {f"chaos/{index}" for index in range(len(faults))}
    calm = in_one_process(tiny_job("one", tmp_path / "calm", steps=steps))  # without Ray or faults
    assert losses(job) == pytest.approx(calm, rel=1e-9)
    check_ledger(job)
    assert check_replay(event_folder(job.name)) == 2, "the log of each term replays to identical commands"
