"""Settings of torch's process groups that recovery in place and hang verdicts need."""

from __future__ import annotations

from collections.abc import MutableMapping

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
RECORDED = "TORCH_FR_BUFFER_SIZE"


def prepare_recorder(environment: MutableMapping[str, str], operations: int) -> None:
    """Have torch's flight recorder, of gloo and NCCL, keep so many collectives; 0: none.

    It reads the environment at the first collective. What that says already stays.
    """
    environment.setdefault(RECORDED, str(operations))


def prepare_nccl(environment: MutableMapping[str, str]) -> None:
    """Have an error of a peer end no other process.

    By default torch ends the process of every survivor, which would start anew. What the environment says
    already stays: ``picotron-ray doctor`` warns of it.
    """
    environment.setdefault(ASYNC_ERRORS, "0")
