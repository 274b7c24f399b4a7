"""Figures of ``bench comm``. Pure.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md there): algorithm bandwidth is the bytes of one
rank's buffer over the time, bus bandwidth that times 2 (n - 1) / n, which makes an ideal all-reduce as fast
as its links whatever n is. Bytes are those of the uncompressed buffer, so that a compressed sum can be
above the links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, pstdev
from typing import Any

from picotron_ray.bench.common.event_log import Event
from picotron_ray.bench.common.statistics import quartiles
from picotron_ray.comm.reducers.selector import Selector, Way

EXACT = ("auto", "reduce-scatter", "hierarchical", "ring", "tree", "mesh")
COMPRESSED = ("bf16", "int8", "int4", "topk", "powersgd")
STRATEGIES = (*EXACT, *COMPRESSED)
NEAR = 0.1
"""Share of the best time by which a pick may be slower."""


def bus_factor(group: int) -> float:
    """Bus over algorithm bandwidth of an all-reduce.

    >>> bus_factor(2), bus_factor(4)
    (1.0, 1.5)
    """
    return 2 * (group - 1) / group


def cell(strategy: str, size: int, group: int, ranks: Sequence[Event]) -> dict[str, Any]:
    """Sum up what the ranks of a cell measured: a repeat takes as long as on its slowest rank."""
    times = [max(each) for each in zip(*(event["seconds"] for event in ranks), strict=True)]
    average = mean(times)
    low, _, high = quartiles(times)
    return {
        "strategy": strategy,
        "size_bytes": size,
        "group": group,
        "repeats": len(times),
        "warmups": ranks[0]["warmups"],
        "avg_s": average,
        "std_s": pstdev(times),
        "min_s": min(times),
        "max_s": max(times),
        "quartiles_s": [low, high],
        "algbw_bytes_s": size / average,
        "busbw_bytes_s": size / average * bus_factor(group),
        "sent_bytes": max(event["sent_bytes"] for event in ranks),
    }


def cells(events: Sequence[Event]) -> list[dict[str, Any]]:
    """List the cells that were measured, in their order."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["what"] == "cell":
            found[event["number"]].append(event)
    ordered = [sorted(events, key=lambda event: int(event["rank"])) for _, events in sorted(found.items())]
    return [cell(e[0]["strategy"], e[0]["size"], e[0]["group"], e) for e in ordered if "seconds" in e[0]]


def selection(measured: Sequence[Mapping[str, Any]], link: str) -> list[dict[str, Any]]:
    """Have the selector choose among exact reducers, for each size and group, after it saw all cells.

    A pick is near where its average is within `NEAR` of the best, or inside the best's quartiles.
    """
    exact = [cell for cell in measured if cell["strategy"] in EXACT]
    selector = Selector()
    for cell in exact:
        selector.observe(_way(cell, link), cell["size_bytes"], cell["avg_s"])
    picks = []
    for size, group in dict.fromkeys((cell["size_bytes"], cell["group"]) for cell in exact):
        at = {_way(c, link): c for c in exact if (c["size_bytes"], c["group"]) == (size, group)}
        if len(at) < 2:
            continue
        chosen = at[selector.choose(list(at), size)]
        best = min(at.values(), key=lambda cell: float(cell["avg_s"]))
        low, high = best["quartiles_s"]
        close = chosen["avg_s"] <= (1 + NEAR) * best["avg_s"] or low <= chosen["avg_s"] <= high
        picks.append(
            {
                "size_bytes": size,
                "group": group,
                "selected": chosen["strategy"],
                "best": best["strategy"],
                "over_best": chosen["avg_s"] / best["avg_s"],
                "near": close,
            }
        )
    return picks


def _way(cell: Mapping[str, Any], link: str) -> Way:
    return Way(cell["strategy"], f"data of {cell['group']}", link)


def near_share(picks: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the picks that are near the best; None without any."""
    return sum(pick["near"] for pick in picks) / len(picks) if picks else None
