"""Kills in a run of picotron_ray.

One run goes on for the whole benchmark, which replaces killed workers by itself.

The time of detection comes from the coordinator's record of the failure. The others come from the heartbeat
pages of the next generation's members, which the workers write themselves. They are read from shared memory,
200 times a second after a kill, which costs under 1 % of a core.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from picotron_ray.bench.common.observe_run import committed_rows, generation_of, id_of, leader_of, pages
from picotron_ray.bench.common.statistics import WINDOW_STEPS, KillFigures, lost_samples, step_time
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.runtime.driver.driver import ensure_coordinator
from picotron_ray.runtime.driver.follow_run import poll, take_down
from picotron_ray.runtime.heartbeat import PageView
from picotron_ray.runtime.ray_cluster import connect

WAIT_S = 180.0
STATUS_S = 0.25
PAGE_S = 0.005


@dataclass(frozen=True, slots=True)
class _Observations:
    """Observations of one kill, before its samples are counted."""

    kill: KillFigures
    step_s: float


def kill_run_workers(
    job: JobConfig, runs: int, settle_steps: int, draw: random.Random, say: Callable[[str], None]
) -> tuple[list[KillFigures], float]:
    """Kill ``runs`` workers, one after the other; returns the kills and the time of an undisturbed step."""
    seen = []
    with _running(job) as coordinator:
        for number in range(1, runs + 1):
            seen.append(_kill_one(job, coordinator, settle_steps, draw))
            kill = seen[-1].kill
            say(f"ours {number}: {kill.total_s:.3f} s, {kill.lost_steps} steps lost")
        horizon = seen[-1].kill.step + WINDOW_STEPS
        _until(coordinator, lambda status: status["step"] >= horizon)
        coordinator.request.remote("stop")
        _until(coordinator, lambda status: status["done"])
    rows = committed_rows(job)
    kills = []
    for entry in seen:
        lost = lost_samples(rows, entry.kill.step, job.data.global_batch)
        values = {name: getattr(entry.kill, name) for name in KillFigures.__dataclass_fields__}
        kills.append(KillFigures(**{**values, "lost_samples": lost}))
    return kills, sorted(entry.step_s for entry in seen)[len(seen) // 2]


@contextmanager
def _running(job: JobConfig) -> Iterator[Any]:
    local = connect.connect(job, begins=False)  # it goes with this process
    coordinator = None
    try:
        coordinator, _ = ensure_coordinator(job, owns_ray=local is not None)
        yield coordinator
    finally:
        take_down(local, coordinator)


def _kill_one(job: JobConfig, coordinator: Any, settle_steps: int, draw: random.Random) -> _Observations:
    progress: list[tuple[float, int]] = []

    def settled(status: dict[str, Any]) -> bool:
        if len(status["members"]) < job.cluster.max_workers:
            progress.clear()
            return False
        leader = leader_of(generation_of(pages(job), status["generation"]))
        if leader is not None and leader.first_step_at_s:
            progress.append((time.time(), leader.step))
            return leader.step >= status["resume_step"] + settle_steps
        return False

    before = _until(coordinator, settled)
    step_s = step_time(progress) if len(progress) > 1 else 0.0
    time.sleep(draw.random() * job.checkpoint.interval_steps * step_s)  # any step between two checkpoints
    victim = draw.choice(generation_of(pages(job), before["generation"]))
    killed_s = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    return _Observations(_recovered(job, coordinator, before, killed_s), step_s)


def _recovered(job: JobConfig, coordinator: Any, before: dict[str, Any], killed_s: float) -> KillFigures:
    """Follow the next generation until it has finished a new step."""
    members = _members_after_step(job, before["generation"], killed_s)
    after = _until(coordinator, lambda status: len(status["failures"]) > len(before["failures"]))
    failure = after["failures"][len(before["failures"])]
    horizon = failure["step"]
    first_s = max(page.first_step_at_s for page in members)
    total_s = _wait_until_step(job, members[0], horizon + 1) if failure["lost_steps"] else first_s
    detected_s = after["began_s"] + failure["detected_s"]
    built_s = max(page.built_at_s for page in members)
    return KillFigures(
        detect_s=detected_s - killed_s,
        rebuild_s=built_s - detected_s,
        restore_s=max(page.restored_at_s for page in members) - built_s,
        total_s=total_s - killed_s,
        total_without_replay_s=first_s - killed_s,
        lost_steps=failure["lost_steps"],
        lost_samples=0,  # counted when the whole ledger is committed
        step=horizon,
    )


def _members_after_step(job: JobConfig, old: str, killed_s: float) -> list[PageView]:
    """The pages of the next generation once all its members have finished a step."""
    while time.time() < killed_s + WAIT_S:
        found = pages(job)
        fresh = {id_of(page) for page in found if page.first_step_at_s > killed_s and id_of(page) != old}
        members = generation_of(found, min(fresh, key=_order)) if fresh else []
        if members and all(page.first_step_at_s for page in members):
            return members
        time.sleep(PAGE_S)
    raise PicotronError(f"bench recovery: no new step within {WAIT_S:g} s of the kill")


def _order(generation: str) -> tuple[int, ...]:
    return tuple(int(part) for part in generation.split("."))


def _wait_until_step(job: JobConfig, member: PageView, step: int) -> float:
    """Wait until ``member`` has finished ``step``; returns seconds since the epoch, to `PAGE_S`."""
    deadline = time.time() + WAIT_S
    while time.time() < deadline:
        if any(page.worker == member.worker and page.step >= step for page in pages(job)):
            return time.time()
        time.sleep(PAGE_S)
    raise PicotronError(f"bench recovery: step {step} was not reached within {WAIT_S:g} s")


def _until(coordinator: Any, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while True:
        status = poll(coordinator, 0)
        if status is not None and reached(status):
            return status
        if time.monotonic() > deadline or (status is not None and status["done"]):
            state = f"{status['state']}: {status['detail']}" if status else "unreachable"
            raise PicotronError(f"bench recovery: the run is {state} and did not get on in {WAIT_S:g} s")
        time.sleep(STATUS_S)
