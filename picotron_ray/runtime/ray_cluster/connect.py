"""Connecting a driver to Ray: the cluster that ``RAY_ADDRESS`` names, else the run's own local Ray.

Ray reads its authentication from the environment when it is loaded and keeps it; a local Ray has a token
of its own, so what was kept is refreshed here, behind one adapter (``_refresh_authentication``).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.runtime.ray_cluster import local_ray
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, run_folder


class ClusterError(PicotronError):
    """No Ray that can be used answers at the address given; nothing was started."""

    exit_code = 2


def local_cpus(job: JobConfig) -> int:
    """CPU slots of a Ray started for this job: every worker fits, and one more for its replacement."""
    workers = job.cluster.max_workers * job.cluster.cpus_per_worker
    return job.cluster.local_cpus or max(1, math.ceil(workers + job.cluster.cpus_per_worker))


def run_folders(job: JobConfig) -> tuple[Path, ...]:
    """Folders of this machine that belong to the run alone and go away with its local Ray."""
    bases = (job.snapshot.folder, job.snapshot.overflow_folder)
    return tuple(run_folder(base, job.name).absolute() for base in bases if base)


def refuse_unauthenticated(job: JobConfig) -> None:
    """Raise ConfigError where Ray is to ask nobody who they are and the user has not agreed to that."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled" and not job.cluster.allow_unauthenticated:
        raise ConfigError(
            "cluster.allow_unauthenticated: saw RAY_AUTH_MODE=disabled in the environment, with which whoever"
            " reaches Ray's ports runs code as you; unset it, or set cluster.allow_unauthenticated=true"
        )


def connect(
    job: JobConfig, connected: Callable[[], None] = lambda: None, begins: bool = True
) -> LocalRay | None:
    """Connect this process to Ray, starting a local one where none runs; None: RAY_ADDRESS was used.

    Args:
        connected: called as soon as it is. What is raised until then takes down what was started.
        begins: a Ray that is started here outlives this process from now on; else from `local_ray.begin` on.
    """
    if os.environ.get("RAY_ADDRESS"):
        connect_to(os.environ["RAY_ADDRESS"])
        connected()
        return None
    with local_ray.locked(job.name):
        ray = local_ray.find(job.name)
        fresh = ray is None or not ray.alive
        if ray is None or fresh:
            gpus = 0 if job.cluster.device == "cpu" else None
            ray = local_ray.start(job.name, cpus=local_cpus(job), gpus=gpus, folders=run_folders(job))
    try:
        attach(ray)
        connected()
        if begins:
            local_ray.begin(ray)
    except BaseException:
        if fresh:
            _take_down(ray)
        raise
    return ray


def _take_down(started: LocalRay) -> None:
    import ray

    ray.shutdown()
    with local_ray.locked(started.run):
        local_ray.stop(started)


def attach(ray: LocalRay) -> None:
    """Connect this process to a local Ray that runs.

    Raises:
        ClusterError: nothing answers, or its files were deleted, without which ``ray.init`` aborts at length.
    """
    if not (local_ray.rays_folder(Path(ray.temp_folder)) / "session_latest" / "sockets").is_dir():
        raise ClusterError(
            f"the files of the Ray of run {ray.run} in {ray.temp_folder} are gone (a cleaner of temporary"
            " files?), so the run goes on and cannot be asked; follow it by its commits in storage and its"
            f" trackers, or end it with `picotron-ray stop {ray.run} --now` and launch it again"
        )
    if ray.token:
        os.environ.update(local_ray.authentication(ray.token))
        _refresh_authentication()
    connect_to(ray.address)


def _refresh_authentication() -> None:
    """Make an already loaded Ray read RAY_AUTH_* again, as its own ``_enable_token_auth`` does."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


REACH_S = 2.5
"""Longest wait for somebody to listen at an address, the search for its name included."""
PROBE_S = 5.0
"""Longest wait for the answer to one call."""
ANSWER_S = 20.0
"""Longest wait for what listens there to answer as a Ray does: its head may be starting."""
REACH_PAUSE_S = 0.25

_START_IT = "start it (`ray start --head`), or unset RAY_ADDRESS for a Ray of this machine"
_SET_TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to that cluster's token"


def connect_to(address: str) -> None:
    """``ray.init`` to an address; raises ClusterError where nothing answers, or where it refuses us."""
    import ray

    if "://" in address:
        is_client = address.startswith("ray://")
        why = "but Ray Client cannot hold a run" if is_client else "which is no Ray's address"
        raise ClusterError(
            f"RAY_ADDRESS: saw {address!r}, {why}; use the head's host:port on a machine of the cluster, or"
            " `ray job submit -- python -m picotron_ray.launch ...`"
        )
    _probe(address)
    if not ray.is_initialized():  # a Ray that the caller is connected to is not ours to quiet
        _drop_messages()
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise ClusterError(f"no Ray answers at {address!r}: {first}") from error


def _drop_messages() -> None:
    """Drop what Ray prints on stdout where a worker dies or memory is short, whatever ``log_to_driver`` says.

    Stdout may be JSON, of ``logs --follow`` for days; the run's events say what happened.
    """
    import ray._private.worker as driver

    assert callable(driver.print_to_stdstream), "what Ray's listener of error messages prints by"
    driver.print_to_stdstream = lambda *message, **how: None


def _probe(address: str) -> None:
    """Call until it answers, with the token that Ray would use: ``ray.init`` retries for many minutes.

    Raises:
        ClusterError: nothing listens or answers, or the cluster wants a token and not this one.
    """
    from ray._private.services import canonicalize_bootstrap_address

    try:
        where = canonicalize_bootstrap_address(address)
    except (ValueError, OSError) as error:
        raise ClusterError(f"RAY_ADDRESS: saw {address!r}, expected auto or host:port: {error}") from error
    if where is None:
        return
    if (why := _why_unreached(where)) is not None:
        raise ClusterError(f"no Ray answers at {address!r}: {why}; {_START_IT}")
    began = time.monotonic()
    while (found := _answer(where)) != "ray":
        patience_s = ANSWER_S if found == "silent" else REACH_S
        if time.monotonic() - began >= patience_s:
            what = f"nothing within {ANSWER_S:g} s" if found == "silent" else "as no Ray does"
            raise ClusterError(
                f"no Ray answers at {address!r}: what listens there answers {what}; name the port of its head"
                f" (6379 unless it was started with another), or {_START_IT}"
            )
        time.sleep(REACH_PAUSE_S)


def _why_unreached(where: str) -> str | None:
    """Explain why nobody takes a connection at an address; None as soon as somebody does.

    In a thread of its own: a search for a name may hang for longer than anybody waits.
    """
    answer: Future[str | None] = Future()
    threading.Thread(target=lambda: answer.set_result(_tried(where)), name="reach", daemon=True).start()
    try:
        return answer.result(REACH_S)
    except TimeoutError:
        return f"no connection within {REACH_S:g} s"


def _tried(where: str) -> str | None:
    host, _, port = where.rpartition(":")
    until = time.monotonic() + REACH_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except (OSError, ValueError, OverflowError) as error:
            if time.monotonic() + REACH_PAUSE_S >= until:
                return getattr(error, "strerror", None) or str(error)
            time.sleep(REACH_PAUSE_S)
        else:
            return None


def _answer(where: str) -> Literal["ray", "silent", "other"]:
    """Make one call; returns who answered."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
    from ray.exceptions import AuthenticationError

    with init_grpc_channel(where) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            stub.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=PROBE_S)  # type: ignore[attr-defined]
        except AuthenticationError as error:
            raise ClusterError(f"RAY_AUTH_MODE=token, but no token was found; {_SET_TOKEN}") from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ClusterError(
                    f"the Ray at {where} refuses the token that this process has, or has none"
                    f" ({error.details()}); {_SET_TOKEN}"
                ) from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "silent"
            others = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED)  # no gRPC, or not Ray's
            return "other" if error.code() in others else "ray"
    return "ray"
