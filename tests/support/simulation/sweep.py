"""Sweep of seeds, spread over the cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from picotron_ray.coordinator.simulator.run import Report


def sweep(run: Callable[[int], Report], seeds: range) -> list[Report]:
    """Simulate seeds; their processes are not traced for coverage, as in ``test_simulator``."""
    cores = min(4, os.cpu_count() or 1)
    with pytest.MonkeyPatch.context() as patch:
        if "PICOTRON_TEST_CONTEXT" not in os.environ:
            patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
            patch.delenv("COVERAGE_PROCESS_START", raising=False)
        with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(run, seeds, chunksize=5))


def broken(reports: list[Report]) -> str:
    """A line for each of the first seeds that broke an invariant; empty: none did."""
    lines = [f"seed {report.seed}: {report.failures[0]}" for report in reports if report.failures]
    return "\n".join(lines[:10])
