"""Greetings of a run's agents: what lives when a term begins, and whether an agent that is silent lives.

Thousands of agents answer at once, and know the same. So an answer names a generation's spec, which one of
the agents that named it is asked for; and the question whether one lives carries a term and no more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import (
    AgentRestarting,
    Fenced,
    GenerationId,
    GenerationSpec,
    NodeLost,
    NodeTraits,
)
from picotron_ray.runtime.coordinator.admission import traits_of
from picotron_ray.runtime.coordinator.run_actors import RunActors
from picotron_ray.runtime.coordinator.storage_patience import Activity
from picotron_ray.runtime.node_agent.specs import REMEMBERED, SpecName
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, agent_name
from picotron_ray.runtime.ray_cluster.placement import living_nodes, restarting, worker_needs
from picotron_ray.runtime.ray_cluster.ray_calls import NO_ANSWER, UNAVAILABLE_RETRY_S, is_dead, refusal

log = logging.getLogger(__name__)
HELLO_S = 10.0  # longest wait for an agent that lives already when a term begins; a later one joins
ALL_SILENT_S = 60.0  # longest wait for agents that may be training, where no other says what is running
MOST_NAMED = 4  # silent agents in an event
LOOK_S = 1.0  # how long one look at the nodes waits for those that join, and for those that are silent
MOST_ERRORS = 3  # errors of an agent in a row, after which it counts as dead
MOST_ASKED_FOR_SPEC = 4  # agents, one after the other
SPECS = ("spec", "kept_by")  # what an agent names in its answer
Tell = Callable[[str, str, str], None]


class Specs:
    """Specs that agents name, each asked of one of them; the newest are remembered."""

    def __init__(self, ask: Callable[[int, str, str], Awaitable[GenerationSpec | None]]) -> None:
        """``ask`` takes a term, a node and a digest."""
        self._ask = ask
        self._known: OrderedDict[str, GenerationSpec] = OrderedDict()
        self._turn = asyncio.Lock()  # of many that join with the same, the first asks

    async def get(self, term: int, name: SpecName, nodes: Sequence[str]) -> GenerationSpec | None:
        """Return the spec of a name, which ``nodes`` told; None where none of some tells more.

        Raises:
            FencedError: an agent knows a newer term.
        """
        async with self._turn:
            for node in nodes[:MOST_ASKED_FOR_SPEC]:
                if name.digest in self._known:
                    break
                try:
                    spec = await self._ask(term, node, name.digest)
                except (RayError, TimeoutError) as error:
                    if (refused := refusal(error)) is not None:
                        raise refused from error
                    log.warning("node %s does not tell generation %s: %s", node[:8], name.id, error)
                    continue
                if spec is not None:
                    self._known[name.digest] = spec
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            return self._known.get(name.digest)


class Greetings(RunActors):
    """Agents of a run as they are found, and what they say of their nodes."""

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job)
        self.run_identity = ""  # told to every agent
        self._order: list[str] = []  # nodes in the order in which they joined
        self._errors: Counter[str] = Counter()  # by node: errors of its agent in a row
        self.metrics: dict[str, dict[str, str]] = {}  # what each agent says of its metrics endpoint
        self._traits: dict[str, NodeTraits] = {}
        self._specs = Specs(self._ask_spec)

    async def _ask_spec(self, term: int, node: str, digest: str) -> GenerationSpec | None:
        call = self.call_agent(node, "spec", term, digest, timeout_s=HELLO_S, patience_s=0.0)
        found: GenerationSpec | None = await call
        return found

    async def hello(
        self, term: int, tell: Tell = lambda *words: None, newest: GenerationId | None = None
    ) -> dict[str, dict[str, Any]]:
        """Greet the agents that live already, all at once; returns what each says, by node.

        One that does not answer in time is not in it, which says nothing of what it has: it is greeted again
        by ``changes``. Where none that answers knows of the newest generation, all are greeted again for up
        to ``ALL_SILENT_S``: the silent ones may be training it. The term would begin as if nothing were
        running, and end their workers when they come to light later.

        Of what they name (``SPECS``) the newest is in the answers of those that know it, whole.

        Args:
            tell: told (level, kind, text) that the silent agents are waited for.
            newest: newest generation of the log.

        Raises:
            FencedError: an agent knows a newer term.
        """
        until, told = time.monotonic() + ALL_SILENT_S, False
        while True:
            found, silent = await self._greet_living(term)
            heard = [said["spec"].id for said in found.values() if said["spec"] is not None]
            known = bool(found) if newest is None else bool(heard) and max(heard) >= newest
            late = time.monotonic() >= until
            if known or not silent or late:
                silent |= (untold := await self._read_specs(term, found))
                if late or not untold:
                    break
            if not told:
                who = ", ".join(sorted(node[:8] for node in silent)[:MOST_NAMED])
                count = f"{len(silent)} of {len(silent.keys() | found)} agents"
                text = f"{count} do not answer ({who}): they may be training, and are waited for"
                tell("warning", "agents", text)
                told = True
            await asyncio.sleep(UNAVAILABLE_RETRY_S)
        for node, error in silent.items():
            log.warning("node %s is not heard at the beginning: %r", node[:8], error)
        return found

    async def _greet_living(self, term: int) -> tuple[dict[str, dict[str, Any]], dict[str, BaseException]]:
        """Greet the living agents once; returns what each says, and the errors of those that said nothing."""
        views = {view.id: view for view in await asyncio.to_thread(living_nodes)}
        handles = await asyncio.to_thread(self._find_agents, views)
        needs = worker_needs(self._job.cluster, list(views.values()))
        found: dict[str, dict[str, Any]] = {}
        silent: dict[str, BaseException] = {}
        self._agents.update(handles)  # also of the silent: what is asked of them meanwhile may be answered
        for node, said in (await self._ask_all(handles, "hello", HELLO_S, term, self.run_identity)).items():
            if isinstance(said, dict):
                found[node] = said
                self._traits[node] = traits_of(self._job, views[node], said, needs)
                self.metrics[node] = said["metrics"]
            elif (refused := refusal(said)) is not None:
                raise refused
            elif is_dead(said):
                del self._agents[node]
            else:
                silent[node] = said
        return found, silent

    def _find_agents(self, nodes: Iterable[str]) -> dict[str, ActorHandle]:
        """Ask Ray for the agents of nodes, one after the other: not on the loop."""
        handles: dict[str, ActorHandle] = {}
        for node in nodes:
            with suppress(ValueError):  # no agent there
                handles[node] = ray.get_actor(agent_name(self._job.name, node), NAMESPACE)
        return handles

    async def _read_specs(
        self, term: int, found: dict[str, dict[str, Any]], parts: Sequence[str] = SPECS
    ) -> dict[str, BaseException]:
        """Put the newest spec of each kind in the place of its name in answers, and None in that of others.

        Returns the errors of the agents that named it and do not tell it.
        """
        untold: dict[str, BaseException] = {}
        for part in parts:
            names = {node: said[part] for node, said in found.items() if said.get(part) is not None}
            newest = max(names.values(), key=lambda name: name.id, default=None)
            nodes = [node for node, name in names.items() if name == newest]
            spec = None if newest is None else await self._specs.get(term, newest, nodes)
            for node in names:
                found[node] = {**found[node], part: spec if node in nodes else None}
            if newest is not None and spec is None:
                untold |= {node: TimeoutError(f"generation {newest.id} is not told") for node in nodes}
        return untold

    async def find(self) -> None:
        """Find the run's agents, which a coordinator without a term has not greeted."""
        nodes = [view.id for view in await asyncio.to_thread(living_nodes)]
        self._agents.update(await asyncio.to_thread(self._find_agents, nodes))

    async def activity(self) -> Activity:
        """Say whether the run has agents, and whether a worker is in a generation; needs no term."""
        await self.find()
        if not self._agents:
            return "none"
        pages = [page for pages in (await self.figures()).values() for page in pages]
        return "training" if any(page["phase"] != "idle" for page in pages) else "idle"

    async def _silent_agents(self, term: int) -> list[AgentRestarting | Fenced | NodeLost]:
        """Ask silent agents, of nodes that Ray holds to be alive, whether they live.

        The question is a ping: thousands are asked once this process itself was busy for two seconds. One
        that does not answer is not dead; one that fails is asked again before it counts as dead.
        """
        silent = [node for node in self._order if self.is_silent(node)]
        handles = {node: self._agents[node] for node in silent}
        found: list[AgentRestarting | Fenced | NodeLost] = []
        for node, said in (await self._ask_all(handles, "newest_term", LOOK_S, term)).items():
            if not isinstance(said, BaseException):
                self._errors.pop(node, None)
            elif isinstance(said, NO_ANSWER):
                self._errors.pop(node, None)
                if await asyncio.to_thread(restarting, handles[node]):
                    found.append(AgentRestarting(node))
            elif (refused := refusal(said)) is not None:
                found.append(Fenced(str(refused)))
            else:
                self._errors[node] += 1
                if is_dead(said) or self._errors[node] >= MOST_ERRORS:
                    found.append(NodeLost(node, "its agent died"))
        return found
