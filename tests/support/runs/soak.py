"""Faults from outside on a run that goes on: signals to its processes, and the time until it steps again."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from picotron_ray.comm.rendezvous_store import read_record
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.heartbeat import process_alive, process_start_ticks, read_page
from picotron_ray.runtime.node_agent.rendezvous import RECORD
from picotron_ray.runtime.ray_cluster.cleanup import SIGNATURE
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, coordinator_name, run_folder
from tests.support.runs.ray_runs import Watched

POLL_S = 0.01
FROZEN_S = 2.0  # of what nobody is to kill; less than elastic.node_timeout_s
WEIGHTS = {
    ("worker", "KILL"): 5, ("worker", "STOP"): 4, ("two workers", "KILL"): 2, ("two workers", "STOP"): 2,
    ("all workers", "KILL"): 1, ("all workers", "STOP"): 1, ("agent", "KILL"): 4, ("agent", "STOP"): 2,
    ("coordinator", "KILL"): 3, ("coordinator", "STOP"): 2, ("store", "KILL"): 2, ("store", "STOP"): 2,
    ("driver", "KILL"): 2, ("driver", "STOP"): 1,
}  # fmt: skip
THAWED = ("agent", "coordinator", "driver")
"""What goes on after a while; stopped workers and stores have to be found and replaced."""
Kind = tuple[str, str]


class Driver:
    """A driver of the run, in a process of its own; another one where it has ended."""

    def __init__(self, job: JobConfig, address: str, folder: Path) -> None:
        self._config, self._log = folder / "job.yaml", folder / "driver.log"
        self._config.write_text(yaml.safe_dump(job.model_dump(mode="json")))
        self._environment = {**os.environ, "RAY_ADDRESS": address}
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "picotron_ray.launch", str(self._config)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)

    def told(self) -> str:
        return self._log.read_text()

    def stop(self, timeout_s: float) -> int:
        """Stop the run by SIGTERM to its driver; returns the driver's exit code."""
        if self.process.poll() is not None:
            self.start()
        deadline = time.monotonic() + timeout_s
        while "[running]" not in self.told().rpartition("attached to run")[2] and time.monotonic() < deadline:
            time.sleep(0.1)
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@dataclass
class Soak:
    """A run under signals drawn by seed.

    Fields:
        took_s: seconds until a step was finished that began after the signal, by kind.
        costs: what the death of an agent did to the run, where it did anything.
    """

    job: JobConfig
    driver: Driver
    watched: Watched
    draw: random.Random
    took_s: dict[Kind, list[float]] = field(default_factory=lambda: defaultdict(list))
    costs: list[str] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)  # pid: start of every process that was met

    @classmethod
    def begin(cls, job: JobConfig, address: str, folder: Path, seed: int) -> Soak:
        """Launch the run, and wait until it steps."""
        import ray

        driver, deadline = Driver(job, address, folder), time.monotonic() + 120
        while time.monotonic() < deadline and driver.process.poll() is None:
            with suppress(ValueError):
                watched = Watched(job, ray.get_actor(coordinator_name(job.name), NAMESPACE))
                watched.until(lambda s: s["step"] >= 10)
                return cls(job, driver, watched, random.Random(seed))
            time.sleep(0.2)
        raise AssertionError(f"no run began:\n{driver.told()}")

    # --- the run's processes -----------------------------------------------------------------------------

    def _folder(self) -> Path:
        return run_folder(self.job.snapshot.folder, self.job.name)

    def step(self) -> int:
        """Newest step that a living worker's page tells of; -1 while there is none."""
        pages = (read_page(path) for path in self._folder().glob("*/*.page"))
        living = [page for page in pages if page is not None and process_alive(page.pid, page.start_ticks)]
        return max((page.step for page in living if page.phase != "idle"), default=-1)

    def processes(self) -> dict[str, list[int]]:
        """Pids of what lives, by what it is."""
        found: dict[str, list[int]] = {"worker": sorted(self.watched.pids().values())}
        for path in self._folder().glob(f"*/{SIGNATURE}"):
            with suppress(OSError, ValueError):
                found["agent"] = [int(path.read_text().split()[0])]
        for path in self._folder().glob(f"*/{RECORD}"):
            if (record := read_record(path)) is not None:
                found["store"] = [record["pid"]]
        found["driver"] = [self.driver.process.pid]
        if (coordinator := self._coordinator()) is not None:
            found["coordinator"] = [coordinator]
        alive = {what: [pid for pid in pids if _lives(pid)] for what, pids in found.items()}
        for pids in alive.values():
            for pid in pids:
                with suppress(OSError):
                    self.seen[pid] = process_start_ticks(pid)
        return alive

    def _coordinator(self) -> int | None:
        import ray

        try:
            return int(ray.get(self.watched.coordinator.pid.remote(), timeout=5))
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return None

    # --- signals -----------------------------------------------------------------------------------------

    def strike(self) -> None:
        """Send one signal, or several at once, and wait until the run steps again."""
        what, how = self.draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        victims = self._victims(what)
        if not victims or self.step() < 0:
            return
        costs_nothing = (what, how) == ("agent", "KILL")
        before = self._so_far() if costs_nothing else None
        step, began = self.step(), time.monotonic()
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, f"SIG{how}"))
        frozen = victims if how == "STOP" and what in THAWED else []
        self._await(lambda: self.step() >= step + 2, f"{what} {how}", frozen, began)
        self.took_s[what, how].append(time.monotonic() - began)
        while frozen:
            self._thaw(frozen, began)
            time.sleep(POLL_S)
        time.sleep(self.draw.uniform(0.2, 4.0))
        if before is not None and (after := self._so_far()) != before:
            self.costs.append(f"step {step}: {before} became {after}")
        if self.driver.process.poll() is not None:
            self.driver.start()

    def _victims(self, what: str) -> list[int]:
        found = self.processes()
        workers = found["worker"]
        if what == "all workers":
            return workers
        if what == "two workers":
            return self.draw.sample(workers, 2) if len(workers) > 2 else []
        pids = found.get(what, [])
        return [self.draw.choice(pids)] if pids else []

    def _so_far(self) -> int:
        """How many failures the run has had."""
        return len(self.watched.look()["failures"])

    def _await(self, reached: Callable[[], bool], what: str, frozen: list[int], began: float) -> None:
        while not reached():
            self._thaw(frozen, began)
            waited_s = time.monotonic() - began
            assert waited_s < 180, f"no step for {waited_s:.0f} s after {what}\n{self.watched.log()}"
            time.sleep(POLL_S)

    def _thaw(self, frozen: list[int], began: float) -> None:
        if frozen and time.monotonic() - began >= FROZEN_S:
            for pid in frozen:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            frozen.clear()

    # --- what came of it -----------------------------------------------------------------------------------

    def left(self) -> list[int]:
        """Processes of the run that still live."""
        return [pid for pid, ticks in self.seen.items() if process_alive(pid, ticks)]

    def table(self) -> str:
        """Seconds to the next step by kind, as text."""
        rows = [f"{'signal':<24}{'times':>6}{'median s':>10}{'worst s':>9}"]
        for (what, how), took_s in sorted(self.took_s.items()):
            median_s = statistics.median(took_s)
            rows.append(f"{f'SIG{how} {what}':<24}{len(took_s):>6}{median_s:>10.2f}{max(took_s):>9.2f}")
        return "\n".join(rows)


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return process_alive(pid, process_start_ticks(pid))
    return False


def soaked(soak: Soak, seconds: float) -> dict[str, Any]:
    """Strike for so long, then stop the run; returns its summary."""
    import ray

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        soak.strike()
        soak.watched.look()
    step = soak.watched.look()["step"]
    soak.watched.until(lambda s: s["step"] > step + 10)
    soak.processes()
    coordinator = soak.watched.coordinator
    code = soak.driver.stop(120)
    assert code == 130, soak.driver.told()[-3000:]
    status = soak.watched.until(lambda s: s["done"], 120)
    with suppress(ray.exceptions.RayError):
        ray.kill(coordinator)
    return dict(status["summary"])
