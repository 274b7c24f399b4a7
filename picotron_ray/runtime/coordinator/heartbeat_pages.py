"""Heartbeats as agents bring them: pages of workers, of which the machine hears who lives and how far."""

from __future__ import annotations

from typing import Any

from picotron_ray.coordinator.messages import GenerationId, Heartbeat
from picotron_ray.runtime.telemetry_window import KEY, WorkerFigures

Figures = list[dict[str, Any]]


def read_heartbeat(node: str, figures: Figures) -> tuple[Heartbeat, Figures, list[WorkerFigures]]:
    """Return a node's heartbeat, the pages in it, and what its workers' telemetry says, where it came along.

    A worker whose page is gone is there by its name alone; one whose slots are saved is marked as rescued
    (`node_agent.folder_guard`).
    """
    told = [entry[KEY] for entry in figures if KEY in entry]
    pages = [_page(entry) if told or "rescued" in entry else entry for entry in figures if "term" in entry]
    newest = max(((page["term"], page["n"]) for page in pages if page["term"]), default=None)
    steps = {page["worker"]: page["step"] for page in pages if (page["term"], page["n"]) == newest}
    others = tuple(entry["worker"] for entry in figures if entry["worker"] not in steps)
    rescued = tuple(entry["worker"] for entry in figures if entry.get("rescued"))
    generation = None if newest is None else GenerationId(*newest)
    shown = [page for page in pages if page["worker"] in steps]
    held = any(page["phase"] == "hold" for page in shown)
    debugged = tuple(page["worker"] for page in shown if page["debugged"])
    return Heartbeat(node, generation, steps, others, rescued, held, debugged), pages, told


def _page(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("rescued", KEY)}
