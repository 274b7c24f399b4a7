"""Debian's promtool, Prometheus and Alertmanager with the rules and findings of a live run."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.observability.alerts.prometheus_rules import EXPRESSIONS, LEFT_OUT
from picotron_ray.observability.alerts.rules import BY_NAME
from picotron_ray.observability.catalogue import CATALOGUE
from tests.server.test_prometheus import wait_for
from tests.support.debian import unpacked
from tests.support.prometheus import PrometheusServer, free_port, listed
from tests.support.runs.planted_anomalies import everywhere, planted_job
from tests.support.runs.ray_runs import start

if TYPE_CHECKING:
    from picotron_ray.runtime.ray_cluster.local_ray import LocalRay

pytestmark = pytest.mark.timeout(300)


def printed(*words: str) -> str:
    done = CliRunner().invoke(app, ["metrics", *words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def rule_files(tmp_path: Path) -> tuple[Path, Path]:
    rules, tests = tmp_path / "rules.yml", tmp_path / "tests.yml"
    rules.write_text(printed("--rules"))
    tests.write_text(printed("--rule-tests", str(rules)))
    return rules, tests


def promtool(programs: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([programs / "promtool", *words], capture_output=True, text=True, timeout=60)


def test_rules_are_sound_and_pass_their_unit_tests(
    prometheus_programs: Path, rule_files: tuple[Path, Path]
) -> None:
    rules, tests = rule_files
    for words in (("check", "rules", rules), ("test", "rules", tests)):
        done = promtool(prometheus_programs, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    groups = yaml.safe_load(rules.read_text())["groups"]
    manifest = yaml.safe_load(printed("--rules", "--kubernetes"))
    assert (manifest["kind"], manifest["spec"]["groups"]) == ("PrometheusRule", groups)
    alerting = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert {rule["labels"]["rule"] for rule in alerting} == set(EXPRESSIONS)
    assert set(EXPRESSIONS) | set(LEFT_OUT) == set(BY_NAME)
    assert {each.metric for each in EXPRESSIONS.values()} <= set(CATALOGUE)


def test_a_rule_that_is_wrong_fails_its_unit_tests(
    prometheus_programs: Path, rule_files: tuple[Path, Path]
) -> None:
    rules, tests = rule_files
    rules.write_text(rules.read_text().replace("> 1.3", "> 1.9"))
    done = promtool(prometheus_programs, "test", "rules", tests)
    assert done.returncode != 0
    assert "straggler fires" in done.stdout + done.stderr


class Alertmanager:
    """A server that takes alerts and shows them."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        config = folder / "alertmanager.yml"
        config.write_text(json.dumps({"route": {"receiver": "none"}, "receivers": [{"name": "none"}]}))
        options = {
            "config.file": config,
            "storage.path": folder / "alertmanager",
            "web.listen-address": self.url.removeprefix("http://"),
            "cluster.listen-address": "",
        }
        with (folder / "alertmanager.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, *(f"--{name}={value}" for name, value in options.items())],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_for("Alertmanager", lambda: self.ask("/api/v2/status"))

    def ask(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
                return json.load(answer)
        except OSError:
            return None

    def alerts(self) -> dict[str, dict[str, Any]]:
        return {each["labels"]["alertname"]: each for each in self.ask("/api/v2/alerts") or []}

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=30)


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[Alertmanager]:
    import os

    root = unpacked("prometheus-alertmanager", os.path.expanduser("~"))
    server = Alertmanager(root / "usr" / "bin" / "prometheus-alertmanager", tmp_path)
    yield server
    server.close()


@pytest.fixture
def connected(local_ray: LocalRay) -> Iterator[None]:
    import ray

    from picotron_ray.runtime.ray_cluster.connect import connect_to

    connect_to(local_ray.address)
    yield
    ray.shutdown()


class Prometheus(PrometheusServer):
    """A server that scrapes a run, judges its rules every second, and tells Alertmanager."""

    def __init__(self, programs: Path, folder: Path, targets: Path, manager: str) -> None:
        rules = json.loads(printed("--rules", "--json"))
        for group in rules["groups"]:
            group["interval"] = "1s"
            for rule in group["rules"]:
                if "alert" in rule:  # a window is a second here
                    rule["for"] = rule["for"].replace("m", "s")
        (folder / "rules.yml").write_text(json.dumps(rules))
        managers = [{"static_configs": [{"targets": [manager.removeprefix("http://")]}]}]
        settings = {
            "rule_files": [str(folder / "rules.yml")],
            "scrape_configs": [{"job_name": "run", "file_sd_configs": listed(targets)}],
            "alerting": {"alertmanagers": managers},
        }
        super().__init__(programs / "prometheus", folder, settings)
        checked = promtool(programs, "check", "config", self.config)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.deep
@pytest.mark.usefixtures("connected")
def test_a_scripted_fault_fires_arrives_and_is_resolved(
    prometheus_programs: Path, alertmanager: Alertmanager, tmp_path: Path
) -> None:
    """A late loader is found by the run's own rule and by Prometheus; both tell Alertmanager, and end."""
    faults = [*everywhere("slow-data", 300, row_s=0.02), *everywhere("slow-data", 900, row_s=0.0)]
    sinks = [{"kind": "alertmanager", "url": alertmanager.url}]
    job = planted_job("alerted", tmp_path / "runs", faults, alerts={"sinks": sinks})
    watched = start(job)
    status = watched.until(lambda s: s["metrics"])
    prometheus = Prometheus(prometheus_programs, tmp_path, Path(status["metrics"]["file"]), alertmanager.url)
    try:
        own, scraped = "data-stall", "PicotronDataStall"
        wait_for("the fault", lambda: watched.look()["step"] >= 300, 120)
        wait_for("both alerts", lambda: {own, scraped} <= set(alertmanager.alerts()), 60)
        found = alertmanager.alerts()
        assert found[own]["labels"]["run"] == "alerted"
        assert found[own]["annotations"]["advice"] == found[scraped]["annotations"]["advice"]
        wait_for("the end of the fault", lambda: watched.look()["step"] >= 900, 120)
        wait_for("the end of both", lambda: not {own, scraped} & set(alertmanager.alerts()), 120)
    finally:
        prometheus.close()
    watched.coordinator.request.remote("stop")
    watched.finish()
