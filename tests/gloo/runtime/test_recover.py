"""A rank dies or stops in the middle of a step of every kind of parallelism: all others get out, at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.gloo.parallel.test_matrix import WIDE
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, make_job
from tests.support.gloo.parity import check
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.train_jobs import FAULT_STEP, SIGNALS, until_lost
from tests.support.selection import also_deep

LAYOUTS = [
    Layout(dp=4, micro_batch=2),
    Layout(dp=4, zero=3, micro_batch=2),
    Layout(tp=2, pp=2, micro_batch=2),
    Layout(dp=2, tp=2, zero=2, micro_batch=2),
    Layout(dp=2, pp=2, zero=3, micro_batch=2, schedule="gpipe"),
    Layout(cp=4, micro_batch=2),
    Layout(dp=4, ep=2, zero=2, micro_batch=2),
    Layout(dp=2, cp=2, zero=3, micro_batch=2, context="all-gather"),
]
RING = Layout(tp=4, micro_batch=2)


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        *((layout, "kill") for layout in LAYOUTS[1::2][:2]),
        (RING, "stop"),
        *also_deep(*((layout, "kill") for layout in LAYOUTS[1::2][2:]), (LAYOUTS[2], "stop")),
        *also_deep(*((layout, "kill") for layout in [*LAYOUTS[::2], RING])),
        *also_deep(*((layout, "stop") for layout in LAYOUTS[4::2])),
    ],
)
def test_survivors_get_out_and_go_on(pool: Pool, tmp_path: Path, layout: Layout, how: str) -> None:
    members = pool.need(4)
    victim, told = 2, tmp_path / "abort"
    model = MIXTURE if layout.ep > 1 else WIDE if layout == RING else MODEL
    at = "backward" if layout == RING else "reduce"  # the others are in the ring, or will be
    job = make_job("adamw", 10, model, kernels=KernelsConfig(tp_overlap="ring" if layout == RING else "none"))
    pool.start(members, until_lost, job, layout, victim, SIGNALS[how], str(told), at)
    wait_for_state(members[victim].pid, "Z" if how == "kill" else "T")
    struck = time.monotonic()
    told.touch()
    replies = [worker.receive(20) for worker in members if worker is not members[victim]]
    assert {reply["kind"] for reply in replies} == {FailureKind.PEER_LOST}
    assert max(reply["ended"] for reply in replies) - struck < 1.0
    assert all(FAULT_STEP - 1 <= reply["steps"] <= FAULT_STEP + 1 for reply in replies), replies
    assert max(reply["sockets"] for reply in replies) <= 0, "sockets of the dead generation are left"
    pool.drop([members[victim]])
    check(pool, Layout(dp=3, micro_batch=2), 10, model)
    assert [w.pid for w in pool.need(3)] == [w.pid for w in members if w is not members[victim]]


def wait_for_state(pid: int, state: str) -> None:
    """Until the kernel shows the process in a state: Z dead, T stopped."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            found = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            found = "Z"  # and taken away by the process that it was forked from
        if found == state:
            return
        time.sleep(0.002)
    raise AssertionError(f"process {pid} did not reach state {state}")
