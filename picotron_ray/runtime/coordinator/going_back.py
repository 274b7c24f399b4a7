"""Words for a generation that goes back behind those before it."""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator.records import GenerationRecord


def gone_back(generations: list[GenerationRecord], spec: m.GenerationSpec) -> str:
    """Say how many steps a generation from a commit goes back behind those before it; "": none."""
    ran = max((record.end_step for record in generations[-1:]), default=0)
    if spec.source.kind != "commit" or ran <= spec.resume_step:
        return ""
    return (
        f"goes back {ran - spec.resume_step} steps, from step {ran} to the commit of step {spec.resume_step}"
    )
