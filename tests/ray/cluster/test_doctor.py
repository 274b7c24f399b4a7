"""The doctor on the nodes of a real cluster: what it says, and that nothing of it stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.runtime.doctor import node_probe
from picotron_ray.runtime.doctor.examine import examine
from picotron_ray.runtime.doctor.node_probe import Probes
from picotron_ray.runtime.ray_cluster.names import event_folder
from picotron_ray.runtime.ray_cluster.placement import living_nodes

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def address(local_ray: Any, connected: None, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RAY_ADDRESS", local_ray.address)
    return str(local_ray.address)


def test_all_nodes_are_looked_at_and_no_probe_stays(address: str, tmp_path: Path) -> None:
    import ray

    job = load_job("tiny", [f"storage.url={tmp_path / 'runs'}"])
    machines, storage, drill = examine(job, configured=True, drill=False)
    found = {one.check: one.status for one in machines}
    well = ("cluster", "clocks", "versions", "plan", "data")
    assert [found[check] for check in well] == ["ok"] * len(well)
    assert "failed" not in {one.status for one in (*machines, *storage)}, (machines, storage)
    assert [one.status for one in drill] == ["skipped"]
    assert list(tmp_path.iterdir()) == []
    actors = ray._private.state.actors().values()
    assert [a for a in actors if a["ActorClassName"] == "NodeProbe" and a["State"] != "DEAD"] == []


def test_nodes_that_do_not_answer_or_reach_their_neighbour_are_named(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = living_nodes()
    with Probes([node]) as probes:
        assert list(probes.silent(probes.ask("clock"))) == []
        assert [one.where for one in probes.silent({})] == [node.host]
        monkeypatch.setattr(probes, "ask", lambda method: {"a": 1, "b": 2})
        monkeypatch.setattr(probes, "_nodes", {"a": node, "b": node})
        monkeypatch.setattr(probes, "ask_each", lambda method, asked: {"a": "", "b": "refused"})
        (found,) = probes.judge_reach()
        assert (found.status, found.seen) == ("failed", f"cannot connect to {node.host} port 1: refused")
    probe = node_probe.NodeProbe()
    assert probe.reach("127.0.0.1", probe.port()) == ""
    probe._socket.close()


@pytest.mark.deep
def test_a_drill_on_a_cluster_leaves_nothing_on_its_nodes(address: str, tmp_path: Path) -> None:
    job = load_job("tiny", [f"storage.url={tmp_path / 'runs'}"])
    before = set(event_folder("x").parent.parent.glob("doctor-*"))
    drill = list(examine(job, configured=True, drill=True))[2]
    assert [(one.check, one.status) for one in drill] == [("drill", "ok"), ("drill ledger", "ok")], drill
    assert list(tmp_path.iterdir()) == []
    assert set(event_folder("x").parent.parent.glob("doctor-*")) == before
