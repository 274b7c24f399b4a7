"""A launch that is stopped while it starts its Ray: nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs.memory_group import until

WORDS = ("steps=5", "cluster.device=cpu", "cluster.min_workers=1", "cluster.max_workers=1")


def mine(state: Path) -> list[str]:
    """Command lines of living processes that were started for a launch with that state folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(state).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("number", "after_s", "codes"),
    [
        pytest.param(signal.SIGTERM, 0.3, (0, 130), marks=pytest.mark.deep),
        pytest.param(signal.SIGHUP, 1.5, (0, 130), marks=pytest.mark.deep),
        (signal.SIGKILL, 2.0, (-signal.SIGKILL,)),
        # Inside `ray.init` Ray's own handler stands, which aborts: nothing may be left then either.
        pytest.param(signal.SIGTERM, 4.0, (0, 130, -signal.SIGABRT), marks=pytest.mark.deep),
    ],
)
def test_a_launch_that_is_ended_while_its_ray_starts_leaves_none(
    tmp_path: Path, number: signal.Signals, after_s: float, codes: tuple[int, ...]
) -> None:
    """It was left for ever: no coordinator was there to end it, and `status` denied it."""
    state = tmp_path / "state"
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "PYTHONUNBUFFERED": "1"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "picotron_ray.cli", "train", "tiny", "name=early-stop"]
    command += [f"storage.url={tmp_path / 'runs'}", *WORDS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as launch:
        assert launch.stdout is not None
        assert any("starting a Ray" in line for line in iter(launch.stdout.readline, ""))
        time.sleep(after_s)
        launch.send_signal(number)
        told = launch.stdout.read()
        assert launch.wait(60) in codes, told
    until(lambda: not mine(state), f"left: {mine(state)}; {told}")
