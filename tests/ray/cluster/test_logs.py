"""Lines of a run on two nodes: each rank's, from its node, also once worker, node and run are gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray import cli
from tests.support.runs.ray_runs import start, tiny_job

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.deep,
]
NODE = {"num_cpus": 2, "object_store_memory": 100 * 2**20}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    from picotron_ray.runtime.ray_cluster.connect import connect_to

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    found.add_node(**NODE)
    found.wait_for_nodes()
    connect_to(found.address)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    ray.shutdown()
    found.shutdown()


def logs(*words: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(cli.app, ["logs", *words, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def until(seen: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := seen()):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    return found


def ranks_of(status: dict[str, Any]) -> set[int]:
    """The ranks whose pages have arrived."""
    return {page["rank"] for page in status["pages"].values()}


def test_a_ranks_lines_outlive_its_worker_its_node_and_its_run(cluster: Any, tmp_path: Path) -> None:
    job = tiny_job("lines", tmp_path, steps=100_000, cluster={"max_workers": 4})
    watched = start(job)
    full = watched.until(lambda s: s["step"] >= 10 and ranks_of(s) == {0, 1, 2, 3})
    pages = {page["rank"]: page for page in full["pages"].values()}
    assert len({page["node"] for page in pages.values()}) == 2

    built = until(lambda: logs("lines", "--rank", "1", "--since", "1m", "--grep", "^generation .* rank 1: "))
    assert {(line["worker"], line["pid"], line["level"]) for line in built} == {
        (pages[1]["worker"], pages[1]["pid"], "stdout")
    }
    assert {line["run"] for line in built} == {"lines"}
    everyone = logs("lines")
    assert {line["rank"] for line in everyone} >= {0, 1, 2, 3}
    assert {line["node"] for line in everyone} == {page["node"] for page in pages.values()}
    assert [line["time"] for line in everyone] == sorted(line["time"] for line in everyone)
    one = pages[1]["node"]
    assert {line["node"] for line in logs("lines", "--node", one[:8])} == {one}
    term = logs("lines", "--node", "coordinator", "--grep", "coordinator of term 1")
    assert [line["logger"] for line in term] == ["picotron_ray.runtime.coordinator.run_record"]
    refused = CliRunner().invoke(cli.app, ["logs", "lines", "--rank", "9"])
    assert (refused.exit_code, refused.stderr) == (
        2,
        "error: --rank: saw 9, expected one of run 'lines': 0 to 3\n",
    )

    os.kill(pages[1]["pid"], signal.SIGKILL)
    watched.until(lambda s: s["failures"] and s["step"] > full["step"] + 10)
    again = logs("lines", "--rank", "1", "--since", "2m", "--grep", "^generation 1.1 rank 1: ")
    assert again == built, "after the worker's death"
    address = str(tmp_path / "lines")
    kept = until(lambda: list((Path(address) / "logs" / "dead").glob("*.zst")) or None)
    assert len(kept) == 1

    bundle = CliRunner().invoke(
        cli.app, ["debug", "lines", "bundle", "--to", str(tmp_path / "b.zip"), "--json"]
    )
    assert bundle.exit_code == 0, bundle.output
    told = json.loads(bundle.stdout)
    assert {"stacks_now.json", "events.jsonl", "status.json", "logs.jsonl"} <= set(told["files"]), told
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        stacks = json.loads(archive.read("stacks_now.json"))
    assert {entry["rank"] for entry in stacks} >= {0, 2}

    (gone,) = cluster.worker_nodes
    cluster.remove_node(gone, allow_graceful=False)
    watched.until(lambda s: s["failures"][-1]["kind"] == "node-lost")
    assert logs("lines", "--rank", "1", "--grep", "^generation 1.1 rank 1: ") == built, "after the node's"

    watched.coordinator.request.remote("stop")
    watched.finish()
    assert logs("lines", "--rank", "1", "--grep", "^generation 1.1 rank 1: ") == built, "after the run's"
    shutil.rmtree(Path(os.environ["XDG_STATE_HOME"]) / "picotron_ray" / "lines" / "logs")
    stored = logs(address, "--rank", "1", "--grep", "^generation 1.1 rank 1: ")
    assert stored == built, "from storage alone"
