"""Cost to a live run of being watched: the page with a browser on it, scrapes of all metrics, telemetry.

Blocks of steps with and without page and scrapes come in interleaved pairs, whose order is drawn by seed.
Between them the page's process is stopped. Step times give an interval as of `bench.profile`; CPU seconds are
read off the processes of the run that are on this machine. Telemetry cannot be turned off: what a step of it
costs is measured here, as by `bench telemetry`, and counted for each step and rank.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from picotron_ray.bench.profile.bench import PASS_STEPS, interval
from picotron_ray.bench.telemetry import bench as telemetry
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.runtime.driver import recordings
from picotron_ray.runtime.driver.tool_orders import RunTools

BOUND = 0.01
"""Share of the run's CPU seconds that watching may take."""
SERVED_S, CALL_S = 60.0, 10.0
SETTLE_S = 0.5
ACTORS = ("ray::Agent", "ray::Coordinator", "ray::WorkerActor")
Say = Callable[[str], None]


@dataclass
class CpuSeconds:
    """CPU and wall seconds of blocks: of the workers, of agents and coordinator, of the page."""

    wall_s: float = 0.0
    workers_s: float = 0.0
    service_s: float = 0.0
    page_s: float = 0.0

    @property
    def run_s(self) -> float:
        """Of all."""
        return self.workers_s + self.service_s + self.page_s


@dataclass
class PageAndScraper:
    """A page with one browser on it, and a scraper, both of which stand still unless they are to look."""

    page: psutil.Process
    url: str
    token: str
    endpoints: tuple[str, ...]
    scrape_s: float
    looks: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    pushed: int = 0
    scraped: int = 0

    def begin(self) -> None:
        """Have both work from now on."""
        for work in (self._browse, self._scrape):
            threading.Thread(target=work, daemon=True).start()

    def set(self, looks: bool) -> None:
        """Look, or stand still."""
        self.looks.set() if looks else self.looks.clear()
        self.page.resume() if looks else self.page.suspend()

    def _browse(self) -> None:
        headers = {"Authorization": f"Bearer {self.token}"}
        while not self.over.is_set():
            request = urllib.request.Request(f"{self.url}api/stream", headers=headers)
            with suppress(OSError), urllib.request.urlopen(request, timeout=600) as stream:
                for _ in stream:
                    self.pushed += 1

    def _scrape(self) -> None:
        while not self.over.is_set():
            self.looks.wait()
            for endpoint in self.endpoints:
                with suppress(OSError), urllib.request.urlopen(endpoint, timeout=CALL_S) as answer:
                    self.scraped += len(answer.read())
            time.sleep(self.scrape_s)


def bench(run: str, pairs: int, steps: int, scrape_s: float, seed: int, say: Say) -> dict[str, Any]:
    """Measure; returns ratios of step times, their interval, and CPU seconds by part.

    Args:
        scrape_s: seconds between scrapes of all endpoints.

    Raises:
        ConfigError: there is no such run, or it does not train now.
        PicotronError: the page does not start.
    """
    tools, draw = RunTools(run), random.Random(seed)
    served = tools.status.get("metrics") or {"endpoints": {}}
    endpoints = tuple(f"http://{at}/metrics" for at in served["endpoints"].values())
    processes = actors([page["pid"] for page in tools.status["pages"].values()])
    ratios: list[float] = []
    spent = {True: CpuSeconds(), False: CpuSeconds()}
    with watcher_of(run, endpoints, scrape_s) as watcher:
        for number in range(pairs):
            first = draw.random() < 0.5
            seconds = {}
            for watched in (first, not first):
                watcher.set(watched)
                time.sleep(SETTLE_S)
                seconds[watched] = _block_s(tools, steps, processes, watcher.page, spent[watched])
            ratios.append(seconds[True] / seconds[False])
            say(f"{number + 1} of {pairs}: {ratios[-1]:.4f}")
        pushed, scraped = watcher.pushed, watcher.scraped
    if not (pushed and scraped):
        raise PicotronError(f"nothing was looked at: {pushed} lines pushed, {scraped} bytes scraped")
    kind = "pipeline" if tools.spec.layout.pp > 1 else "loop"
    costs = {
        row["passes"]: row["step_us"] for row in telemetry.bench(1000, 4, 8, lambda line: None)["worker"]
    }
    looked = {"lines_pushed": pushed, "bytes_scraped": scraped, "endpoints": len(endpoints)}
    means = {"run": run, "pairs": pairs, "steps": steps, "scrape_s": scrape_s, "ratios": ratios}
    blocks = steps + PASS_STEPS
    cost = shares(spent[True], spent[False], 1e-6 * costs[kind] * blocks * pairs * tools.world_size)
    return {**means, **looked, **interval(ratios), **cost}


def actors(workers: Collection[int]) -> list[psutil.Process]:
    """Agents, coordinator and workers of a run that are on this machine.

    Args:
        workers: pids of the run's.

    Raises:
        ConfigError: workers of another run are on this machine: whose the agents are cannot be told.
    """
    found = [each for each in psutil.process_iter() if _title(each).startswith(ACTORS)]
    strange = [each.pid for each in found if _title(each).startswith(ACTORS[-1]) and each.pid not in workers]
    if strange:
        raise ConfigError(
            f"run: processes {strange} on this machine are workers of another run; end that one"
        )
    return found


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return "".join(process.cmdline()[:1])
    return ""


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _block_s(
    tools: RunTools, steps: int, processes: list[psutil.Process], page: psutil.Process, spent: CpuSeconds
) -> float:
    """Median seconds of a step of a block; adds what CPU seconds it took."""
    before = [_cpu_s(process) for process in processes]
    page_s, began_s = _cpu_s(page), time.monotonic()
    order = {"kind": "times", "wait": PASS_STEPS, "warmup": 0, "active": steps}
    key, answers = recordings.record(tools, (0,), order)
    recordings.drop(tools, (0,), key)
    spent.wall_s += time.monotonic() - began_s
    spent.page_s += _cpu_s(page) - page_s
    for process, earlier in zip(processes, before, strict=True):
        more_s = max(0.0, _cpu_s(process) - earlier)
        if _title(process).startswith(ACTORS[-1]):
            spent.workers_s += more_s
        else:
            spent.service_s += more_s
    return statistics.median(answers[0]["steps_s"])


def shares(watched: CpuSeconds, plain: CpuSeconds, telemetry_s: float) -> dict[str, Any]:
    """CPU seconds that watching takes, as a share of the run's while it is watched.

    Scrapes are answered by agents and coordinator: theirs are what these take more of, a wall second.

    >>> part = shares(CpuSeconds(100, 180, 11, 1), CpuSeconds(100, 180, 10.5, 0), 0.1)
    >>> round(part["share"], 5), part["exporter_s"], part["small"]
    (0.00833, 0.5, True)
    """
    exporter_s = max(0.0, watched.service_s - plain.service_s * watched.wall_s / plain.wall_s)
    share = (watched.page_s + exporter_s + telemetry_s) / watched.run_s
    parts = {"page_s": watched.page_s, "exporter_s": exporter_s, "telemetry_s": telemetry_s}
    return {**parts, "run_s": watched.run_s, "wall_s": watched.wall_s, "share": share, "small": share < BOUND}


@contextmanager
def watcher_of(run: str, endpoints: tuple[str, ...], scrape_s: float) -> Iterator[PageAndScraper]:
    """Serve a run's page in a process of its own.

    Raises:
        PicotronError: it does not start.
    """
    command = [sys.executable, "-m", "picotron_ray.cli", "dashboard", run, "--port", "0", "--json"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        killer = threading.Timer(SERVED_S, process.kill)
        killer.start()
        line = process.stdout.readline()
        killer.cancel()
        if not line:
            raise PicotronError(f"`picotron-ray dashboard {run}` did not start (exit {process.wait()})")
        told = json.loads(line)
        where = f"http://{told['host']}:{told['port']}/"
        watcher = PageAndScraper(psutil.Process(process.pid), where, told["token"], endpoints, scrape_s)
        watcher.begin()
        try:
            yield watcher
        finally:
            watcher.over.set()
            watcher.set(True)
            process.send_signal(signal.SIGTERM)


def lines(found: dict[str, Any]) -> list[str]:
    """Say the figures."""
    word = "unchanged" if found["unchanged"] else "not shown to be unchanged"
    small = "under" if found["small"] else "NOT under"
    parts = ", ".join(f"{part} {found[f'{part}_s']:.3f}" for part in ("page", "exporter", "telemetry"))
    return [
        f"step time watched over unwatched: {found['ratio']:.4f}, 95 % interval"
        f" {found['low']:.4f} to {found['high']:.4f} (half-width {100 * found['half_width']:.1f} %),"
        f" {found['pairs']} pairs: {word}",
        f"CPU seconds of {found['run_s']:.1f}: {parts}; {100 * found['share']:.2f} %,"
        f" {small} {100 * BOUND:g} %",
        f"a page with one browser, {found['endpoints']} endpoints scraped each {found['scrape_s']:g} s:"
        f" {found['lines_pushed']} lines, {found['bytes_scraped'] / 1024:.0f} KiB",
    ]
