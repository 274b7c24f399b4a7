"""Metric: its name, kind, unit and labels, and the time series that it turns into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]
Server = Literal["coordinator", "agent"]

SERVER_LABELS: dict[Server, tuple[str, ...]] = {"coordinator": ("run",), "agent": ("run", "node")}
"""Labels of every series that a process serves."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of the catalogue.

    Fields:
        unit: the suffix of the name (before ``_total``); "1": none.
        labels: those beyond ``SERVER_LABELS``.
        buckets: upper bounds of a histogram, ascending, without infinity.
        needs_gpu: has series only on machines with an NVIDIA GPU.
        in_ray: also given to Ray (as ``ray_<name>``), so that Ray's own service discovery leads to the run.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    server: Server
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    needs_gpu: bool = False
    in_ray: bool = False

    @property
    def all_labels(self) -> tuple[str, ...]:
        return (*SERVER_LABELS[self.server], *self.labels)


def bucket_of(value: float, buckets: tuple[float, ...]) -> int:
    """Index of the bucket that a value falls into; upper bounds belong to their bucket."""
    return sum(value > bound for bound in buckets)


def series_of(metric: Metric) -> tuple[str, ...]:
    """Names of the time series that a metric turns into."""
    if metric.kind == "histogram":
        return tuple(f"{metric.name}_{part}" for part in ("bucket", "count", "sum"))
    return (metric.name,)
