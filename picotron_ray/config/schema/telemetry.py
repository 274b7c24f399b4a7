"""Config of the telemetry of steps, and the names of what it measures."""

from __future__ import annotations

from pydantic import Field

from picotron_ray.config.schema.base import Section

STEP_PHASES = ("data", "forward", "backward", "bubble", "reduce", "sync", "snapshot", "optimizer", "other")
"""Parts of a step's seconds, which add up to the step.

``reduce`` is exposed communication: what the backward pass did not hide of the sum of gradients, and what
passes wait for where the host sees it (gloo). ``bubble`` is what a pipeline rank waits for other stages,
``sync`` what a rank waits for the others at the step's end, ``snapshot`` what it waits for a copy.
"""

AXES = ("dp", "tp", "pp", "cp", "ep")
"""Axes of a layout along which a rank sends."""


class OtelConfig(Section):
    """Spans of a run for an OpenTelemetry collector (in a checkout: ``pip install -e '.[otel]'``).

    Headers, such as a token, come from ``OTEL_EXPORTER_OTLP_HEADERS`` in the environment of the coordinator's
    node, and are never told.

    Example::

        telemetry:
          otel:
            endpoint: http://collector:4318
    """

    endpoint: str | None = Field(
        default=None,
        description="collector that takes OTLP over HTTP, http:// or https://, /v1/traces added where it is"
        " missing; null: no spans",
    )
    sample_steps: int = Field(
        default=100, ge=0, description="steps from one that becomes a span to the next; 0: none does"
    )


class TelemetryConfig(Section):
    """Figures of steps: each worker notes them, its node's agent sums them up, the coordinator reads them.

    Example::

        telemetry:
          interval_s: 30.0
    """

    interval_s: float | None = Field(
        default=60.0,
        gt=0,
        description="interval at which an agent sums the steps of its workers up; null: none are measured",
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="peak of one worker's device that MFU refers to, such as the fastest product of"
        " `picotron-ray probe`; null: its data sheet's, where that is known, else there is no MFU",
    )
    otel: OtelConfig = Field(default_factory=OtelConfig, description="spans for OpenTelemetry")
