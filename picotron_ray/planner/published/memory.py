"""Memory of Megatron-DeepSpeed's pipeline ranks, held against what BLOOM's team published of the fullest.

Weights and gradients in 16 bits, fp32 master weights and moments cut over the replicas (ZeRO-1); of every
layer its input, for as many micro-batches as the schedule keeps in flight (`layout.schedules`); one layer's
activations while it is computed again (Korthikanti et al. 2022, without sequence parallelism); logits on the
last stage. Four constants were fitted to the 21 published figures, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.planner.datasheet import RESERVED
from picotron_ray.planner.memory import budget_bytes
from picotron_ray.planner.published.runs import PublishedRun, published_runs, run_of

SOURCE = "BLOOM / BigScience 2022"
DEVICE_BYTES = 80e9
OVERHEAD_BYTES = 6.7e9
"""CUDA, NCCL's buffers, DeepSpeed's buckets (fitted)."""
WIDE_GRADIENT_BYTES = 2.8
"""Of fp32 gradients per parameter, beside bf16 ones (fitted: they are freed in part)."""
KEPT_FACTOR = 1.3
"""Of the inputs kept: buffers to send and receive them, and what the allocator cannot use (fitted)."""
LAYER_FACTOR = 1.6
"""Of one layer's activations: its gradients live beside them (fitted)."""
LOGIT_BYTES = 8
"""Of one logit: in 16 bits, in fp32, and its gradient."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One published figure of the fullest stage beside the estimate, in bytes.

    ``published_bytes`` is 0 for a layout that ran out of memory.
    """

    run: PublishedRun
    published_bytes: float
    predicted_bytes: float

    @property
    def error(self) -> float | None:
        return self.predicted_bytes / self.published_bytes - 1 if self.published_bytes else None

    @property
    def refused(self) -> bool:
        """Whether the planner's own budget of such a device would keep the layout from running."""
        assert self.run.job is not None, "its memory was predicted"
        return self.predicted_bytes > budget_bytes(self.run.job, (1 - RESERVED) * DEVICE_BYTES)


def stage_memories() -> list[StageMemory]:
    """Every published figure with its estimate, and then the layouts that ran out of memory."""
    found = []
    for run in published_runs():
        published = (run.facts.get("also_published") or {}).get("memory_gb_max_stage")
        if run.source == SOURCE and published:
            found.append(StageMemory(run, published * 1e9, fullest_stage_bytes(run)))
    return found + [StageMemory(run, 0.0, fullest_stage_bytes(run)) for run in map(run_of, OUT_OF_MEMORY)]


def memory_dict(found: list[StageMemory]) -> dict[str, Any]:
    """The comparison as plain data: rows, mean and worst error, and layouts without room that are refused."""
    errors = [abs(one.error) for one in found if one.error is not None]
    without_room = [one for one in found if one.error is None]
    return {
        "memory_rows": [
            {
                "model": one.run.name,
                "layout": str(one.run.layout),
                "published_bytes": one.published_bytes or None,
                "predicted_bytes": one.predicted_bytes,
                "error": one.error,
                "refused": one.refused,
            }
            for one in found
        ],
        "memory_mape": sum(errors) / len(errors),
        "memory_worst": max(errors),
        "out_of_memory": len(without_room),
        "out_of_memory_refused": sum(one.refused for one in without_room),
        "ran_and_refused": sum(one.refused for one in found if one.error is not None),
    }


def fullest_stage_bytes(run: PublishedRun) -> float:
    """Estimated bytes of the fullest pipeline rank. Only of runs with a job and a layout."""
    job, layout = run.job, run.layout
    if job is None or layout is None:
        raise ValueError(f"{run.source}, {run.name}: the source states no layout")
    wide = "fp32 gradients" in (run.facts["layout"]["precision"] or "")
    return max(_rank_bytes(job, layout, rank, wide) for rank in range(layout.pp))


def _rank_bytes(job: JobConfig, layout: Layout, rank: int, wide_gradients: bool) -> float:
    model, layers = job.model, -(-job.model.layers // layout.pp)
    table = model.vocab_size * model.hidden_size * (rank in (0, layout.pp - 1))
    parameters = (12 * layers * model.hidden_size**2 + table) / layout.tp
    state = parameters * (4 + (WIDE_GRADIENT_BYTES if wide_gradients else 0) + 12 / layout.dp)
    tokens = layout.micro_batch * job.data.sequence_length
    shape = layout.pipeline_shape(job.data.global_batch)
    in_flight = schedule_of(layout.schedule).in_flight(shape, rank)
    kept = 2 * tokens * model.hidden_size * layers * in_flight
    scores = 5 * model.heads / layout.tp * job.data.sequence_length
    layer = tokens * (model.hidden_size * (10 + 24 / layout.tp) + scores)
    logits = LOGIT_BYTES * tokens * model.vocab_size / layout.tp if rank == layout.pp - 1 else 0.0
    return state + KEPT_FACTOR * kept + LAYER_FACTOR * layer + logits + OVERHEAD_BYTES


def _out_of_memory(
    name: str, layers: int, heads: int, dp: int, tp: int, pp: int, micro_batch: int, precision: str = "fp16"
) -> Mapping[str, Any]:
    """A row of the file for a layout that did not fit, of the model's other dimensions."""
    return {
        "source": SOURCE,
        "where": "BigScience train/tr11-176B-ml/chronicles-prequel.md: out of memory",
        "model": {
            "name": name, "layers": layers, "hidden": 14336, "heads": heads, "kv_heads": heads, "ffn": 57344,
            "vocab": 250880, "seq": 2048,
        },
        "hardware": "a100-80g",
        "gpus": 384,
        "layout": {
            "tp": tp, "pp": pp, "cp": 1, "dp": dp, "virtual_stages": 1, "zero": 1,
            "micro_batch": micro_batch, "global_batch_samples": 2048, "recompute": "full",
            "sequence_parallel": False, "precision": precision,
        },
        "measured": {"step_s": float("inf")},
    }  # fmt: skip


OUT_OF_MEMORY = (
    _out_of_memory("BLOOM-like 181B", 72, 64, dp=48, tp=8, pp=1, micro_batch=1),
    _out_of_memory("BLOOM-like 181B", 72, 64, dp=32, tp=2, pp=6, micro_batch=1),
    _out_of_memory("BLOOM-like 181B", 72, 64, dp=32, tp=2, pp=6, micro_batch=2),
    # of 02-28, by when all runs had "BF16 optimizer ... to accumulate gradients in fp32" (the same page)
    _out_of_memory("BLOOM-like 206B", 82, 128, 8, 4, 12, 2, precision="bf16 (fp32 gradients)"),
)
