"""Figures of ``bench mfu``: step times to rates, ratios, MFU and a breakdown. Pure.

MFU (model FLOPs utilisation; PaLM, Chowdhery et al. 2022, appendix B) is the FLOPs that the model's
training needs per token, times tokens per second, over what the devices could do. Recomputed activations
are not counted, and attention is counted in full although the causal mask needs half of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from picotron_ray.bench.common.statistics import quartiles
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.planner.model_sizes import active_parameters, flops_per_token, sizes_of

PHASES = ("data", "forward", "backward", "bubble", "reduce", "clip", "optimizer")
"""What a step consists of, as the engine names it; ``data`` is the loader and the copy to the device,
``bubble`` waits for other pipeline stages, ``reduce`` is communication that nothing hides."""

Spread = dict[str, float]
"""``median`` with ``low`` and ``high``, the quartiles."""


@dataclass(frozen=True, slots=True)
class Formula:
    """FLOPs of training per token, and the numbers that they come from."""

    parameters: int
    """that a token goes through, of the whole model"""
    layers: int
    width: int
    """of the query heads together"""
    sequence: int
    """tokens per row"""
    flops_per_token: float

    def __str__(self) -> str:
        return (
            f"6 x {self.parameters:,} parameters + 12 x {self.layers} layers x {self.width} wide"
            f" x {self.sequence:,} tokens"
        )


def formula(job: JobConfig) -> Formula:
    """6·N + 12·L·h·s as ``planner.model_sizes.flops_per_token`` computes it."""
    sizes, sequence = sizes_of(job.model), job.data.sequence_length
    flops = flops_per_token(job.model, sequence)
    return Formula(active_parameters(job.model), sizes.layers, sizes.scores, sequence, flops)


def mfu(tokens_per_s: float, flops_per_token: float, workers: int, peak: float) -> float:
    """Share of ``workers`` times ``peak`` FLOP/s."""
    return tokens_per_s * flops_per_token / (workers * peak)


def spread(values: Sequence[float]) -> Spread:
    low, median, high = quartiles(values)
    return {"median": median, "low": low, "high": high}


def measured(segments: Sequence[Mapping[str, Any]], tokens_per_step: int) -> dict[str, Any]:
    """Figures of one setting from its segments, one per round.

    A segment: ``steps_s``, seconds of each step in turn on rank 0; ``peak_bytes``, of the fullest rank;
    ``sent_bytes``, in a step, of the rank that sends most (None: not counted); ``loss_sum``, nats of a step's
    tokens towards the end (None: not known).
    """
    steps = [step for segment in segments for step in segment["steps_s"]]
    return {
        "tokens_per_s": spread([tokens_per_step * _steps_per_s(segment) for segment in segments]),
        "step_s": spread(steps),
        "steps": len(steps),
        "peak_bytes": max(segment["peak_bytes"] for segment in segments),
        "sent_bytes": max(
            (sent for s in segments if (sent := s.get("sent_bytes")) is not None), default=None
        ),
        "loss": _loss(segments, tokens_per_step),
    }


def _loss(segments: Sequence[Mapping[str, Any]], tokens_per_step: int) -> float | None:
    """Mean loss of a token in nats, of all segments that know it."""
    known = [loss for segment in segments if (loss := segment.get("loss_sum")) is not None]
    return sum(known) / len(known) / tokens_per_step if known else None


def _steps_per_s(segment: Mapping[str, Any]) -> float:
    """Rate of a whole segment: pauses between steps count."""
    return len(segment["steps_s"]) / sum(segment["steps_s"])


def speed_up(ours: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> Spread:
    """Ratio of our speed to another's, within each round; its spread over rounds."""
    return spread([_steps_per_s(a) / _steps_per_s(b) for a, b in zip(ours, others, strict=True)])


def breakdown(ranks: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Shares of a step's time on the rank that computes most, which waits least for others.

    Args:
        ranks: per rank, seconds per step of each phase.
    """

    def computing(rank: int) -> float:
        return ranks[rank].get("forward", 0.0) + ranks[rank].get("backward", 0.0)

    busiest = max(range(len(ranks)), key=computing)
    seconds = ranks[busiest]
    total = sum(seconds.values())
    phases = {
        name: {"s": seconds[name], "share": seconds[name] / total} for name in PHASES if name in seconds
    }
    return {"rank": busiest, "step_s": total, "phases": phases}


class Timed(NamedTuple):
    """Steps that count: seconds of each in turn, and the snapshots that began among them."""

    steps_s: list[float]
    snapshots: int


def timed(
    began_s: Mapping[int, float], sealed: Sequence[int], warmup: int, steps: int, *, snapshots: bool
) -> Timed | None:
    """Choose at least ``steps`` steps after the warm-up, with ``snapshots`` whole intervals; None: not yet.

    Args:
        began_s: when each step began; the last one is under way.
        sealed: steps whose state was snapshotted, in order.

    >>> timed({step: float(step) for step in range(1, 10)}, [1, 3, 5, 7], 2, 3, snapshots=True)
    Timed(steps_s=[1.0, 1.0, 1.0, 1.0], snapshots=2)
    """
    marks = [step for step in sealed if step >= warmup] if snapshots else [warmup, warmup + steps]
    last = next((step for step in marks if step - marks[0] >= steps), None)
    if last is None or last + 1 not in began_s:
        return None
    times = [began_s[step] for step in range(marks[0] + 1, last + 2)]
    taken = sum(marks[0] < step <= last for step in marks) if snapshots else 0
    return Timed([after - before for before, after in pairwise(times)], taken)
