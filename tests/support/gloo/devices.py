"""Devices of the pool's processes: one body of a test trains over gloo on CPUs and over NCCL on GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch

from picotron_ray.comm.device_claim import claim_device
from picotron_ray.runtime.worker.nccl_settings import prepare_nccl


def own_device(kind: str) -> torch.device:
    """This process's own, the same for its whole life; its siblings have others."""
    if kind == "cuda":
        prepare_nccl(os.environ)  # as workers do, before the first communicator
    return claim_device(kind, os.getppid())


def group_options(device: torch.device) -> dict[str, Any]:
    """What `Job.groups` is told for a device."""
    return {"backend": "nccl", "device": device} if device.type == "cuda" else {}
