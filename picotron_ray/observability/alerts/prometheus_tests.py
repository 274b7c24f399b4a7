"""Unit tests of the rules for Prometheus, made of the table: each rule fires where it should, and else not.

``promtool test rules`` runs them. A run is given an ordinary hour, then what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from picotron_ray.errors import ConfigError
from picotron_ray.observability.alerts.prometheus_rules import EXPRESSIONS, alert_name
from picotron_ray.observability.alerts.rules import BY_NAME

QUIET_MIN, WRONG_MIN = 90, 20
LABELS_LOST = {"folder", "reason", "kind", "worker"}
"""Labels that an expression sums over."""
USUAL_WRONG = {
    "loss-spike": ("3", "6"),
    "gradient-exploding": ("1", "20"),
    "gradient-vanishing": ("1", "0.001"),
    "throughput": ("1000", "700"),
    "straggler": ("1.05", "1.8"),
    "data-stall": ("0.02", "0.6"),
    "host-cpu": ("0.5", "0.97"),
    "host-memory": ("40", "97"),
    "device-memory": ("50", "95"),
    "disk": ("0.5", "0.95"),
    "fragmentation": ("0.1", "0.8"),
    "bandwidth": ("1000", "400"),
    "latency": ("0.001", "0.01"),
    "utilization": ("0.9", "0.2"),
    "throttling": ("0", "1"),
    "durability-lag": ("10", "60"),
}
"""Value of an ordinary minute, and of one that is wrong, by rule."""
GROWING = ("leak", "pending-operations", "ecc", "xid", "recovery-loop")
COMPANIONS = {
    "host-cpu": ("picotron_training_data_wait_ratio", 'run="r"', "0.02", "0.2"),
    "host-memory": ("picotron_host_memory_size_bytes", 'run="r", node="n"', "100", "100"),
    "device-memory": ("picotron_gpu_memory_size_bytes", 'run="r", node="n", gpu="g"', "100", "100"),
}
"""Second series of a rule: metric, labels, ordinary value, value beside what is wrong."""


def tests_of_rules(rules_file: str) -> dict[str, Any]:
    """Return the tests as ``promtool test rules`` reads them.

    Args:
        rules_file: that holds `prometheus_rules`, beside the file of the tests.
    """
    return {"rule_files": [rules_file], "evaluation_interval": "1m", "tests": list(_tests())}


def refuse_other_rules(rules_file: str) -> None:
    """Raise ConfigError where a file is not there, or lacks an alert that the tests are about."""
    how = "`picotron-ray metrics --rules > picotron-rules.yml` makes the file"
    try:
        found = yaml.safe_load(Path(rules_file).read_text(encoding="utf-8"))
        groups = found["groups"]
        there = {rule.get("alert") for group in groups for rule in group["rules"]}
    except OSError as error:
        raise ConfigError(f"--rule-tests: cannot read {rules_file}: {error.strerror}; {how}") from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"--rule-tests: saw {rules_file}, which holds no rules of Prometheus; {how}"
        ) from None
    missing = [name for name in map(alert_name, EXPRESSIONS) if name not in there]
    if missing:
        raise ConfigError(
            f"--rule-tests: saw {rules_file} without the rule {missing[0]}, expected all of ours; {how}"
        )


def _tests() -> Iterator[dict[str, Any]]:
    for name in EXPRESSIONS:
        yield _test(name, wrong=True)
        yield _test(name, wrong=False)


def _series(name: str, wrong: bool) -> list[dict[str, str]]:
    found = EXPRESSIONS[name]
    if name in GROWING:
        step = {"leak": 5, "recovery-loop": 1}.get(name, 1) if wrong else 0
        start = 1000 if name == "leak" else 3
        values = f"{start}+0x{QUIET_MIN} {start}+{step}x{WRONG_MIN}"
    else:
        usual, bad = USUAL_WRONG[name]
        values = f"{usual}+0x{QUIET_MIN} {bad if wrong else usual}+0x{WRONG_MIN}"
    made = [{"series": f"{found.metric}{{{found.labels}}}", "values": values}]
    if name in COMPANIONS:
        metric, labels, usual, beside = COMPANIONS[name]
        after = beside if wrong else usual
        series = {"series": f"{metric}{{{labels}}}", "values": f"{usual}+0x{QUIET_MIN} {after}+0x{WRONG_MIN}"}
        made.append(series)
    return made


def _test(name: str, *, wrong: bool) -> dict[str, Any]:
    rule, at_min = BY_NAME[name], QUIET_MIN + max(12, BY_NAME[name].windows + 2)
    labels = dict(part.split("=") for part in EXPRESSIONS[name].labels.replace('"', "").split(", "))
    if name in ("host-cpu", "leak", "fragmentation", "pending-operations", "utilization", "recovery-loop"):
        labels = {"run": "r"}
    kept = {label: value for label, value in labels.items() if label not in LABELS_LOST}
    if name == "throttling":
        kept.pop("gpu")
    fires = {
        "exp_labels": {**kept, "severity": rule.severity, "rule": name},
        "exp_annotations": {"summary": rule.means, "advice": rule.advice},
    }
    return {
        "interval": "1m",
        "name": f"{name} {'fires' if wrong else 'does not fire where nothing is wrong'}",
        "input_series": _series(name, wrong),
        "alert_rule_test": [
            {"eval_time": f"{QUIET_MIN - 1}m", "alertname": alert_name(name), "exp_alerts": []},
            {
                "eval_time": f"{at_min}m",
                "alertname": alert_name(name),
                "exp_alerts": [fires] if wrong else [],
            },
        ],
    }
