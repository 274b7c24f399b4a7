"""Services listen at the interface that carries the run, and secrets stay out of what is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.config.resume import changes
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.storage_urls import redact_words
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.replay import event_line, header_line
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.driver.inventory import InventoryNode, plan
from picotron_ray.runtime.driver.preflight import check_services
from picotron_ray.runtime.driver.resolve_job import ON_THE_CLUSTER, ResolvedJob, resolve
from picotron_ray.runtime.ray_cluster import interfaces
from picotron_ray.runtime.ray_cluster.connect import refuse_unauthenticated
from picotron_ray.runtime.ray_cluster.interfaces import addresses, carry_collectives, listen_address
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts, look
from tests.support.runs.coordinator_world import job

ADDRESSES = next(step for step in ON_THE_CLUSTER if step.name == "addresses")


def test_this_machine_has_a_loopback() -> None:
    assert addresses()["lo"][0] == "127.0.0.1"


def test_a_run_listens_at_the_interface_that_is_named_else_at_its_nodes_address() -> None:
    assert listen_address(job(), "10.0.0.7") == "10.0.0.7"
    assert listen_address(job(cluster__interface="lo"), "10.0.0.7") == "127.0.0.1"
    with pytest.raises(
        ConfigError, match=r"cluster.interface: saw 'ib7', and node 10\.0\.0\.7 has addresses at .*lo"
    ):
        listen_address(job(cluster__interface="ib7"), "10.0.0.7")


def test_an_interface_that_is_not_there_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_services(job(cluster__interface="lo"))
    with pytest.raises(ConfigError, match=r"cluster\.interface: saw 'eth77', and node .* every node has"):
        check_services(job(cluster__interface="eth77"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check_services(job(cluster__interface="eth77"))  # not this machine's to say ...
    folder = job().snapshot.folder
    assert "saw 'eth77'" in look(folder, "night", interface="eth77").interface_problem
    assert look(folder, "night", interface="lo").interface_problem == ""
    room = {"host_bytes": 64 << 30, "snapshot_bytes": 64 << 30}
    good, bad = NodeFacts(**room), NodeFacts(**room, interface_problem="cluster.interface: saw 'eth77'")
    nodes = [InventoryNode("a", 4, good), InventoryNode("b", 4, bad)]
    assert plan(job(), "cpu", nodes).left_out == ("node b is left out: cluster.interface: saw 'eth77'",)
    with pytest.raises(ConfigError, match=r"node b is left out: cluster.interface: saw 'eth77'"):
        plan(job(), "cpu", nodes[1:])


def test_a_ray_of_the_runs_own_serves_this_machine_alone() -> None:
    own = resolve(ResolvedJob(job(), owns_ray=True), (ADDRESSES,)).job
    assert (own.cluster.interface, own.metrics.host) == ("lo", "127.0.0.1")
    assert changes(own.model_dump(mode="json"), job()) == [], "what launch fills in is no change"
    named = resolve(ResolvedJob(job(cluster__interface="eth1"), owns_ray=True), (ADDRESSES,)).job
    assert named.cluster.interface == "eth1"
    assert resolve(ResolvedJob(job()), (ADDRESSES,)).job == job()


def test_gloo_is_told_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        interfaces, "addresses", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7", "fd00::7"]}
    )

    def told(config: JobConfig, host: str, **before: str) -> dict[str, str]:
        carry_collectives(config, host, before)
        return before

    assert told(job(), "10.0.0.7") == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert told(job(), "fd00::7") == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert told(job(), "10.0.0.8") == {}
    assert told(job(), "10.0.0.7", GLOO_SOCKET_IFNAME="ib0") == {"GLOO_SOCKET_IFNAME": "ib0"}
    named = told(job(cluster__interface="ib1"), "10.0.0.7", GLOO_SOCKET_IFNAME="ib0")
    assert named == {"GLOO_SOCKET_IFNAME": "ib1", "NCCL_SOCKET_IFNAME": "ib1"}


def test_a_ray_without_authentication_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in (None, "token"):
        monkeypatch.delenv("RAY_AUTH_MODE") if mode is None else monkeypatch.setenv("RAY_AUTH_MODE", mode)
        refuse_unauthenticated(job())
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match=r"cluster\.allow_unauthenticated: saw RAY_AUTH_MODE=disabled"):
        refuse_unauthenticated(job())
    refuse_unauthenticated(job(cluster__allow_unauthenticated=True))


@pytest.mark.parametrize(
    "url", ["https://me:hunter2@host/api", "http://host?token=hunter2", "postgresql://u:hunter2@h/d"]
)
def test_a_secret_in_a_trackers_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job("tiny", [f"trackers=[{{kind: mlflow, url: '{url}'}}]"])
    assert str(caught.value).startswith("trackers.0.url: saw credentials or a query in ")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["databricks", "https://host:5000/api", "sqlite:///runs.db", "file:///runs"])
def test_other_urls_of_trackers_are_taken(url: str) -> None:
    assert load_job("tiny", [f"trackers=[{{kind: mlflow, url: '{url}'}}]"]).trackers[0].url == url


SECRETS = "no answer from https://me:hunter2@host:9000/a?sig=hunter2. Tried s3://k:hunter2@b/p"


def test_words_of_libraries_are_kept_without_their_secrets() -> None:
    assert redact_words(SECRETS) == "no answer from https://host:9000/a. Tried s3://b/p"
    for same in ("a@b.c said so? yes", "at 10.0.0.7:80", "see https://host/a/b#"[:-1]):
        assert redact_words(same) == same


def test_no_secret_reaches_the_event_log_or_the_runs_record() -> None:
    storage: dict[str, Any] = {
        "url": "s3://key:hunter2@bucket/p",
        "endpoint_url": "https://host/?sig=hunter2",
    }
    config = JobConfig.model_construct(
        **{**dict(JobConfig()), "storage": JobConfig().storage.model_copy(update=storage)}
    )
    assert "hunter2" not in header_line(config, {}), "even of a config that was never validated"
    event = m.Uploaded("a", m.GenerationId(1, 1), 5, SECRETS)
    line = event_line(1.0, event, [m.Alert("warning", SECRETS, "storage", {"why": SECRETS})])
    assert "hunter2" not in line
    assert json.loads(line)["event"]["error"] == redact_words(SECRETS)
    record = RunRecord(job())
    record.note("warning", "tracker", f"tracker: {SECRETS}")
    assert "hunter2" not in str(record.status(0))
