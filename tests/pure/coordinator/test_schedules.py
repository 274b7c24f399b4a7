"""Seeds mean the same runs everywhere and always: their schedules are kept in schedules.tsv.

A seed that a report names must repeat its run on another machine and after a change that was to change
nothing. Where the behaviour was changed on purpose, ``PICOTRON_KEEP_LOGS=1`` writes the file anew: read the
difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.simulator.run import simulate
from tests.support.runs.replays import KEEP

KEPT = Path(__file__).with_name("schedules.tsv")
SEEDS = range(30)


def schedule(seed: int, patch: pytest.MonkeyPatch) -> str:
    """One line: what happened, when it ended, and how often the machine gave each command."""
    given: Counter[str] = Counter()
    real = Machine.handle

    def handle(self: Machine, event: m.Event, now: float) -> Sequence[m.Command]:
        commands = real(self, event, now)
        given.update(type(command).__name__ for command in commands)
        return commands

    with patch.context() as inner:
        inner.setattr(Machine, "handle", handle)
        report = simulate(seed)
    counts = (f"{name}={count}" for name, count in sorted(given.items()))
    return "\t".join(
        (
            f"{seed}",
            f"{report.events} events",
            f"{report.generations} generations",
            f"{report.virtual_s:.6f} s",
            " ".join(report.faults),
            " ".join(counts),
        )
    )


def test_seeds_repeat_the_schedules_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    if KEEP:
        KEPT.write_text("".join(f"{schedule(seed, monkeypatch)}\n" for seed in SEEDS))
        pytest.skip("rewritten")
    kept = KEPT.read_text().splitlines()
    assert len(kept) == len(SEEDS)
    for seed, line in zip(SEEDS, kept, strict=True):
        assert schedule(seed, monkeypatch) == line
