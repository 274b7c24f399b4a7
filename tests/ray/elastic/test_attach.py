"""An IDE's debugger on a rank of a real run: it stops the rank for long, reads its values, and goes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from picotron_ray.runtime.driver import attach_debugger, control
from picotron_ray.runtime.driver.console import held_lines
from picotron_ray.train import loop
from tests.support.runs.dap import Ide
from tests.support.runs.ray_runs import Watched, losses, start, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(500), pytest.mark.deep]
STEPS = 1500
HELD_S = 15.0
"""Many times what a phase may take without a debugger."""


def line_of(text: str) -> int:
    lines = Path(loop.__file__).read_text().splitlines()
    return next(at for at, line in enumerate(lines, 1) if text in line)


def job(name: str, folder: Path, attach: bool) -> Any:
    many = {"interval_steps": 500}
    return tiny_job(
        name, folder, steps=STEPS, layout={"dp": 2}, checkpoint=many, evaluate={**many, "samples": 4},
        cluster={"max_workers": 2}, elastic={"hang_floor_s": 1.0, "first_step_timeout_s": 10.0},
        debug={"attach": attach},
    )  # fmt: skip


def served(run: str, stop_s: float, rank: str = "1") -> tuple[threading.Thread, Queue[int], list[str]]:
    """`attach` in a thread of its own: that thread, the port, why it is over."""
    ports: Queue[int] = Queue()
    over = list[str]()

    def serve() -> None:
        try:
            over.append(attach_debugger.attach(run, rank, 0, stop_s, print, ports.put))
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            over.append(str(error))
            ports.put(-1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, ports, over


def test_a_rank_is_held_by_a_debugger_and_no_loss_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = start(job("attached", tmp_path / "runs", True))
    monkeypatch.setattr(control, "connect_to_run", lambda run: (watched.coordinator, None))
    watched.until(lambda status: status["step"] >= 5)
    thread, ports, over = served("attached", 240.0)
    ide = Ide(ports.get(timeout=120))
    ide.attach()
    at = str(loop.__file__), line_of("loss = agreement.loss_sum")
    held, frame = ide.stop_at(*at)
    step = int(ide.value("step", frame))
    assert float(ide.value("grad_norm", frame)) > 0
    time.sleep(HELD_S)
    seen = watched.look()
    assert seen["step"] <= step, "no rank goes on without it"
    assert any("a debugger is attached to rank" in line for line in held_lines(seen))
    assert [event["data"]["attached"] for event in watched.events if event["kind"] == "debugger"] == [True]
    ide.go_on(at[0], held)
    watched.until(lambda status: status["step"] > step + 20)
    another, ports, refused = served("attached", 240.0)
    another.join(60)
    assert "is attached to this rank already" in refused[0]
    check_that_a_stop_ends(watched, at)
    assert not watched.look()["failures"]
    thread.join(1)
    assert thread.is_alive(), "an IDE may come again"
    ide.leave()
    watched.finish()
    thread.join(90)
    assert over, "its end is the run's"

    calm = start(job("calm", tmp_path / "runs", False))
    monkeypatch.setattr(control, "connect_to_run", lambda run: (calm.coordinator, None))
    calm.until(lambda status: status["step"] >= 5)
    _, ports, over = served("calm", 10.0)
    assert ports.get(timeout=120) == -1
    assert "debug.attach is off" in over[0]
    calm.finish()
    assert losses(watched.job) == losses(calm.job)


def check_that_a_stop_ends(watched: Watched, at: tuple[str, int]) -> None:
    """Rank 0 is left standing: after its time it goes on without its debugger."""
    thread, ports, over = served("attached", 6.0, "0")
    ide = Ide(ports.get(timeout=120))
    ide.attach()
    _, frame = ide.stop_at(*at)
    step = int(ide.value("step", frame))
    began = time.monotonic()
    watched.until(lambda status: status["step"] > step + 5)
    thread.join(60)
    print(f"rank 0 went on after {time.monotonic() - began:.1f} s: {over[0]}")
    assert "has stood still for 6 s" in over[0]
    ide.event("closed")
