"""What a node's agent tells of it reaches the coordinator's roster."""

from __future__ import annotations

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.policies.membership import Roster
from picotron_ray.observability.nvml import Card
from picotron_ray.runtime.coordinator.admission import joined, traits_of
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts
from picotron_ray.runtime.ray_cluster.placement import NodeView, WorkerNeeds

JOB = JobConfig()


def test_what_nodes_tell_of_their_cards_reaches_what_is_kept() -> None:
    facts = NodeFacts(cards=[Card("NVIDIA H100", (9, 0), 80 * 10**9)])
    view = NodeView("a", "h", 8.0, 4.0, 8.0, 4.0)
    known = traits_of(JOB, view, {"facts": facts}, WorkerNeeds(1.0, 1.0))
    roster = Roster()
    roster.join("a", 4, 0.0, joined(known, 4).traits)
    assert roster.nodes["a"].hardware == "NVIDIA H100"
    assert traits_of(JOB, view, {"facts": facts}, WorkerNeeds(1.0, 0.0)).hardware == ""
