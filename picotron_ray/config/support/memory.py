"""Keys of ``memory`` that not every device or job has, and the allocator's options by strategy."""

from __future__ import annotations

from collections.abc import Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.job import JobConfig

ALLOCATOR_OPTIONS = {
    "auto": "",
    "best-fit": "expandable_segments:False",
    "adaptive": "expandable_segments:True,garbage_collection_threshold:0.8",
}
"""Options of torch's CUDA allocator by ``memory.allocator``; empty: it is left as it is."""


def memory_problems(job: JobConfig, device: str) -> dict[str, str]:
    """Explain, by key, what a device does not have.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` where it is not known yet.
    """
    memory, found = job.memory, {}
    if device != "cpu":
        return {}
    if memory.allocator in ALLOCATOR_OPTIONS and memory.allocator != "auto":
        found["memory.allocator"] = (
            f"saw {memory.allocator}, but workers run on CPUs, where the C library allocates by its own"
            " strategy; use auto"
        )
    if memory.preallocate:
        text = "saw true, but workers run on CPUs, which have no memory pools; drop it"
        found["memory.preallocate"] = text
    return found


def strategy_problems(job: JobConfig) -> Iterator[Problem]:
    """Find what no device has, and what does not go together."""
    memory = job.memory
    if memory.allocator not in ALLOCATOR_OPTIONS:
        text = f"saw {memory.allocator}, which torch's allocators do not have: they take the smallest free"
        yield Problem("memory.allocator", f"{text} block that is large enough; use best-fit or adaptive")
    against = {
        "memory.allocator": memory.allocator == "adaptive" and "adaptive, whose segments grow by themselves",
        "kernels.cuda_graphs": job.kernels.cuda_graphs and "true, whose graph has a pool of its own",
        "optimizer.offload": job.optimizer.offload and "true, whose state lies in host memory",
    }
    for key, why in against.items():
        if memory.preallocate and why:
            yield Problem("memory.preallocate", f"saw true with {key}={why}; drop one", (key,))
