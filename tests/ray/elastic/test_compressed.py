"""Quickstart with compressed gradients, through a kill and two re-meshes: it learns what exact sums do, and
sends the share of their bytes that the reducer states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from tests.support.runs.ray_runs import check_ledger, losses, start

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(900)]
STEPS = 120
NEAR = 0.02
OVER = 1.05
"""Scales and exact vectors are not in what a reducer states."""
SHARES = {
    "comm.gradients=bf16": 1 / 2,
    "comm.gradients=int8": 1 / 4,
    "comm.gradients=int8 comm.bits=4": 1 / 8,
    "comm.gradients=topk": 1 / 2,
    "comm.gradients=powersgd": 1 / 2,
}
"""Bytes sent over those of exact sums, as docs/communication.md states them; of topk and powersgd by size."""


@dataclass
class Trained:
    """Mean loss of the last ten steps, layouts of all generations, bytes that a rank of two sends a step.

    The bytes are those between checkpoints, before each of which the mean of error feedback is an exact sum.
    """

    loss: float
    layouts: list[str]
    sent_bytes: float


def trained(storage: Path, name: str, *overrides: str) -> Trained:
    """Train; one of two workers is killed half-way."""
    fault = '[{fault: kill, target: "worker:1", step: 60, phase: forward}]'
    machines = [
        f"storage.url={storage}",
        "cluster.max_workers=2",
        "cluster.start_timeout_s=200",
        "telemetry.interval_s=0.5",
        f"chaos={fault}",
    ]
    job = load_job("quickstart", [f"name={name}", f"steps={STEPS}", *machines, *overrides])
    watched, sent = start(job), list[float]()

    def ended(status: dict[str, Any]) -> bool:
        figures = status.get("telemetry") or {}
        if figures.get("ranks") == 2 and figures["sent_bytes"].get("dp"):
            sent.append(figures["sent_bytes"]["dp"])
        return bool(status["done"])

    watched.until(ended, 400)
    summary = watched.finish()
    assert summary["status"] == "finished", f"{summary['detail']}\n{watched.log()}"
    check_ledger(job)
    layouts = [generation["layout"] for generation in summary["generations"]]
    return Trained(sum(losses(job)[-10:]) / 10, layouts, min(sent))


@pytest.fixture(scope="module")
def exact() -> dict[str, Trained]:
    """The run with exact sums, once a test has asked for it."""
    return {}


@pytest.mark.deep
@pytest.mark.parametrize("asked", SHARES)
def test_the_loss_is_that_of_exact_sums(tmp_path: Path, exact: dict[str, Trained], asked: str) -> None:
    if not exact:
        exact["run"] = trained(tmp_path / "exact", "exact")
    reference = exact["run"]
    name = asked.replace("comm.gradients=", "").replace(" comm.bits=", "-")
    found = trained(tmp_path, name, *asked.split())
    share = found.sent_bytes / reference.sent_bytes
    print(f"{asked}: loss {found.loss:.4f}, exact {reference.loss:.4f}; {share:.4f} of the bytes")
    assert [layout[:3] for layout in found.layouts] == ["dp2", "dp1", "dp2"]
    assert found.loss != reference.loss
    assert found.loss == pytest.approx(reference.loss, rel=NEAR)
    assert 0.9 * SHARES[asked] <= share <= OVER * SHARES[asked]
