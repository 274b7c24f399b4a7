"""History of a run in its storage: the log's generations and commits, and the ledger's losses and times.

Each look reads what is new since the last one. Of a long run's ledger it reads at most `MOST_SEGMENTS`
segments, the newest always and older ones evenly chosen, so that a page opens in seconds whatever the run's
length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.lineage import commits_on, newest_generation
from picotron_ray.checkpoint.store.manifest import Segment
from picotron_ray.checkpoint.store.outline import Outline
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.checkpoint.store.verify import stream_ledger
from picotron_ray.errors import CorruptError, NotFoundError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.dashboard.curves import Curves

MOST_SEGMENTS = 256
"""Ledger segments that one look reads."""
MOST_GENERATIONS = 200
MOST_COMMITS = 200
FIGURES = ("loss", "grad_norm", "learning_rate")


class History:
    """Reader of one run's log and ledger; fills ``curves``."""

    def __init__(self, storage: Storage, curves: Curves) -> None:
        self._storage, self._curves = storage, curves
        self._log = RunLog(storage)
        self._read: set[str] = set()
        self._spans: dict[str, tuple[float, float]] = {}  # by generation: first and last time of its steps
        self.notes: list[str] = []

    def look(self) -> None:
        """Read what is new.

        Raises:
            StorageError: storage does not answer.
        """
        self._log.refresh()
        self.notes = [f"log: {line}" for line in self._log.complaints()[:4]]
        newest = newest_generation(self._log)
        written = [entry for entry in self._log.entries() if entry.kind == "commit"]
        counting = [] if newest is None else commits_on(self._log.entries(), written, newest)
        unread = [entry for entry in counting if self._key(entry) not in self._read]
        for entry in chosen(unread, MOST_SEGMENTS):
            self._take(entry)
        self._read.update(self._key(entry) for entry in unread)

    def _key(self, entry: Entry) -> str:
        return str((entry.body.get("segment") or [""])[0])

    def _take(self, entry: Entry) -> None:
        row = entry.body.get("segment")
        if not row:
            return  # of an earlier version, whose manifests alone name them
        body = entry.body
        outline = Outline(body["step"], body["term"], body["n"], ledger=(Segment(*row),))
        try:
            self._curves.fill(self._rows(stream_ledger(self._storage, outline)))
        except (NotFoundError, CorruptError, ValueError, KeyError, TypeError) as error:
            self.notes.append(f"ledger: steps up to {body['step']} cannot be read: {error}")

    def _rows(self, lines: Iterable[str]) -> Iterable[tuple[int, dict[str, float | None]]]:
        before: dict[str, Any] = {}
        for text in lines:
            line = json.loads(text)
            step, at_s = int(line["step"]), line.get("at_s")
            figures = {name: line.get(name) for name in FIGURES}
            if at_s is not None:
                self._note_time(f"{line['term']}.{line['n']}", at_s)
                figures["at_s"] = at_s
                follows = before.get("step") == step - 1 and before["n"] == line["n"]
                if follows and at_s > before["at_s"]:
                    figures["tokens_per_s"] = line["tokens"] / (at_s - before["at_s"])
                before = line
            yield step, figures

    def _note_time(self, generation: str, at_s: float) -> None:
        first_s, last_s = self._spans.get(generation, (at_s, at_s))
        self._spans[generation] = min(first_s, at_s), max(last_s, at_s)

    def generations(self) -> list[dict[str, Any]]:
        """Newest generations, oldest first, as `RunFacts` has them."""
        found = [
            entry.body for entry in self._log.entries() if entry.kind == "generation" and entry.body["n"]
        ]
        rows = [self._generation(body) for body in found[-MOST_GENERATIONS:]]
        for row, after in pairwise(rows):
            row["end_step"] = max(row["start_step"], after["start_step"], row["end_step"])
            row["to_s"] = row["to_s"] or after["from_s"]
        return rows

    def _generation(self, body: dict[str, Any]) -> dict[str, Any]:
        name = f"{body['term']}.{body['n']}"
        spec, source = body.get("spec") or {}, body["source"]
        from_s, to_s = self._spans.get(name, (None, None))
        layout = _layout(spec.get("layout") or body.get("layout"))
        return {
            "id": name,
            "layout": "" if layout is None else str(layout),
            "workers": None if layout is None else layout.world_size,
            "start_step": source["step"],
            "end_step": source["step"],
            "reason": str(spec.get("reason") or ""),
            "source": str(source["kind"]),
            "from_s": from_s,
            "to_s": to_s,
        }

    def commits(self) -> list[dict[str, Any]]:
        """Newest commits that are kept, oldest first."""
        return [
            {"step": entry.body["step"], "generation": f"{entry.body['term']}.{entry.body['n']}"}
            for entry in self._log.commits()[-MOST_COMMITS:]
        ]

    @property
    def newest_term(self) -> int:
        """Newest term that the log holds; 0: none."""
        return max((entry.term for entry in self._log.entries()), default=0)


def _layout(data: Any) -> Layout | None:
    try:
        return Layout.from_dict(data) if isinstance(data, dict) else None
    except (TypeError, ValueError, KeyError):
        return None


def chosen(entries: Sequence[Entry], most: int) -> list[Entry]:
    """Choose at most so many of them, evenly, and the newest always.

    >>> chosen(list(range(10)), 4)
    [0, 3, 6, 9]
    """
    if len(entries) <= most:
        return list(entries)
    last = len(entries) - 1
    return [entries[last - round(at * last / max(1, most - 1))] for at in reversed(range(most))]
