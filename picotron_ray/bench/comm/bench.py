"""``bench comm``: plan of its cells, launch of its processes, and the result.

Cells go from small sizes to large ones, so that a budget cuts the longest. What was cut is in the result.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from picotron_ray.bench.comm.figures import COLLECTIVES, cells, near_share, selection
from picotron_ray.bench.comm.room import fitting, usable_bytes
from picotron_ray.bench.common.event_log import Event, Events
from picotron_ray.bench.common.machine import machine, versions
from picotron_ray.bench.common.process import Launched, torchrun
from picotron_ray.bench.common.signals import sigterm_exits
from picotron_ray.errors import ConfigError, PicotronError

POLL_S = 0.1
INNER = 2
"""Ranks of a neighbourhood under ``hierarchical``, as in `operations`, which loads torch."""
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
Say = Callable[[str], None]
Cell = tuple[str, str, int, int]
"""Collective, strategy, bytes, ranks."""


@dataclass(frozen=True, slots=True)
class CommOptions:
    """Options of the command line; see its help."""

    groups: str
    sizes: str
    collectives: str
    strategies: str
    budget_s: float
    device: str


def size_of(word: str) -> int:
    """Bytes of a word such as ``4MiB``. Raises ConfigError.

    >>> size_of("1KiB"), size_of("2MiB")
    (1024, 2097152)
    """
    number, unit = word.strip()[:-3], word.strip()[-3:]
    if unit not in UNITS or not number.isdecimal() or not 0 < int(number) * UNITS[unit] <= 2**32:
        raise ConfigError(f"--sizes: saw {word!r}, expected 1KiB to 4GiB, such as 1KiB,1MiB,1GiB")
    return int(number) * UNITS[unit]


def chosen_groups(text: str) -> list[int]:
    """Sizes of groups, ascending. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 2 <= int(word) <= 64 for word in words):
        raise ConfigError(f"--groups: saw {text!r}, expected numbers of ranks from 2 to 64, such as 2,4,8")
    return sorted({int(word) for word in words})


def chosen_names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Names out of those that are known. Raises ConfigError."""
    words = list(known) if text == "all" else [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ConfigError(f"{option}: saw {unknown[0]!r}, expected all, or some of {', '.join(known)}")
    return list(dict.fromkeys(words))


def planned(options: CommOptions, usable: int) -> tuple[list[Cell], list[dict[str, Any]]]:
    """List the cells in their order, and those that are measured in a smaller size.

    Two levels need two neighbourhoods at least.

    Args:
        usable: bytes that all ranks together may take.
    """
    sizes = sorted({size_of(word) for word in options.sizes.split(",")})
    collectives = chosen_names("--collectives", options.collectives, list(COLLECTIVES))
    known = list(dict.fromkeys(name for each in collectives for name in COLLECTIVES[each]))
    strategies = chosen_names("--strategies", options.strategies, known)
    groups = chosen_groups(options.groups)

    cells, smaller = list[Cell](), list[dict[str, Any]]()
    for size, group, collective in itertools.product(sizes, groups, collectives):
        levels = group > INNER and group % INNER == 0
        names = [name for name in COLLECTIVES[collective] if name in strategies]
        chosen = [name for name in names if name != "hierarchical" or levels]
        for name, found in fitting(size, group, chosen, usable, collective).items():
            cells.append((collective, name, found, group))
            if found < size:
                what = {"collective": collective, "strategy": name, "size_bytes": size, "group": group}
                smaller.append({**what, "cut": f"memory: measured with {found} B"})
    return list(dict.fromkeys(cells)), smaller


def bench(options: CommOptions, say: Say) -> dict[str, Any]:
    """Measure; returns ``cells``, ``cuts``, ``selections`` and ``selected_within_10_percent``.

    Raises ConfigError, before anything is started, for options that cannot be used.
    """
    if not options.budget_s > 0:
        raise ConfigError(f"--budget-s: saw {options.budget_s:g}, expected seconds above 0")
    device = _device(options.device, max(chosen_groups(options.groups)))
    order, smaller = planned(options, usable_bytes(device))
    with sigterm_exits(), tempfile.TemporaryDirectory(prefix="picotron-bench-") as name:
        events = _measure(order, options, device, Path(name), say)
    return {
        "machine": {**machine(), **versions()},
        "options": asdict(options),
        "device": device,
        **result(events, "nccl" if device == "cuda" else "gloo", smaller),
    }


def result(events: Sequence[Event], link: str, smaller: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Compute all figures from the events; ``smaller``: cells of a size that memory did not allow."""
    measured = cells(events)
    picks = selection(measured, link)
    told = ("collective", "strategy", "group", "cut")
    first = [event for event in events if event["what"] == "cell" and event["rank"] == 0]
    cuts = [
        {**{key: e[key] for key in told}, "size_bytes": e["size"]}
        for e in sorted(first, key=lambda event: int(event["number"]))
        if "cut" in e
    ]
    return {
        "cells": measured,
        "cuts": [*smaller, *cuts],
        "selections": picks,
        "selected_within_10_percent": near_share(picks),
    }


def _device(asked: str, ranks: int) -> str:
    """``cpu`` or ``cuda``; raises ConfigError where a rank would have no GPU."""
    if asked not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device: saw {asked!r}, expected auto, cpu or cuda")
    if asked == "cpu":
        return asked
    import torch  # takes a second

    gpus = torch.cuda.device_count()
    if gpus >= ranks:
        return "cuda"
    if asked == "cuda":
        raise ConfigError(
            f"--groups: saw {ranks} ranks, but {gpus} GPUs; give smaller groups, or --device cpu"
        )
    return "cpu"


def _measure(order: Sequence[Cell], options: CommOptions, device: str, folder: Path, say: Say) -> list[Event]:
    ranks = max(group for *_, group in order)
    plan = {
        "cells": order,
        "groups": sorted({group for *_, group in order}),
        "budget_s": options.budget_s,
        "device": device,
    }
    file, events = folder / "plan.json", Events(folder / "events")
    file.write_text(json.dumps(plan))
    workers = Launched("bench comm", folder / "workers")
    try:
        workers.launch(torchrun(ranks, "picotron_ray.bench.comm.worker", str(file), str(folder / "events")))
        told = 0
        while workers.ended() is None:
            time.sleep(POLL_S)
            told = _tell(events.read(), told, len(order), say)
        noted = events.read()
        failed = [event["error"] for event in noted if event["what"] == "failed"]
        if failed:
            raise PicotronError(f"bench comm: a worker failed: {failed[0].splitlines()[0][:300]}")
        if workers.ended():
            workers.check()
        return noted
    finally:
        workers.stop()


def _tell(noted: Sequence[Event], told: int, total: int, say: Say) -> int:
    done = [event for event in noted if event["what"] == "cell" and event["rank"] == 0]
    for event in done[told:]:
        found = event.get("seconds")
        what = f"{min(found):.3g} s at best of {len(found)}" if found else f"cut by {event['cut']}"
        name = f"{event['collective']} by {event['strategy']} of {event['size']} B over {event['group']}"
        say(f"{event['number'] + 1} of {total}: {name}: {what}")
    return len(done)
