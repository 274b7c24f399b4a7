"""Doors that see a run's storage, but neither its Ray nor its state folder: a shell, user or machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.memory_group import until

pytestmark = pytest.mark.timeout(400)  # seconds on an idle machine
RUN = "elsewhere"


class Shell:
    """A shell with a state folder and a place for snapshots of its own."""

    def __init__(self, folder: Path, storage: Path) -> None:
        (folder / "slots").mkdir(parents=True)
        self.said = folder / "said"
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        self.overrides = (f"name={RUN}", f"storage.url={storage}", "cluster.device=cpu")
        self.overrides += (f"snapshot.folder={folder / 'slots'}", "checkpoint.interval_steps=300")
        self.overrides += ("evaluate.interval_steps=100000",)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "picotron_ray.launch", "tiny", *self.overrides, *words]
        with self.said.open("w") as out:
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=self.environment)

    def ended(self, launch: subprocess.Popen[bytes], expect: int) -> str:
        """Wait for a launch; returns what it said."""
        code, said = launch.wait(200), self.said.read_text()
        assert code == expect, said
        return said

    def command(self, *words: str, expect: int = 0) -> str:
        command = [sys.executable, "-m", "picotron_ray.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=self.environment)
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout if expect == 0 else done.stderr

    def step(self) -> int:
        """Newest step of the run; 0 while it is being launched."""
        command = [sys.executable, "-m", "picotron_ray.cli", "status", RUN, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=self.environment)
        status: dict[str, Any] = json.loads(done.stdout.splitlines()[0]) if done.stdout else {}
        return int(status.get("step", 0))


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[tuple[Shell, Shell]]:
    both = Shell(tmp_path / "one", tmp_path / "runs"), Shell(tmp_path / "two", tmp_path / "runs")
    yield both
    for shell in both:
        with_it = [sys.executable, "-m", "picotron_ray.cli", "stop", RUN, "--now", "--discard"]
        subprocess.run(with_it, capture_output=True, timeout=100, env=shell.environment)


@pytest.mark.deep
def test_a_run_is_ended_by_nobody_who_does_not_say_so(shells: tuple[Shell, Shell]) -> None:
    here, there = shells
    run = here.start("steps=100000")
    until(lambda: run.poll() is not None or here.step() > 310, "no step of the run", 200)
    assert run.poll() is None, here.said.read_text()

    collect = ("checkpoints", "gc", "tiny", *there.overrides)
    said = there.command(*collect, expect=2)
    assert re.fullmatch(r"error: run 'elsewhere' goes on elsewhere.* process \d+ on .*--force.*\n", said), (
        said
    )
    said = there.ended(there.start("steps=100000"), 2)
    assert re.search(r"error: name: run 'elsewhere' goes on elsewhere.*--take-over", said), said
    assert run.poll() is None, "it goes on"

    assert there.command(*collect, "--force")
    said = here.ended(run, 3)
    assert re.search(r"because: `checkpoints gc` \(process \d+ on .*nobody has taken the run over", said), (
        said
    )
    kept = int(re.findall(r"run elsewhere was fenced off by another claim at step (\d+)", said)[0])
    assert kept >= 600, "it heard with its next commit"

    status = here.command("status", RUN, expect=4)
    held = re.search(r"has ended and keeps step (\d+) in memory.*launch it again", status)
    assert held, status
    assert int(held[1]) >= 600, "the last step that all had sealed, which may be one before the last heard of"

    said = here.ended(here.start(f"steps={kept + 20}", "--json"), 0)
    summary = json.loads(said.splitlines()[-1])
    first = next(entry for entry in summary["generations"] if entry["term"] > 2)
    assert first["start_step"] >= 600, "its snapshots were kept; committed were 300 steps"
    assert summary["ledger"]["lost"] == 0


@pytest.mark.deep
def test_a_coordinator_that_ray_starts_again_ends_no_run_of_its_successor(
    shells: tuple[Shell, Shell], tmp_path: Path
) -> None:
    """It knows nothing of the terms since its own; its claim of the next one would fence who has the run."""
    here, there = shells
    overtaken = here.start("steps=100000", "checkpoint.interval_steps=100000")
    until(lambda: overtaken.poll() is not None or here.step() > 10, "no step of the run", 200)
    assert overtaken.poll() is None, here.said.read_text()
    coordinator = json.loads((tmp_path / "runs" / RUN / "life" / "000001.json").read_text())["process"]["pid"]
    os.kill(coordinator, signal.SIGSTOP)  # else it may hear of the other claim before it dies
    run = there.start("steps=100000", "--take-over")
    until(lambda: run.poll() is not None or there.step() > 10, "no step of the run's successor", 200)
    os.kill(coordinator, signal.SIGKILL)
    said = here.ended(overtaken, 3)
    assert re.search(r"because: another launch has taken the run over: .* claimed term 2", said), said
    assert re.search(r"run elsewhere was fenced off by another claim\n", said), "of no step it knows"
    step = there.step()
    until(lambda: run.poll() is not None or there.step() > step, "the successor stands still", 100)
    assert run.poll() is None, there.said.read_text()
    there.command("stop", RUN, "--now")
    run.wait(200)
