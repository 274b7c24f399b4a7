"""Metrics catalogue: every metric that a run serves, as data.

It is the one source of exporters, dashboard and documentation.

Names are ``picotron_<what>_<unit>`` in Prometheus' base units, counters end in ``_total``; a figure without
a unit (a norm, a number of a generation) has the unit "1" and no suffix. A figure that is not known yet
has no series, rather than a 0 that nobody measured.

Each process adds the labels that it has for everything: the coordinator ``run``, an agent ``run`` and
``node``.
"""

from __future__ import annotations

from picotron_ray.observability.agent_metrics import MEMORY, NODE, WORKER
from picotron_ray.observability.coordinator_metrics import CHECKPOINT, ELASTIC, TRAINING
from picotron_ray.observability.machine_metrics import GPU, HOST
from picotron_ray.observability.metric import Metric
from picotron_ray.observability.step_metrics import STEPS

GROUPS: dict[str, tuple[Metric, ...]] = {
    "Training": TRAINING,
    "Steps": STEPS,
    "Elasticity": ELASTIC,
    "Checkpoints": CHECKPOINT,
    "Workers": WORKER,
    "Memory": MEMORY,
    "Nodes": NODE,
    "Hosts": HOST,
    "GPUs": GPU,
}
"""The catalogue, by the dashboard's rows."""

CATALOGUE: dict[str, Metric] = {metric.name: metric for group in GROUPS.values() for metric in group}
"""The catalogue, by name."""
