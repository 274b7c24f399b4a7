"""A module of the user's own under data and tensor parallelism: killed, and nothing shows in its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from tests.support.runs.ray_runs import check_ledger, in_one_process, losses, run, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(400)]
STEPS = 24


def encoder_job(name: str, storage: Path) -> JobConfig:
    """torch's own encoder layers on two replicas of two tensor-parallel ranks; one of the four is killed."""
    fault = {"fault": "kill", "target": "worker:1", "step": 9, "phase": "backward"}
    job = tiny_job(
        name,
        storage,
        steps=STEPS,
        layout={"tp": 2},
        cluster={"start_timeout_s": 200.0},  # all four, however busy the machine
        chaos=(fault,),
        elastic={"replace_workers": False},
    )
    model = {
        "vocab_size": 264,
        "builder": "own_models:encoder",
        "arguments": {"vocabulary": 264, "hidden": 32, "heads": 4, "inner": 64, "layers": 2},
    }
    return job.model_copy(update={"model": ModelConfig.model_validate(model)})


@pytest.mark.deep
def test_a_kill_under_data_and_tensor_parallelism_costs_nothing(tmp_path: Path) -> None:
    from picotron_ray.runtime.driver.resolve_job import OWN_MODEL, ResolvedJob, resolve

    said: list[str] = []
    asked = ResolvedJob(encoder_job("own-model", tmp_path), say=said.append)
    job = resolve(asked, (OWN_MODEL,)).job
    assert "encoder.layers.*.linear1 colwise" in said[1]
    summary = run(job)
    layouts = [generation["layout"] for generation in summary["generations"]]
    assert [layout[:8] for layout in layouts] == ["dp2-tp2-", "dp1-tp2-"]
    assert [failure["kind"] for failure in summary["failures"]] == ["worker-exited"]
    assert losses(job) == pytest.approx(in_one_process(job), rel=1e-9)
    check_ledger(job)
