"""Seconds from the SIGKILL of a worker to the next finished step, on a job of the quickstart's size.

One run goes on for the whole benchmark. Before each kill all workers are members again and a fresh
generation has trained for a while; the victim is drawn by seed. The clock starts at the signal and stops
at the moment at which rank 0 of the next generation finished its first step (it writes that down itself).
"""

from __future__ import annotations

import os
import platform
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from picotron_ray.config.job import JobConfig
from picotron_ray.config.load import load_job
from picotron_ray.errors import PicotronError
from picotron_ray.runtime import connect
from picotron_ray.runtime.drive import poll, take_down
from picotron_ray.runtime.run import ensure_coordinator

SETTLE_STEPS = 8
"""Steps of a full generation before the next kill."""
WAIT_S = 120.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: seconds from the signal to the next finished step, and steps that were computed again."""

    total_s: float
    lost_steps: int
    layout: str


def job_for_recovery(folder: str) -> JobConfig:
    """The quickstart without its end, its own fault and its checkpoints."""
    changes = [
        "name=bench-recovery",
        "steps=1000000",
        "chaos=[]",
        "checkpoint.interval_steps=1000000",
        "evaluate.interval_steps=1000000",
        "elastic.max_failures=1000",
        f"storage.url={folder}",
    ]
    return load_job("quickstart", changes)


def bench(runs: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Kill ``runs`` workers one after the other; returns per-run figures and their medians."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="picotron-bench-") as folder:
        job = job_for_recovery(folder)
        local = connect.connect(job)
        coordinator, _ = ensure_coordinator(job, owns_ray=local is not None)
        try:
            kills = []
            for number in range(1, runs + 1):
                kills.append(_kill_one(job, coordinator, draw))
                say(f"kill {number}: {kills[-1].total_s:.3f} s, {kills[-1].lost_steps} steps lost")
            coordinator.request.remote("stop")
            _until(coordinator, lambda status: status["done"])
        finally:
            take_down(local, coordinator)
    totals = [kill.total_s for kill in kills]
    return {
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
        "workers": job.cluster.max_workers,
        "runs": [{"total_s": k.total_s, "lost_steps": k.lost_steps, "layout": k.layout} for k in kills],
        "median_total_s": statistics.median(totals),
        "max_total_s": max(totals),
        "max_lost_steps": max(kill.lost_steps for kill in kills),
    }


def _kill_one(job: JobConfig, coordinator: Any, draw: random.Random) -> Kill:
    def settled(status: dict[str, Any]) -> bool:
        leader = _leader(status)
        full = len(status["members"]) == job.cluster.max_workers
        return full and bool(leader) and leader["step"] >= status["resume_step"] + SETTLE_STEPS

    before = _until(coordinator, settled)
    victim = draw.choice(before["members"])
    time.sleep(draw.random() * 0.2)  # any phase of a step
    killed_s = time.time()
    os.kill(before["pages"][victim]["pid"], signal.SIGKILL)
    after = _until(
        coordinator,
        lambda s: s["generation"] != before["generation"] and _leader(s).get("first_step_at_s", 0) > killed_s,
    )
    failure = after["failures"][-1]
    return Kill(_leader(after)["first_step_at_s"] - killed_s, failure["lost_steps"], after["layout"])


def _leader(status: dict[str, Any]) -> dict[str, Any]:
    """The page of rank 0 of the running generation; empty while none has come."""
    for page in status["pages"].values():
        if f"{page['term']}.{page['n']}" == status["generation"] and page["rank"] == 0:
            return dict(page)
    return {}


def _until(coordinator: Any, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while True:
        status = poll(coordinator, 0)
        if status is not None and reached(status):
            return status
        if time.monotonic() > deadline or (status is not None and status["done"]):
            state = status["state"] if status else "unreachable"
            raise PicotronError(f"bench recovery: the run is {state} and did not get on in {WAIT_S:g} s")
        time.sleep(POLL_S)
