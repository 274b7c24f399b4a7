"""Debian's Prometheus scrapes a live run, through the run's own list of endpoints and through Ray's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.observability.catalogue import CATALOGUE
from picotron_ray.observability.metric import series_of
from tests.support.prometheus import PrometheusServer, free_port, listed
from tests.support.runs.ray_runs import Watched, start, tiny_job

pytestmark = [
    pytest.mark.timeout(300),
    # Ray's test Cluster leaves sockets to the garbage collector while it looks for free ports
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def discovery_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Ray with the dashboard, which is what writes Ray's list of metrics endpoints."""
    import ray
    from ray.cluster_utils import Cluster

    from picotron_ray.runtime.ray_cluster.connect import connect_to

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": 100 * 2**20,
            "include_dashboard": True,
            "dashboard_port": free_port(),
            "_system_config": {"metrics_report_interval_ms": 500},
        },
    )
    connect_to(cluster.address)
    yield Path(cluster.head_node.get_session_dir_path()) / "prom_metrics_service_discovery.json"
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def run(discovery_file: Path, tmp_path: Path) -> Iterator[Watched]:
    """A run of two workers, which goes on until the test ends."""
    job = tiny_job(
        "scraped", tmp_path / "store", steps=1_000_000, cluster={"max_workers": 2, "cpus_per_worker": 0.5},
        layout={"dp": 2}, checkpoint={"interval_steps": 500},
        evaluate={"interval_steps": 500, "samples": 2},
    )  # fmt: skip
    watched = start(job)
    watched.until(lambda s: s["committed"] and s["eval_loss"] and s["metrics"])
    yield watched
    watched.coordinator.request.remote("stop")
    watched.finish()


WITHOUT_PEAK = ("picotron_training_mfu_ratio",)
"""Metrics that a CPU which nobody has probed does not have: `tests/pure/observability` has their samples."""


class Prometheus(PrometheusServer):
    """A server that scrapes every second what the given lists of endpoints name."""

    def __init__(self, program: Path, folder: Path, lists: dict[str, Path]) -> None:
        jobs = [{"job_name": job, "file_sd_configs": listed(file)} for job, file in lists.items()]
        super().__init__(program, folder, {"scrape_configs": jobs})

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Labels of every series that a query finds; none while the server is not up."""
        asked = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except (ConnectionError, urllib.error.URLError):
            return []
        return [series["metric"] for series in found]


@pytest.fixture
def prometheus(
    prometheus_programs: Path, run: Watched, discovery_file: Path, tmp_path: Path
) -> Iterator[Prometheus]:
    own = Path(run.status["metrics"]["file"])
    server = Prometheus(
        prometheus_programs / "prometheus", tmp_path, {"picotron": own, "ray": discovery_file}
    )
    yield server
    server.close()


def wait_for(what: str, found: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def expositions(run: Watched) -> dict[str, str]:
    """What each endpoint of the run answers."""
    texts = {}
    for who, at in run.status["metrics"]["endpoints"].items():
        with urllib.request.urlopen(f"http://{at}/metrics", timeout=5) as answer:
            texts[who] = answer.read().decode()
    return texts


@pytest.mark.deep
def test_every_metric_is_scraped_and_ray_leads_to_the_run(
    prometheus_programs: Path, run: Watched, prometheus: Prometheus, discovery_file: Path
) -> None:
    run.until(lambda s: len(s["metrics"]["endpoints"]) == 2)  # the coordinator, and the node's agent
    has_gpu = os.path.exists("/dev/nvidiactl")
    expected = {
        series: set(metric.all_labels)
        for metric in CATALOGUE.values()
        for series in series_of(metric)
        if (has_gpu or not metric.needs_gpu) and metric.name not in WITHOUT_PEAK
    }

    def missing() -> set[str]:
        there = {labels["__name__"] for labels in prometheus.ask('{run="scraped", job="picotron"}')}
        return expected.keys() - there

    with contextlib.suppress(AssertionError):
        wait_for("all series of the catalogue", lambda: not missing())
    assert missing() == set()
    for labels in prometheus.ask('{run="scraped", job="picotron"}'):
        assert expected[labels["__name__"]] <= labels.keys(), labels

    texts = expositions(run)
    for who, text in texts.items():
        done = subprocess.run(
            [prometheus_programs / "promtool", "check", "metrics"],
            input=text,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert (done.returncode, done.stderr) == (0, ""), (who, done.stdout, done.stderr)

    through_ray = '{__name__=~"ray_picotron_.*", run="scraped", job="ray"}'
    seen = wait_for("the run behind Ray's discovery file", lambda: prometheus.ask(through_ray))
    wanted = {f"ray_{metric.name}" for metric in CATALOGUE.values() if metric.in_ray}
    wait_for("all gauges", lambda: {s["__name__"] for s in prometheus.ask(through_ray)} == wanted)
    targets = {target for group in json.loads(discovery_file.read_text()) for target in group["targets"]}
    assert {series["instance"] for series in seen} <= targets
