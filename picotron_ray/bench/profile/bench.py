"""Whether steps outside a profile's window take as long as without one: interleaved pairs on a live run.

Each block of a pair records the seconds of some steps, after others that pass. Before one of the two a
profile is taken. Which comes first is drawn by seed, so that a drift of the machine cancels.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

from picotron_ray.runtime.driver import recordings
from picotron_ray.runtime.driver.profile_run import representative
from picotron_ray.runtime.driver.tool_orders import RunTools

PASS_STEPS = 3
"""Steps before a block, in which all ranks come back from the last hold."""
PROFILE = {"kind": "profile", "wait": 1, "warmup": 1, "active": 3, "shapes": True, "stacks": False}
BOUND = 0.03
"""Half-width of the interval above which a measurement says too little."""
Say = Callable[[str], None]


def bench(run: str, pairs: int, steps: int, seed: int, say: Say) -> dict[str, Any]:
    """Measure; returns each pair's ratio, and the interval of their geometric mean.

    Raises:
        ConfigError: there is no such run, or it does not train now.
    """
    tools, draw = RunTools(run), random.Random(seed)
    ranks = representative(tools.spec.layout)
    ratios: list[float] = []
    for number in range(pairs):
        profiled_first = draw.random() < 0.5
        seconds = {
            profiled: _block_s(tools, ranks, steps, profiled)
            for profiled in (profiled_first, not profiled_first)
        }
        ratios.append(seconds[True] / seconds[False])
        say(f"{number + 1} of {pairs}: {ratios[-1]:.4f}")
    return {"run": run, "pairs": pairs, "steps": steps, "ratios": ratios, **interval(ratios)}


def _block_s(tools: RunTools, ranks: tuple[int, ...], steps: int, profiled: bool) -> float:
    """Median seconds of a step, after a profile or not."""
    if profiled:
        key, _ = recordings.record(tools, ranks, PROFILE)
        recordings.drop(tools, ranks, key)
    order = {"kind": "times", "wait": PASS_STEPS, "warmup": 0, "active": steps}
    key, answers = recordings.record(tools, ranks[:1], order)
    recordings.drop(tools, ranks[:1], key)
    return statistics.median(answers[ranks[0]]["steps_s"])


def interval(ratios: list[float]) -> dict[str, Any]:
    """Geometric mean of ratios, its 95 % interval by Student's t, and whether steps are unchanged.

    >>> interval([1.01, 0.99, 1.0, 1.0])["unchanged"]
    True
    """
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.mean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    reach = _student(len(logs) - 1) * error
    low, high = math.exp(middle - reach), math.exp(middle + reach)
    half = (high - low) / 2
    return {
        "ratio": math.exp(middle),
        "low": low,
        "high": high,
        "half_width": half,
        "unchanged": low <= 1.0 <= high and half <= BOUND,
    }


def _student(freedom: int) -> float:
    """97.5 % point of Student's t, by the expansion about the normal's (Abramowitz and Stegun, 26.7.5)."""
    z, n = 1.959964, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def lines(found: dict[str, Any]) -> list[str]:
    """Say the figures."""
    word = "unchanged" if found["unchanged"] else "not shown to be unchanged"
    return [
        f"step time after a profile over that without: {found['ratio']:.4f}, 95 % interval"
        f" {found['low']:.4f} to {found['high']:.4f} (half-width {100 * found['half_width']:.1f} %) of"
        f" {found['pairs']} pairs: {word}"
    ]
