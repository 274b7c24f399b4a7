"""Bodies of findings, as each kind of sink takes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from picotron_ray.observability.alerts.finding import Finding

AlertBody = Callable[[str, Finding], Any]
MOST_TEXT = 1024
ALERTS_PATH = "/api/v2/alerts"
"""Path of Alertmanager's API v2 to which alerts are posted."""


def webhook(run: str, found: Finding) -> dict[str, Any]:
    """Finding as JSON, with the run's name and one line for people."""
    return {"run": run, "text": found.text[:MOST_TEXT], **found.plain()}


def slack(run: str, found: Finding) -> dict[str, Any]:
    """Message of Slack's incoming webhooks, and of what is compatible with them."""
    state = "resolved" if found.resolved else found.severity
    text = f"[{state}] run {run}: {found.text}"[:MOST_TEXT]
    return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}


def alertmanager(run: str, found: Finding) -> list[dict[str, Any]]:
    """Alerts of Alertmanager's API v2; one that is over has its end."""
    labels = {
        "alertname": found.rule,
        "run": run,
        "severity": found.severity,
        "where": found.where,
        **({"node": found.node} if found.node else {}),
    }
    evidence = ", ".join(f"{name}={value:.6g}" for name, value in found.evidence.items())
    alert: dict[str, Any] = {
        "labels": labels,
        "annotations": {
            "summary": found.said[:MOST_TEXT],
            "advice": found.advice,
            "evidence": evidence,
            "step": str(found.step),
            "generation": found.generation,
        },
        "startsAt": _rfc3339(found.since_s),
    }
    if found.resolved:
        alert["endsAt"] = _rfc3339(found.at_s)
    return [alert]


def _rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


BODIES: Mapping[str, AlertBody] = {"webhook": webhook, "slack": slack, "alertmanager": alertmanager}


def encoded(kind: str, run: str, found: Finding) -> bytes:
    """Return what is posted to a sink of this kind."""
    return json.dumps(BODIES[kind](run, found)).encode()
