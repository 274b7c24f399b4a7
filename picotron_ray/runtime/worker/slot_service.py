"""Address of another node's shard service, as its agent tells it by Ray.

Apart from what reads them (`remote_slots`), so that a generation runs without Ray where all slots are its own
node's (``bench gpu``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from picotron_ray.checkpoint.shard_service.channel import POLL_S, Endpoint
from picotron_ray.errors import SlotUnreachableError
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, agent_name


def find_service(run: str, timeout_s: float, node: str, meanwhile: Callable[[], None]) -> Endpoint:
    """Ask the agent of a node for its shard service.

    Raises:
        SlotUnreachableError: there is none, or it does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    try:
        agent: Any = ray.get_actor(agent_name(run, node), NAMESPACE)
        answer = agent.shard_service.remote()
        while True:
            meanwhile()
            try:
                endpoint: Endpoint = ray.get(answer, timeout=POLL_S)
                return endpoint
            except (GetTimeoutError, ActorUnavailableError) as error:
                if isinstance(error, ActorUnavailableError):  # it is being started again
                    time.sleep(POLL_S)
                    answer = agent.shard_service.remote()
                if time.monotonic() > deadline:
                    raise SlotUnreachableError(
                        f"node {node[:8]} did not answer in {timeout_s:g} s"
                    ) from error
    except (ValueError, RayError) as error:
        raise SlotUnreachableError(f"node {node[:8]} has no agent that answers: {error}") from error
