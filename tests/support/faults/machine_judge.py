"""Judge of the simulators: at which seed do they notice each mutation of what they run?

Usage: python -m tests.support.faults.machine_judge [--seeds 1000] [--processes 2] [NAME ...]

Each mutation of ``machine_mutations`` and ``store_mutations`` is planted in memory, and seed after seed is
run until an invariant breaks (or the code raises). Prints one line each; the exit code is 1 where one
survives all seeds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from picotron_ray.coordinator.simulator.comeback import simulate_comeback
from picotron_ray.coordinator.simulator.lost_targets import simulate_lost_target
from picotron_ray.coordinator.simulator.repetition import simulate_repetition
from picotron_ray.coordinator.simulator.run import Report, simulate
from tests.support.faults.machine_mutations import COMEBACK, LISTED, OWN, TARGETS
from tests.support.faults.planting import Mutation, plant
from tests.support.faults.store_mutations import KEPT, STORED
from tests.support.simulation.kept_world import simulate_kept
from tests.support.simulation.store_world import simulate_store

Simulation = Callable[[int], Report]
TABLES: tuple[tuple[Mapping[str, Mutation], tuple[Simulation, ...]], ...] = (
    (LISTED, (simulate, simulate_repetition)),
    (OWN, (simulate, simulate_repetition)),
    (COMEBACK, (simulate_comeback,)),
    (TARGETS, (simulate_lost_target,)),
    (STORED, (simulate_store,)),
    (KEPT, (simulate_kept,)),
)
"""Tables of mutations, each with the simulations that must notice them."""
ALL = {name: mutation for table, _ in TABLES for name, mutation in table.items()}
FIRST = {
    "what_a_silent_node_holds_is_forgotten": 1000,
    "a_launch_that_nobody_begins_may_not_leave": 2000,
}
"""First seed of mutations that only rare schedules show."""
RAISED = (AssertionError, KeyError, IndexError, RuntimeError, TypeError)  # by code that is broken


def first_failure(simulations: tuple[Simulation, ...], seed: int) -> str:
    """What simulations of one seed find; empty: nothing."""
    for run in simulations:
        try:
            failures = run(seed).failures
        except RAISED as error:
            return f"{type(error).__name__}: {error}"
        if failures:
            return failures[0]
    return ""


def judge(seeds: int, name: str) -> tuple[str, int | None, str]:
    """Plant a mutation; returns its name, the seed that notices it (None: none did), and what that found."""
    simulations = next(found for table, found in TABLES if name in table)
    with pytest.MonkeyPatch.context() as patch:
        plant(ALL[name], patch)
        first = FIRST.get(name, 0)
        for seed in range(first, first + seeds):
            if found := first_failure(simulations, seed):
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
    others = len(ALL) - len(LISTED)
    print(f"{len(LISTED)} listed and {others} own mutations; {len(survived)} survive {chosen.seeds} seeds")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
