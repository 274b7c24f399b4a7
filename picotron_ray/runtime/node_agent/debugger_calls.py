"""Calls of an agent for a person who attaches a debugger to a worker of its node."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError

from picotron_ray.runtime.heartbeat import PageView
from picotron_ray.runtime.node_agent.debugger_link import DebuggerLink
from picotron_ray.runtime.node_agent.pages import is_alive, read_pages

MOST_LINKS = 4
"""Of a node at a time: each takes one of the agent's threads."""
MOST_WAIT_S = 5.0


class DebuggerCalls:
    """Part of the agent's actor, which runs its methods on threads of their own."""

    _folder: Path
    _worker: Callable[[str], Any]
    _links: ClassVar[dict[str, DebuggerLink]] = {}
    """By key, open ones and those whose end nobody has heard of yet; a process has one agent."""

    def debugger_attach(
        self, term: int, generation: tuple[int, int], worker: str, stop_s: float
    ) -> Mapping[str, Any]:
        """Open a link to a worker's debugger, which connects after the step at hand; returns its key.

        Args:
            stop_s: time of one phase after which the link is closed.
        """
        links = DebuggerCalls._links
        for key in [key for key, link in list(links.items()) if link.over]:
            del links[key]
        if len(links) >= MOST_LINKS:
            return {"refused": f"attach: {MOST_LINKS} debuggers are attached on this node; end one of them"}
        try:
            actor = self._worker(worker)
        except ValueError:
            return {"refused": f"worker {worker} has ended"}
        key = secrets.token_hex(16)
        link = links[key] = DebuggerLink(
            worker, (generation[0], generation[1]), partial(self._page_of, worker), stop_s
        )
        order = {"what": "attach", "port": link.port, "agent": os.getpid()}
        asked = actor.tool.remote(term, generation, order)
        threading.Thread(target=_hear, args=(link, asked), name="debugger-asked", daemon=True).start()
        return {"link": key}

    def debugger_send(self, key: str, data: bytes) -> bool:
        """Send bytes to the debugger; False where its link is closed."""
        link = DebuggerCalls._links.get(key)
        return link is not None and link.send(data)

    def debugger_receive(self, key: str, wait_s: float) -> Mapping[str, Any]:
        """Return what the debugger has sent, whether it has connected, and why the link is closed."""
        link = DebuggerCalls._links.get(key)
        if link is None:
            return {"data": b"", "connected": False, "over": "the agent of its node knows nothing of it"}
        data = link.receive(min(wait_s, MOST_WAIT_S))
        return {"data": data, "connected": link.connected, "over": "" if data else link.over}

    def debugger_detach(self, key: str) -> None:
        """Close a link: the worker goes on."""
        link = DebuggerCalls._links.get(key)
        if link is not None:
            link.close("it was detached")

    # --- helpers -------------------------------------------------------------------------------------

    def _page_of(self, worker: str) -> PageView | None:
        pages = filter(is_alive, read_pages(self._folder))
        return next((page for page in pages if page.worker == worker), None)


def _hear(link: DebuggerLink, asked: Any) -> None:
    """Close a link whose worker refuses; what it says once it is attached is seen by its connection."""
    try:
        answer = ray.get(asked)
    except RayError as error:
        answer = {"refused": f"worker {link.worker} does not answer: {type(error).__name__}"}
    if "refused" in answer:
        link.close(answer["refused"])
