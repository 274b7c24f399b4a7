"""torchtitan as a peer on a CUDA device, with its flex attention: the plain loop's losses and weights."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.support.gloo.pool import Job
from tests.support.gloo.train_jobs import torchtitan_jobs

CHECKOUT = os.environ.get("PICOTRON_TORCHTITAN", "")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="needs PICOTRON_TORCHTITAN, a checkout of torchtitan")
SIZES = ["model.hidden_size=128", "data.sequence_length=128", "layout.micro_batch=4", "optimizer.eps=1e-3"]


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_three_steps_are_ours(precision: str, bound: float) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job("127.0.0.1", store.port, f"titan/{precision}", 0, 1)
    overrides = [*SIZES, f"precision={precision}"]
    found = torchtitan_jobs.apart(job, CHECKOUT, overrides, torch.device("cuda", 0))
    assert found["loss"] < bound
    assert found["weights"] < bound
