"""A worker that the kernel ends for want of memory is told from any other kill."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.ray_cluster import local_ray
from tests.support.runs.memory_group import MemoryGroup, memory_group, until
from tests.support.runs.ray_runs import check_ledger, in_one_process, losses, tiny_job

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]
ROOM_BYTES = 128 * 2**20


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    found = memory_group("oom")
    yield found
    found.close()


class Run:
    """A run through its own door, in a control group."""

    def __init__(self, job: JobConfig, folder: Path, group: MemoryGroup) -> None:
        self.job, self.log = job, folder / "driver.log"
        (folder / "job.yaml").write_text(json.dumps(job.model_dump(mode="json")))
        command = [sys.executable, "-m", "picotron_ray.launch", str(folder / "job.yaml")]
        values = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=group.enter, env=values
            )

    def says(self, pattern: str) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        return re.search(pattern, self.log.read_text()) is not None

    def finish(self) -> dict[str, Any]:
        """Wait for the end; returns the summary."""
        code = self.process.wait(timeout=200)
        assert code == 0, self.log.read_text()[-6000:]
        [summary] = Path(self.job.storage.url).rglob("summary.json")
        return dict(json.loads(summary.read_text()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if (left := local_ray.find(self.job.name)) is not None:
            local_ray.stop(left, grace_s=0.0, discard=True)


def job_of(name: str, folder: Path) -> JobConfig:
    return tiny_job(
        name,
        folder / "runs",
        steps=500,
        cluster={"max_workers": 3},
        checkpoint={"interval_steps": 100},
    )


def test_a_worker_that_the_kernel_ends_for_want_of_memory_is_told_as_that(
    group: MemoryGroup, tmp_path: Path
) -> None:
    job = job_of("oom-kernel", tmp_path)
    run = Run(job, tmp_path, group)
    try:
        until(lambda: run.says(r"step +\d\d"), "the run did not begin")
        group.use_up(ROOM_BYTES)
        summary = run.finish()
    finally:
        run.close()
    assert [failure["kind"] for failure in summary["failures"]] == ["out-of-memory"]
    first, *_, last = [generation["layout"] for generation in summary["generations"]]
    assert last != first, "the same layout would run out of memory again"
    assert losses(job) == pytest.approx(in_one_process(job), rel=1e-9)
    check_ledger(job)
