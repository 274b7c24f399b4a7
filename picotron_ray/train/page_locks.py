"""Slots' pages, registered with CUDA, so that the device writes into them by itself.

A copy into pageable memory goes through a buffer of the driver's, and whoever queues it waits. Into pages
that are registered (``cudaHostRegister``) it goes by itself, at the speed of the bus, and nobody waits.
Registering takes long (it locks each page in memory), so that it is done once a slot, before it is first
written (`slot_room`). What holds of it:

- The pages are those of a shared mapping of a file on a memory file system, allocated and touched before:
  none of them can be missing (a hole in a full file system would kill the process by SIGBUS), readers in
  other processes see what the device wrote, and a process that is forked shares them as they are. Files on a
  disk are not registered: kernels do not look after pages that a device writes behind a disk's file system.
- They are locked until they are given back: before they are unmapped, when a slot grows or goes. A process
  that ends gives back its own; its slots lie there as before, and another process may read or remove them.
- One refusal (a limit of locked memory, of the driver, of the machine, an error of torch's) is the last one
  that is asked for: it is said once, and slots that have none are written through the ring of `state_copies`.

torch hands on CUDA's functions for it as ``torch.cuda.cudart()``, and does not document them:
``tests/gloo/comm/test_torch_interfaces.py`` and ``tests/gpu/test_snapshots.py`` look at them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch

PORTABLE = 1
"""Flag of ``cudaHostRegister``: page-locked for every context, as all memory that torch pins."""
IN_MEMORY = ("tmpfs", "ramfs")
FAILURES = (RuntimeError, AssertionError, AttributeError, TypeError, ValueError)
"""What torch raises for CUDA's errors, without CUDA, and where its functions are others."""

log = logging.getLogger(__name__)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class CudaPageLocks:
    """Registers memory with a CUDA device's runtime (`checkpoint.snapshot.slot_file.PageLocks`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, length: int) -> bool:
        """Lock memory in place, both multiples of a page; False where it is refused, which is said."""
        try:
            why = self._registered(address, length)
        except FAILURES as error:
            why = _words(error)
            with contextlib.suppress(*FAILURES):  # it may be registered, and what it returned is not known
                self._given_back(address)
        if why:
            log.warning(
                "CUDA registers no memory for snapshots (%s, %d MiB): copies go through a ring of page-locked"
                " memory, and steps wait longer for them; lower the number of workers of this node or"
                " snapshot.slots, or raise its limit of locked memory",
                why,
                length >> 20,
            )
        return not why

    def unlock(self, address: int) -> None:
        """Give back what was locked at an address; nothing copies into it any more."""
        try:
            why = self._given_back(address)
        except FAILURES as error:
            why = _words(error)
        if why:
            log.warning("CUDA does not give back a slot's memory: %s", why)

    def _registered(self, address: int, length: int) -> str:
        """Return why it was refused, "" where it was not."""
        with torch.cuda.device(self._device):  # a new thread's is the first one
            return self._answer(self._runtime().cudaHostRegister(address, length, PORTABLE))

    def _given_back(self, address: int) -> str:
        with torch.cuda.device(self._device):
            return self._answer(self._runtime().cudaHostUnregister(address))

    def _answer(self, returned: Any) -> str:
        error = int(returned)
        if not error:
            return ""
        self._forget_error()
        return str(torch.cuda.CudaError(error))

    @staticmethod
    def _runtime() -> Any:
        return torch.cuda.cudart()

    def _forget_error(self) -> None:
        """Take the error from CUDA, which keeps it for this thread: else its next launch would raise it."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device).neg_()


def page_locks(device: torch.device, folder: str | os.PathLike[str]) -> CudaPageLocks | None:
    """Choose how pages of slots in ``folder`` are locked; None: nothing writes into them but the host."""
    if device.type != "cuda":
        return None
    if not in_memory(folder):
        log.warning(
            "slots in %s lie on no memory file system: copies of snapshots go through a ring of page-locked"
            " memory, and steps wait longer for them",
            folder,
        )
        return None
    return CudaPageLocks(device)


def in_memory(folder: str | os.PathLike[str]) -> bool:
    """Whether files in a folder are kept in memory alone (Linux; False where it cannot be told)."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for fields in (line.split() for line in mounts):
        if (
            fields[2] == wanted
        ):  # "30 25 0:27 / /dev/shm rw - tmpfs tmpfs rw": optional fields end with a dash
            return fields[fields.index("-") + 1] in IN_MEMORY
    return False
