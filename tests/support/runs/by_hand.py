"""A model and a machine whose numbers are easy by hand."""

from __future__ import annotations

from typing import Any

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.planner.device_profile import DeviceProfile

UNIT = DeviceProfile(
    flops=1e3, memory_bytes=1e9, link_bytes_s=1e2, latency_s=5.0, node_link_bytes_s=1e1, kernel_s=7.0
)
MIXTURE = {"moe": {"experts": 4, "top_k": 2, "intermediate_size": 6}}
BY_HAND: dict[str, Any] = {
    "model": {
        "vocab_size": 300,
        "hidden_size": 8,
        "intermediate_size": 10,
        "layers": 4,
        "heads": 2,
        "kv_heads": 1,
    },
    "data": {"sequence_length": 6, "global_batch": 16},
}


def job_by_hand(model: dict[str, Any] | None = None, **options: Any) -> JobConfig:
    """Blocks 8 wide with keys of 4: 16 + 192 parameters, and 240 of SwiGLU or 32 + 4·144 of a mixture."""
    return parse_job({**BY_HAND, "model": {**BY_HAND["model"], **(model or {})}, **options})
