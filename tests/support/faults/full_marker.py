"""An agent, with what surrounds it left out, on whose full file system slots are to be kept."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader
from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.node_agent.agent import Agent
from picotron_ray.runtime.node_agent.kept_state import KeptState
from picotron_ray.runtime.node_agent.seal_watch import slot_info
from picotron_ray.runtime.ray_cluster import cleanup
from picotron_ray.runtime.ray_cluster.names import node_folder

MARKER_BYTES = 16_384


class DeadPage:
    """A page of a process that has ended."""

    def __init__(self, folder: Path) -> None:
        child = os.fork()
        if not child:
            Page(folder / "w1.page", ElasticConfig())
            os._exit(0)
        os.waitpid(child, 0)


def lone_agent(base: Path, reserved: bool = True) -> Agent:
    """Return an agent of run "r" that has three slots of steps 10 to 12, of a worker that is dead."""
    agent: Any = Agent.__new__(Agent)
    agent._folder = node_folder(str(base), "r", "n1")
    cleanup.claim(agent._folder, MARKER_BYTES if reserved else 0)
    for index in range(3):
        slot = SlotFile.create(agent._folder / f"w1.{index}.slot", 1 << 20)
        slot.write(SlotHeader(1, 1, 10 + index, 0, ((0, 0, 1),)), (), (), pinned=True)
        slot.close()
    DeadPage(agent._folder)
    agent._terms = SimpleNamespace(newest=lambda term: term, accept=lambda term: term, run="R")
    agent._closing, agent._node, agent._job = threading.Event(), "n1", SimpleNamespace(name="r")
    for part in ("_guard", "_burials", "_uploads", "_shards", "_members", "_rendezvous", "_logs"):
        ended = SimpleNamespace(
            close=lambda: None, stop=lambda: None, settle=lambda timeout_s: None, robbed=list
        )
        setattr(agent, part, ended)
    agent._watch = lambda: agent._closing.wait()
    agent._watcher = agent._begin_watch()
    agent._kept = KeptState(agent._folder, partial(slot_info, "n1"))
    found: Agent = agent
    return found
