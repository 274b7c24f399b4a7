"""Rules for Prometheus, made of the same table: recording rules for shares and baselines, and alerts.

A window is a minute here. What the table calls so many windows in a row is so many minutes of ``for``; a
baseline is the median of the last hour. Rules whose figures have no metric are left out (`LEFT_OUT` names
them, with the reason).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from picotron_ray.observability.alerts.conditions import LEAST_BESIDE
from picotron_ray.observability.alerts.rules import BESIDE, BURST_S, BY_NAME, Rule

LEFT_OUT: Mapping[str, str] = {
    "nan": "its update is left out within the step: the events have it",
}
BASELINE = "1h"
WARM_UP = "10m"
"""Age of a run's series before it is compared with itself."""


@dataclass(frozen=True, slots=True)
class Expression:
    """PromQL of a rule.

    Fields:
        value: of the figure, by run, and by node and GPU where the metric has them.
        metric: whose series are there in each test of the rules, with the labels in ``labels``.
        recorded: the name under which ``value`` is recorded; "": it is short enough to be repeated.
    """

    value: str
    metric: str
    recorded: str = ""
    labels: str = 'run="r"'
    beside: str = ""


def _by_run(metric: str, how: str = "max") -> str:
    return f"{how} by (run) ({metric})"


EXPRESSIONS: Mapping[str, Expression] = {
    "loss-spike": Expression("picotron_training_loss_nats", "picotron_training_loss_nats"),
    "gradient-exploding": Expression("picotron_training_gradient_norm", "picotron_training_gradient_norm"),
    "gradient-vanishing": Expression("picotron_training_gradient_norm", "picotron_training_gradient_norm"),
    "throughput": Expression("picotron_training_tokens_per_second", "picotron_training_tokens_per_second"),
    "straggler": Expression("picotron_training_straggler_ratio", "picotron_training_straggler_ratio"),
    "data-stall": Expression("picotron_training_data_wait_ratio", "picotron_training_data_wait_ratio"),
    "host-cpu": Expression(
        _by_run("picotron_host_cpu_ratio"),
        "picotron_host_cpu_ratio",
        "run:picotron_host_cpu_ratio:max",
        'run="r", node="n"',
        beside="picotron_training_data_wait_ratio",
    ),
    "host-memory": Expression(
        "picotron_host_memory_used_bytes / picotron_host_memory_size_bytes",
        "picotron_host_memory_used_bytes",
        "node:picotron_host_memory_ratio",
        'run="r", node="n"',
    ),
    "device-memory": Expression(
        "picotron_gpu_memory_used_bytes / picotron_gpu_memory_size_bytes",
        "picotron_gpu_memory_used_bytes",
        "gpu:picotron_gpu_memory_ratio",
        'run="r", node="n", gpu="g"',
    ),
    "disk": Expression(
        "max by (run, node) (picotron_host_disk_used_ratio)",
        "picotron_host_disk_used_ratio",
        "node:picotron_host_disk_used_ratio:max",
        'run="r", node="n", folder="storage"',
    ),
    "leak": Expression(
        _by_run("picotron_worker_resident_bytes"),
        "picotron_worker_resident_bytes",
        "run:picotron_worker_resident_bytes:max",
        'run="r", node="n", worker="w"',
    ),
    "fragmentation": Expression(
        _by_run("picotron_worker_fragmentation_ratio"),
        "picotron_worker_fragmentation_ratio",
        "run:picotron_worker_fragmentation_ratio:max",
        'run="r", node="n", worker="w"',
    ),
    "bandwidth": Expression(
        "picotron_training_link_bandwidth_bytes_per_second",
        "picotron_training_link_bandwidth_bytes_per_second",
        labels='run="r", axis="dp"',
    ),
    "latency": Expression(
        "picotron_training_link_latency_seconds",
        "picotron_training_link_latency_seconds",
        labels='run="r", axis="dp"',
    ),
    "pending-operations": Expression(
        _by_run("picotron_worker_pending_operations"),
        "picotron_worker_pending_operations",
        "run:picotron_worker_pending_operations:max",
        'run="r", node="n", worker="w"',
    ),
    "utilization": Expression(
        _by_run("picotron_gpu_utilization_ratio", "avg"),
        "picotron_gpu_utilization_ratio",
        "run:picotron_gpu_utilization_ratio:avg",
        'run="r", node="n", gpu="g"',
    ),
    "throttling": Expression(
        "sum by (run, node) (picotron_gpu_throttling"
        '{reason=~"hw_slowdown|sw_thermal|hw_thermal|hw_power_brake"})',
        "picotron_gpu_throttling",
        "node:picotron_gpu_throttling:sum",
        'run="r", node="n", gpu="g", reason="hw_thermal"',
    ),
    "ecc": Expression(
        "picotron_gpu_ecc_errors_total", "picotron_gpu_ecc_errors_total", labels='run="r", node="n", gpu="g"'
    ),
    "xid": Expression(
        "picotron_gpu_xid_errors_total", "picotron_gpu_xid_errors_total", labels='run="r", node="n", gpu="g"'
    ),
    "durability-lag": Expression(
        "picotron_checkpoint_durability_lag_steps", "picotron_checkpoint_durability_lag_steps"
    ),
    "recovery-loop": Expression(
        "sum by (run) (picotron_elastic_failures_total)",
        "picotron_elastic_failures_total",
        "run:picotron_elastic_failures_total:sum",
        'run="r", kind="hang"',
    ),
}


def alert_name(rule: str) -> str:
    """Return a rule's name as alerts of Prometheus have it.

    >>> alert_name("loss-spike")
    'PicotronLossSpike'
    """
    return "Picotron" + "".join(part.capitalize() for part in rule.split("-"))


def expression(name: str) -> str:
    """Return the PromQL that is true where a rule fires."""
    rule, found = BY_NAME[name], EXPRESSIONS[name]
    value, limit = found.recorded or found.value, rule.threshold
    if name == "durability-lag":  # the commit interval is not a metric: most gaps of the last hour
        usual = f"quantile_over_time(0.8, {value}[{BASELINE}] offset 5m)"
        return f"{value} > {limit:g} * {usual}"
    if rule.kind in ("above", "below"):
        sign = ">" if rule.kind == "above" else "<"
        return f"{value} {sign} {limit:g}{_beside(found)}"
    if rule.kind in ("rise", "drop"):
        usual = f"quantile_over_time(0.5, {value}[{BASELINE}] offset 5m)"
        sign, factor = (">", limit) if rule.kind == "rise" else ("<", round(1 - limit, 6))
        return f"{value} {sign} {factor:g} * {usual} and {value} offset {WARM_UP}"
    if rule.kind == "rising":
        minutes = int(limit)
        steady = f"resets({value}[{minutes}m]) == 0 and changes({value}[{minutes}m]) >= {minutes - 1}"
        return f"{steady} and {value} offset {WARM_UP}"
    span = f"{BURST_S / 60:g}m" if rule.kind == "burst" else "5m"
    return f"increase({value}[{span}]) >= {limit if rule.kind == 'burst' else 0.5:g}"


def _beside(found: Expression) -> str:
    if not found.beside:
        return ""
    usual = f"quantile_over_time(0.5, {found.beside}[{BASELINE}] offset 5m)"
    return f" and {found.beside} > {BESIDE:g} and {found.beside} > {LEAST_BESIDE:g} * {usual}"


def prometheus_rules() -> dict[str, Any]:
    """Return the rules as Prometheus reads them from a file (YAML, of which JSON is a part)."""
    recorded = {each.recorded: each.value for each in EXPRESSIONS.values() if each.recorded}
    recording = [{"record": name, "expr": value} for name, value in sorted(recorded.items())]
    return {
        "groups": [
            {"name": "picotron-recorded", "interval": "1m", "rules": recording},
            {"name": "picotron-alerts", "interval": "1m", "rules": list(_alerts())},
        ]
    }


def kubernetes_rules() -> dict[str, Any]:
    """Return the rules as the Prometheus operator takes them; its Prometheus may select by further labels."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "picotron", "labels": {"app.kubernetes.io/part-of": "picotron-ray"}},
        "spec": prometheus_rules(),
    }


def _alerts() -> Iterator[dict[str, Any]]:
    for name, rule in BY_NAME.items():
        if name in EXPRESSIONS:
            yield {
                "alert": alert_name(name),
                "expr": expression(name),
                "for": f"{_minutes(rule)}m",
                "labels": {"severity": rule.severity, "rule": name},
                "annotations": {"summary": rule.means, "advice": rule.advice},
            }


def _minutes(rule: Rule) -> int:
    """Minutes for which a rule must hold: its windows but the first one, which shows it."""
    return rule.windows - 1
