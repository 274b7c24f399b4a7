"""Telemetry of a simulated generation: even figures, told late; some are of a generation that is over."""

from __future__ import annotations

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.telemetry import STEP_PHASES
from picotron_ray.coordinator.messages import GenerationSpec, Measured, RunFigures

EVERY = 20
"""Steps between two events of a generation."""
LATE_S = 2.0
"""From a step to the event that tells of it."""
_SHARES = {"forward": 0.3, "backward": 0.6, "reduce": 0.05, "optimizer": 0.05}


def is_told(spec: GenerationSpec, step: int) -> bool:
    """Whether figures are told after a step."""
    return (step - spec.resume_step) % EVERY == 0


def measured(job: JobConfig, spec: GenerationSpec, step: int, step_s: float) -> Measured:
    """Return what all ranks of an undisturbed generation would measure."""
    layout = spec.layout
    computes_s = step_s * (_SHARES["forward"] + _SHARES["backward"])
    rows = tuple(
        last - first for first, last in (layout.rows(i, job.data.global_batch) for i in range(layout.dp))
    )
    figures = RunFigures(
        steps=min(100, step - spec.resume_step),
        last_step=step,
        step_s=step_s,
        phase_s={phase: step_s * _SHARES.get(phase, 0.0) for phase in STEP_PHASES},
        replica_row_s=tuple(computes_s / max(1, fed) for fed in rows),
        replica_rows=rows,
        stage_s=(computes_s / layout.micro_batches(job.data.global_batch) / layout.virtual_stages,)
        * layout.stages,
        utilization=computes_s / step_s,
        ranks=layout.world_size,
    )
    return Measured(spec.id, figures)
