"""Every door opens the dataset once and chooses the layout once. No Ray is started here."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from picotron_ray import ElasticTrainer
from picotron_ray.checkpoint.snapshot import slot_pool
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.driver import driver
from picotron_ray.runtime.driver.resolve_job import PATHS, check_machine, resolve_words
from tuning import plan


class EnoughError(Exception):
    """Everything before Ray is through."""


def enough(*_: Any) -> None:
    raise EnoughError


ONCE = {"datasets": 1, "layouts": 2}  # the layout, and that for a worker less, which slots have to hold too


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the datasets that a door opens and the times that the planner ranks layouts for it."""
    counts = {"datasets": 0, "layouts": 0}

    def counting(what: str, module: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(module, name)

        def called(*arguments: Any, **named: Any) -> Any:
            counts[what] += 1
            return real(*arguments, **named)

        monkeypatch.setattr(module, name, called)

    from picotron_ray.data import dataset
    from picotron_ray.planner import search

    # below every door's own import of the public names
    counting("datasets", dataset, "DataSplits")
    for name in ("_cheapest", "_ranked"):
        counting("layouts", search, name)
    counting("layouts", plan, "ranked")
    return counts


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = f"snapshot.folder={tmp_path}"
    return [f"storage.url={tmp_path / 'runs'}", folder, "cluster.device=cpu", "metrics.enabled=false"]


def test_launch_opens_the_dataset_once_and_chooses_the_layout_once(
    words: list[str], counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way of a launch up to its Ray, which is not started here."""
    monkeypatch.setattr(driver.connect, "connect", enough)
    with open(os.devnull, "w") as sink, pytest.raises(EnoughError):
        driver.drive("tiny", words, console=Console(file=sink))
    assert counted == ONCE


def test_the_trainer_opens_the_dataset_once_and_chooses_the_layout_once(
    words: list[str], counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.connect, "connect", enough)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    trainer = ElasticTrainer(load_job("tiny", words))
    assert counted == {"datasets": 0, "layouts": 0}
    with pytest.raises(EnoughError):
        trainer.fit()
    assert counted == ONCE


def test_the_job_that_was_checked_is_the_one_that_runs(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where only the overflow folder has room, the slots lie there, and not only in launch's note."""
    small, disk = tmp_path / "small", tmp_path / "disk"
    small.mkdir()
    disk.mkdir()
    room = {str(small): 1 << 20, str(disk): 1 << 40}
    monkeypatch.setattr(slot_pool, "free_bytes", lambda folder: room[str(folder)])
    monkeypatch.setattr(driver.connect, "connect", lambda *_: "local")
    monkeypatch.setattr(driver, "find_coordinator", lambda run: None)
    monkeypatch.setattr(driver, "take_down", lambda *parts: None)
    ran: list[JobConfig] = []

    def started(job: JobConfig, *rest: object, **named: object) -> None:
        ran.append(job)
        raise EnoughError

    monkeypatch.setattr(driver, "ensure_coordinator", started)
    folders = [f"snapshot.folder={small}", f"snapshot.overflow_folder={disk}"]
    said = io.StringIO()
    with pytest.raises(EnoughError):
        driver.drive("tiny", [*words, *folders], console=Console(file=said, width=1000))
    assert said.getvalue().count(f"; using {disk} instead (slower)") == 1
    [job] = ran
    assert (job.snapshot.folder, job.snapshot.overflow_folder) == (str(disk), str(small))


def test_a_checked_machine_is_asked_once(words: list[str], counted: dict[str, int]) -> None:
    """As ElasticTrainer does on the Ray that it is given."""
    assert check_machine(resolve_words("tiny", words, (PATHS,)).job, own_ray=True).notes == ()
    assert counted == ONCE


def test_a_sweep_opens_the_dataset_once_and_ranks_layouts_once(
    words: list[str], counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from picotron_ray.runtime.driver import follow_run
    from picotron_ray.runtime.ray_cluster import connect
    from picotron_ray.runtime.ray_cluster.placement import NodeView
    from tuning import connected, room, stages, sweep

    monkeypatch.setattr(connect, "connect", lambda job, begins: None)
    monkeypatch.setattr(follow_run, "take_down", lambda local: None)
    monkeypatch.setattr(room, "living_nodes", lambda: [NodeView("a", "h", 16, 0, 16, 0)])
    monkeypatch.setattr(connected, "_only_one", lambda name: True)
    monkeypatch.setattr(stages.Sweep, "run", lambda self: {"layouts": len(self._begin())})
    job = resolve_words("tiny", words, (PATHS,)).job
    options = sweep.SweepOptions(name="s", trials=4, steps=4)
    with open(os.devnull, "w") as sink:
        found = sweep.run(job, options, 1, Console(file=sink))
    assert found["layouts"] >= 1
    assert counted == {"datasets": 1, "layouts": 1}


def test_bench_mfu_opens_the_dataset_once_and_chooses_the_layout_once(
    words: list[str], counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from picotron_ray.bench.mfu import run

    monkeypatch.setattr(run, "measure", lambda *_, **__: [])
    monkeypatch.setattr(run, "result", lambda *_: {})
    run.bench("tiny", words, run.MfuOptions(1, 1, 0, 1, False, "none", None, None, None), lambda line: None)
    assert counted == {"datasets": 1, "layouts": 1}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_way_from_the_command_line_to_the_worker() -> None:
    """A real launch, traced: half the files and fewer steps back up than in commit 03561a3 (12 and 6).

    The driver resolves twice: the words, and then, with the launch marked as under way, all that they name.
    """
    done = subprocess.run(
        [sys.executable, "tests/support/house/trace_job.py"], capture_output=True, text=True, check=True
    )
    (found,) = re.findall(r"(\d+) files on the way, (\d+) steps back up", done.stdout)
    assert int(found[0]) <= 6, done.stdout
    assert int(found[1]) <= 4, done.stdout
