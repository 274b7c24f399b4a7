"""Operations that nothing ends hold up neither the next generation nor the end of the process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.gloo.parallel_jobs.leaving_jobs import WAYS, closing, stay
from tests.support.gloo.pool import Job, Pool

TIMEOUT_S = 12.0
PROMPT_S = 45.0  # to start, leave and end; the operations run longer, but for the one that shall not


def test_closing_does_not_wait_for_an_operation_that_still_runs(pool: Pool) -> None:
    _, seen = pool.run(2, closing, TIMEOUT_S)
    assert seen["took"] < TIMEOUT_S / 2, f"close took {seen['took']:.1f} s"
    assert seen["behind"]
    assert seen["next"] == 1.0
    assert seen["more"] <= 0, f"{seen['more']} threads of gloo outlived the operation's timeout"


@pytest.mark.deep
def test_a_process_ends_although_an_operation_still_runs(pool: Pool, tmp_path: Path) -> None:
    members = pool.need(len(WAYS))
    processes = {}
    began = time.monotonic()
    for how, worker in zip(WAYS, members, strict=True):
        prefix = f"leaving/{tmp_path.name}/{how}"
        worker.send(Job(pool.host, pool.port, prefix, 0, 2), stay, (str(tmp_path / "left"),))
        line = [
            sys.executable,
            "-m",
            "tests.support.gloo.parallel_jobs.leaving_jobs",
            pool.host,
            str(pool.port),
            prefix,
            how,
        ]
        processes[how] = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for how, process in processes.items():
            said, errors = process.communicate(timeout=began + PROMPT_S - time.monotonic())
            assert said == "leaving\n", f"{how}: {errors[-2000:]}"
            assert process.returncode == 0, f"{how}: {errors[-2000:]}"
    finally:
        (tmp_path / "left").touch()
        for process in processes.values():
            process.kill()
            process.communicate()
        for worker in members:
            worker.receive()
