"""Calls of an agent: the run's coordinator, and other nodes' agents."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import ray

from picotron_ray.runtime.ray_cluster.names import NAMESPACE, agent_name, coordinator_name


def call_coordinator(run: str, method: str, *arguments: Any) -> Future[Any]:
    """Call the coordinator of a run; raises ValueError where there is none."""
    return _call(coordinator_name(run), method, arguments)


def call_agent(run: str, node: str, method: str, *arguments: Any) -> Future[Any]:
    """Call the agent of a node; raises ValueError where there is none."""
    return _call(agent_name(run, node), method, arguments)


def _call(name: str, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
    reference = getattr(ray.get_actor(name, NAMESPACE), method).remote(*arguments)
    answer: Future[Any] = reference.future()
    return answer
