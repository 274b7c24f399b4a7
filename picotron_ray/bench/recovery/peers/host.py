"""Host of a peer: starts it, kills its workers one after the other, and ends it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import psutil

from picotron_ray.bench.common.event_log import Event, Events
from picotron_ray.bench.common.statistics import WINDOW_STEPS, KillFigures, kill_from_events, step_time
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError

WAIT_S = 300.0
POLL_S = 0.25


def environment() -> dict[str, str]:
    """Make the environment of a peer's processes: ours, without the address of another Ray."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def job_of(folder: Path) -> tuple[JobConfig, float]:
    """The job that the benchmark left in ``folder``, and the time of a step in seconds."""
    saved = json.loads((folder / "job.json").read_text())
    return JobConfig.model_validate(saved["job"]), float(saved["step_s"])


class Peer(ABC):
    """Framework under test. Its processes log events into ``folder/events`` (``bench.common.event_log``)."""

    name: str

    def __init__(self, folder: Path, job: JobConfig, step_s: float) -> None:
        self.folder, self.job = folder, job
        self._processes: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps({"job": job.model_dump(mode="json"), "step_s": step_s}))
        self.events = Events(folder / "events")

    @abstractmethod
    def start(self) -> None:
        """Start all processes; they train until they are ended."""

    @abstractmethod
    def revive(self) -> None:
        """Start what is to take a dead worker's place, where the framework does not do it itself."""

    def launch(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own; its output goes to a log in the folder."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        self._processes.append(process)
        return process

    def stop(self) -> None:
        """End all processes that were launched, and their children."""
        for process in self._processes:
            if process.poll() is None:
                family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                for member in family:
                    if member.is_running():
                        member.kill()
            process.wait()

    def check(self) -> None:
        """Raise PicotronError with the log's last line where every process has ended by itself."""
        if self._processes and all(process.poll() is not None for process in self._processes):
            lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
            raise PicotronError(f"bench recovery: {self.name} ended by itself: {''.join(lines)[:300]}")


def kill_workers(
    peer: Peer, runs: int, settle_steps: int, draw: random.Random, say: Callable[[str], None]
) -> tuple[list[KillFigures], float]:
    """Kill ``runs`` workers, one after the other; returns the kills and the time of an undisturbed step."""
    kills, step_times = [], []
    peer.start()
    try:
        for number in range(1, runs + 1):
            era = _settled(peer, settle_steps)
            step_times.append(step_time([(event["t"], event["step"]) for event in era]))
            time.sleep(draw.random() * peer.job.checkpoint.interval_steps * step_times[-1])
            victim = draw.choice(sorted({event["pid"] for event in era}))
            killed_s = time.time()
            os.kill(victim, signal.SIGKILL)
            kills.append(_recovered(peer, killed_s))
            say(
                f"{peer.name} {number}: {kills[-1].total_s:.3f} s, {kills[-1].lost_steps} steps and"
                f" {kills[-1].lost_samples} samples lost"
            )
            peer.revive()
    finally:
        peer.stop()
    return kills, sorted(step_times)[len(step_times) // 2]


def _settled(peer: Peer, settle_steps: int) -> list[Event]:
    """Wait until all workers have trained together for a while; returns the steps of that membership."""
    workers = peer.job.cluster.max_workers

    def era() -> list[Event]:
        done = [event for event in peer.events.read() if event["what"] == "step"]
        return [event for event in done if event["era"] == done[-1]["era"]]

    def settled() -> bool:
        steps = era()
        full = bool(steps) and steps[-1]["members"] == workers and len({s["pid"] for s in steps}) == workers
        return full and steps[-1]["step"] >= steps[0]["step"] + settle_steps

    _until(peer, settled, "all workers trained together")
    return era()


def _recovered(peer: Peer, killed_s: float) -> KillFigures:
    """Wait until a new membership has finished `WINDOW_STEPS` new steps; returns the kill's figures."""

    def done() -> bool:
        events = peer.events.read()
        old = {event["era"] for event in events if "era" in event and event["t"] <= killed_s}
        steps = [event for event in events if event["what"] == "step"]
        horizon = max(event["step"] for event in steps if event["era"] in old)
        return any(event["step"] > horizon + WINDOW_STEPS for event in steps if event["era"] not in old)

    _until(peer, done, "new steps were finished after a kill")
    return kill_from_events(peer.events.all, killed_s, peer.job.data.global_batch)


def _until(peer: Peer, reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        peer.check()
        if time.monotonic() > deadline:
            raise PicotronError(f"bench recovery: {peer.name}: not within {WAIT_S:g} s: {what}")
        time.sleep(POLL_S)
