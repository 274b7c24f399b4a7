"""What may be kept in host memory, and where that says nothing. Torch-free."""

from __future__ import annotations

from picotron_ray.config.job import JobConfig


def offload_problems(job: JobConfig, device: str) -> dict[str, str]:
    """Key and what is wrong, in words, of everything that was asked to leave a device that has nowhere to go.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` where it is not known yet.
    """
    asked = {
        "optimizer.offload": job.optimizer.offload,
        "layout.offload_activations": job.layout.offload_activations,
    }
    text = "saw true, but workers run on CPUs, whose memory is the host's; drop it"
    return {key: text for key, wanted in asked.items() if wanted and device == "cpu"}
