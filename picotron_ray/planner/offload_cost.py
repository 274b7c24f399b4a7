"""Offload cost: seconds of a step in which moments and activations travel to host memory and back."""

from __future__ import annotations

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.kept_activations import offloaded_activations
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.model_sizes import blocks_again


def offload_s(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds of a step for offloading to host memory.

    - Moments: gradients go down and updates come up. AdamW runs on the host's cores, which read and write
      update and moments and read gradients: seven values per parameter.
    - Activations: down and up, per micro-batch.
    """
    seconds = 0.0
    if job.optimizer.offload:
        moments = memory_estimate(job, layout).host_state_bytes
        rate = profile.host_bytes_s * max(1, int(job.cluster.cpus_per_worker))
        seconds += moments / profile.host_link_bytes_s + 3.5 * moments / rate
    if layout.offload_activations:
        most = max(
            offloaded_activations(job, layout, rank, blocks_again(job, layout, rank))
            for rank in range(layout.pp)
        )
        seconds += 2 * layout.micro_batches(job.data.global_batch) * most / profile.host_link_bytes_s
    return seconds
