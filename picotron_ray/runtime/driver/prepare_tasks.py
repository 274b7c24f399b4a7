"""Tasks of ``data prepare``: processes of this machine, or tasks of a Ray cluster.

A process ends with the command, whatever ends that, and Ray ends tasks whose driver is gone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process

from picotron_ray.data.prepare.part import PartCounts, PartJob, write_part
from picotron_ray.errors import DataError

ONE_CORE = {"TOKENIZERS_PARALLELISM": "false"}
"""Environment of a task: tasks share the cores, not what is in one of them."""
TRIES = 3
AGAIN = "run the command again: finished parts are kept"


def on_this_machine(jobs: Sequence[PartJob]) -> Iterator[tuple[int, PartCounts]]:
    """Run jobs in a process for each core that this one may use."""
    if not jobs:
        return
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin) as pool:
        numbers = {pool.submit(write_part, job): at for at, job in enumerate(jobs)}
        try:
            for done in as_completed(numbers):
                yield numbers[done], done.result()
        except BrokenProcessPool:
            text = f"--out: a process that writes parts was killed (out of memory?); {AGAIN}"
            raise DataError(text) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _begin() -> None:
    os.environ.update(ONE_CORE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command says that it was interrupted
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def on_ray(address: str) -> Callable[[Sequence[PartJob]], Iterable[tuple[int, PartCounts]]]:
    """Connect to a Ray cluster, whose tasks run jobs. Raises ClusterError where none answers."""
    from picotron_ray.runtime.ray_cluster.connect import connect_to

    connect_to(address)
    return _ray_tasks


def _ray_tasks(jobs: Sequence[PartJob]) -> Iterator[tuple[int, PartCounts]]:
    import ray
    from ray.exceptions import RayError, RayTaskError

    task = ray.remote(num_cpus=1, max_retries=TRIES, runtime_env={"env_vars": ONE_CORE})(write_part)
    numbers = {task.remote(job): at for at, job in enumerate(jobs)}
    open_tasks = list(numbers)
    try:
        while open_tasks:
            done, open_tasks = ray.wait(open_tasks)
            yield numbers[done[0]], ray.get(done[0])
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, (DataError, OSError)):
            raise cause from None
        raise DataError(f"--address: a task failed ({_first(cause)}); {AGAIN}") from None
    except RayError as error:
        raise DataError(f"--address: a task was lost ({_first(error)}); {AGAIN}") from None


def _first(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
