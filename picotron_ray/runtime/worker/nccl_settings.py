"""Settings of torch's NCCL process groups that recovery in place needs; read when a group is made."""

from __future__ import annotations

from collections.abc import MutableMapping

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
RECORDED = "TORCH_FR_BUFFER_SIZE"
MOST_RECORDED = 1000
"""Collectives that the flight recorder holds."""


def prepare_nccl(environment: MutableMapping[str, str]) -> None:
    """Have an error of a peer end no other process, and the flight recorder keep the newest collectives.

    By default torch ends the process of every survivor, which would start anew. What the environment says
    already stays: ``picotron-ray doctor`` warns of it.
    """
    environment.setdefault(ASYNC_ERRORS, "0")
    environment.setdefault(RECORDED, str(MOST_RECORDED))
