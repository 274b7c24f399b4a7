"""Agents of a run that goes on, and what the commands that ask them ask first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picotron_ray.runtime.driver import control, follow_run
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, agent_name

ANSWER_S = 15.0


def connected(run: str) -> tuple[Any, dict[str, Any]]:
    """(coordinator, status) of a run.

    Raises:
        ConfigError: no run of that name goes on.
        LostRunError: its coordinator does not answer.
    """
    coordinator, _ = control.connect_to_run(run)
    status = follow_run.poll(coordinator, follow_run.ALL_SEEN)
    if status is None:
        raise follow_run.LostRunError(
            f"the coordinator of run {run} does not answer; see `picotron-ray logs {run}`"
        )
    return coordinator, status


def agent_nodes(run: str) -> list[str]:
    """Nodes on which a run has an agent."""
    from ray.util import list_named_actors

    prefix = agent_name(run, "")
    named = [each["name"] for each in list_named_actors(True) if each["namespace"] == NAMESPACE]
    return [name.removeprefix(prefix) for name in named if name.startswith(prefix)]


def ask_evidence(run: str, status: Mapping[str, Any], most_bytes: int) -> list[dict[str, Any]]:
    """Ask all agents where the ranks of the running generation are.

    Returns an entry for each rank, and one with a ``problem`` for each node that does not answer in time;
    nothing where no generation runs.

    Args:
        most_bytes: of one rank's answer.
    """
    import ray
    from ray.exceptions import RayError

    if not status.get("generation"):
        return []
    term, n = map(int, status["generation"].split("."))
    asked: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    for node in agent_nodes(run):
        try:
            agent: Any = ray.get_actor(agent_name(run, node), NAMESPACE)
        except ValueError:
            found.append({"node": node, "problem": "its agent has just ended"})
            continue
        asked[node] = agent.evidence.remote(status["term"], (term, n), most_bytes)
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
    for node, reference in asked.items():
        try:
            found += [{"node": node, **entry} for entry in ray.get(reference, timeout=0)]
        except RayError as error:
            found.append({"node": node, "problem": f"{type(error).__name__}: {error}"[:500]})
    return found
