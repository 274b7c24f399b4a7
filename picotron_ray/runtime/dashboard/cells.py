"""Map of a run: one cell for each rank, or for each node or group of nodes where there are many ranks.

A cell has its place on each axis of the mesh, and its health. What is sent is bounded: columns of small
numbers, at most `MOST_CELLS` of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.dashboard.facts import RunFacts

MOST_CELLS = 1024
SLOW = 1.2
"""Own seconds over the median of all from which on a rank is called slow."""
HEALTH = ("well", "over", "behind", "slow", "silent", "failed")
"""Health of a rank, and of a cell the gravest of its ranks': ``over`` where the run is, ``behind`` by more
than a step, ``silent`` without a heartbeat.
"""
WELL, OVER, BEHIND, SLOW_RANK, SILENT, FAILED = range(6)
AXES = ("dp", "tp", "pp", "cp")
SEVERAL = -1
"""Place on an axis of a cell whose ranks have different ones."""
_DEGREE = re.compile(r"(?:^|-)(dp|tp|pp|cp|ep)(\d+)(?=-|$)")
MOST_DEGREE = 1 << 20


def degrees(layout: str | None) -> dict[str, int]:
    """Degrees of a layout by its name; those that are not in it are 1.

    >>> degrees("dp2-tp1-pp2-zero2-1f1b-mb4")["pp"]
    2
    """
    found = {axis: min(MOST_DEGREE, int(number[:9])) for axis, number in _DEGREE.findall(layout or "")}
    return {axis: max(1, found.get(axis, 1)) for axis in (*AXES, "ep")}


def health_of(facts: RunFacts) -> list[int]:
    """Health of each rank, as a place in `HEALTH`."""
    if facts.status.get("done") or facts.source != "live":
        open_ = _failed(facts)
        return [FAILED if _is_hit(facts, rank, open_) else OVER for rank in range(len(facts.members))]
    pages, failed = facts.status.get("pages") or {}, _failed(facts)
    slow = {row["rank"] for row in facts.slow_ranks if (row.get("ratio") or 0.0) >= SLOW}
    newest = max((page["step"] for page in pages.values()), default=0)
    every = len(pages) > 1 or len(facts.members) <= 1  # a follower is shown rank 0's alone
    found = []
    for rank, worker in enumerate(facts.members):
        page = pages.get(worker)
        if _is_hit(facts, rank, failed):
            found.append(FAILED)
        elif page is None:
            found.append(SILENT if every else WELL)
        elif rank in slow:
            found.append(SLOW_RANK)
        else:
            found.append(BEHIND if newest - page["step"] > 1 else WELL)
    return found


def _failed(facts: RunFacts) -> frozenset[str]:
    """Workers and nodes of failures from which the run has not recovered."""
    failures = facts.status.get("failures") or ()
    return frozenset(str(one["target"]) for one in failures if one.get("recovered_s") is None)


def _is_hit(facts: RunFacts, rank: int, failed: frozenset[str]) -> bool:
    return facts.members[rank] in failed or (bool(facts.nodes[rank]) and facts.nodes[rank] in failed)


def coordinates(layout: str | None, ranks: int) -> dict[str, list[int]]:
    """Places of all ranks by axis, of the axes along which there is more than one; none where the layout's
    degrees do not give so many ranks.
    """
    sizes = degrees(layout)
    mesh = Layout(dp=sizes["dp"], tp=sizes["tp"], pp=sizes["pp"], cp=sizes["cp"])
    if mesh.world_size != ranks:
        return {}
    places = [mesh.coordinates(rank)._asdict() for rank in range(ranks)]
    found = {axis: [place[axis] for place in places] for axis in AXES if sizes[axis] > 1}
    if sizes["ep"] > 1:
        found["ep"] = [mesh.replica(rank) % sizes["ep"] for rank in range(ranks)]
    return found


def build_map(facts: RunFacts) -> dict[str, Any]:
    """Build the map's section."""
    ranks = len(facts.members)
    health, axes = health_of(facts), coordinates(facts.status.get("layout"), ranks)
    slow = {row["rank"]: row["ratio"] for row in facts.slow_ranks if row.get("ratio")}
    nodes = list(dict.fromkeys(facts.nodes))
    of_node = {name: at for at, name in enumerate(nodes)}
    groups = [[rank] for rank in range(ranks)]
    level, labels = "rank", [str(rank) for rank in range(ranks)]
    if ranks > MOST_CELLS:
        level, labels, groups = _grouped(facts.nodes, nodes)
    cells = [_cell(group, health, slow, axes) for group in groups]
    counts = [sum(one == place for one in health) for place in range(len(HEALTH))]
    return {
        "level": level,
        "ranks": ranks,
        "nodes": len(nodes),
        "health": dict(zip(HEALTH, counts, strict=True)),
        "labels": labels if level != "rank" else [],
        "node": [of_node[facts.nodes[group[0]]] for group in groups] if level == "rank" else [],
        "node_names": [short(name) for name in nodes[:MOST_CELLS]] if level == "rank" else [],
        "sizes": [len(group) for group in groups] if level != "rank" else [],
        "cell_health": [cell[0] for cell in cells],
        "slow": [cell[1] for cell in cells],
        "axes": {axis: [cell[2][axis] for cell in cells] for axis in axes},
        "first": [group[0] for group in groups] if level != "rank" else [],
    }


def _grouped(of_rank: Sequence[str], nodes: Sequence[str]) -> tuple[str, list[str], list[list[int]]]:
    """Level, labels and ranks of the cells where ranks are too many to have their own."""
    size = math.ceil(len(nodes) / MOST_CELLS)
    known = len(nodes) > 1
    if not known:  # nobody tells where they are: by number
        many = math.ceil(len(of_rank) / MOST_CELLS)
        groups = [list(range(at, min(at + many, len(of_rank)))) for at in range(0, len(of_rank), many)]
        return "group", [f"{group[0]}-{group[-1]}" for group in groups], groups
    place = {name: at // size for at, name in enumerate(nodes)}
    found: list[list[int]] = [[] for _ in range(math.ceil(len(nodes) / size))]
    for rank, name in enumerate(of_rank):
        found[place[name]].append(rank)
    labels = [short(nodes[at * size]) + (f" +{size - 1}" if size > 1 else "") for at in range(len(found))]
    return ("node" if size == 1 else "group"), labels, found


def _cell(
    group: Sequence[int],
    health: Sequence[int],
    slow: Mapping[int, float],
    axes: Mapping[str, Sequence[int]],
) -> tuple[int, float, dict[str, int]]:
    ratio = max((slow.get(rank, 0.0) for rank in group), default=0.0)
    places = {axis: {of[rank] for rank in group} for axis, of in axes.items()}
    own = {axis: found.pop() if len(found) == 1 else SEVERAL for axis, found in places.items()}
    return max(health[rank] for rank in group), round(ratio, 3), own


def short(name: str) -> str:
    """The first characters of a node's name."""
    return name[:8] or "unknown"
