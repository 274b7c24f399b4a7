"""Sections of the page: what is pushed, each bounded whatever the number of ranks and the length of the run.

A section is plain JSON. All text in it is untrusted: the page puts it in as text, never as markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from picotron_ray.config.schema.memory import MEMORY_CLASSES
from picotron_ray.config.schema.telemetry import STEP_PHASES
from picotron_ray.observability.rank_table import WAITING
from picotron_ray.runtime.dashboard.analysis import predicted_memory, stated_peak
from picotron_ray.runtime.dashboard.cells import HEALTH, SLOW, build_map, coordinates, health_of, short
from picotron_ray.runtime.dashboard.curves import goodput, thinned
from picotron_ray.runtime.dashboard.doors import offered
from picotron_ray.runtime.dashboard.facts import RunFacts
from picotron_ray.runtime.dashboard.log_tail import LogTail

MOST_BYTES = 128 << 10
"""Of a section; one that is larger is a mistake, and is left out and said."""
EVENTS = 200
MARKS = 100
TEXT = 600
ROWS = 64
"""Ranks of one answer to a question for rows."""
FIGURES = ("loss", "eval_loss", "tokens_per_s", "mfu_ratio", "goodput_ratio", "grad_norm")
MARKED = {"recovery": "recovery", "failure": "failure", "generation": "generation", "rewind": "rewind"}
HEAD = (
    *("run", "state", "done", "detail", "term", "generation", "layout", "precision", "step"),
    *("steps", "loss", "eval_loss", "baseline_loss", "tokens_per_s", "committed", "stopping", "uncommitted"),
    "began_s",
)


def plain(value: Any) -> Any:
    """JSON values of ``value``: text cut, what is not finite null."""
    if isinstance(value, str):
        return value[:TEXT]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key)[:TEXT]: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (int, bool)) else str(value)[:TEXT]


def encode(name: str, value: Any) -> bytes:
    """Encode a section; one that is too large says so in its place."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    if len(data) <= MOST_BYTES:
        return data
    return json.dumps({"too_large": len(data), "section": name}).encode()


Maker = Callable[[RunFacts, LogTail | None, Mapping[str, Any]], Any]
_MAKERS: dict[str, Maker] = {
    "head": lambda facts, logs, about: _head(facts),
    "map": lambda facts, logs, about: build_map(facts),
    "curves": lambda facts, logs, about: _curves(facts),
    "timeline": lambda facts, logs, about: {"generations": list(facts.generations)},
    "checkpoints": lambda facts, logs, about: _checkpoints(facts),
    "ranks": lambda facts, logs, about: _ranks(facts),
    "memory": lambda facts, logs, about: _memory(facts),
    "findings": lambda facts, logs, about: {"findings": list(findings(facts))},
    "events": lambda facts, logs, about: {"events": [_event(one) for one in _events(facts)[-EVENTS:]]},
    "logs": lambda facts, logs, about: (
        {"lines": logs.newest(), "problem": logs.problem} if logs else {"lines": []}
    ),
    "config": lambda facts, logs, about: about,
    "doors": lambda facts, logs, about: {
        "doors": offered(facts.source == "live", str(facts.status.get("state")))
    },
}
NAMES = tuple(_MAKERS)
"""Sections."""


def build(
    facts: RunFacts, logs: LogTail | None, about: Mapping[str, Any], names: Iterable[str] = NAMES
) -> dict[str, Any]:
    """Build sections.

    Args:
        about: section ``config``, which is made once.
        names: of those that are to be built.
    """
    return {name: plain(_MAKERS[name](facts, logs, about)) for name in names}


def _head(facts: RunFacts) -> dict[str, Any]:
    status = facts.status
    found = {name: status.get(name) for name in HEAD}
    windows = status.get("windows") or {}
    for name in ("mfu_ratio", "goodput_ratio"):
        found[name] = (windows.get(name) or {}).get("mean")
    if found["mfu_ratio"] is None:
        stated = stated_peak(facts.config, len(facts.members))
        told, rate = facts.memory.get("mfu_ratio"), status.get("tokens_per_s")
        found["mfu_ratio"] = rate * stated[0] if stated and rate else told
    known = status.get("goodput") or facts.curves.newest("goodput_ratio") or _goodput(facts)
    found["goodput_ratio"] = known or found["goodput_ratio"]
    found["lag_steps"] = max(0, (status.get("step") or 0) - (status.get("committed") or 0))
    found["ranks"] = len(facts.members)
    return {**found, "source": facts.source, "heard_s": facts.heard_s, "notes": list(facts.notes)[:8]}


def _goodput(facts: RunFacts) -> float | None:
    points = goodput(facts.curves.all("at_s"), facts.status.get("began_s") or 0.0)
    return points[-1][1] if points else None


def _curves(facts: RunFacts) -> dict[str, Any]:
    shown = {name: facts.curves.shown(name) for name in FIGURES}
    if not shown["goodput_ratio"]:
        began_s = facts.status.get("began_s") or 0.0
        shown["goodput_ratio"] = thinned(goodput(facts.curves.all("at_s"), began_s), 600) if began_s else []
    shown["mfu_ratio"] = _stated_mfu(facts, shown["tokens_per_s"]) or shown["mfu_ratio"]
    return {"figures": shown, "marks": _marks(facts), "peak": _peak(facts)}


def _peak(facts: RunFacts) -> str:
    """Source of the peak that MFU refers to; "": none is known."""
    stated = stated_peak(facts.config, len(facts.members))
    return stated[1] if stated else str(facts.memory.get("mfu_peak") or "")


def _stated_mfu(facts: RunFacts, tokens_per_s: list[list[float]]) -> list[list[float]]:
    """MFU by step from the throughput, where the config names the devices' peak."""
    if stated_peak(facts.config, 1) is None:
        return []
    starts = [(row["start_step"], row["workers"] or 0) for row in facts.generations]
    found = []
    for step, rate in tokens_per_s:
        workers = next((many for start, many in reversed(starts) if start < step), len(facts.members))
        stated = stated_peak(facts.config, workers)
        found += [[step, rate * stated[0]]] if stated else []
    return found


def _marks(facts: RunFacts) -> list[dict[str, Any]]:
    """Events that curves show: where failures struck and generations began."""
    found = [
        {"step": one["step"], "kind": "failure", "text": f"{one['kind']} of {one['target']}"}
        for one in facts.status.get("failures") or ()
    ]
    found += [
        {"step": row["start_step"], "kind": "generation", "text": f"generation {row['id']}: {row['layout']}"}
        for row in facts.generations
    ]
    return sorted(found, key=lambda mark: mark["step"])[-MARKS:]


def _events(facts: RunFacts) -> list[dict[str, Any]]:
    return list(facts.status.get("events") or ())


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: event.get(name) for name in ("seq", "t", "level", "kind", "text")}


def _checkpoints(facts: RunFacts) -> dict[str, Any]:
    status = facts.status
    return {
        "commits": list(facts.commits)[-EVENTS // 2 :],
        "committed": status.get("committed"),
        "step": status.get("step"),
        "lag_steps": max(0, (status.get("step") or 0) - (status.get("committed") or 0)),
        "uncommitted": bool(status.get("uncommitted")),
    }


def _ranks(facts: RunFacts) -> dict[str, Any]:
    telemetry = facts.status.get("telemetry") or {}
    windows = facts.status.get("windows") or {}
    mean = {phase: (windows.get(f"{phase}_s") or {}).get("mean") for phase in STEP_PHASES}
    told = {phase: window["mean"] for phase, window in (telemetry.get("phase_s") or {}).items()}
    return {
        "phases": list(STEP_PHASES),
        "waiting": list(WAITING),
        "mean_s": told or mean,
        "waits_seen": telemetry.get("waits_seen", True),
        "slow": [{**_place(facts, row["rank"], facts.ranks_of), **_seconds(row)} for row in facts.slow_ranks],
        "steps": telemetry.get("steps"),
        "of": facts.ranks_of or facts.status.get("generation"),
        "health": list(HEALTH),
    }


def _seconds(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("rank", "ratio", "phase", "excess_s", "own_s", "step_s", "utilization_ratio", "peak_bytes")
    found = {name: row.get(name) for name in kept}
    return {**found, "phase_s": [row.get(f"{phase}_s") for phase in STEP_PHASES]}


def _place(facts: RunFacts, rank: int, generation: str = "") -> dict[str, Any]:
    """Worker and node of a rank; not known of another generation than the newest."""
    known = 0 <= rank < len(facts.members) and generation in ("", facts.status.get("generation"))
    return {
        "worker": facts.members[rank] if known else "",
        "node": short(facts.nodes[rank]) if known and facts.nodes[rank] else "",
    }


def rank_rows(facts: RunFacts, first: int, count: int, node: str = "") -> dict[str, Any]:
    """Rows of single ranks, at most `ROWS`: those of a node by the begin of its name, or by number."""
    ranks = len(facts.members)
    wanted = [rank for rank in range(max(0, first), ranks) if not node or facts.nodes[rank].startswith(node)]
    wanted = wanted[: max(0, min(count, ROWS))]
    health, axes = health_of(facts), coordinates(facts.status.get("layout"), ranks)
    slow = {row["rank"]: row for row in facts.slow_ranks}
    table = facts.table
    known = {row["rank"]: row for row in table.rows(wanted)} if table is not None else {}
    pages = facts.status.get("pages") or {}
    rows = []
    for rank in wanted:
        page = pages.get(facts.members[rank]) or {}
        seconds = slow.get(rank) or known.get(rank)
        rows.append(
            {
                **_place(facts, rank),
                **(_seconds(seconds) if seconds else {}),
                "rank": rank,
                "health": HEALTH[health[rank]],
                "at": {axis: of[rank] for axis, of in axes.items()},
                "step": page.get("step"),
                "doing": page.get("phase"),
                "step_s": page.get("step_time_s") or (seconds or {}).get("step_s"),
            }
        )
    return {"rows": plain(rows), "ranks": ranks}


def _memory(facts: RunFacts) -> dict[str, Any]:
    workers = facts.memory.get("workers") or {}
    rank_of = {worker: rank for rank, worker in enumerate(facts.members)}
    rows = [
        {
            "rank": rank_of[worker],
            "worker": worker,
            "node": short(one["node"]),
            "classes": [one["classes"].get(kind) for kind in MEMORY_CLASSES] if one["classes"] else None,
            "peak_bytes": one.get("peak_bytes") or one.get("resident_bytes"),
        }
        for worker, one in workers.items()
        if worker in rank_of
    ]
    windows, told = (
        facts.status.get("windows") or {},
        (facts.status.get("telemetry") or {}).get("memory") or {},
    )
    whole = ("allocated_bytes", "reserved_bytes", "peak_bytes", "device_bytes", "planned_peak_bytes")
    return {
        "classes": list(MEMORY_CLASSES),
        "rows": sorted(rows, key=lambda row: row["rank"])[: ROWS // 2],
        "fullest": {name: told.get(name) or (windows.get(name) or {}).get("mean") for name in whole},
        "predicted": predicted_memory(facts.config, facts.status.get("layout")),
        "gpus": list(facts.memory.get("gpus") or ())[:ROWS],
    }


def findings(facts: RunFacts) -> Iterable[dict[str, Any]]:
    """Findings of any kind: open ones, failures, slow ranks, and warnings, the newest first."""
    for one in list(facts.status.get("alerts") or ())[-ROWS:]:
        text = f"{one['rule']} ({one['where']}): {one['said']}; {one['advice']}"
        yield {"level": one["severity"], "t": one["since_s"], "kind": "alert", "text": text}
    for one in (facts.status.get("failures") or ())[-ROWS:]:
        back = one.get("recovered_s")
        what = f"{one['kind']} of {one['target']} at step {one['step']}"
        after = (
            "no step has followed" if back is None else f"back in {back:.2f} s from {one['restored_from']}"
        )
        yield {"level": "error" if back is None else "warning", "kind": "failure", "text": f"{what}: {after}"}
    for row in list(facts.slow_ranks)[:4]:
        if (row.get("ratio") or 0.0) >= SLOW:
            text = f"rank {row['rank']} takes {row['ratio']:.2f} times the median's own seconds"
            yield {
                "level": "warning",
                "kind": "straggler",
                "text": f"{text}, most in {row['phase'] or 'none'}",
            }
    told = [one for one in _events(facts) if one.get("level") in ("warning", "error")]
    for one in reversed(told[-ROWS:]):
        yield _event(one)
