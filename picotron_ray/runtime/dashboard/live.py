"""A run that goes on, as its coordinator tells it, with the history that its storage has."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from itertools import pairwise
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.dashboard.agent_figures import NodeScrapes
from picotron_ray.runtime.dashboard.curves import Curves
from picotron_ray.runtime.dashboard.facts import RunFacts
from picotron_ray.runtime.dashboard.stored import StoredSource
from picotron_ray.runtime.driver import find_stored, follow_run
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay

log = logging.getLogger(__name__)
WHOLE_S = 10.0
"""Time between two questions for what grows with the ranks: windows, and the pages of all workers."""
FEW = 256
"""Workers up to which each answer has the pages of all."""
HISTORY_S = 5.0
"""Time between two looks into storage, unless a commit came."""
FIRST_S = 5.0
"""Longest wait of a first look for what storage knows."""
ANSWER_S = 3.0
EVENTS = 1000
"""Newest events that are kept."""


class LiveSource:
    """Reader of one run through its coordinator; for one thread.

    It counts as a follower of the run, so that the run's end is told here before the coordinator goes.
    """

    def __init__(self, run: str, coordinator: Any, local: LocalRay | None) -> None:
        self.run, self._coordinator, self._local = run, coordinator, local
        self._follower = f"dashboard-{uuid.uuid4().hex}"
        self._config: dict[str, Any] = {}
        self._stored: StoredSource | None = None
        self._reading: threading.Thread | None = None
        self._past: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])  # generations, commits
        self.curves = Curves()
        self._agents = NodeScrapes()
        self._members: list[str] = []
        self._nodes: dict[str, str] = {}  # by worker
        self._pages: dict[str, dict[str, Any]] = {}
        self._windows: dict[str, Any] = {}
        self._alerts: list[dict[str, Any]] = []
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self._term = 0
        self._whole_s = self._history_s = float("-inf")
        self._committed: Any = None
        self._notes: list[str] = []

    def look(self) -> RunFacts | None:
        """Return what is known now; None while the coordinator does not answer."""
        status = follow_run.poll(self._coordinator, self._seen(), ANSWER_S, self._follower)
        if status is None:
            return None
        self._hear(status)
        self._learn(status)
        self._read_history(status)
        status = {**status, "pages": self._pages, "windows": self._windows, "alerts": self._alerts}
        self._follow(status)
        return RunFacts(
            self.run,
            "live",
            status,
            self.curves,
            self._members,
            [self._nodes.get(worker, "") for worker in self._members],
            self._generations(status),
            self._past[1],
            slow_ranks=(status.get("telemetry") or {}).get("slow_ranks") or (),
            memory=self._memory(status),
            config=self._config,
            notes=self._notes,
            heard_s=time.time(),
        )

    def _seen(self) -> int:
        """Number of the newest event that is known here."""
        return int(self._events[-1]["seq"]) if self._events else 0

    def _hear(self, status: dict[str, Any]) -> None:
        """Keep the events, of which an answer has the new ones alone; a new term may number them anew."""
        if status["term"] != self._term and not status["continues"]:
            self._events.clear()
        if status["term"] != self._term:
            self._term = status["term"]
            whole = follow_run.poll(self._coordinator, self._seen(), ANSWER_S, self._follower)
            status["events"] = status["events"] if whole is None else whole["events"]
        self._events += [event for event in status["events"] if event["seq"] > self._seen()]
        status["events"] = list(self._events)

    def _learn(self, status: dict[str, Any]) -> None:
        """Take the members and their pages; of many, seldom."""
        self._members = list(status["members"])
        if not self._config:
            self._config = follow_run.ask(self._coordinator, "config", timeout_s=ANSWER_S) or {}
        if len(self._members) <= FEW:
            self._pages = status["pages"]
        if time.monotonic() - self._whole_s > WHOLE_S:
            whole = follow_run.ask(self._coordinator, "status", follow_run.ALL_SEEN, timeout_s=ANSWER_S)
            self._whole_s = time.monotonic()
            if whole is not None:
                self._pages, self._windows = whole["pages"], whole.get("windows") or {}
            told = follow_run.ask(self._coordinator, "alerts", timeout_s=ANSWER_S)
            self._alerts = list((told or {}).get("firing") or ())
        self._nodes.update({worker: page.get("node", "") for worker, page in self._pages.items()})
        if len(self._nodes) > 4 * len(self._members) + FEW:
            self._nodes = {worker: self._nodes.get(worker, "") for worker in self._members}

    def _follow(self, status: dict[str, Any]) -> None:
        told = {"mfu_ratio": self._agents.newest.get("mfu_ratio"), "goodput_ratio": status.get("goodput")}
        page = self._pages.get(self._members[0], {}) if self._members else {}
        figures = {"loss": status["loss"], "grad_norm": page.get("grad_norm") or None, **told}
        if status["step"]:
            self.curves.add(status["step"], {**figures, "at_s": time.time()})
            self.curves.fill([(status["step"], {"tokens_per_s": status["tokens_per_s"]})])
        if status.get("eval_step") is not None:
            self.curves.fill([(status["eval_step"], {"eval_loss": status["eval_loss"]})])

    def _read_history(self, status: dict[str, Any]) -> None:
        """Have storage looked at where a commit came, or it is time; one that hangs keeps nothing waiting."""
        news = (status["committed"], status["generation"]) != self._committed
        going = self._reading is not None and self._reading.is_alive()
        if going or (not news and time.monotonic() - self._history_s < HISTORY_S):
            return
        self._history_s, self._committed = time.monotonic(), (status["committed"], status["generation"])
        first = self._reading is None
        self._reading = threading.Thread(target=self._read_storage, name="history", daemon=True)
        self._reading.start()
        if first:
            self._reading.join(FIRST_S)

    def _read_storage(self) -> None:
        """Read what is new in storage, on a thread of its own."""
        try:
            if self._stored is None:
                job = JobConfig.model_validate(self._config)
                self._stored = StoredSource(self.run, find_stored.storage_of(job), self.curves)
            self._stored.read()
            self._past = self._stored.generations(), self._stored.commits()
            self._notes = self._stored.notes
        except Exception as error:  # the rest of the page goes on, and says so
            log.debug("storage of %s", self.run, exc_info=True)
            self._notes = [f"storage: what it knows is missing here: {error}"]

    def _generations(self, status: dict[str, Any]) -> list[dict[str, Any]]:
        rows = [dict(row) for row in self._past[0]]
        began = {
            event["data"].get("generation"): event["t"]
            for event in status["events"]
            if event["kind"] in ("generation", "recovery")
        }
        for row in rows:
            row["from_s"] = began.get(row["id"]) or row["from_s"]
        for row, after in pairwise(rows):
            row["to_s"] = after["from_s"] or row["to_s"]
        if rows and rows[-1]["id"] == status["generation"]:
            rows[-1] |= {"end_step": max(status["step"], rows[-1]["start_step"]), "to_s": None}
        return rows

    def _memory(self, status: dict[str, Any]) -> dict[str, Any]:
        slow = (status.get("telemetry") or {}).get("slow_ranks") or ()
        workers = [self._members[row["rank"]] for row in slow if row["rank"] < len(self._members)]
        first = [self._nodes.get(worker, "") for worker in [*self._members[:1], *workers]]
        self._agents.of((status.get("metrics") or {}).get("endpoints") or {}, first)
        return self._agents.newest

    def is_over(self, facts: RunFacts | None) -> bool:
        """Whether the coordinator has told the run's end, or is gone for good."""
        if facts is not None:
            return bool(facts.status["done"])
        return follow_run.is_gone(self.run, self._coordinator, self._local)

    def request(self, what: str) -> None:
        """Ask the coordinator for a stop or a checkpoint; raises LostRunError where it does not answer."""
        follow_run.tell(self._coordinator, self.run, what)

    @property
    def storage(self) -> Any:
        """Storage of the run, once it is known."""
        return None if self._stored is None else self._stored.storage

    def close(self) -> None:
        """End what runs beside."""
        self._agents.close()
