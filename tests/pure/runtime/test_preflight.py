"""What machines rule out by their number and devices is refused before a process of the run is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.open import open_storage, try_storage
from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError, StorageError
from picotron_ray.observability.nvml import Card, visible
from picotron_ray.runtime.driver import preflight, resolve_job
from picotron_ray.runtime.driver.resolve_job import NODES, ResolvedJob, check_machine, resolve
from picotron_ray.runtime.ray_cluster.placement import NodeView
from tests.support.runs.coordinator_world import job

CARD = Card("NVIDIA H100", (9, 0), 80 * 2**30)


def nodes(*gpus: float) -> list[NodeView]:
    return [NodeView(f"n{at}", f"host-{at}", 8, each, 8, each) for at, each in enumerate(gpus)]


def refusal(patch: pytest.MonkeyPatch, there: list[NodeView], url: str = "", **keys: Any) -> str:
    """The one line that a cluster of these nodes gives; empty where it is taken."""
    patch.setattr(preflight, "living_nodes", lambda: there)
    try:
        resolve(ResolvedJob(job(**keys), relative_url=url), (NODES,))
    except ConfigError as error:
        return "; and ".join(error.problems)
    return ""


def test_a_relative_storage_folder_is_refused_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "storage.url: saw './runs' on a cluster of 2 nodes, where that means a folder of one of them; give"
    assert refusal(monkeypatch, nodes(0, 0), "./runs").startswith(line)
    assert "nodes still to come" in refusal(monkeypatch, nodes(0), "./runs", cluster__autoscale=True)
    assert refusal(monkeypatch, nodes(0), "./runs") == ""
    assert refusal(monkeypatch, nodes(0, 0)) == ""


@pytest.mark.parametrize(
    ("url", "relative"),
    [("./runs", "./runs"), ("runs", "runs"), ("/runs", ""), ("~/runs", ""), ("s3://bucket/x", "")],
)
def test_a_door_knows_what_was_written(url: str, relative: str) -> None:
    asked = ResolvedJob(load_job("tiny", [f"storage.url={url}"]))
    assert resolve(asked, (resolve_job.PATHS,)).relative_url == relative


def test_gpus_are_refused_where_no_node_of_a_cluster_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = {"cluster__device": "cuda"}
    line = refusal(monkeypatch, nodes(0, 0, 0), **cuda)
    assert line.startswith(
        "cluster.device: saw cuda, but none of the cluster's 3 nodes offers Ray a GPU; use"
    )
    assert refusal(monkeypatch, nodes(0, 8), **cuda) == ""
    assert refusal(monkeypatch, nodes(0), cluster__autoscale=True, **cuda) == "", "one that has it may come"
    assert refusal(monkeypatch, nodes(0), cluster__device="auto") == ""


def test_what_nccl_does_not_have_is_refused_once_workers_are_known_to_run_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``cluster.device: auto`` says nothing of it before the cluster is seen."""
    monkeypatch.setattr(preflight, "facts_of", lambda nodes, job: {})

    def line(comm: str, value: str, *gpus: float) -> str:
        monkeypatch.setattr(preflight, "living_nodes", lambda: nodes(*gpus))
        asked = job(cluster__device="auto", **{f"comm__{comm}": value})
        with pytest.raises(ConfigError) as refused:
            preflight.check_cluster(asked)
        return refused.value.problems[0]

    assert line("topology", "ring", 8).startswith("comm.topology: saw ring, but workers run on GPUs")
    assert line("parameters", "hierarchical", 8).startswith("comm.parameters: saw hierarchical, but workers")
    assert line("topology", "ring", 0).startswith("cluster: none of 1 nodes said")


@pytest.mark.parametrize(
    ("cards", "seen", "keys", "line"),
    [
        (0, None, {"cluster__device": "cuda"}, "cluster.device: saw cuda, but this machine shows no GPU"),
        (2, "", {"cluster__device": "cuda"}, "cluster.device: saw cuda, but this machine shows no GPU"),
        (2, None, {"cluster__min_workers": 3}, "cluster.min_workers: saw 3, but this machine shows 2 GPUs"),
        (2, "1", {"cluster__min_workers": 2}, "cluster.min_workers: saw 2, but this machine shows 1 GPUs"),
    ],
)
def test_gpus_are_refused_where_this_machine_has_too_few(
    monkeypatch: pytest.MonkeyPatch, cards: int, seen: str | None, keys: dict[str, Any], line: str
) -> None:
    """Before Ray starts, and before data is made into tokens."""
    monkeypatch.setattr(preflight.Gpus, "cards", lambda self: [CARD] * cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setattr(resolve_job, "_data", None)
    with pytest.raises(ConfigError, match=line) as refused:
        check_machine(job(**keys), own_ray=True)
    assert refused.value.step == "nodes"


def test_too_few_open_files_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    """Ray would wait for ever, with its processes up."""
    words = [sys.executable, "-m", "picotron_ray.launch", "tiny", f"storage.url={tmp_path / 'runs'}"]
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "s"), "TMPDIR": str(tmp_path)}
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | home
    limited = ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", *words]
    done = subprocess.run(limited, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: ulimit -n: saw 40 open files, expected at least 1024, since Ray holds a socket per peer and"
        " actor; raise `ulimit -n` (65536)\n"
    )
    assert [path for path in tmp_path.rglob("*") if path.name != "s"] == []


def test_gpus_are_not_looked_for_where_workers_run_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.Gpus, "cards", lambda self: [CARD])
    assert preflight.cards_here(job(cluster__device="cpu", cluster__min_workers=3)) == []
    assert preflight.cards_here(job(cluster__device="auto")) == [CARD]
    monkeypatch.setattr(preflight.Gpus, "cards", lambda self: [])
    assert preflight.cards_here(job(cluster__device="auto")) == []


def test_only_visible_cards_count() -> None:
    cards = [Card(name, (9, 0), 1) for name in "abc"]

    def names(value: str | None) -> str:
        found = visible(cards, {} if value is None else {"CUDA_VISIBLE_DEVICES": value})
        return "".join(card.name for card in found)

    asked = (None, "", "NoDevFiles", "2", "2, 0", "5", "GPU-1,GPU-2")
    assert [names(value) for value in asked] == ["abc", "", "", "c", "ca", "", "ab"]


# --- storage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["", "runs", "runs/world", "runs/world/.tmp"])
def test_trying_storage_leaves_nothing_there(tmp_path: Path, there: str) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    config = load_job("tiny", [f"storage.url={tmp_path / 'runs'}"]).storage
    try_storage(config, "world")
    assert sorted(tmp_path.rglob("*")) == before


def test_storage_that_is_refused_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match="is a file; storage"):
        try_storage(load_job("tiny", [f"storage.url={tmp_path / 'runs'}"]).storage, "world")
    assert (tmp_path / "runs").read_text() == "a file"


def test_a_refused_launch_leaves_nothing_in_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by a step after the one that tries storage."""
    monkeypatch.setattr(preflight.Gpus, "cards", lambda self: [])
    words = [f"storage.url={tmp_path / 'runs'}", "init_from.run=gone", "metrics.enabled=false"]
    with pytest.raises(ConfigError, match="gone"):
        check_machine(load_job("tiny", words), own_ray=True)
    assert list(tmp_path.iterdir()) == []


def test_a_first_write_survives_a_refused_launch_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one takes its empty folders away between two steps of this one's write."""
    from picotron_ray.checkpoint.storage import local

    config = load_job("tiny", [f"storage.url={tmp_path / 'runs'}"]).storage
    mine, real, tried = open_storage(config, "world"), local._write_durably, []

    def meanwhile(path: Path, data: bytes) -> None:
        if not tried:
            tried.append(path)
            local.remove_empty([path.parent, path.parent.parent, path.parent.parent.parent])
        real(path, data)

    monkeypatch.setattr(local, "_write_durably", meanwhile)
    mine.put("run.json", b"x")
    assert (tried[0].parent.exists(), mine.get("run.json")) == (True, b"x")
