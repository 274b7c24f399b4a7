"""Probes on all nodes of a cluster: each looks at its machine, tells its clock, and reaches its neighbour."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.doctor.data_check import DataReport, open_data
from picotron_ray.runtime.doctor.finding import Finding
from picotron_ray.runtime.doctor.machine_report import LOOK_S, MachineReport, Question, look
from picotron_ray.runtime.ray_cluster.fingerprint import node_versions
from picotron_ray.runtime.ray_cluster.names import event_folder, run_folder
from picotron_ray.runtime.ray_cluster.placement import NodeView, on_node
from picotron_ray.runtime.ray_cluster.private_folder import remove_tree

ANSWER_S = 90.0
"""Longest wait for all nodes: a process is started on each, and every look has its own deadline."""
REACH_S = 5.0


class NodeProbe:
    """Ray actor on one node, gone with the command that made it."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("", 0))
        self._socket.listen()

    def look(self, question: Question) -> MachineReport:
        """Look at the machine."""
        return look(question)

    def clock(self) -> float:
        """Return the time of the machine's clock, seconds since the epoch."""
        return time.time()

    def versions(self, job: dict[str, Any]) -> dict[str, str]:
        """Return what a node must share with the coordinator."""
        return node_versions(JobConfig.model_validate(job))

    def data(self, job: dict[str, Any]) -> DataReport:
        """Open the job's data."""
        return open_data(job)

    def port(self) -> int:
        """Return the port at which it listens, on all interfaces."""
        return int(self._socket.getsockname()[1])

    def reach(self, host: str, port: int) -> str:
        """Connect to a neighbour; returns why not, or an empty text."""
        try:
            socket.create_connection((host, port), REACH_S).close()
        except OSError as error:
            return str(error)
        return ""

    def forget(self, snapshot_folder: str, run: str) -> None:
        """Delete what a run left on this machine's disk and in its memory file system."""
        shutil.rmtree(event_folder(run).parent, ignore_errors=True)
        remove_tree(run_folder(snapshot_folder, run))


class Probes:
    """Probes on some nodes; use it as a context, which ends them."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self._nodes = {node.id: node for node in nodes}
        self._actors: dict[str, Any] = {}

    def __enter__(self) -> Probes:
        actor: Any = ray.remote(NodeProbe)
        for node in self._nodes.values():
            options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": on_node(node.id)}
            self._actors[node.id] = actor.options(**options).remote()
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of all probes at once; by node, the answers that came in time."""
        return self.ask_each(method, dict.fromkeys(self._actors, arguments))

    def ask_each(self, method: str, arguments: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Call a method with arguments of each node's own."""
        asked = {node: getattr(self._actors[node], method).remote(*own) for node, own in arguments.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        found = {}
        for node, reference in asked.items():
            with contextlib.suppress(RayError):
                found[node] = ray.get(reference, timeout=0)
        return found

    def silent(self, answers: dict[str, Any]) -> Iterator[Finding]:
        """Find the nodes that gave no answer."""
        for node, view in self._nodes.items():
            if node not in answers:
                seen = f"no answer for {ANSWER_S:g} s (every look there has {LOOK_S:g} s)"
                yield Finding("nodes", "failed", seen, "look at its raylet's log, or take it out", view.host)

    def offsets_s(self, nodes: Iterable[str]) -> dict[str, float]:
        """Seconds by which each node's clock is ahead of this one's, by host, to half of the call's time."""
        found: dict[str, float] = {}
        for node in nodes:
            actor = self._actors[node]
            with contextlib.suppress(RayError):
                before = time.time()
                there = ray.get(actor.clock.remote(), timeout=REACH_S)
                found[self._nodes[node].host] = there - (before + time.time()) / 2
        return found

    def judge_reach(self) -> Iterator[Finding]:
        """Let every node connect to the next one, and the last one to the first."""
        ports = self.ask("port")
        ring = list(ports)
        if len(ring) < 2:
            return
        after = dict(zip(ring, [*ring[1:], ring[0]], strict=True))
        asked = {node: (self._nodes[to].host, ports[to]) for node, to in after.items()}
        answers = self.ask_each("reach", asked)
        fine = True
        for node, why in answers.items():
            if why:
                seen = f"cannot connect to {asked[node][0]} port {asked[node][1]}: {why}"
                mend = "open all TCP ports between the nodes (security group, network policy, firewall)"
                yield Finding("ports", "failed", seen, mend, self._nodes[node].host)
                fine = False
        if fine:
            yield Finding("ports", "ok", f"{len(answers)} nodes reach one another at free ports")

    def open_data(self, job: JobConfig) -> list[tuple[str, DataReport]]:
        """Let every node open the job's data; by host, what those saw that answered in time."""
        answers = self.ask("data", job.model_dump(mode="json"))
        return [(view.host, answers.get(node, DataReport(slow=True))) for node, view in self._nodes.items()]

    def judge_versions(self, job: JobConfig) -> Iterator[Finding]:
        """Compare what nodes must share with this process's."""
        ours, fine = node_versions(job), True
        for node, theirs in self.ask("versions", job.model_dump(mode="json")).items():
            differing = [f"{k} {theirs.get(k)} (here {v})" for k, v in ours.items() if theirs.get(k) != v]
            if differing:
                mend = "use one image on all nodes"
                yield Finding("versions", "failed", ", ".join(differing), mend, self._nodes[node].host)
                fine = False
        if fine:
            yield Finding("versions", "ok", "package, torch and Python are the same on all nodes")
