"""Config of alerts: rules over windows of telemetry, what they may have done, and whom they tell."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from picotron_ray.config.schema.base import Section
from picotron_ray.config.schema.telemetry import AXES, STEP_PHASES

AlertRule = Literal[
    "nan",
    "loss-spike",
    "gradient-exploding",
    "gradient-vanishing",
    "throughput",
    "straggler",
    "data-stall",
    "host-cpu",
    "host-memory",
    "device-memory",
    "disk",
    "leak",
    "fragmentation",
    "bandwidth",
    "latency",
    "pending-operations",
    "utilization",
    "throttling",
    "ecc",
    "xid",
    "durability-lag",
    "recovery-loop",
]
"""Rules that are known; ``observability.alerts.rules`` is the table of them."""
ALERT_RULES: tuple[AlertRule, ...] = get_args(AlertRule)
Severity = Literal["critical", "warning", "info"]
AlertAct = Literal["snapshot", "rewind", "quarantine"]
Detector = Literal["thresholds", "robust", "learned"]

FIGURES = (
    *("step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu_ratio", "goodput_ratio"),
    *("step_s", "step_s_std", *(f"{phase}_s" for phase in STEP_PHASES), "straggler_ratio"),
    *(f"{name}.{axis}" for name in ("sent_bytes", "bandwidth_bytes_per_s", "latency_s") for axis in AXES),
    *("pending_operations", "peak_bytes", "allocated_bytes", "reserved_bytes", "device_bytes"),
    *("planned_peak_bytes", "fragmentation_ratio", "utilization_ratio", "host_cpu_ratio"),
    *("host_memory_ratio", "disk_used_ratio", "durability_lag_steps", "throttled_gpus"),
    *("ecc_errors_total", "xid_errors_total", "failures_total", "recoveries_total", "bad_steps_total"),
)
"""Figures of a window, which rules of your own may look at."""


class AlertRuleConfig(Section):
    """A rule that is not as the table has it, or one of your own over a figure.

    Example::

        alerts:
          rules:
            - rule: throughput
              threshold: 0.1
            - rule: eval-too-slow
              figure: goodput_ratio
              below: 0.8
    """

    rule: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,62}$",
        description="name of a known rule, or, with `figure`, of one of your own",
    )
    enabled: bool = Field(default=True, description="false: the rule is off")
    threshold: float | None = Field(default=None, gt=0, description="a known rule's; null: the table's")
    windows: int | None = Field(
        default=None, ge=1, le=1000, description="windows in a row that must show it; null: the table's, or 3"
    )
    severity: Severity | None = Field(default=None, description="null: the table's, or warning")
    figure: str | None = Field(default=None, description="figure of a window; null: the rule is a known one")
    above: float | None = Field(default=None, description="a rule of your own fires above this value")
    below: float | None = Field(default=None, description="a rule of your own fires below this value")


class AlertActConfig(Section):
    """Request to the coordinator when a rule fires.

    Example::

        alerts:
          act:
            - rule: nan
              do: rewind
    """

    rule: str = Field(description="name of a rule that is on")
    do: AlertAct = Field(
        description="snapshot: commit a checkpoint now; rewind: go back as elastic.on_nonfinite=rewind does,"
        " within elastic.max_rewinds; quarantine: move off the node that the finding names"
    )


class AlertSinkConfig(Section):
    """Receiver of findings beside the run's events.

    An address that holds a secret is read from the environment or a file on the coordinator's node, and never
    told.

    Example::

        alerts:
          sinks:
            - kind: slack
              url_env: SLACK_WEBHOOK_URL
            - kind: alertmanager
              url: http://alertmanager:9093
    """

    kind: Literal["webhook", "slack", "alertmanager"] = Field(
        description="webhook: JSON of the finding; slack: {text}, as Slack and what is compatible with it"
        " take it; alertmanager: its API v2"
    )
    url: str | None = Field(
        default=None, description="address, http:// or https://, where it is no secret; null: see below"
    )
    url_env: str | None = Field(
        default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="environment variable that holds it"
    )
    url_file: str | None = Field(default=None, description="file that holds it")
    least: Severity = Field(default="warning", description="least severity that is sent")
    timeout_s: float = Field(default=5.0, gt=0, le=60, description="longest wait for an answer, per try")


UtcTime = Annotated[
    str,
    Field(
        pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?Z$",
        json_schema_extra={"expected": "a time in UTC such as 2026-12-01T08:00Z"},
    ),
]


class AlertSilenceConfig(Section):
    """A rule whose findings are noted and neither told nor acted on.

    Example::

        alerts:
          silences:
            - rule: straggler
              why: node 3 is known to be slow
    """

    rule: str = Field(description="name of a rule, or * for all")
    until: UtcTime | None = Field(
        default=None,
        description="end in UTC, such as 2026-12-01T08:00Z, after which it silences nothing; null: for as"
        " long as the run goes on",
    )
    why: str = Field(default="", description="why, for whoever looks")


class AlertsConfig(Section):
    """Alerts on what telemetry shows of a run.

    Example::

        alerts:
          rules:
            - rule: disk
              threshold: 0.8
          act:
            - rule: nan
              do: rewind
          sinks:
            - kind: webhook
              url_env: ALERT_URL
    """

    enabled: bool = Field(default=True, description="judge windows; needs telemetry.interval_s")
    detectors: tuple[Detector, ...] = Field(
        default=("thresholds",),
        description="thresholds: the table of rules; robust: figures far from their medians, in median"
        " absolute deviations; learned: an isolation forest over figures (extra alerts). The last two tell"
        " of what is unusual, as info",
    )
    rules: tuple[AlertRuleConfig, ...] = Field(default=(), description="rules that differ from the table")
    act: tuple[AlertActConfig, ...] = Field(default=(), description="what findings have done")
    act_budget: int = Field(
        default=6, ge=1, le=100, description="most findings within an hour on which something is done"
    )
    sinks: tuple[AlertSinkConfig, ...] = Field(default=(), max_length=16, description="who is told")
    silences: tuple[AlertSilenceConfig, ...] = Field(default=(), description="who is not listened to")
