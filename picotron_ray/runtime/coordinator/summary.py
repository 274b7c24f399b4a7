"""Summary of a run: the content of summary.json, made of its facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.meta import SEQUENCES, SINUSOIDS
from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator.records import (
    Facts,
    FailureRecord,
    GenerationRecord,
    goodput,
    median_step_s,
)

EXIT_CODES = {"finished": 0, "failed": 3, "storage": 4, "fenced": 3, "stopped": 130}
REQUEUE = 75
"""Exit code of a launch that was stopped to be launched again: EX_TEMPFAIL of sysexits.h."""


def exit_code(status: str, again: bool) -> int:
    """Exit code of a launch whose run ended so; ``again``: to be launched again."""
    return REQUEUE if again else EXIT_CODES[status]


def generation_entry(record: GenerationRecord) -> dict[str, Any]:
    """Format a generation as summary.json lists it; ``members`` is null where they are not kept any more."""
    return {
        "term": record.id.term,
        "n": record.id.n,
        "layout": record.layout,
        "members": None if record.members is None else record.names,
        "workers": record.workers,
        "members_digest": record.members_digest,
        "start_step": record.start_step,
        "end_step": record.end_step,
        "reason": record.reason,
        "settings": dict(record.settings),
        "predicted_s": record.predicted_s or None,
        "measured_s": record.measured_s or None,
    }


def summary_of(
    job: JobConfig,
    facts: Facts,
    finish: m.Finish,
    began_s: float,
    wall_s: float,
    lived_s: float,
    paused_s: float = 0.0,
) -> dict[str, Any]:
    """Return the content of summary.json, without the ledger's part, which is added when it is stored.

    Args:
        began_s: when the run first began, in seconds since the epoch.
        wall_s: since then.
        lived_s: of those, what its launches lived, without the pauses of operators.
        paused_s: those pauses.
    """
    median = median_step_s(facts)
    tokens = tokens_per_step(job)
    return {
        "run": job.name,
        "status": finish.status,
        "detail": finish.detail,
        "submissions": list(facts.submissions),
        "steps": facts.generations[-1].end_step if facts.generations else 0,
        "eval_loss": facts.newest_eval().get("eval_loss"),
        **loss_before(job, facts),
        "eval_sets": facts.newest_sets(),
        "baseline_loss": facts.baseline_loss,
        "tokens_per_s": tokens / median if median and tokens else None,
        "mfu": None,  # needs the device's peak rate: unknown on a CPU
        "goodput": goodput(facts, lived_s),
        "wall_s": wall_s,
        "lived_s": lived_s,
        "paused_s": paused_s,
        "requeue": finish.again,
        "generations": [generation_entry(record) for record in facts.generations],
        "failures": failure_entries(facts),
        "seconds": facts.account.told(began_s + wall_s)["seconds"],
        "checkpoints": list(facts.checkpoints),
    }


def tokens_per_step(job: JobConfig) -> int:
    """Count what a step predicts: tokens, or of tasks the values of their query sets.

    0 where a task's size is known to workers alone.
    """
    if not job.meta.on:
        return job.data.global_batch * job.data.sequence_length
    values = {SEQUENCES: job.data.sequence_length, SINUSOIDS: 1}.get(job.meta.tasks, 0)
    return job.data.global_batch * job.meta.query * values


def loss_before(job: JobConfig, facts: Facts) -> dict[str, float | None]:
    """Return the newest held-out loss of tasks before their inner steps; nothing for a job without tasks."""
    if not job.meta.on:
        return {}
    page = facts.leader(facts.newest)
    return {"eval_loss_before": page.get("eval_loss_before") if page.get("eval_step", -1) >= 0 else None}


def failure_entries(facts: Facts) -> list[dict[str, Any]]:
    """Format failures as the status and summary.json list them, with the seconds that each one cost."""
    return [
        {**failure_entry(each, facts.evidence), **facts.account.of_failure(at)}
        for at, each in enumerate(facts.failures)
    ]


def training_status(job: JobConfig, facts: Facts) -> dict[str, Any]:
    """Format what the status says of the newest generation and its training."""
    record = facts.newest
    page, newest_eval = facts.leader(record), facts.newest_eval()
    step_time = page.get("step_time_s") or 0.0
    tokens = tokens_per_step(job)
    return {
        "generation": str(record.id) if record else None,
        "layout": record.layout if record else None,
        "precision": job.precision,
        "members": record.names if record else [],
        "resume_step": record.start_step if record else 0,
        "step": page.get("step", record.end_step if record else 0),
        "steps": job.steps,
        "loss": page.get("loss") or None,
        "tokens_per_s": tokens / step_time if step_time and tokens else None,
        "eval_loss": newest_eval.get("eval_loss"),
        "eval_step": newest_eval.get("eval_step"),
        **loss_before(job, facts),
        "eval_sets": facts.newest_sets(),
        "baseline_loss": facts.baseline_loss,
        "failures": failure_entries(facts),
    }


def failure_entry(failure: FailureRecord, evidence: Mapping[str, str]) -> dict[str, Any]:
    """Format a failure as the status and summary.json list it."""
    return {
        "kind": failure.kind.value,
        "target": failure.target,
        "step": failure.step,
        "detected_s": failure.detected_s,
        "recovered_s": failure.recovered_s,
        "lost_steps": failure.lost_steps,
        "restored_from": failure.restored_from,
        "evidence": evidence.get(failure.struck),
    }
