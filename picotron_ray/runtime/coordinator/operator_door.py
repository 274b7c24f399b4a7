"""Door of the coordinator for operators: orders that are answered, and the run's nodes.

An order carries the term of whoever gives it, so that one that was long under way is not obeyed by a later
coordinator. What becomes of it the machine alone says (``coordinator.operator_orders``).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.node_rows import node_rows
from picotron_ray.coordinator.operator_orders import ORDER
from picotron_ray.runtime.coordinator.command_executor import CommandExecutor

ANSWER_S = 20.0
"""Longest wait of a caller for the coordinator's loop."""
T = TypeVar("T")


class OperatorDoor:
    """Methods of the coordinator's actor that tools of operators call."""

    _job: JobConfig
    _loop: asyncio.AbstractEventLoop
    _machine: Machine
    _executor: CommandExecutor
    _begun: bool

    def _dispatch(self, event: m.Event) -> list[m.Command]:
        """Have the machine handle an event; returns what it answers."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Return the config that the run goes on with, without secrets."""
        return public_dict(self._job)

    def pid(self) -> int:
        """Return the process id, for drills that kill it."""
        return os.getpid()

    def order(self, term: int, fields: dict[str, Any]) -> dict[str, Any]:
        """Give an order (`messages.Order`); returns ``accepted``, ``text``, ``again``, ``term`` and more.

        Args:
            term: of the coordinator that the order is meant for; 0: whichever this is.
            fields: of the order.
        """
        return self._on_loop(lambda: self._ordered(term, m.Order(**fields)))

    def nodes(self) -> list[dict[str, Any]]:
        """Return the run's nodes with their workers."""
        return self._on_loop(lambda: node_rows(self._machine.memory))

    def _on_loop(self, call: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 (raised where the caller waits)
                future.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return future.result(timeout=ANSWER_S)

    def _ordered(self, term: int, order: m.Order) -> dict[str, Any]:
        """Have the machine judge an order; ``again``: it was not, and may be given again in a moment."""
        own = self._executor.term
        if self._executor.ending:
            return _refused("the run has ended", own)
        if not self._begun:
            return _refused("the coordinator is only beginning", own, again=True)
        if term not in (0, own):
            return _refused(f"it was meant for term {term}, and this is term {own}", own, again=True)
        if order.what == "drain":
            order, problem = self._whole_name(order)
            if problem:
                return _refused(problem, own)
        commands = self._dispatch(order)
        answers = [c for c in commands if isinstance(c, m.Alert) and c.kind == ORDER]
        if not answers:
            return _refused("the run has ended", own)
        return {**answers[0].data, "text": answers[0].text, "again": False, "term": own}

    def _whole_name(self, order: m.Order) -> tuple[m.Order, str]:
        """Complete a node's name, of which people type the beginning; returns what speaks against it."""
        memory = self._machine.memory
        known = {*memory.roster.nodes, *memory.freed}
        found = sorted(name for name in known if order.node and name.startswith(order.node))
        if len(found) > 1 and order.node not in known:
            named = ", ".join(name[: len(order.node) + 4] for name in found[:8])
            return order, f"drain refused: {order.node!r} begins the names of {len(found)} nodes: {named}"
        return (replace(order, node=found[0]) if len(found) == 1 else order), ""


def _refused(text: str, term: int, again: bool = False) -> dict[str, Any]:
    return {"accepted": False, "text": text, "again": again, "term": term}
