"""First place where ranks differ that must be alike, from hashes that each of them made of one step.

Stages follow each other as causes do: the state before the step, its summed gradients, the state after it,
and activations that the same rows bring about. The first stage that differs is where to look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

STAGES = ("before", "gradients", "after", "activations")
MOST_PLACES = 100
"""Differences that are listed."""

Entry = tuple[str, str, int]
"""Key (ranks with equal keys are alike), name, hash."""
Report = Mapping[str, Sequence[Entry] | None]
"""Entries of one rank by stage."""

_WORDS = {
    "before": "state before the step",
    "gradients": "summed gradients",
    "after": "state after the step",
    "activations": "activations of the same rows",
}


@dataclass(frozen=True, slots=True)
class DifferingPlace:
    """Tensor or module of which ranks must hold or compute the same, and do not.

    Fields:
        stage: of ``STAGES``.
        groups: ranks with equal values together, the largest group first.
        suspects: ranks that differ from more than half of them; empty: nobody has a majority.
    """

    stage: str
    name: str
    groups: tuple[tuple[int, ...], ...]
    suspects: tuple[int, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        groups = " differ from ".join(f"ranks {_few(group)}" for group in self.groups)
        who = f"; suspected: {_few(self.suspects)}" if self.suspects else ""
        return f"{_WORDS[self.stage]}: {self.name}: {groups}{who}"


def _few(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more


def compared(reports: Mapping[int, Report]) -> tuple[list[DifferingPlace], dict[str, int]]:
    """Return the places that differ, causes first, and how many were compared of each stage.

    A place counts as compared where two ranks or more tell of it.

    >>> one = {"before": [("w:0", "a", 1), ("w:0", "b", 2)]}
    >>> other = {"before": [("w:0", "a", 1), ("w:0", "b", 3)]}
    >>> found, counts = compared({0: one, 1: other})
    >>> str(found[0]), counts["before"]
    ('state before the step: b: ranks 0 differ from ranks 1', 2)
    """
    found, counts = [], dict.fromkeys(STAGES, 0)
    for stage in STAGES:
        told: dict[tuple[str, str, int], dict[int, list[int]]] = {}
        for rank in sorted(reports):
            seen: dict[tuple[str, str], int] = defaultdict(int)
            for key, name, value in reports[rank].get(stage) or ():
                number = seen[key, name]  # a module may be called several times
                seen[key, name] += 1
                told.setdefault((key, name, number), {}).setdefault(value, []).append(rank)
        for (_, name, _), by_value in told.items():
            ranks = sum(map(len, by_value.values()))
            counts[stage] += ranks > 1
            if len(by_value) > 1:
                found.append(_place(stage, name, by_value, ranks))
    return found, counts


def _place(stage: str, name: str, by_value: Mapping[int, list[int]], ranks: int) -> DifferingPlace:
    groups = sorted((tuple(group) for group in by_value.values()), key=lambda group: (-len(group), group))
    majority = 2 * len(groups[0]) > ranks
    suspects = tuple(sorted(rank for group in groups[1:] for rank in group)) if majority else ()
    return DifferingPlace(stage, name, tuple(groups), suspects)


def suggestions(found: Sequence[DifferingPlace], counts: Mapping[str, int], run: str) -> list[str]:
    """Return what to do next, the most promising first."""
    if not found:
        if any(counts.values()):
            return [
                f"nothing differs in this step; `debug.replica_check_steps` looks regularly, and"
                f" `picotron-ray debug race {run}` for what changes from run to run"
            ]
        return [
            "no two ranks hold or compute the same in this layout, so nothing can be compared: ZeRO with"
            " layout.replicate, or data parallelism without ZeRO, have replicas"
        ]
    return [*_BY_STAGE[found[0].stage](found[0], run), *_nodes(found)]


def _state(place: DifferingPlace, run: str) -> list[str]:
    return [
        "the state itself is corrupt on some rank: stop trusting checkpoints since the last check; with"
        " debug.replica_check_steps the run goes back by itself to what all ranks agreed on",
        "launch again with checkpoint.resume_step at a commit from before the difference",
    ]


def _sums(place: DifferingPlace, run: str) -> list[str]:
    return [
        f"ranks received different sums of the same gradients: look for a buffer that is written while it is"
        f" summed with `picotron-ray debug race {run}`",
        "set comm.gradients and comm.topology to the backend's own, and see whether it stays",
    ]


def _update(place: DifferingPlace, run: str) -> list[str]:
    return [
        "equal states and gradients gave different updates: that rank's device computes wrongly, or its"
        " memory changed during the step",
    ]


def _passes(place: DifferingPlace, run: str) -> list[str]:
    return [
        f"equal weights and rows gave different outputs of {place.name}: see whether one rank alone repeats"
        f" itself with `picotron-ray debug race {run}`",
        "compare GPU models, drivers and library versions of these ranks: other kernels round otherwise",
    ]


_BY_STAGE = {"before": _state, "gradients": _sums, "after": _update, "activations": _passes}


def _nodes(found: Sequence[DifferingPlace]) -> list[str]:
    suspects = sorted({rank for place in found for rank in place.suspects})
    if suspects:
        return [
            f"move off the nodes of ranks {_few(suspects)} (`picotron-ray drain`), and test their memory and"
            " GPUs"
        ]
    return ["with three replicas or more a majority would tell who is wrong"]
