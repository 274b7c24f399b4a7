"""Account of a stored run: what a report says, as JSON values that scripts rely on."""

from __future__ import annotations

from typing import Any

from picotron_ray.observability.goodput import CAUSES, FAILURE_CAUSES
from picotron_ray.runtime.coordinator.records import Facts, FailureRecord, GenerationRecord
from picotron_ray.runtime.coordinator.summary import failure_entries, generation_entry
from picotron_ray.runtime.run_storage.stored_run import CUT_OFF, StoredRun

RUNG = {"slots": "snapshots in memory", "commit": "a commit in storage", "init": "initial weights"}
"""Rung of the ladder of recovery, by what a failure was restored from."""


def run_account(run: StoredRun) -> dict[str, Any]:
    """Return the account of a run.

    ``wall_s`` is the time since the run began up to its end, or the newest that its record tells; of a run
    that died, up to its last sign of life. ``seconds`` has its causes (`observability.goodput`), which add up
    to it, and ``failures`` each one's ``detect_s`` to ``recompute_s``.
    """
    told = _times(run)
    facts = run.facts or Facts()
    summary = run.summary or {}
    ends = run.vitals.state not in ("running", "starting", CUT_OFF)
    return {
        "run": run.name,
        "began_at_s": None if run.memo is None else run.memo["began_s"],
        "storage": run.where,
        "state": run.vitals.state,
        "updated_s": run.vitals.updated_s or None,
        "step": newest_step(run),
        "steps": run.config.get("steps"),
        "loss": newest_loss(run),
        "eval_loss": facts.newest_eval().get("eval_loss"),
        "eval_sets": facts.newest_sets(),
        "baseline_loss": facts.baseline_loss,
        **told,
        "failures": failure_entries(facts),
        "recoveries": _recoveries(facts.failures),
        "generations": [_generation(record) for record in facts.generations],
        "checkpoints": list(facts.checkpoints),
        "ledger": summary.get("ledger") if ends else None,
        "environment": run.environment,
        "complaints": run.complaints,
    }


def _times(run: StoredRun) -> dict[str, Any]:
    if run.facts is None or run.memo is None:
        return {"wall_s": 0.0, "goodput": None, "seconds": dict.fromkeys(CAUSES, 0.0)}
    told = run.facts.account.told(run.memo["began_s"] + run.memo["wall_s"])
    unseen_s = run.vitals.updated_s - (run.facts.account.began_s + told["wall_s"])
    if run.vitals.state == CUT_OFF and unseen_s > 0:  # since its record was stored
        told["wall_s"] += unseen_s
        told["seconds"]["unknown"] += unseen_s
        told["goodput"] = told["seconds"]["steps"] / (told["wall_s"] - told["seconds"]["paused"])
    return told


def newest_step(run: StoredRun) -> int:
    """Return the newest step that storage tells of."""
    known = [run.steps[-1].step] if run.steps else []
    if run.facts is not None and run.facts.newest is not None:
        known.append(run.facts.newest.end_step)
    return max(known, default=int((run.summary or {}).get("steps") or 0))


def newest_loss(run: StoredRun) -> float | None:
    """Return the newest loss that storage tells of; None: none."""
    if run.steps:
        return run.steps[-1].loss
    if run.memo is not None and run.memo.get("loss") is not None:
        return float(run.memo["loss"])
    found: float | None = (run.summary or {}).get("final_loss")
    return found


def _generation(record: GenerationRecord) -> dict[str, Any]:
    found = generation_entry(record)
    nodes = len({member.node for member in record.members}) if record.members else None
    plain = {name: value for name, value in found.items() if name != "members"}
    return {**plain, "nodes": nodes, "began_at_s": record.at_s or None, "source": record.source}


def _recoveries(failures: list[FailureRecord]) -> list[dict[str, Any]]:
    """Count recoveries, and their mean seconds, by the rung of the ladder that they restored from."""
    rows = []
    for source, rung in RUNG.items():
        found = [one for one in failures if one.restored_from == source and one.recovered_s is not None]
        if found:
            seconds = [one.recovered_s for one in found if one.recovered_s is not None]
            lost = sum(one.lost_steps for one in found)
            mean_s = sum(seconds) / len(seconds)
            rows.append({"rung": rung, "count": len(found), "mean_s": mean_s, "lost_steps": lost})
    return rows


def failure_seconds(failure: dict[str, Any]) -> float:
    """Seconds that a failure cost, all parts together."""
    return float(sum(failure[f"{cause}_s"] for cause in FAILURE_CAUSES))
