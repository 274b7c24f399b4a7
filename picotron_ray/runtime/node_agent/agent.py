"""Node agent: one torch-free Ray actor per node that outlives the workers.

It watches its workers' heartbeat pages twelve times a second, reports to the coordinator, kills by pid
(immediate, where ``ray.kill`` takes seconds), keeps the snapshot slots of living and dead workers,
uploads them to storage, serves the node's metrics, and holds the standing rendezvous store. It decides
nothing about the run: what it sees becomes an event of the coordinator, what it is told is done at once
and may be told twice.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader
from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX, list_slots
from picotron_ray.checkpoint.snapshot.slot_reader import set_pinned, verify
from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.codec import decode_spec, plain
from picotron_ray.coordinator.messages import Fragment, GenerationId, GenerationSpec, SlotInfo
from picotron_ray.errors import CorruptError, PicotronError, SlotError
from picotron_ray.observability.exporter import Exporter, PortTakenError, address
from picotron_ray.observability.nvml import Gpus
from picotron_ray.runtime.heartbeat import PageView, process_alive, read_page
from picotron_ray.runtime.node_agent.cpu_use import CpuUse
from picotron_ray.runtime.node_agent.metrics import AgentFigures
from picotron_ray.runtime.ray_cluster import cleanup, kept_slots
from picotron_ray.runtime.ray_cluster.fingerprint import node_versions
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, coordinator_name
from picotron_ray.runtime.ray_cluster.node_facts import look

log = logging.getLogger(__name__)
WATCH_S = 0.08


class Agent:
    """Ray actor. Several methods run at a time."""

    def __init__(self, job: dict[str, Any], node: str, folder: str, host: str) -> None:
        self._job = JobConfig.model_validate(job)
        self._node, self._host = node, host
        self._folder = Path(folder)
        cleanup.claim(self._folder)
        self._lock = threading.Lock()
        self._term = 0
        self._gpus = Gpus()
        self._gone: set[str] = set()  # workers whose end has been reported
        self._cpu_use = CpuUse()
        self._stalls: dict[str, int] = {}  # worker -> phase_count of the stall reported
        self._sealed: tuple[int, int, int] = (0, 0, -1)  # term, n, step last reported
        self._quarantined: set[str] = set()
        self._store_lock = threading.Lock()
        self._store: subprocess.Popen[str] | None = None
        self._store_address: tuple[str, int] | None = None
        self._storage: Storage | None = None
        self._metrics = self._serve_metrics() if self._job.metrics.enabled else {}
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    def _serve_metrics(self) -> dict[str, str]:
        """Listen for scrapes; returns ``{"address": …}``, or ``{"problem": …}`` where it cannot listen."""
        metrics = self._job.metrics
        host, labels = metrics.host or self._host, {"run": self._job.name, "node": self._node}
        figures = AgentFigures(self._folder, self._living)
        try:
            exporter = Exporter("agent", labels, figures, host, metrics.port)
        except PortTakenError as error:
            return {"problem": str(error)}
        return {"address": address(host, self._host, exporter.port)}

    # --- about this node -----------------------------------------------------------------------------

    def hello(self, term: int) -> dict[str, Any]:
        """Return what the node is and what runs on it; a newer term fences older coordinators off."""
        self._accept(term)
        with self._store_lock:
            self._start_store()  # now, so that it listens by the time the workers have imported torch
        self._stalls.clear()  # what an earlier coordinator was told, this one has not heard
        self._sealed = (0, 0, -1)
        spec = self._newest_spec()
        living = self._living()
        return {
            "node": self._node,
            "pid": os.getpid(),
            "versions": node_versions(self._job),
            "workers": [page.worker for page in living],
            "busy": [(page.worker, page.term, page.n) for page in living if page.phase != "idle"],
            "spec": spec,
            **self._kept(),
            "metrics": self._metrics,
            "facts": look(self._job.snapshot.folder, self._job.name, self._gpus),
        }

    def _newest_spec(self) -> GenerationSpec | None:
        specs = [decode_spec(json.loads(path.read_text())) for path in self._folder.glob("*.spec")]
        return max(specs, key=lambda spec: spec.id, default=None)

    def _kept(self) -> dict[str, Any]:
        """Slots that an earlier launch could not commit, and the newest generation that it knew of."""
        marker = kept_slots.read_marker(self._folder)
        if marker is None:
            return {"kept": (), "kept_by": None}
        listed = list_slots(self._folder)
        kept = tuple(self._info(path, header) for path, header in listed if path.name in marker["slots"])
        return {"kept": kept, "kept_by": decode_spec(marker["spec"]) if marker["spec"] else None}

    def store_address(self) -> tuple[str, int]:
        """Return the address of the standing rendezvous store on this node; waits until it listens."""
        with self._store_lock:
            store = self._start_store()
            if self._store_address is None:
                assert store.stdout is not None
                line = store.stdout.readline()
                if not line:
                    raise PicotronError(f"the rendezvous store on node {self._node[:8]} did not start")
                answer = json.loads(line)
                self._store_address = (answer["host"], answer["port"])
            return self._store_address

    def _start_store(self) -> subprocess.Popen[str]:
        """Return the store's process: the living one, or a new one, which takes seconds to listen."""
        if self._store is None or self._store.poll() is not None:
            command = [
                sys.executable,
                "-m",
                "picotron_ray.comm.rendezvous_store",
                "--parent-pid",
                str(os.getpid()),
            ]
            self._store_address = None
            self._store = subprocess.Popen(
                [*command, "--host", self._host], stdout=subprocess.PIPE, text=True
            )
        return self._store

    def figures(self) -> list[dict[str, Any]]:
        """Return the pages of the living workers, as heartbeats carry them."""
        return [asdict(page) for page in self._living()]

    # --- slots -----------------------------------------------------------------------------------------

    def inventory(self, term: int) -> tuple[SlotInfo, ...]:
        """Return all sealed slots of this node whose digests hold."""
        self._accept(term)
        found = []
        for path, header in list_slots(self._folder):
            if path.name in self._quarantined:
                continue
            try:
                verify(path)
            except (CorruptError, SlotError) as error:
                log.warning("slot %s is set aside: %s", path.name, error)
                continue
            found.append(self._info(path, header))
        return tuple(found)

    def _info(self, path: Path, header: SlotHeader) -> SlotInfo:
        return SlotInfo(
            node=self._node,
            slot=path.name,
            generation=GenerationId(header.term, header.n),
            step=header.step,
            rank=header.rank,
            fragments=tuple(Fragment(*fragment) for fragment in header.fragments),
        )

    def read_slot(self, name: str) -> bytes:
        """Return a whole slot file, for a worker on another node."""
        return (self._folder / Path(name).name).read_bytes()

    def quarantine(self, term: int, name: str) -> None:
        """Never offer this slot again."""
        self._accept(term)
        self._quarantined.add(name)

    def upload(
        self, term: int, generation: tuple[int, int], step: int, slots: tuple[str, ...]
    ) -> dict[str, Any]:
        """Put the chunks of pinned slots into storage; returns this node's part of the manifest."""
        self._accept(term)
        if self._storage is None:
            self._storage = open_storage(self._job.storage, self._job.name)
        paths = [self._folder / name for name in slots]
        codec, owner = self._job.checkpoint.codec, self._node[:16]
        _pin(paths, reading=True)
        try:
            part = upload_slots(paths, self._storage, *generation, step, owner=owner, codec=codec)
        except PicotronError:
            _pin(paths, reading=False)  # until it is asked for again, a newer checkpoint may take the slots
            raise
        return part.to_dict()

    def release(self, term: int, generation: tuple[int, int], step: int) -> None:
        """Unpin the slots up to a committed state, and delete those that dead workers left behind.

        Of slots that an earlier launch kept, the committed ones go too: the new workers' need the room.
        """
        self._accept(term)
        living = {page.worker for page in self._living()}
        kept = {info.slot: info for info in self._kept()["kept"]}
        done = {name for name, info in kept.items() if (*_pair(info), info.step) <= (*generation, step)}
        if done:
            kept_slots.let_go(self._folder, done, [n for n in done if owner(Path(n)) not in living])
        for path, header in list_slots(self._folder):
            if header.key > (*generation, step):
                continue
            if header.key < (*generation, step) and owner(path) not in living:
                path.unlink(missing_ok=True)
            else:
                set_pinned(path, False)

    def keep(self, term: int, key: tuple[int, int, int]) -> None:
        """Mark the slots of state (term, n, step): the next launch finds them, whatever ends this one."""
        self._accept(term)
        self._mark(key)

    def _mark(self, key: tuple[int, ...]) -> bool:
        """Mark the slots of a state beside those that are marked already; False where there are none."""
        before = self._kept()
        marked = {info.slot for info in before["kept"]}
        slots = {
            path.name: header.step
            for path, header in list_slots(self._folder)
            if not key or header.key == key or path.name in marked
        }
        if slots:
            kept_slots.mark(self._folder, slots, plain(self._newest_spec() or before["kept_by"]))
        return bool(slots)

    # --- workers -----------------------------------------------------------------------------------------

    def kill(self, term: int, worker: str) -> bool:
        """Kill a worker of this node by SIGKILL to its pid; True where it was alive."""
        self._accept(term)
        return self._kill_page(read_page(self._folder / f"{worker}.page"))

    def _kill_page(self, page: PageView | None) -> bool:
        if page is None or not process_alive(page.pid, page.start_ticks):
            return False
        os.kill(page.pid, signal.SIGKILL)
        return True

    def die(self) -> None:
        """Take the whole node away, as if unplugged: workers, slots, Ray's raylet, this agent."""
        self._closing.set()
        for page in self._pages():
            self._kill_page(page)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self, keep: tuple[int, ...] | None = None) -> None:
        """End the run on this node: kill what is left, remove the node's folder.

        Args:
            keep: (term, n, step) of a state whose slots stay for the next launch, empty: all that are sealed;
                None: none stays.
        """
        self._closing.set()
        self._watcher.join(timeout=2)
        for page in self._pages():
            self._kill_page(page)
        if self._store is not None:
            self._store.kill()
            self._store.wait()
        if keep is not None and self._mark(keep):
            kept_slots.strip(self._folder)
        else:
            cleanup.release(self._folder)

    # --- watching --------------------------------------------------------------------------------------

    def _accept(self, term: int) -> None:
        if term < self._term:
            raise PicotronError(
                f"refused: term {term} is older than {self._term}; another coordinator took over"
            )
        self._term = term

    def _pages(self) -> list[PageView]:
        pages = (read_page(path) for path in sorted(self._folder.glob("*.page")))
        return [page for page in pages if page is not None]

    def _living(self) -> list[PageView]:
        return [page for page in self._pages() if process_alive(page.pid, page.start_ticks)]

    def _watch(self) -> None:
        beat = 0.0
        while not self._closing.wait(WATCH_S):
            now = time.monotonic()
            due = now >= beat
            if due:
                beat = now + self._job.elastic.heartbeat_s
            try:
                self._look(now, heartbeat=due)
            except (ray.exceptions.RayError, ValueError) as error:
                log.debug("coordinator away: %s", error)  # workers carry on; the next look tries again

    def _look(self, now: float, heartbeat: bool) -> None:
        pages = self._pages()
        living = []
        for page in pages:
            if process_alive(page.pid, page.start_ticks):
                living.append(page)
            elif page.worker not in self._gone:
                self._tell("worker_exited", page.worker, "process gone")
                self._gone.add(page.worker)
        self._report_stalls(living, now)
        self._report_sealed(living)
        if heartbeat:
            self._tell("heartbeat", self._node, [asdict(page) for page in living])

    def _report_stalls(self, living: list[PageView], now: float) -> None:
        stuck = [
            page for page in living if page.stalled(now) and self._stalls.get(page.worker) != page.phase_count
        ]
        if stuck:
            self._cpu_use.look(living, now)
        for page in stuck:
            if self._cpu_use.excuses(page, living, now):
                continue
            self._tell("stalled", page.worker, [page.term, page.n], page.phase, now - page.phase_since_s)
            self._stalls[page.worker] = page.phase_count

    def _report_sealed(self, living: list[PageView]) -> None:
        newest = max(((page.term, page.n) for page in living), default=(0, 0))
        members = [page for page in living if (page.term, page.n) == newest]
        step = min((page.pinned for page in members), default=-1)
        if step >= 0 and (*newest, step) != self._sealed:
            slots = [
                self._info(path, header)
                for path, header in list_slots(self._folder)
                if (header.term, header.n, header.step) == (*newest, step)
            ]
            self._tell("sealed", self._node, newest, step, slots)
            self._sealed = (*newest, step)

    def _tell(self, method: str, *arguments: Any) -> None:
        coordinator = ray.get_actor(coordinator_name(self._job.name), NAMESPACE)
        getattr(coordinator, method).remote(*arguments)


def _pair(info: SlotInfo) -> tuple[int, int]:
    return (info.generation.term, info.generation.n)


def _pin(paths: list[Path], reading: bool) -> None:
    for path in paths:
        if path.exists():
            set_pinned(path, True, reading)


def owner(slot: Path) -> str:
    """Return the worker that wrote a slot: ``<worker>.<index>.slot``."""
    return slot.name.removesuffix(SUFFIX).rpartition(".")[0]
