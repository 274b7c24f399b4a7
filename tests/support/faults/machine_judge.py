"""Judge of the simulator: at which seed does it notice each mutation of the coordinator's machine?

Usage: python -m tests.support.faults.machine_judge [--seeds 1000] [--processes 2] [NAME ...]

Each mutation of ``machine_mutations`` is planted in memory, and seed after seed is run until an invariant
breaks (or the machine raises). Prints one line each; the exit code is 1 where one survives all seeds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from picotron_ray.coordinator.simulator.repetition import simulate_repetition
from picotron_ray.coordinator.simulator.run import Report, simulate
from tests.support.faults.machine_mutations import ALL, LISTED, OWN, RAISED

SIMULATIONS: tuple[Callable[[int], Report], ...] = (simulate, simulate_repetition)


def first_failure(seed: int) -> str:
    """What the simulations of one seed find; empty: nothing."""
    for run in SIMULATIONS:
        try:
            failures = run(seed).failures
        except RAISED as error:
            return f"{type(error).__name__}: {error}"
        if failures:
            return failures[0]
    return ""


def judge(seeds: int, name: str) -> tuple[str, int | None, str]:
    """Plant a mutation; returns its name, the seed that notices it (None: none did), and what that found."""
    with pytest.MonkeyPatch.context() as patch:
        ALL[name](patch)
        for seed in range(seeds):
            if found := first_failure(seed):
                return name, seed, found
    return name, None, ""


def verdicts(names: list[str], seeds: int, processes: int) -> Iterator[tuple[str, int | None, str]]:
    """Judge mutations, spread over processes, in order."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(partial(judge, seeds), names)


def main() -> int:
    """Print a line for each mutation."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", help="mutations; default: all")
    options.add_argument("--seeds", type=int, default=1000)
    options.add_argument("--processes", type=int, default=2)
    chosen = options.parse_args()
    survived = []
    for name, seed, found in verdicts(chosen.names or list(ALL), chosen.seeds, chosen.processes):
        text = "SURVIVES" if seed is None else f"seed {seed}: {found}"
        print(f"{name:64} {text}", flush=True)
        if seed is None:
            survived.append(name)
    print(f"{len(LISTED)} listed and {len(OWN)} own mutations; {len(survived)} survive {chosen.seeds} seeds")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
