"""A run through its own door that is struck from outside, at random, for as long as one likes.

Every process of it is struck: SIGKILL and SIGSTOP of one worker, of two, of all, of the agent, the
coordinator, the rendezvous store and the driver that follows it. Most blows wait until the run is whole
again; some come while it still recovers from another. What is stopped stays stopped, but for agents and
coordinators: a frozen one of them is a machine that swaps, and goes on after seconds.
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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picotron_ray.bench.common.observe_run import id_of, pages
from picotron_ray.comm.rendezvous_store import read_record
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.driver.follow_run import find_coordinator
from picotron_ray.runtime.heartbeat import PageView, process_alive
from picotron_ray.runtime.node_agent.rendezvous import RECORD
from picotron_ray.runtime.ray_cluster import connect
from picotron_ray.runtime.ray_cluster import local_ray as lifecycle
from picotron_ray.runtime.ray_cluster.cleanup import SIGNATURE
from picotron_ray.runtime.ray_cluster.names import run_folder

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
KINDS: dict[str, tuple[str, int, signal.Signals]] = {
    "worker killed": ("worker", 1, KILL),
    "worker stopped": ("worker", 1, STOP),
    "two workers killed": ("worker", 2, KILL),
    "two workers stopped": ("worker", 2, STOP),
    "all workers killed": ("worker", 99, KILL),
    "all workers stopped": ("worker", 99, STOP),
    "agent killed": ("agent", 1, KILL),
    "agent stopped": ("agent", 1, STOP),
    "coordinator killed": ("coordinator", 1, KILL),
    "coordinator stopped": ("coordinator", 1, STOP),
    "store killed": ("store", 1, KILL),
    "store stopped": ("store", 1, STOP),
    "driver killed": ("driver", 1, KILL),
    "driver stopped": ("driver", 1, STOP),
}
COSTS_NOTHING = ("agent killed", "driver killed", "driver stopped")
"""After these the same workers go on in the same generation."""
FROZEN_S = (1.0, 8.0)
CALM_S = (0.3, 2.0)
OVERLAPS = 0.2
"""Part of the blows that come within ``AT_ONCE_S`` of the one before."""
AT_ONCE_S = 1.5
WHOLE_S = 180.0
"""Longest wait until a run is whole again."""
LOOK_S, ASK_S = 0.005, 0.1
STEPS = 5
"""A run is whole again when it has finished so many steps with all its members."""


@dataclass(slots=True)
class Blow:
    """One blow; ``alone``: the run was whole when it came, and again before the next one."""

    kind: str
    at_s: float
    generation: str
    alone: bool = True
    to_next_step_s: float = -1.0
    remeshed: bool = False


@dataclass
class Soak:
    """One run, its drivers and what befell it. A thread looks at the pages, whatever the caller waits for."""

    job: JobConfig
    folder: Path
    draw: random.Random
    blows: list[Blow] = field(default_factory=list)
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    frozen: list[tuple[float, int]] = field(default_factory=list)
    steps: deque[tuple[float, int, str]] = field(default_factory=deque)
    """(time, step, generation) of every step that was seen to be finished for the first time."""
    over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Launch, and connect this process to the Ray that the first driver started."""
        (self.folder / "job.yaml").write_text(json.dumps(self.job.model_dump(mode="json")))
        threading.Thread(target=self.look_on, name="soak", daemon=True).start()
        self.drive()
        self.until(lambda: (ray := lifecycle.find(self.job.name)) is not None and ray.alive, "no Ray")
        found = lifecycle.find(self.job.name)
        assert found is not None
        self.ray = found
        connect.attach(found)
        self.until(self.whole, "the run did not begin")

    def drive(self) -> None:
        """Start a driver that follows the run, as a user would after the one before was lost."""
        with (self.folder / f"driver-{len(self.drivers)}.log").open("wb") as log:
            command = [sys.executable, "-m", "picotron_ray.launch", str(self.folder / "job.yaml")]
            self.drivers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

    def strike_for(self, seconds: float, kinds: list[str] | None = None) -> None:
        """Strike until ``seconds`` are over: each of ``kinds`` once in a drawn order, then any of them."""
        end, first = time.monotonic() + seconds, list(kinds or KINDS)
        self.draw.shuffle(first)
        while first or time.monotonic() < end:
            overlaps = not first and self.draw.random() < OVERLAPS
            kind = first.pop() if first else self.draw.choice(list(kinds or KINDS))
            self.strike(kind, then_wait=not overlaps)
            time.sleep(self.draw.uniform(*((0.0, AT_ONCE_S) if overlaps else CALM_S)))
        self.until(self.whole, "the run is not whole at the end")

    def strike(self, kind: str, then_wait: bool = True) -> None:
        """Send the signal; ``then_wait``: until the run is whole again."""
        target, count, number = KINDS[kind]
        alone = then_wait and (not self.blows or self.blows[-1].to_next_step_s >= 0)
        before = self.workers()
        victims = self.victims(target, count)
        blow = Blow(kind, time.monotonic(), self.generation(), alone)
        self.blows.append(blow)
        for pid in victims:
            os.kill(pid, number)
        if number is STOP and target in ("agent", "coordinator"):
            until = blow.at_s + self.draw.uniform(*FROZEN_S)
            self.frozen += [(until, pid) for pid in victims]
        if target == "driver":
            self.drive()
        if then_wait:
            settled_from = len(self.steps)
            self.until(lambda: self.struck(victims, number, target) and self.whole(settled_from), kind)
            blow.to_next_step_s = self.pause_after(blow)
            blow.remeshed = self.generation() != blow.generation
            print(f"{kind}: {blow.to_next_step_s:.2f} s{', re-meshed' * blow.remeshed}", flush=True)
            if alone and kind in COSTS_NOTHING:
                assert not blow.remeshed, f"{kind} cost a generation"
                assert self.workers() == before, f"{kind} cost workers"

    # --- what there is to strike -------------------------------------------------------------------------

    def victims(self, target: str, count: int) -> list[int]:
        """Pids of up to ``count`` living processes; fewer than that only where there are no more."""
        found: list[int] = []

        def some() -> bool:
            find: dict[str, Callable[[], list[int]]] = {
                "worker": lambda: sorted(self.workers().values()),
                "agent": self.agents,
                "coordinator": self.coordinators,
                "store": self.stores,
                "driver": lambda: [self.drivers[-1].pid] if self.drivers[-1].poll() is None else [],
            }
            found[:] = find[target]()
            return bool(found)

        self.until(some, f"no {target}")
        return self.draw.sample(found, min(count, len(found)))

    def workers(self) -> dict[str, int]:
        return {page.worker: page.pid for page in self.living()}

    def living(self) -> list[PageView]:
        return [page for page in pages(self.job) if process_alive(page.pid, page.start_ticks)]

    def agents(self) -> list[int]:
        folder = run_folder(self.job.snapshot.folder, self.job.name)
        found = [tuple(map(int, path.read_text().split())) for path in folder.glob(f"*/{SIGNATURE}")]
        return [pid for pid, ticks in found if process_alive(pid, ticks)]

    def stores(self) -> list[int]:
        folder = run_folder(self.job.snapshot.folder, self.job.name)
        found = [record for path in folder.glob(f"*/{RECORD}") if (record := read_record(path))]
        return [each["pid"] for each in found if process_alive(each["pid"], each["start_ticks"])]

    def coordinators(self) -> list[int]:
        import ray

        try:
            handle = find_coordinator(self.job.name)
            return [] if handle is None else [ray.get(handle.pid.remote(), timeout=5)]
        except (ray.exceptions.RayError, TimeoutError):
            return []

    # --- what is seen ------------------------------------------------------------------------------------

    def generation(self) -> str:
        return self.steps[-1][2] if self.steps else ""

    def look_on(self) -> None:
        while not self.over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Note a step that was not finished before; let go on what was frozen for long enough."""
        now = time.monotonic()
        for until, pid in [each for each in self.frozen if each[0] <= now]:
            self.frozen.remove((until, pid))
            if process_alive_pid(pid):
                os.kill(pid, signal.SIGCONT)
        living = self.living()
        if not living:
            return
        newest = max((page.term, page.n) for page in living)
        members = [page for page in living if (page.term, page.n) == newest and page.first_step_at_s]
        step = max((page.step for page in members), default=-1)
        if members and step > (self.steps[-1][1] if self.steps else 0):
            self.steps.append((now, step, id_of(members[0])))

    def until(self, reached: Callable[[], Any], otherwise: str) -> None:
        """Wait until it is so; fails with the run's log where it does not come."""
        deadline = time.monotonic() + WHOLE_S
        while time.monotonic() < deadline:
            if reached():
                return
            time.sleep(ASK_S)
        logs = sorted(self.folder.glob("driver-*.log"))
        raise AssertionError(f"{otherwise}; {self.blows[-3:]}\n{logs[-1].read_text()[-6000:]}")

    def whole(self, since: int = 0) -> bool:
        """Whether all members take steps: ``STEPS`` of them since the ``since``-th, in one generation."""
        newest = list(self.steps)[since:][-STEPS:]
        members = [page for page in self.living() if newest and id_of(page) == newest[-1][2]]
        return (
            len(newest) == STEPS
            and len({generation for *_, generation in newest}) == 1
            and len(members) == self.job.cluster.max_workers
            and not self.frozen
        )

    def struck(self, victims: list[int], number: signal.Signals, target: str) -> bool:
        """Whether what was struck has its successor, or goes on."""
        if target in ("agent", "coordinator"):
            found = self.agents() if target == "agent" else self.coordinators()  # looked at once: it may go
            return bool(found) and (number is STOP or found[0] not in victims)
        return target != "worker" or not set(victims) & set(self.workers().values())

    def pause_after(self, blow: Blow) -> float:
        """Longest time without a new step, from the blow to the first step of another generation, if any."""
        longest, last = 0.0, blow.at_s
        for at, _, generation in list(self.steps):
            if at < blow.at_s:
                continue
            longest, last = max(longest, at - last), at
            if generation != blow.generation:
                break
        return longest

    # --- the end -----------------------------------------------------------------------------------------

    def stop(self) -> int:
        """Ask for a stop, as a user does; returns the exit code of the driver that follows the run."""
        import ray

        self.over.set()
        for driver in self.drivers[:-1]:
            driver.kill()
            driver.wait()
        handle = find_coordinator(self.job.name)
        ray.get(handle.request.remote("stop"), timeout=60)
        ray.shutdown()
        return self.drivers[-1].wait(timeout=WHOLE_S)

    def table(self) -> str:
        """Median and worst seconds to the next step, by kind of blow."""
        lines = [f"{'struck':28}{'times':>6}{'median s':>10}{'worst s':>10}{'re-meshed':>11}"]
        rows = {kind: [b for b in self.blows if b.kind == kind and b.alone] for kind in KINDS}
        rows["while it still recovered"] = [b for b in self.blows if not b.alone and b.to_next_step_s >= 0]
        for kind, blows in rows.items():
            times = [blow.to_next_step_s for blow in blows]
            if times:
                middle, worst, again = statistics.median(times), max(times), sum(b.remeshed for b in blows)
                lines.append(f"{kind:28}{len(times):6}{middle:10.2f}{worst:10.2f}{again:11}")
        return "\n".join([*lines, f"{len(self.blows)} blows, {self.steps[-1][1]} steps"])


def process_alive_pid(pid: int) -> bool:
    """Whether a process of this number exists, ours or not."""
    return Path(f"/proc/{pid}").exists()
