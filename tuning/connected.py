"""The Ray of a sweep or study: that of ``RAY_ADDRESS``, else a local one that goes with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError

QUIET = {
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Environment under which Ray Tune prints nothing of its own; it reads them when it is imported."""

GUARDS = "picotron_ray_studies"
"""Ray's namespace of the actors that stand for a study that goes on, by name."""
LEAVES_S = 10.0
"""Longest wait for Ray to notice that a killed driver is gone."""
_HELD: dict[str, Any] = {}


@contextlib.contextmanager
def connected(
    job: JobConfig, name: str, concurrent: int | None, relative_url: str, drivers: int = 0
) -> Iterator[None]:
    """Connect to Ray for the trials of a job, and take down what was started.

    Args:
        drivers: trials' actors at once, where they are more than the trials that train.

    Raises:
        ConfigError, ClusterError: nothing was started.
    """
    import ray

    from picotron_ray.runtime.driver import launch_mark
    from picotron_ray.runtime.driver.follow_run import take_down
    from picotron_ray.runtime.driver.resolve_job import DATA, NODES, ResolvedJob, resolve
    from picotron_ray.runtime.ray_cluster import connect
    from tuning.room import local_cpus

    own_ray = not os.environ.get("RAY_ADDRESS")
    resolve(ResolvedJob(job, owns_ray=True), (NODES, DATA) if own_ray else (DATA,))
    cluster = job.cluster.model_copy(update={"local_cpus": local_cpus(job, concurrent or 1, drivers)})
    with launch_mark.held(name):  # else `picotron-ray stop` takes its Ray for what a launch left
        ours = job.model_copy(update={"name": name, "cluster": cluster})
        local = connect.connect(ours, begins=False)  # without its driver there is no study
        # `ray job stop` sends SIGTERM, which Tune does not know; SIGUSR1 it takes for an interrupt.
        before = signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
        shared = False
        try:
            shared = not _only_one(name)
            if shared:
                raise ConfigError(
                    f"name: a study {name!r} goes on on this Ray; wait for it, or choose another --name"
                )
            if not own_ray:
                resolve(ResolvedJob(job, relative_url=relative_url), (NODES,))
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            if shared:
                ray.shutdown()  # the other study's Ray stays
            else:
                take_down(local)


def _only_one(name: str) -> bool:
    """Whether no other driver runs a study of the name on this Ray; held until this one ends.

    A driver that was killed is given the time that Ray takes to notice.
    """
    import ray

    deadline, here = time.monotonic() + LEAVES_S, (socket.gethostname(), os.getpid())
    guards = {"name": f"study-{name}", "namespace": GUARDS}
    while True:
        with contextlib.suppress(ValueError):
            _HELD[name] = ray.remote(num_cpus=0)(StudyGuard).options(**guards).remote(*here)
            ray.get(_HELD[name].driver.remote())
            return True
        other: Any = ("", 0)  # one that is just going does not answer
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            other = ray.get(ray.get_actor(**guards).driver.remote(), timeout=LEAVES_S)
        lives = other[0] == here[0] and os.path.exists(f"/proc/{other[1]}")
        if lives or time.monotonic() > deadline:
            return False
        time.sleep(0.5)


class StudyGuard:
    """Actor that stands for a study that goes on, and goes with its driver."""

    def __init__(self, host: str, pid: int) -> None:
        self._driver = host, pid

    def driver(self) -> tuple[str, int]:
        """Host and pid of the process that runs the study."""
        return self._driver
