"""Drain the own Ray node before its pod ends: ``python -m picotron_ray.runtime.ray_cluster.pre_stop 60``.

A preStop hook of Kubernetes (deploy/components/disruption), told the seconds to wait. Ray announces the
drain, the run moves its workers off at a step boundary, and Ray takes the node away once nothing is left on
it. Whatever goes wrong is one line in the pod's events. SIGTERM follows all the same, and Ray then drains the
node itself.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import ray
from ray._private import services
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

from picotron_ray.errors import ConfigError, PicotronError

POLL_S = 0.5


class DrainError(PicotronError):
    """The own node could not be drained."""


def own_node() -> str:
    """Id of the one Ray node of this pod, from its raylet's command line.

    Raises:
        DrainError: there is none, or several.
    """
    nodes = services.find_node_ids()
    if len(nodes) != 1:
        raise DrainError(f"saw {len(nodes)} raylets, expected the one of a pod; run this inside of it")
    return str(next(iter(nodes)))


def drain(address: str, node: str, seconds: float) -> bool:
    """Announce that a node goes in ``seconds``, and wait so long for it to be left.

    Returns:
        Whether Ray took the node away in time.

    Raises:
        DrainError: Ray does not accept the drain.
    """
    client: Any = ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
    until = time.monotonic() + seconds
    deadline_ms = int((time.time() + seconds) * 1000)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = client.drain_node(node, reason, "the pod ends", deadline_ms)
    if not accepted:
        raise DrainError(f"Ray does not drain node {node}: {why}")
    while _alive(client, node):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def _alive(client: Any, node: str) -> bool:
    known = client.get_all_node_info(timeout=10)
    # GcsNodeInfo.ALIVE is 0
    return any(key.hex() == node and info.state == 0 for key, info in known.items())


def main(words: list[str]) -> int:
    """Drain the own node; returns the exit code of the hook."""
    try:
        seconds = _seconds(words)
        left = drain(services.canonicalize_bootstrap_address_or_die("auto"), own_node(), seconds)
    except PicotronError as error:
        print(f"pre_stop: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # noqa: BLE001 (told; SIGTERM follows whatever happens here)
        print(f"pre_stop: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print("the node was left" if left else f"the node was not left within {seconds:g} s", file=sys.stderr)
    return 0


def _seconds(words: list[str]) -> float:
    try:
        (word,) = words
        seconds = float(word)
    except ValueError:
        raise ConfigError(f"saw {' '.join(words)!r}, expected the seconds to wait, such as 60") from None
    if not 0 < seconds < 86400:
        raise ConfigError(f"saw {word}, expected seconds above 0, such as 60")
    return seconds


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Ray's threads need not be waited for
