"""A run as its storage alone tells it: one that is over or dead, or that goes on elsewhere."""

from __future__ import annotations

import time
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage, decode_json, get_json, get_or_none
from picotron_ray.checkpoint.store.run_log import SCHEMA, entry_key
from picotron_ray.errors import ConfigError, CorruptError, NotFoundError
from picotron_ray.observability.rank_table import RankTable
from picotron_ray.observability.windows import TelemetryWindow
from picotron_ray.runtime.coordinator.event_log.files import decode_record
from picotron_ray.runtime.coordinator.run_record import EXIT_CODES
from picotron_ray.runtime.dashboard.curves import Curves
from picotron_ray.runtime.dashboard.facts import RunFacts
from picotron_ray.runtime.dashboard.history import MOST_COMMITS, MOST_GENERATIONS, History
from picotron_ray.runtime.run_storage.life_sign import SILENT_S
from picotron_ray.runtime.run_storage.run_json import newest_config
from picotron_ray.runtime.run_storage.run_store import RECORDS
from picotron_ray.runtime.run_storage.telemetry_archive import read_archive

ARCHIVE_S = 30.0
"""Time between two readings of the archive of a run that goes on."""
MOST_SLOW = 32
FROM_WINDOWS = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu_ratio", "goodput_ratio")


def refuse_newer(run: str, storage: Storage) -> None:
    """Raise ConfigError where a newer version of this package wrote the run's storage, or none did."""
    try:
        first = get_or_none(storage, entry_key(1))
        schema = None if first is None else decode_json(entry_key(1), first)["schema"]
    except (CorruptError, KeyError):
        return  # the log's own reader tells it
    if isinstance(schema, int) and schema > SCHEMA:
        raise ConfigError(
            f"run: the log of {run!r} in {storage.where} has schema {schema}, expected at most {SCHEMA}: a"
            " newer version of picotron_ray wrote it; install that one to look at the run"
        )


class StoredRun:
    """Reader of one run; for one thread."""

    def __init__(self, run: str, storage: Storage, curves: Curves | None = None) -> None:
        """
        Raises:
            ConfigError: a newer version wrote it.
            StorageError: storage does not answer.
        """
        refuse_newer(run, storage)
        self.run, self.storage = run, storage
        self.curves = curves or Curves()
        self.history = History(storage, self.curves)
        self._record: dict[str, Any] = {}
        self._record_key = ""
        self._windows: tuple[TelemetryWindow, ...] = ()
        self._table: tuple[RankTable | None, str] = None, ""
        self._archived_s = float("-inf")
        self._archive_notes: tuple[str, ...] = ()

    def look(self) -> RunFacts:
        """Read what is new; raises StorageError where storage does not answer."""
        self.read()
        facts = self._record.get("facts", {})
        config = newest_config(self.storage) or {}
        members, nodes = _members(facts.get("generations", []))
        found = RunFacts(
            self.run,
            "storage",
            self._status(facts, config),
            self.curves,
            members,
            nodes,
            self.generations(),
            self.commits(),
            config=config,
            notes=self.notes,
            heard_s=self._record.get("began_s", 0.0) + self._record.get("wall_s", 0.0),
        )
        table, generation = self._table
        if table is not None and generation == found.status["generation"] and table.ranks == len(members):
            found.table, found.slow_ranks = table, slow_rows(table)
        return found

    def read(self) -> None:
        """Read log, ledger, record and archive."""
        self.history.look()
        self._read_record()
        for step, loss in self._record.get("facts", {}).get("evaluations", ()):
            self.curves.fill([(int(step), {"eval_loss": loss})])
        if time.monotonic() - self._archived_s > ARCHIVE_S:
            self._archived_s = time.monotonic()
            self._read_archive()

    @property
    def notes(self) -> list[str]:
        """Lines on what could not be read."""
        return [*self.history.notes, *self._archive_notes]

    def _read_record(self) -> None:
        keys = sorted((entry.key for entry in self.storage.list(RECORDS)), key=_record_order)
        for key in reversed(keys):
            if key == self._record_key:
                return
            try:
                record = decode_record(self.storage.get(key))
            except NotFoundError:
                continue  # a newer one has replaced it
            if record is not None and isinstance(record.get("facts"), dict):
                self._record, self._record_key = record, key
                return

    def _read_archive(self) -> None:
        found = read_archive(self.storage)
        self._windows, self._table = found.windows, (found.ranks, found.ranks_generation)
        self._archive_notes = tuple(f"telemetry: {line}" for line in found.complaints[:4])
        self.curves.fill(
            (int(one.figures["step"]), {name: one.figures.get(name) for name in FROM_WINDOWS})
            for one in found.windows
            if "step" in one.figures
        )

    def generations(self) -> list[dict[str, Any]]:
        """Newest generations, oldest first; the record knows their ends better than the log."""
        known = {
            f"{one['term']}.{one['n']}": one for one in self._record.get("facts", {}).get("generations", ())
        }
        rows = self.history.generations()[-MOST_GENERATIONS:]
        for row in rows:
            one = known.get(row["id"])
            if one is not None:
                row["end_step"] = max(row["start_step"], one["end_step"])
                row |= {name: one.get(name) or None for name in ("predicted_s", "measured_s")}
        return rows

    def commits(self) -> list[dict[str, Any]]:
        """Newest commits, oldest first, with their sizes and times where the record has them."""
        facts = self._record.get("facts", {})
        sized = {one["step"]: one for one in facts.get("checkpoints", ())}
        told = {
            event["data"]["step"]: event["t"]
            for event in facts.get("events", ())
            if event.get("kind") == "commit" and "step" in event.get("data", {})
        }
        rows = self.history.commits()[-MOST_COMMITS:]
        return [{**row, "at_s": told.get(row["step"]), **sized.get(row["step"], {})} for row in rows]

    @property
    def window(self) -> dict[str, float]:
        """Figures of the newest archived window; none where there is no archive."""
        return dict(self._windows[-1].figures) if self._windows else {}

    def _status(self, facts: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        generations = facts.get("generations") or []
        newest = generations[-1] if generations else None
        rows = self.history.generations()
        step = max([int(at) for at, _ in self.curves.all("at_s")[-1:]] + [0])
        end = self._end()
        return {
            "run": self.run,
            **end,
            "term": self.history.newest_term,
            "began_s": self._record.get("began_s"),
            "wall_s": self._record.get("wall_s"),
            "goodput": self._record.get("goodput"),
            "generation": rows[-1]["id"] if rows else None,
            "layout": rows[-1]["layout"] if rows else None,
            "precision": config.get("precision"),
            "step": max(step, newest["end_step"] if newest and end["done"] else 0),
            "steps": config.get("steps"),
            "loss": self.curves.newest("loss"),
            "tokens_per_s": self.curves.newest("tokens_per_s"),
            "eval_loss": self.curves.newest("eval_loss"),
            "baseline_loss": facts.get("baseline_loss"),
            "committed": max((row["step"] for row in self.history.commits()[-1:]), default=None),
            "failures": facts.get("failures") or [],
            "events": facts.get("events") or [],
            "windows": {name: {"mean": value} for name, value in self.window.items()},
        }

    def _end(self) -> dict[str, Any]:
        """State of the run: how it ended, or whether it seems to go on elsewhere."""
        term = self.history.newest_term
        try:
            summary = get_json(self.storage, "summary.json")
        except (NotFoundError, CorruptError):
            summary = {}
        if summary and summary.get("term", 0) >= term:
            state = str(summary["status"])
            detail = str(summary.get("detail") or "")
            return {"state": state, "done": True, "detail": detail, "exit_code": EXIT_CODES.get(state)}
        if self._lives(term):
            text = "its coordinator signs in storage; this page asks storage alone"
            return {"state": "elsewhere", "done": False, "detail": text, "exit_code": None}
        text = "its last launch left no summary; launch it again to go on from its newest commit"
        return {"state": "cut-off", "done": True, "detail": text, "exit_code": None}

    def _lives(self, term: int) -> bool:
        """Whether the newest term's coordinator signed of late. Nothing is written, unlike by a launch."""
        key = f"life/{term:06d}.json"
        listed = [entry for entry in self.storage.list(key) if entry.key == key]
        try:
            ended = bool(get_json(self.storage, key)["ended"]) if listed else True
        except (NotFoundError, CorruptError, KeyError):
            ended = False
        return not ended and time.time() - listed[0].mtime_s < SILENT_S


def slow_rows(table: RankTable) -> list[dict[str, Any]]:
    """Slowest ranks of a table with all their columns, the slowest first."""
    slow = table.slowest(MOST_SLOW)
    rows = table.rows([one.rank for one in slow])
    return [{**row, **one._asdict()} for row, one in zip(rows, slow, strict=True)]


def _members(generations: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Workers and nodes by rank, of the newest generation whose members the record has."""
    for one in reversed(generations):
        if "names" in one:
            return list(one["names"]), [one["nodes"][at] for at in one["on"]]
    return [], []


def _record_order(key: str) -> tuple[int, ...]:
    parts = key.removeprefix(RECORDS).removesuffix(".json").split("-")
    return tuple(int(part) for part in parts if part.isdecimal())
