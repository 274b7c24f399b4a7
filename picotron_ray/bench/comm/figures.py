"""Figures of ``bench comm``. Pure.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md there). Algorithm bandwidth is the bytes of the buffer
over the time: of what all ranks together give to a gather, and one rank to all else. Bus bandwidth is that
times a factor of the collective, which makes an ideal one as fast as its links whatever the number of ranks
is. Bytes are those of the uncompressed buffer, so that a compressed sum can be above the links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, median, pstdev
from typing import Any

from picotron_ray.bench.common.event_log import Event
from picotron_ray.bench.common.statistics import quartiles
from picotron_ray.comm.reducers.selector import Selector, Way

EXACT = ("auto", "reduce-scatter", "hierarchical", "ring", "tree", "mesh")
COMPRESSED = ("bf16", "int8", "int4", "topk", "powersgd")
STRATEGIES = (*EXACT, *COMPRESSED)
GATHERS = ("flat", "ring", "mesh", "hierarchical")
COLLECTIVES: dict[str, tuple[str, ...]] = {
    "all-reduce": STRATEGIES,
    "all-gather": GATHERS,
    "reduce-scatter": GATHERS,
    "all-to-all": ("flat", "pairwise", "hierarchical"),
    "broadcast": ("flat", "tree", "hierarchical"),
}
"""Strategies of each collective."""
NEAR = 0.1
"""Share of the best time by which a pick may be slower."""


def bus_factor(group: int, collective: str = "all-reduce") -> float:
    """Bus over algorithm bandwidth of a collective.

    >>> bus_factor(2), bus_factor(4), bus_factor(4, "all-gather"), bus_factor(4, "broadcast")
    (1.0, 1.5, 0.75, 1.0)
    """
    if collective == "broadcast":
        return 1.0
    return (2 if collective == "all-reduce" else 1) * (group - 1) / group


def cell(ranks: Sequence[Event]) -> dict[str, Any]:
    """Sum up what the ranks of a cell measured: a repeat takes as long as on its slowest rank."""
    size, group, collective = ranks[0]["size"], ranks[0]["group"], ranks[0]["collective"]
    times = [max(each) for each in zip(*(event["seconds"] for event in ranks), strict=True)]
    average = mean(times)
    low, _, high = quartiles(times)
    return {
        "collective": collective,
        "strategy": ranks[0]["strategy"],
        "size_bytes": size,
        "group": group,
        "repeats": len(times),
        "warmups": ranks[0]["warmups"],
        "avg_s": average,
        "std_s": pstdev(times),
        "min_s": min(times),
        "max_s": max(times),
        "quartiles_s": [low, high],
        "times_s": times,
        "algbw_bytes_s": size / average,
        "busbw_bytes_s": size / average * bus_factor(group, collective),
        "sent_bytes": max(event["sent_bytes"] for event in ranks),
    }


def cells(events: Sequence[Event]) -> list[dict[str, Any]]:
    """List the cells that were measured, in their order."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["what"] == "cell":
            found[event["number"]].append(event)
    ordered = [sorted(events, key=lambda event: int(event["rank"])) for _, events in sorted(found.items())]
    return [cell(ranks) for ranks in ordered if "seconds" in ranks[0]]


def selection(measured: Sequence[Mapping[str, Any]], link: str) -> list[dict[str, Any]]:
    """Have the selector choose among exact strategies, for each collective, size and group.

    It learns from every other repeat of all cells. The pick is judged by the others: it is near where their
    median is within `NEAR` of the best, or inside the best's quartiles. One late wake-up among a hundred
    repeats of 1 KiB doubles an average.
    """
    exact = [cell for cell in measured if cell["strategy"] not in COMPRESSED]
    selector = Selector()
    for cell in exact:
        for seconds in cell["times_s"][::2]:
            selector.observe(_way(cell, link), cell["size_bytes"], seconds)
    picks = []
    for key in dict.fromkeys(_place(cell) for cell in exact):
        at = {_way(c, link): c for c in exact if _place(c) == key}
        if len(at) < 2:
            continue
        chosen = selector.choose(list(at), key[1])
        others = {way: cell["times_s"][1::2] for way, cell in at.items()}
        usual = {way: median(times) for way, times in others.items()}
        best = min(usual, key=lambda way: usual[way])
        low, _, high = quartiles(others[best])
        over = usual[chosen] / usual[best]
        picks.append(
            {
                **dict(zip(("collective", "size_bytes", "group"), key, strict=True)),
                "selected": chosen.strategy,
                "best": best.strategy,
                "over_best": over,
                "near": over <= 1 + NEAR or low <= usual[chosen] <= high,
            }
        )
    return picks


def _place(cell: Mapping[str, Any]) -> tuple[str, int, int]:
    return cell["collective"], cell["size_bytes"], cell["group"]


def _way(cell: Mapping[str, Any], link: str) -> Way:
    return Way(cell["strategy"], f"{cell['collective']} over {cell['group']}", link)


def near_share(picks: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the picks that are near the best; None without any."""
    return sum(pick["near"] for pick in picks) / len(picks) if picks else None
