"""One GPU for each process of a machine that several processes share.

Ray shows each worker its own GPU alone. Where there is no Ray (``bench gpu``, the tests on GPUs) a process
takes the first one that no other process of the same owner has, and keeps it for life: a communicator of
NCCL must not have two ranks on one GPU, and a rank's number changes from generation to generation. The claim
is the name of a socket, which the kernel gives back when the process ends, also by SIGKILL.
"""

from __future__ import annotations

import contextlib
import socket

import torch

from picotron_ray.errors import PicotronError

_claims: dict[int, tuple[int, socket.socket]] = {}


def claim_device(kind: str, owner: int, count: int | None = None) -> torch.device:
    """Return this process's own device: a CPU, or a GPU, which is made the current one.

    Args:
        kind: ``cpu`` or ``cuda``.
        owner: number that the processes have in common, such as the pid of their parent.
        count: GPUs to choose from; None: all that torch sees.

    Raises PicotronError where all are taken.
    """
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", claim_index(owner, torch.cuda.device_count() if count is None else count))
    torch.cuda.set_device(device)
    return device


def claim_index(owner: int, count: int) -> int:
    """Return the number below ``count`` that is this process's; see `claim_device`."""
    if owner in _claims:
        return _claims[owner][0]
    for index in range(count):
        claim = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            claim.bind(f"\0picotron-gpu/{owner}/{index}")
            _claims[owner] = index, claim
            return index
        claim.close()
    raise PicotronError(f"saw {count} GPUs, all taken by processes of {owner}, expected one more; use fewer")
