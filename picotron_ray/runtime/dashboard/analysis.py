"""Config of a run as YAML, the numbers of its model, and the memory that its layout should take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml
from pydantic import ValidationError

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.analysis import analyse
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.peaks import mfu_ratio, peak_of_worker
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


def predicted_memory(config: Mapping[str, Any], layout: str | None) -> dict[str, float]:
    """Bytes by kind that the planner expects on the fullest worker of a layout; none where it cannot tell."""
    return dict(_predicted(json.dumps(config), layout or ""))


@lru_cache(maxsize=8)
def _predicted(config: str, layout: str) -> Mapping[str, float]:
    job = _job(config)
    try:
        found = None if job is None else memory_estimate(job, Layout(**_numbers(layout)))
    except (PicotronError, ValueError, TypeError):
        found = None
    if found is None:
        return {}
    return {
        "state": found.state_bytes,
        "gathered": found.gathered_bytes,
        "activations": found.activation_bytes,
        "update": found.update_bytes,
    }


def _numbers(layout: str) -> dict[str, Any]:
    numbers: dict[str, Any] = dict(degrees(layout))
    for word in layout.split("-"):
        if word.startswith("zero") and word[4:].isdecimal():
            numbers["zero"] = int(word[4:])
        if word.startswith("mb") and word[2:].isdecimal():
            numbers["micro_batch"] = int(word[2:])
    return numbers


def stated_peak(config: Mapping[str, Any], workers: int) -> tuple[float, str] | None:
    """MFU of one token a second on so many workers, and its peak, where the config names one."""
    return _stated(json.dumps(config), workers)


@lru_cache(maxsize=64)
def _stated(config: str, workers: int) -> tuple[float, str] | None:
    job = _job(config)
    peak = None if job is None else peak_of_worker(job, set())
    return None if job is None or peak is None else (mfu_ratio(job, 1.0, workers, peak), peak.source)


@lru_cache(maxsize=8)
def _job(config: str) -> JobConfig | None:
    try:
        return JobConfig.model_validate_json(config)
    except (PicotronError, ValidationError, ValueError):
        return None
