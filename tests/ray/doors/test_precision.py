"""``precision: auto`` at a launch: settled once, kept by run.json, and asked of every node that joins."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.observability.nvml import Card
from picotron_ray.runtime.coordinator.admission import objection
from picotron_ray.runtime.driver import preflight as run_module
from picotron_ray.runtime.driver import resolve_precision, snapshot_folder
from picotron_ray.runtime.driver.follow_run import find_coordinator
from picotron_ray.runtime.driver.preflight import check_cluster
from picotron_ray.runtime.driver.resolve_job import (
    ON_THE_CLUSTER,
    ON_THE_MACHINE,
    ResolvedJob,
    resolve,
)
from picotron_ray.runtime.driver.resolve_precision import able_nodes, settled_precision
from picotron_ray.runtime.ray_cluster import placement
from picotron_ray.runtime.ray_cluster.connect import ClusterError
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts, small_files_bytes
from picotron_ray.runtime.ray_cluster.placement import NodeView
from picotron_ray.runtime.run_storage.hf_import import import_hf
from tests.support.runs.ray_runs import start, tiny_job

H100, T4 = Card("NVIDIA H100", (9, 0), 80), Card("Tesla T4", (7, 5), 16)
FACTS = {"new": NodeFacts([H100, H100]), "old": NodeFacts([T4]), "silent": NodeFacts()}


def node(name: str) -> NodeView:
    return NodeView(name, f"host-{name}", 8, 2, 8, 2)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[NodeView]:
    """Living nodes with GPUs, of which a test chooses; no Ray is asked."""
    found: list[NodeView] = []
    monkeypatch.setattr(resolve_precision, "living_nodes", lambda: found)
    monkeypatch.setattr(resolve_precision, "facts_of", lambda seen, job: {n.id: FACTS[n.id] for n in seen})
    return found


def auto(folder: Path, device: str = "cuda", **sections: Any) -> tuple[JobConfig, LocalStorage]:
    job = tiny_job("auto", folder, precision="auto", cluster={"device": device}, **sections)
    return job, LocalStorage(str(folder), "auto")


@pytest.mark.parametrize(
    ("names", "expected"), [(["new"], "bf16"), (["new", "old"], "fp16"), (["old"], "fp16")]
)
def test_the_least_of_all_nodes_decides(
    nodes: list[NodeView], tmp_path: Path, names: list[str], expected: str
) -> None:
    nodes += map(node, names)
    found, note = settled_precision(*auto(tmp_path))
    assert found == expected
    assert note.startswith(f"precision: auto came to {expected}: ")


def test_what_the_run_was_started_with_stays(nodes: list[NodeView], tmp_path: Path) -> None:
    job, storage = auto(tmp_path)
    nodes.append(node("old"))
    storage.put("run.json", json.dumps({"config": {"precision": "bf16"}}).encode())
    assert settled_precision(job, storage)[0] == "bf16"


def test_no_gpu_to_look_at_is_refused(nodes: list[NodeView], tmp_path: Path) -> None:
    job, storage = auto(tmp_path)
    with pytest.raises(ConfigError, match="saw auto, but no node with a GPU is there yet"):
        settled_precision(job, storage)
    nodes += [node("new"), node("silent")]
    with pytest.raises(ConfigError, match="NVML tells nothing of the GPUs on host-silent; name one"):
        settled_precision(job, storage)


def test_the_config_is_judged_again(nodes: list[NodeView], tmp_path: Path) -> None:
    job, storage = auto(tmp_path, "auto", adaptive_precision={"error_bound": 0.01})
    said = r"adaptive_precision.error_bound: saw 0.01 with precision=fp32.*\(precision: auto came to fp32"
    with pytest.raises(ConfigError, match=said):
        settled_precision(job, storage)
    nodes.append(node("old"))
    assert settled_precision(job, storage)[0] == "fp16"


def test_nodes_that_lack_it_do_not_count(nodes: list[NodeView], tmp_path: Path) -> None:
    job = tiny_job("named", tmp_path, precision="bf16", cluster={"device": "cuda"})
    new, old = node("new"), node("old")
    assert able_nodes(job, [new, node("silent")], "cuda", FACTS) == ([new, node("silent")], "")
    able, why = able_nodes(job, [new, old], "cuda", FACTS)
    assert able == [new]
    assert why.endswith("on devices of 7.5; use fp16 or fp32 (Tesla T4 on host-old)")
    assert able_nodes(tiny_job("x", tmp_path, precision="tf32", cluster={}), [new], "cpu", {})[0] == []


def test_a_node_that_joins_without_it_is_refused(tmp_path: Path) -> None:
    job = tiny_job("joins", tmp_path, precision="bf16", cluster={"device": "cuda"})
    card, room = Card("A40", (8, 6), 48), 3 * 10 * 2 + small_files_bytes(job, 2)

    def said(facts: NodeFacts) -> str:
        hello = {"versions": {"torch": "2"}, "facts": facts}
        return objection(job, hello, {"torch": "2"}, "cuda", slot_bytes=10, workers=2)

    assert said(NodeFacts([card], room)) == ""
    assert "precision: saw bf16" in said(NodeFacts([card._replace(capability=(7, 0))], room))
    assert said(NodeFacts([card], room - 1)).startswith("snapshot.folder: saw room for ")


def test_a_connected_cluster_is_asked_for_its_room_and_not_this_machine(
    connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A door that is not on any node of the cluster has no say in what fits on them."""
    job = tiny_job("elsewhere", tmp_path, cluster={"max_workers": 2})
    monkeypatch.setattr(snapshot_folder, "choose_folder", lambda *_: pytest.fail("looked at this machine"))
    assert resolve(ResolvedJob(job), ON_THE_MACHINE).layout is None
    resolved = resolve(ResolvedJob(job), ON_THE_CLUSTER)
    assert (resolved.layout is not None, resolved.slot_bytes > 0, resolved.notes) == (True, True, ())
    monkeypatch.setattr(placement, "look", lambda *_: NodeFacts([], 1000))
    with pytest.raises(ConfigError, match=r"node .* is left out: snapshot.folder: saw room for 1e-06 GB in"):
        check_cluster(job)
    assert check_cluster(job, own_ray=True) is None
    monkeypatch.setattr(placement, "look", lambda *_: time.sleep(5.0))
    monkeypatch.setattr(placement, "LOOK_S", 0.5)
    with pytest.raises(ConfigError, match=r"cluster: none of \d nodes said within .* launch again"):
        check_cluster(job)


@pytest.mark.deep
def test_a_run_on_cpus_keeps_fp32_and_says_so(connected: None, tmp_path: Path) -> None:
    job = tiny_job("auto-run", tmp_path, precision="auto", steps=10, cluster={"max_workers": 1})
    for steps in (10, 15):
        watched = start(job.model_copy(update={"steps": steps}))
        assert watched.finish()["status"] == "finished"
        assert watched.status["precision"] == "fp32"
        why = "workers run on CPUs" if steps == 10 else "as run auto-run was started"
        assert f"precision: auto came to fp32: {why}" in watched.log()
        while find_coordinator(job.name) is not None:
            time.sleep(0.1)
    saved = json.loads(LocalStorage(str(tmp_path), "auto-run").get("run.json"))["config"]
    assert saved["precision"] == "fp32"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"precision": "tf32"}, "precision: saw tf32, which CPUs do not have"),
        ({"precision": "fp8", "data": {"sequence_length": 32}}, "precision: saw fp8, which CPUs do not have"),
        ({"optimizer": {"offload": True}}, "optimizer.offload: saw true, but workers run on CPUs"),
        (
            {"layout": {"offload_activations": True}},
            "layout.offload_activations: saw true, but",
        ),
        ({"kernels": {"cuda_graphs": True}}, "kernels.cuda_graphs: saw true, but workers run on CPUs"),
    ],
)
def test_what_needs_a_gpu_is_refused_once_the_machines_are_known(
    connected: None, tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    job = tiny_job("needs-gpu", tmp_path, **{"cluster": {"device": "auto"}, **sections})
    with pytest.raises(ConfigError, match=said):
        check_cluster(job)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"precision": "fp8", "data": {"sequence_length": 32}}, "precision: saw fp8, which needs torchao"),
        (
            {"precision": "fp32", "optimizer": {"moments": "8bit"}},
            r"optimizer.moments: saw 8bit, which needs torchao; on every node install the extra 8bit",
        ),
    ],
)
def test_what_needs_an_extra_is_refused_without_it(
    connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(run_module, "is_there", lambda module: False)
    monkeypatch.setattr(run_module, "able_nodes", lambda job, nodes, device, facts: (nodes, ""))
    job = tiny_job("needs-extra", tmp_path, **{"cluster": {"device": "auto"}, **sections})
    with pytest.raises(ConfigError, match=said):
        check_cluster(job)
    if job.precision == "fp32":
        full = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"moments": "full"})})
        check_cluster(full)


def test_flash_attention_is_missed_before_anything_starts(tmp_path: Path) -> None:
    job = tiny_job("needs-flash", tmp_path, precision="bf16", kernels={"attention": "flash-attn"})
    assert "extra flash" in run_module._missing_extras(job)["kernels.attention"]
    assert not run_module._missing_extras(tiny_job("needs-nothing", tmp_path))


def test_a_checkpoint_is_imported_into_a_named_precision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"precision: saw auto, .*; name it for an import"):
        import_hf(auto(tmp_path)[0], tmp_path)


def test_a_node_that_does_not_answer_is_named_and_the_others_count(
    connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job("silent", tmp_path, cluster={"max_workers": 2})
    there = placement.living_nodes()
    gone = NodeView("ab" * 28, "gone-host", 8, 0, 8, 0)
    monkeypatch.setattr(placement, "LOOK_S", 5.0)
    assert list(placement.facts_of([*there, gone], job)) == [node.id for node in there]
    with pytest.raises(ClusterError, match="saw no answer of gone-host for 5 s"):
        placement.kept_on([*there, gone], "silent", str(tmp_path), False)
