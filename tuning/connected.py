"""The Ray of a sweep or study: that of ``RAY_ADDRESS``, else a local one that goes with it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from picotron_ray.config.schema.job import JobConfig

QUIET = {
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Environment under which Ray Tune prints nothing of its own; it reads them when it is imported."""


@contextlib.contextmanager
def connected(job: JobConfig, name: str, concurrent: int | None, relative_url: str) -> Iterator[None]:
    """Connect to Ray for the trials of a job, and take down what was started.

    Raises:
        ConfigError, ClusterError: nothing was started.
    """
    from picotron_ray.runtime.driver import launch_mark
    from picotron_ray.runtime.driver.follow_run import take_down
    from picotron_ray.runtime.driver.resolve_job import DATA, NODES, ResolvedJob, resolve
    from picotron_ray.runtime.ray_cluster import connect
    from tuning.stages import local_cpus

    own_ray = not os.environ.get("RAY_ADDRESS")
    resolve(ResolvedJob(job, owns_ray=True), (NODES, DATA) if own_ray else (DATA,))
    cluster = job.cluster.model_copy(update={"local_cpus": local_cpus(job, concurrent or 1)})
    with launch_mark.held(name):  # else `picotron-ray stop` takes its Ray for what a launch left
        local = connect.connect(job.model_copy(update={"name": name, "cluster": cluster}))
        # `ray job stop` sends SIGTERM, which Tune does not know; SIGUSR1 it takes for an interrupt.
        before = signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
        try:
            if not own_ray:
                resolve(ResolvedJob(job, relative_url=relative_url), (NODES,))
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            take_down(local)
