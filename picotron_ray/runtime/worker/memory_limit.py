"""Memory limit of a worker, held by the kernel: too large an allocation fails where it is asked for.

RLIMIT_DATA counts private, writable memory and not what is shared, such as snapshot slots. A failed
allocation raises in torch and NumPy, so it becomes the worker's outcome (``oom``), where the kernel's own OOM
killer would take any process of the machine. A thread's stack counts with its 8 MB, and Ray's own threads
abort the process where they find no memory: so the limit is set late, when they have all been started.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch


def limit_memory(more_bytes: int) -> None:
    """Let the calling process take that many bytes more than it has now, and no more."""
    found = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(found[1]) * 1024 + more_bytes, hard))


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the device or of the host, whose allocator has no error class in torch."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
