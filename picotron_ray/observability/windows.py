"""Windows of telemetry: one flat row of figures for each round, as rules, pages and archives read them.

A figure that is not known is absent; none is made up. Names carry their units:

- training: ``step, loss, grad_norm, learning_rate, tokens_per_s, mfu_ratio, goodput_ratio``;
- a step: ``step_s, step_s_std``, ``<phase>_s`` for each of `STEP_PHASES`, ``straggler_ratio``;
- communication: ``sent_bytes.<axis>``, ``bandwidth_bytes_per_s.<axis>``, ``latency_s.<axis>``,
  ``pending_operations``;
- memory: ``peak_bytes, allocated_bytes, reserved_bytes, device_bytes, planned_peak_bytes,
  fragmentation_ratio``;
- devices and hosts: ``utilization_ratio, host_cpu_ratio, host_memory_ratio, disk_used_ratio,
  throttled_gpus``, and ``ecc_errors_total, xid_errors_total`` since each node was first heard of;
- the run: ``durability_lag_steps, failures_total, recoveries_total``; ``bad_steps_total`` (steps of the
  generation whose update was left out, and generations that ended for one) and ``bad_step``, the newest one.

`straggler_ratio` is the own seconds of the slowest rank over the median of all (`rank_table`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from picotron_ray.failures import FailureKind
from picotron_ray.observability.rank_table import RankTable, SlowRank

SAMPLES = 1000
"""Newest samples of a figure that its mean, largest, smallest and deviation are over."""
SLOWEST = 8
"""Ranks of a window that are kept one by one."""


@dataclass(frozen=True, slots=True)
class TelemetryWindow:
    """Figures of one round.

    Fields:
        at_s: its end, in seconds since the epoch.
        generation: as ``term.n``.
        figures: by name, finite.
        slowest: ranks with the most seconds of their own, the slowest first; empty where waits are not told
            from computing.
    """

    at_s: float
    generation: str
    figures: Mapping[str, float]
    slowest: tuple[SlowRank, ...] = ()


def known(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Return the figures that there are: neither None nor NaN nor infinite.

    >>> known({"loss": 2.0, "grad_norm": None, "mfu_ratio": float("nan")})
    {'loss': 2.0}
    """
    return {
        name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)
    }


def round_figures(told: Mapping[str, Any], slowest: Sequence[SlowRank]) -> dict[str, float]:
    """Flatten a round's figures.

    Args:
        told: as the run's status shows the round (docs/telemetry.md, keys of ``telemetry``).
        slowest: of its ranks; empty: not known.
    """
    memory = told["memory"]
    on_device, free = memory["device_bytes"], memory["largest_free_bytes"]
    unused = on_device - memory["allocated_bytes"] if on_device else 0
    found: dict[str, float | None] = {
        "step": told["last_step"],
        "step_s": told["step_s"]["mean"],
        "step_s_std": told["step_s"]["std"],
        **{f"{phase}_s": window["mean"] for phase, window in told["phase_s"].items()},
        **{f"sent_bytes.{axis}": sent for axis, sent in told["sent_bytes"].items()},
        **{name: memory[name] or None for name in ("peak_bytes", "allocated_bytes", "reserved_bytes")},
        "device_bytes": on_device or None,
        "fragmentation_ratio": 1.0 - min(1.0, free / unused) if unused > 0 and free else None,
        "utilization_ratio": told["utilization"] or None,
        "straggler_ratio": slowest[0].ratio if slowest else None,
        **told.get("health", {}),
        **{f"latency_s.{axis}": link["latency_s"] for axis, link in told.get("links", {}).items()},
        **{
            f"bandwidth_bytes_per_s.{axis}": link["bandwidth_bytes_per_s"]
            for axis, link in told.get("links", {}).items()
        },
    }
    return known(found)


def run_figures(status: Mapping[str, Any], page: Mapping[str, Any]) -> dict[str, float]:
    """Flatten what a run's status and the page of rank 0 say beside the round."""
    failures = status["failures"]
    bad = page.get("skipped_step", -1)
    lag = status["step"] - (status["committed"] or 0)
    return known(
        {
            "loss": status["loss"],
            "grad_norm": page.get("grad_norm"),
            "learning_rate": page.get("learning_rate"),
            "tokens_per_s": status["tokens_per_s"],
            "goodput_ratio": status.get("goodput"),
            "durability_lag_steps": max(0, lag),
            "bad_steps_total": page.get("bad_steps", 0)
            + sum(failure["kind"] == FailureKind.NUMERICS for failure in failures),
            "bad_step": bad if bad >= 0 else None,
            "failures_total": len(failures),
            "recoveries_total": sum(failure["recovered_s"] is not None for failure in failures),
        }
    )


def window_of_round(
    at_s: float, told: Mapping[str, Any], more: Mapping[str, float], ranks: RankTable
) -> TelemetryWindow:
    """Build the window of a round.

    Args:
        told: the round, as of `round_figures`.
        more: figures from elsewhere, such as `run_figures`.
        ranks: of the round.
    """
    slowest = ranks.slowest(SLOWEST) if told["waits_seen"] else []
    figures = {**round_figures(told, slowest), **known(more)}
    return TelemetryWindow(at_s, told["generation"], figures, tuple(slowest))


class Samples:
    """Newest `SAMPLES` values of each figure; takes 4 kB a figure.

    >>> samples = Samples()
    >>> for loss in (3.0, 1.0):
    ...     samples.add({"loss": loss})
    >>> samples.windows()["loss"]
    {'mean': 2.0, 'max': 3.0, 'min': 1.0, 'std': 1.0, 'samples': 2}
    """

    def __init__(self, most: int = SAMPLES) -> None:
        self._most = most
        self._values: dict[str, np.ndarray] = {}
        self._counts: dict[str, int] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """Take one sample of each figure; the oldest of a figure is written over."""
        for name, value in figures.items():
            if name not in self._values:
                self._values[name], self._counts[name] = np.empty(self._most, np.float32), 0
            count = self._counts[name]
            self._values[name][count % self._most] = value
            self._counts[name] = count + 1

    def windows(self) -> dict[str, dict[str, float]]:
        """Return mean, largest, smallest and standard deviation of each figure, and over how many samples."""
        found = {}
        for name, ring in sorted(self._values.items()):
            held = ring[: min(self._counts[name], self._most)].astype(np.float64)
            found[name] = {
                "mean": float(held.mean()),
                "max": float(held.max()),
                "min": float(held.min()),
                "std": float(held.std()),
                "samples": len(held),
            }
        return found


def thinned(windows: Sequence[TelemetryWindow], most: int) -> list[TelemetryWindow]:
    """Return at most ``most`` windows: neighbours become one, with the mean of each figure.

    Steps, totals and times are the newer one's. Windows of two generations stay apart for as long as
    there are others to merge.
    """
    found = list(windows)
    while len(found) > max(1, most):
        merged = _paired(found, lambda one, two: one.generation == two.generation)
        found = merged if len(merged) < len(found) else _paired(found, lambda one, two: True)
    return found


def _paired(windows: Sequence[TelemetryWindow], may: Any) -> list[TelemetryWindow]:
    found: list[TelemetryWindow] = []
    single = False  # whether the last one is of its own
    for window in windows:
        if single and may(found[-1], window):
            found[-1], single = _mean(found[-1], window), False
        else:
            found.append(window)
            single = True
    return found


def _mean(one: TelemetryWindow, two: TelemetryWindow) -> TelemetryWindow:
    figures = {
        name: value if counts(name) or name not in one.figures else (one.figures[name] + value) / 2
        for name, value in two.figures.items()
    }
    return TelemetryWindow(two.at_s, two.generation, {**one.figures, **figures}, two.slowest or one.slowest)


def counts(name: str) -> bool:
    """Whether a figure counts up, so that the newest value stands for those before it."""
    return name in ("step", "bad_step") or name.endswith("_total")


def series(windows: Iterable[TelemetryWindow], name: str) -> list[tuple[float, float]]:
    """Return (seconds since the epoch, value) of one figure, where it is known."""
    return [(window.at_s, window.figures[name]) for window in windows if name in window.figures]
