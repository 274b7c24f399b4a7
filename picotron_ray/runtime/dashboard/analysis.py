"""Config of a run as YAML, the numbers of its model, and the memory that its layout should take."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import ValidationError

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.analysis import analyse
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.plan_text import analysis_lines
from picotron_ray.runtime.dashboard.cells import degrees

YAML_BYTES = 48 << 10
OF_THE_MODEL = 4
"""First lines of an analysis, which no device changes."""
ANY_DEVICE = "h100-80g"


def config_section(config: dict[str, Any]) -> dict[str, Any]:
    """The config, and the numbers of its model that no device changes."""
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    found: dict[str, Any] = {"yaml": text[:YAML_BYTES], "cut": len(text) > YAML_BYTES, "analysis": []}
    try:
        job = JobConfig.model_validate(config)
        lines = list(analysis_lines(analyse(job, 1, hardware(ANY_DEVICE))))[:OF_THE_MODEL]
        found["analysis"] = [line.split(None, 1) for line in lines]
    except (PicotronError, ValidationError, ValueError) as error:
        found["problem"] = str(error).splitlines()[0][:300]
    return found


def predicted_memory(config: dict[str, Any], layout: str | None, micro_batch: int = 0) -> dict[str, float]:
    """Bytes by kind that the planner expects on the fullest worker of a layout; none where it cannot tell."""
    sizes = degrees(layout)
    try:
        job = JobConfig.model_validate(config)
        found = memory_estimate(job, Layout(**_named(sizes, layout or "", micro_batch)))
    except (PicotronError, ValidationError, ValueError, TypeError):
        return {}
    return {
        "state": found.state_bytes,
        "gathered": found.gathered_bytes,
        "activations": found.activation_bytes,
        "update": found.update_bytes,
    }


def _named(sizes: dict[str, int], layout: str, micro_batch: int) -> dict[str, Any]:
    words = layout.split("-")
    numbers: dict[str, Any] = dict(sizes)
    for word in words:
        if word.startswith("zero") and word[4:].isdecimal():
            numbers["zero"] = int(word[4:])
        if word.startswith("mb") and word[2:].isdecimal():
            numbers["micro_batch"] = micro_batch or int(word[2:])
    return numbers
