"""Memory of a rank by cause: weights, gradients, optimizer, activations, buffers."""

from __future__ import annotations

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.meta import MetaConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.kept_activations import receive_bytes
from picotron_ray.planner.memory import rank_memory
from picotron_ray.planner.model_sizes import blocks_again, trained_of_rank


def memory_by_cause(job: JobConfig, layout: Layout, rank: int) -> dict[str, float]:
    """Estimated bytes of a pipeline rank by cause, and their total at the fullest moment of a step.

    ``buffers`` are what ZeRO gathers and gradients that are not yet reduced, ``received`` those into which a
    pipeline receives. The optimizer's update has temporaries of its own, at a time
    when no activations live; the total has whichever is more.
    """
    again = blocks_again(job, layout, rank)
    estimate = rank_memory(job, layout, rank, again)
    without = {"name": "sgd", "offload": False, "moments": "full", "ema_decay": None}
    bare = {"optimizer": job.optimizer.model_copy(update=without), "meta": MetaConfig()}
    plain = rank_memory(job.model_copy(update=bare), layout, rank, again)
    received = receive_bytes(job, layout, rank)
    trained = trained_of_rank(job.model, layout, rank)
    gradients = plain.state_bytes * trained.share / (1 + trained.added + trained.share)
    return {
        "weights": plain.state_bytes - gradients,
        "gradients": gradients,
        "optimizer": estimate.state_bytes - plain.state_bytes,
        "activations": estimate.activation_bytes - received,
        "received": received,
        "buffers": estimate.gathered_bytes,
        "update": estimate.update_bytes,
        "total": estimate.total_bytes,
    }
