"""Release process groups on a thread of their own, because their destructors may block.

The destructor of a gloo group joins the group's threads, and so waits for every operation that still runs.
After an abort one may run until its timeout, although no caller waits for it (abortable_wait.py). torch
releases the GIL meanwhile, so another thread can carry the wait. Until it ends, such a group costs three
threads that mostly sleep, a few descriptors and the tensors of the operation; its connections are shut.
That thread is also the last to let go of a group: where something else still refers to one (a traceback, a
cache), whoever drops that reference, in any thread and at any garbage collection, would run the destructor.

An exit handler prevents two accidents at the end of the process:

- The main thread would destroy groups that nobody closed, and wait in their destructors: they are kept.
- A thread that comes back from torch while the interpreter is finalised asks for the GIL. CPython then ends
  it by unwinding through C++ frames that do not allow that, and the process dies of SIGABRT. So threads that
  may be inside torch are put to sleep in a signal handler, out of which they never come.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import signal
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from picotron_ray.comm.torch_groups import living_groups

PROMPT_S = 1.0  # a destructor takes about 20 ms where no operation runs, longer on a busy machine
PARK = signal.SIGRTMAX
LOOK_S = (0.02, 1.0)  # from one look at who else refers to a group to the next, at first and at last
_LISTED = 2  # references to a group that only a list holds: the list's, and the argument of getrefcount
_inside_torch: set[threading.Thread] = set()


def release(groups: list[Any], wait_s: float = PROMPT_S) -> bool:
    """Empty ``groups`` on another thread, and wait for their destructors no longer than ``wait_s``.

    Garbage that refers to the groups is collected first: who collects it last runs the destructors.

    Returns:
        Whether the groups are gone. It is not waited for where something else refers to one of them.
    """
    if _referred(groups):
        gc.collect()
        wait_s = 0.0 if _referred(groups) else wait_s
    thread = threading.Thread(target=_clear, args=(groups,), name="release-groups", daemon=True)
    park_at_exit(thread)
    thread.start()
    thread.join(wait_s)
    return not thread.is_alive()


def _referred(groups: list[Any]) -> bool:
    """Whether anything but the list refers to one of the groups."""
    return any(sys.getrefcount(groups[index]) > _LISTED for index in range(len(groups)))


def _clear(groups: list[Any]) -> None:
    pause_s, most_s = LOOK_S
    while groups:
        while sys.getrefcount(groups[-1]) > _LISTED:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)
        groups.pop()
    leave(threading.current_thread())


def park_at_exit(thread: threading.Thread) -> None:
    """Say that a daemon thread may be inside torch when the process ends; `leave` takes it back."""
    _inside_torch.add(thread)


def leave(thread: threading.Thread) -> None:
    """Say that ``thread`` calls torch no more."""
    _inside_torch.discard(thread)


def _at_exit() -> None:
    if dist.is_initialized() and dist.get_backend() == "gloo":
        _keep_for_ever(living_groups())
    threads = [thread for thread in _inside_torch if thread.is_alive()]
    if threads:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        libc.signal(int(PARK), ctypes.cast(libc.pause, ctypes.c_void_p))
    for thread in threads:
        assert thread.ident is not None
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            signal.pthread_kill(thread.ident, PARK)


def _keep_for_ever(groups: list[Any]) -> None:
    """Take references that nothing gives back, not even the end of the interpreter."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


atexit.register(_at_exit)
