"""Orders of a person's tools to ranks of a run that goes on: by the agents of their nodes, one call a node.

The coordinator is asked for the run's state alone. What ranks record comes from their agents, page by page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import follow_run, run_agents
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, agent_name

ANSWER_S = 45.0
Answers = dict[int, dict[str, Any]]
"""By rank."""


class RunTools:
    """Ranks of the generation that a run has when this is made."""

    def __init__(self, run: str) -> None:
        """Find them.

        Raises:
            ConfigError: no run of that name goes on, or it is not training now.
        """
        self.run = run
        _, status = run_agents.connected(run)
        if status["done"]:
            raise ConfigError(f"run: {run!r} is over; there are no steps to look at")
        self.status = status
        self._agents: dict[str, Any] = {}
        self.spec = self._running_spec()

    def _running_spec(self) -> GenerationSpec:
        """The generation that runs; refuses a run that is paused, recovers or starts.

        Workers and nodes that take no part in it, such as spares, say nothing of it.
        """
        if self.status["state"] in ("pausing", "paused"):
            raise ConfigError(
                f"run: {self.run!r} is {self.status['state']}; `picotron-ray resume {self.run}` ends that"
            )
        told = self._call(dict.fromkeys(run_agents.agent_nodes(self.run), ("generation",)))
        newest = self.status["generation"]
        spec = next((spec for spec in told.values() if spec is not None and str(spec.id) == newest), None)
        phases = [
            page["phase"] for page in self.status["pages"].values() if f"{page['term']}.{page['n']}" == newest
        ]
        building = not phases or any(
            phase in ("idle", "rendezvous", "build", "restore", "storage", "flush", "queue")
            for phase in phases
        )
        if spec is None or building:
            raise ConfigError(
                f"run: {self.run!r} does not train now: it starts, or recovers from a failure; ask again in a"
                f" while (`picotron-ray status {self.run}`)"
            )
        return spec

    @property
    def held(self) -> bool:
        """Whether a tool held the run's ranks at a boundary when this was made."""
        return any(page["phase"] == "hold" for page in self.status["pages"].values())

    def _agent(self, node: str) -> Any:
        import ray

        if node not in self._agents:
            self._agents[node] = ray.get_actor(agent_name(self.run, node), NAMESPACE)
        return self._agents[node]

    def _call(self, calls: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Call agents at once; by node, what those say that answer."""
        import ray
        from ray.exceptions import RayError

        asked: dict[str, Any] = {}
        for node, (method, *arguments) in calls.items():
            try:
                asked[node] = getattr(self._agent(node), method).remote(*arguments)
            except ValueError:  # it has ended
                continue
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        found: dict[str, Any] = {}
        for node, reference in asked.items():
            try:
                found[node] = ray.get(reference, timeout=0)
            except RayError:
                continue
        return found

    # --- ranks -----------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return len(self.spec.members)

    @property
    def identity(self) -> tuple[int, tuple[int, int]]:
        """(term, generation), as agents and workers are called with."""
        return self.spec.id.term, (self.spec.id.term, self.spec.id.n)

    def at_rank(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call a method of the agent of a rank's node.

        Raises:
            LostRunError: it does not answer.
        """
        node = self.spec.members[rank].node
        found = self._call({node: (method, *arguments)})
        if node not in found:
            raise follow_run.LostRunError(
                f"rank {rank}: the agent of node {node[:8]} does not answer; ask again"
            )
        return found[node]

    def one_rank(self, text: str, option: str) -> int:
        """The rank that a person names, where a command takes one alone; ConfigError where it is none."""
        if not text.strip().isdecimal() or int(text) >= self.world_size:
            raise ConfigError(f"{option}: saw {text!r}, expected one rank from 0 to {self.world_size - 1}")
        return int(text)

    def ranks(self, text: str, default: Sequence[int]) -> tuple[int, ...]:
        """Ranks that a person names with commas between them, or ``all``.

        Raises:
            ConfigError: one of them is no rank.
        """
        if not text:
            return tuple(default)
        if text == "all":
            return tuple(range(self.world_size))
        words = [word.strip() for word in text.split(",")]
        bad = next((word for word in words if not word.isdigit() or int(word) >= self.world_size), None)
        if bad is not None:
            raise ConfigError(
                f"--ranks: saw {bad!r}, expected ranks from 0 to {self.world_size - 1} with commas between,"
                " or all"
            )
        return tuple(sorted(set(map(int, words))))

    def order(self, orders: Mapping[int, Mapping[str, Any]]) -> Answers:
        """Give ranks orders; their answers. One that does not answer is told of as ``refused``."""
        by_node: dict[str, dict[str, Mapping[str, Any]]] = {}
        for rank, order in orders.items():
            member = self.spec.members[rank]
            by_node.setdefault(member.node, {})[member.worker] = order
        said = self._call({node: ("tools", *self.identity, own) for node, own in by_node.items()})
        found: Answers = {}
        for rank in orders:
            member = self.spec.members[rank]
            silent = {"refused": f"the agent of node {member.node[:8]} does not answer"}
            found[rank] = said.get(member.node, {}).get(member.worker, silent)
        return found

    def to_all(self, ranks: Sequence[int], order: Mapping[str, Any]) -> Answers:
        """Give several ranks the same order."""
        return self.order(dict.fromkeys(ranks, order))

    def all_of(self, ranks: Sequence[int], order: Mapping[str, Any]) -> Answers:
        """Give several ranks the same order, which each of them must take.

        Raises:
            ConfigError: one refuses it.
        """
        found = self.to_all(ranks, order)
        for rank, answer in found.items():
            if "refused" in answer:
                raise ConfigError(f"rank {rank}: {answer['refused']}")
        return found

    def recording(self, rank: int) -> Iterator[bytes]:
        """Pages of what a rank has recorded.

        Raises:
            LostRunError: its agent does not answer.
        """
        member, offset = self.spec.members[rank], 0
        while True:
            page = self.at_rank(rank, "recording", member.worker, offset)
            if not page:
                return
            offset += len(page)
            yield page
