"""Grafana dashboard made of the catalogue: one row for each group, one panel for each metric.

Deterministic, so that the copy under ``deploy/dashboards`` can be compared with what this makes. A panel's
query follows from the metric's kind: a gauge as it is, a counter as its increase over the window shown, a
histogram as its median and 99th percentile.
"""

from __future__ import annotations

from typing import Any

from picotron_ray.observability.catalogue import GROUPS
from picotron_ray.observability.metric import Metric

Panel = dict[str, Any]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {
    "bytes": "bytes",
    "bytes_per_second": "Bps",
    "hertz": "hertz",
    "celsius": "celsius",
    "ratio": "percentunit",
    "seconds": "s",
    "tokens_per_second": "short",
    "watts": "watt",
}
"""Grafana's names of the catalogue's units; others are plain numbers."""
COLUMNS, WIDTH, HEIGHT = 3, 8, 7
CHOSEN = 'run=~"$run"'
RUN_QUERY = "label_values(picotron_training_target_steps, run)"


def queries(metric: Metric) -> list[tuple[str, str]]:
    """Make (PromQL, legend) of each line of a metric's panel."""
    by = ", ".join(metric.all_labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.all_labels)
    if metric.kind == "gauge":
        return [(f"{metric.name}{{{CHOSEN}}}", legend)]
    if metric.kind == "counter":
        return [(f"sum by ({by}) (increase({metric.name}{{{CHOSEN}}}[$__rate_interval]))", legend)]
    rates = f"sum by (le, {by}) (rate({metric.name}_bucket{{{CHOSEN}}}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rates})", f"p{q * 100:g} {legend}") for q in (0.5, 0.99)]


def _panel(metric: Metric, number: int, x: int, y: int) -> Panel:
    title = metric.name.removeprefix("picotron_").removesuffix("_total").replace("_", " ")
    targets = [
        {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(queries(metric))
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": metric.help,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": UNITS.get(metric.unit, "short")}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": targets,
    }


def _panels() -> list[Panel]:
    panels: list[Panel] = []
    y = 0
    for title, metrics in GROUPS.items():
        row_at = {"x": 0, "y": y, "w": COLUMNS * WIDTH, "h": 1}
        number = len(panels) + 1
        panels.append(
            {
                "id": number,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": row_at,
                "panels": [],
            }
        )
        for index, metric in enumerate(metrics):
            x, below = index % COLUMNS * WIDTH, index // COLUMNS * HEIGHT
            panels.append(_panel(metric, number + 1 + index, x, y + 1 + below))
        y += 1 + -(-len(metrics) // COLUMNS) * HEIGHT
    return panels


def dashboard() -> dict[str, Any]:
    """Make the dashboard, as Grafana imports it."""
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "run",
            "type": "query",
            "label": "Run",
            "datasource": DATASOURCE,
            "query": {"query": RUN_QUERY, "refId": "run"},
            "definition": RUN_QUERY,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
        },
    ]
    return {
        "uid": "picotron",
        "title": "picotron_ray",
        "tags": ["picotron_ray"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": _panels(),
    }
