"""Quickstart with compressed gradients, through a kill and two re-meshes: it learns what exact sums do."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.config.load import load_job
from tests.support.runs.ray_runs import check_ledger, losses, run

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(900)]
STEPS = 120
NEAR = 0.02
KINDS = (
    "comm.gradients=topk",
    "comm.gradients=int8",
    "comm.gradients=int8 comm.bits=4",
    "comm.gradients=powersgd",
)


def trained(storage: Path, name: str, *overrides: str) -> tuple[float, list[str]]:
    """Mean loss of the last ten steps, and the layouts of all generations. One of two workers is killed."""
    fault = '[{fault: kill, target: "worker:1", step: 60, phase: forward}]'
    machines = [
        f"storage.url={storage}",
        "cluster.max_workers=2",
        "cluster.start_timeout_s=200",
        f"chaos={fault}",
    ]
    job = load_job("quickstart", [f"name={name}", f"steps={STEPS}", *machines, *overrides])
    summary = run(job, timeout_s=400)
    check_ledger(job)
    return sum(losses(job)[-10:]) / 10, [generation["layout"] for generation in summary["generations"]]


@pytest.fixture(scope="module")
def exact() -> dict[str, float]:
    """Loss of exact sums, once a test has asked for it."""
    return {}


@pytest.mark.deep
@pytest.mark.parametrize("asked", KINDS)
def test_the_loss_is_that_of_exact_sums(tmp_path: Path, exact: dict[str, float], asked: str) -> None:
    if not exact:
        exact["loss"] = trained(tmp_path / "exact", "exact")[0]
    name = asked.replace("comm.gradients=", "").replace(" comm.bits=", "-")
    loss, layouts = trained(tmp_path, name, *asked.split())
    print(f"{asked}: {loss:.4f}, exact {exact['loss']:.4f}")
    assert [layout[:3] for layout in layouts][:2] == ["dp2", "dp1"]
    assert loss != exact["loss"]
    assert loss == pytest.approx(exact["loss"], rel=NEAR)
