"""Generations whose tools are given orders while they train: the test is the person, and the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationSpec, Outcome
from picotron_ray.runtime.worker.generation import GenerationRun
from picotron_ray.train.step_sync import STOP
from tests.support.gloo.pool import Job
from tests.support.gloo.train_jobs.remesh_jobs import resources_of

Orders = Sequence[Mapping[str, Any]]
LONGEST_S = 90.0
LEAST_STEPS = 20
"""Steps that every run takes."""


def ordered(
    job: Job, config: JobConfig, spec: GenerationSpec, folder: str, orders: Orders
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Run a generation; from its first step on, give its tools orders one after the other, then stop it.

    Args:
        orders: each with ``until``, a key and value that its answer, asked for again and again, must have;
            those of another ``rank`` are left out.

    Returns:
        The outcome, and the answers.
    """
    home = resources_of(config, Path(folder))
    run = GenerationRun(home, spec, (job.host, job.port))
    answers: list[dict[str, Any]] = []
    mine = [order for order in orders if order.get("rank") in (None, job.rank)]

    def person() -> None:
        give(home.tools.order, home.page, mine, answers)
        while home.page.value("step") < LEAST_STEPS and not run.done.is_set():
            time.sleep(0.005)
        run.interrupt(STOP)

    thread = threading.Thread(target=person, daemon=True)
    thread.start()
    outcome = run.run()
    thread.join(LONGEST_S)
    return outcome, answers


def give(
    order: Callable[[Mapping[str, Any]], dict[str, Any]], page: Any, orders: Orders, answers: list[Any]
) -> None:
    """Give orders one by one, from the first step on."""
    deadline = time.monotonic() + LONGEST_S
    while page.value("step") < 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    for each in orders:
        time.sleep(each.get("after_s", 0.0))
        answer = order(each)
        for key, wanted in each.get("until", {}).items():
            while answer.get(key) != wanted and time.monotonic() < deadline:
                time.sleep(0.005)
                answer = order(each)
        answers.append({**answer, "page": read_page_of(page), "at_s": time.monotonic()})


def read_page_of(page: Any) -> dict[str, float]:
    """What the page says now."""
    return {"step": page.value("step"), "phase_limit_s": page.value("phase_limit_s")}
