"""Operations that nothing ends hold up neither the next generation nor the end of the process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.gloo.leaving import FINALISING_S, OPERATION_S, WAYS, closing, stay
from tests.gloo.pool import Job, Pool

TIMEOUT_S = 6.0


def test_closing_does_not_wait_for_an_operation_that_still_runs(pool: Pool) -> None:
    _, seen = pool.run(2, closing, TIMEOUT_S)
    assert seen["took"] < TIMEOUT_S / 2, f"close took {seen['took']:.1f} s"
    assert seen["behind"]
    assert seen["next"] == 1.0
    assert seen["more"] == 0, f"{seen['more']} threads of gloo outlived the operation's timeout"


def test_a_process_ends_although_an_operation_still_runs(pool: Pool, tmp_path: Path) -> None:
    members = pool.need(len(WAYS))
    processes = {}
    for how, worker in zip(WAYS, members, strict=True):
        prefix = f"leaving/{tmp_path.name}/{how}"
        worker.send(Job(pool.host, pool.port, prefix, 0, 2), stay, (str(tmp_path / "left"),))
        line = [sys.executable, "-m", "tests.gloo.leaving", pool.host, str(pool.port), prefix, how]
        processes[how] = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for how, process in processes.items():
            assert process.stdout is not None
            assert process.stdout.readline() == "leaving\n", process.communicate(timeout=5)[1]
            began = time.monotonic()
            _, said = process.communicate(timeout=OPERATION_S[how] / 2 if how != "finalising" else 30)
            assert process.returncode == 0, f"{how}: {said[-2000:]}"
            if how == "finalising":
                assert time.monotonic() - began < FINALISING_S + 10
    finally:
        (tmp_path / "left").touch()
        for process in processes.values():
            process.kill()
            process.communicate()
        for worker in members:
            worker.receive()
