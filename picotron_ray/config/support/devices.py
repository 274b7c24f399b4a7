"""Features that only some devices have: CUDA graphs, and offloading to the host's memory.

``kernels.cuda_graphs`` records passes whose shapes, memory and kernels are the same each time."""

from __future__ import annotations

from collections.abc import Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.job import JobConfig

KEY = "kernels.cuda_graphs"


def device_problems(job: JobConfig, device: str) -> dict[str, str]:
    """Explain, by key, that a device has no CUDA graphs.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` where it is not known yet.
    """
    text = "saw true, but workers run on CPUs, which have no CUDA graphs; drop it"
    return {KEY: text} if job.kernels.cuda_graphs and device == "cpu" else {}


def graph_problems(job: JobConfig) -> Iterator[Problem]:
    """Find everything else of a job that cannot be recorded, but for its layout (``validation.layout``)."""
    if not job.kernels.cuda_graphs:
        return
    model = job.model
    reasons = {
        "model.builder": (model.builder is not None, "a model of your own, which may do anything"),
        "model.moe.experts": (
            bool(model.moe.experts),
            f"model.moe.experts={model.moe.experts}, which get other numbers of rows each time",
        ),
        job.data.asks_apart[0]: (
            job.data.keeps_documents_apart,
            f"{'='.join(job.data.asks_apart)}, whose masks are other ones in every row",
        ),
        "layout.offload_activations": (
            job.layout.offload_activations,
            "layout.offload_activations=true, which waits for copies between kernels",
        ),
        "precision": (job.precision == "fp8", "precision=fp8, which was not tried together"),
    }
    for key, (met, why) in reasons.items():
        if met:
            yield Problem(KEY, f"saw true with {why}; use false", (key,))


def offload_problems(job: JobConfig, device: str) -> dict[str, str]:
    """Explain, by key, that a device has no other memory to offload to.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` where it is not known yet.
    """
    asked = {
        "optimizer.offload": job.optimizer.offload,
        "layout.offload_activations": job.layout.offload_activations,
    }
    text = "saw true, but workers run on CPUs, whose memory is the host's; drop it"
    return {key: text for key, wanted in asked.items() if wanted and device == "cpu"}
