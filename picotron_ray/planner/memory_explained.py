"""One rank's memory by cause: bytes, each with its formula and the numbers in it. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.kept_activations import STATE_BYTES, narrows
from picotron_ray.planner.memory import MOMENTS, averages, rank_memory
from picotron_ray.planner.model_sizes import Trained, blocks_again, stage_parameters, trained_of_rank


class MemoryCause(NamedTuple):
    """One cause of a rank's bytes, and the formula that gave them, numbers filled in."""

    cause: str
    bytes: float
    formula: str


def explain_memory(job: JobConfig, layout: Layout, rank: int) -> list[MemoryCause]:
    """Bytes of one global rank by cause; their sum is the estimate's ``total_bytes``.

    Causes are ``weights``, ``gradients``, ``optimizer``, ``activations`` and ``buffers``. Buffers are weights
    in 16 bits or gathered under ZeRO, and gradients not yet reduced, or the temporaries of the optimizer's
    update where they take more than those and the activations together, which are then not counted.

    Example:
        >>> from picotron_ray.config.schema.model import ModelConfig
        >>> model = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=32, layers=2, heads=2)
        >>> explain_memory(JobConfig(model=model, precision="fp32"), Layout(), 0)[0].formula
        '6,224 parameters x 4 bytes'
    """
    stage_rank = layout.coordinates(rank).pp
    found = rank_memory(job, layout, stage_rank, blocks_again(job, layout, stage_rank))
    size = STATE_BYTES[job.precision]
    held = sum(
        stage_parameters(job.model, layout.cut, stage, layout.tp, layout.ep)
        for stage in layout.rank_stages(stage_rank)
    )
    # gradients are of the size of what is trained; what is kept is the weights and all moments
    trained = trained_of_rank(job.model, layout, stage_rank)
    mine = _gradients(found.kept_bytes, found.state_bytes + found.host_state_bytes, job, trained)
    weights = mine * (1 + trained.added) / trained.share if trained.share else found.kept_bytes
    shards = f" ({held:,.0f} over {layout.shards} shards)" if layout.zero else ""
    parameters = f"{mine / size:,.0f} parameters{shards}"
    optimizer = found.state_bytes - mine - weights
    tokens = layout.widest_rows(job.data.global_batch) * job.data.sequence_length // layout.cp
    updating = found.update_bytes > found.gathered_bytes + found.activation_bytes
    activations = 0.0 if updating else found.activation_bytes
    buffers = found.update_bytes if updating else found.gathered_bytes
    return [
        MemoryCause("weights", weights, f"{weights / size:,.0f} parameters{shards} x {size} bytes"),
        MemoryCause("gradients", mine, f"{parameters} x {size} bytes"),
        MemoryCause("optimizer", optimizer, _optimizer(job, parameters, size, found.host_state_bytes)),
        MemoryCause(
            "activations",
            activations,
            f"{tokens:,} tokens a micro-batch x {activations / tokens:,.0f} bytes, recompute"
            f" {layout.recompute}, schedule {layout.schedule}",
        ),
        MemoryCause(
            "buffers",
            buffers,
            f"{buffers:,.0f} bytes of the update's temporaries"
            if updating
            else f"{held:,.0f} parameters, gathered and reduced by zero={layout.zero}"
            if layout.zero
            else f"{held:,.0f} parameters in 16 bits to compute with"
            if narrows(job)
            else f"{held:,.0f} parameters, not gathered without zero",
        ),
    ]


def _gradients(kept: float, state: float, job: JobConfig, trained: Trained) -> float:
    """Bytes of the gradients: what is in ``state`` and not in ``kept``."""
    if not job.optimizer.offload:
        return state - kept
    per_trained = MOMENTS[job.optimizer.name] + averages(job)
    return kept * trained.share / (1 + trained.added + per_trained * trained.share)


def _optimizer(job: JobConfig, parameters: str, size: int, host: float) -> str:
    name, moments = job.optimizer.name, MOMENTS[job.optimizer.name]
    average = f" + {parameters} x {size} bytes (average)" if averages(job) else ""
    if job.meta.strategy == "metasgd":
        average = f" + {parameters} x {averages(job)} x {size} bytes (beside them, of inner rates too)"
    if host:
        return f"staging of {name}'s {host:,.0f} bytes in host memory{average}"
    width = "1.02 bytes" if job.optimizer.moments == "8bit" else f"{size} bytes"
    return f"{parameters} x {moments} moments x {width} ({name}){average}"
