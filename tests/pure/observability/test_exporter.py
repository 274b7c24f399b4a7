"""Endpoints: what coordinator and agents measure is in the catalogue and reads as Prometheus' text format."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from picotron_ray.config.schema.service import ElasticConfig, MetricsConfig
from picotron_ray.config.schema.telemetry import STEP_PHASES
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.observability.agent_metrics import STEP_BUCKETS_S
from picotron_ray.observability.catalogue import CATALOGUE
from picotron_ray.observability.exporter import (
    Distribution,
    Exporter,
    PortTakenError,
    Sample,
    SampleCollector,
    address,
)
from picotron_ray.observability.nvml import Gpus
from picotron_ray.observability.ports import check_ports, port_taken
from picotron_ray.planner.model_sizes import flops_per_token
from picotron_ray.runtime.coordinator.metrics import CoordinatorFigures, essentials
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.heartbeat import Page, read_page
from picotron_ray.runtime.node_agent.machine import NodeMachine
from picotron_ray.runtime.node_agent.metrics import AgentFigures
from picotron_ray.runtime.telemetry_page import MemoryFigures, StepRow, TelemetryPage
from picotron_ray.runtime.telemetry_window import WARM_UP, Window
from tests.support.runs.coordinator_world import job

RUN = {"run": "r"}
NODE = {"run": "r", "node": "n"}
SERVICE: Any = SimpleNamespace(served_bytes=77)
SPEC = m.GenerationSpec(m.GenerationId(1, 2), (m.Member("a", "n"),), Layout(), m.Source("slots", 5), "test")


COMMIT_FIGURES = {10: {"bytes": 100, "written_bytes": 60, "commit_s": 0.07}}


@pytest.fixture
def page(tmp_path: Path) -> Page:
    page = Page(tmp_path / "a.page", ElasticConfig())
    page.begin(term=1, n=2, rank=0, step=5)
    for step, seconds in enumerate((0.25, 0.015, 130.0, 0.25), start=6):
        page.put(tokens=32 * step, loss=2.5, grad_norm=0.5, learning_rate=1e-3)
        page.count_step(seconds)
        page.put(step=step)
    page.put(eval_step=8, eval_loss=2.25, baseline_loss=3.0, wait_s=0.125, snapshot_s=0.01, skipped=2)
    page.put(memory_mode=2, memory_peak_bytes=50, memory_activation_bytes=20)
    steps = TelemetryPage(tmp_path / "a.telemetry")
    for ordinal in range(WARM_UP + 2):
        memory = MemoryFigures(allocated=5, reserved=6, peak=700, largest_free=8, device=1000)
        phases = (0.0, 0.1, 0.2 + ordinal, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0)
        figures: Any = {"step_s": sum(phases), "row_s": 0.1, "phase_s": phases, "sent_bytes": (4, 0, 2, 0, 0)}
        figures |= {"stage_s": {}, "rows": 4, "micro_batches": 2}
        steps.write(StepRow(0, 1, 2, 0, ordinal, ordinal, **figures, memory=memory))
    return page


def living(folder: Path) -> list[Any]:
    return [view for path in folder.glob("*.page") if (view := read_page(path)) is not None]


def told_record(folder: Path) -> RunRecord:
    """A run that lost a worker, went on with the page above, and committed."""
    history = RunRecord(job())
    history.begin(1, COMMIT_FIGURES)
    now = time.time()
    first = m.GenerationSpec(
        m.GenerationId(1, 1), (m.Member("a", "n"), m.Member("b", "n")), Layout(dp=2), m.Source("init", 0), ""
    )
    history.observe(m.Tick(), [m.RunGeneration(first)], now - 9)
    history.observe(m.Heartbeat("n", first.id, {"a": 6, "b": 6}), [], now - 8)
    history.observe(m.WorkerExited("b", "process died"), [], now - 7)
    history.observe(m.Tick(), [m.RunGeneration(SPEC)], now - 6.5)
    history.figures("n", [view.figures() for view in living(folder)])
    history.observe(m.Heartbeat("n", SPEC.id, {"a": 9}), [], now - 6)
    history.observe(m.Appended("commit", SPEC.id, 10, seq=4), [], now - 2)
    return history


TELEMETRY: dict[str, Any] = {
    "step_s": {"mean": 2.0},
    "phase_s": {
        phase: {"mean": mean, "max": 1.0, "min": 0.0, "std": 0.1}
        for phase, mean in zip(STEP_PHASES, (0.2, 0.4, 0.6, 0.0, 0.5, 0.3, 0.0, 0.0, 0.0), strict=True)
    },
    "sent_bytes": {"dp": 64.0},
    "utilization": 0.5,
    "waits_seen": True,
    "slow_ranks": [{"rank": 3, "ratio": 1.5}],
    "links": {"dp": {"latency_s": 1e-4, "bandwidth_bytes_per_s": 2e9, "efficiency_ratio": 0.5}},
}


def agent_figures(folder: Path) -> AgentFigures:
    """Figures of a node with a host that is this one, and no GPU."""
    logs: Any = SimpleNamespace(lines=12, lost=3)
    machine = NodeMachine(Gpus(), {"state": folder})
    time.sleep(0.1)  # the shares of the host's time are since its reader was made
    return AgentFigures(folder, lambda: living(folder), SERVICE, machine, logs)


def exposed(server: Any, labels: dict[str, str], read: Callable[[], list[Sample]]) -> dict[str, Any]:
    """Sample values by name and own labels, after a trip through the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SampleCollector(server, labels, read))
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        known = CATALOGUE.get(family.name) or CATALOGUE[f"{family.name}_total"]
        assert (family.type, family.documentation) == (known.kind, known.help)
        for sample in family.samples:
            assert sample.labels.items() >= labels.items()
            own = tuple(value for name, value in sample.labels.items() if name not in labels)
            found[" ".join((sample.name, *own))] = sample.value
    return found


def test_the_coordinator_measures_all_that_the_catalogue_says(tmp_path: Path, page: Page) -> None:
    del page
    record = told_record(tmp_path)
    record.telemetry = TELEMETRY
    rated = job(telemetry={"peak_tflops": 1e-6})
    figures = CoordinatorFigures(rated, record, lambda: MachineState.RUNNING)
    asked_for = {"picotron_training_eval_loss_before_nats", "picotron_training_eval_set_loss_nats"}
    assert {sample.name for sample in figures()} == {
        name for name, metric in CATALOGUE.items() if metric.server == "coordinator"
    } - asked_for, "those of tasks and of held-out sets are there where a run has them"
    values = exposed("coordinator", RUN, figures)
    expected = {
        "picotron_training_steps": 9,
        "picotron_training_tokens_total": 9 * 32,
        "picotron_training_gradient_norm": 0.5,
        "picotron_training_eval_loss_nats": 2.25,
        "picotron_elastic_generation": 2,
        "picotron_elastic_generations_total": 2,
        "picotron_elastic_workers": 1,
        "picotron_elastic_state running": 1,
        "picotron_elastic_state waiting": 0,
        "picotron_elastic_failures_total worker-exited": 1,
        "picotron_elastic_failures_total hang": 0,
        "picotron_elastic_lost_steps_total": 1,
        "picotron_elastic_recovery_seconds_count": 1,
        "picotron_checkpoint_commits_total": 1,
        "picotron_checkpoint_newest_steps": 10,
        "picotron_checkpoint_size_bytes": 100,
        "picotron_checkpoint_written_bytes_total": 60,
        "picotron_checkpoint_commit_seconds_sum": 0.07,
    }
    assert {name: values[name] for name in expected} == expected
    assert values["picotron_elastic_recovery_seconds_sum"] == pytest.approx(1.0, abs=1e-3)
    assert values["picotron_checkpoint_age_seconds"] == pytest.approx(2.0, abs=1.0)
    steps = {
        "picotron_training_communication_ratio": 0.4,
        "picotron_training_data_wait_ratio": 0.1,
        "picotron_training_utilization_ratio": 0.5,
        "picotron_training_straggler_ratio": 1.5,
        "picotron_training_sent_bytes dp": 64.0,
        "picotron_training_phase_seconds backward mean": 0.6,
        "picotron_training_link_latency_seconds dp": 1e-4,
        "picotron_training_link_bandwidth_bytes_per_second dp": 2e9,
        "picotron_training_link_efficiency_ratio dp": 0.5,
        "picotron_checkpoint_durability_lag_steps": 0.0,
    }
    assert {name: values[name] for name in steps} == pytest.approx(steps)
    status = record.status(0)
    causes = [value for name, value in values.items() if name.startswith("picotron_training_wall_seconds ")]
    assert sum(causes) == pytest.approx(sum(status["seconds"].values()), abs=0.5)
    flops = flops_per_token(rated.model, rated.data.sequence_length)
    share = values["picotron_training_mfu_ratio telemetry.peak_tflops"]
    assert share == pytest.approx(status["tokens_per_s"] * flops / 1e6)


def test_what_is_not_known_yet_has_no_series() -> None:
    values = exposed(
        "coordinator", RUN, CoordinatorFigures(job(), RunRecord(job()), lambda: MachineState.STARTING)
    )
    assert "picotron_training_loss_nats" not in values
    assert "picotron_checkpoint_age_seconds" not in values
    assert not [name for name in values if name.startswith("picotron_training_mfu")], "no peak is known"
    assert values["picotron_elastic_workers"] == 0


def test_ray_is_given_the_plain_figures(tmp_path: Path, page: Page) -> None:
    del page
    given = essentials(CoordinatorFigures(job(), told_record(tmp_path), lambda: MachineState.RUNNING)())
    assert given.keys() == {name for name, metric in CATALOGUE.items() if metric.in_ray}


def test_an_agent_measures_all_but_gpus(tmp_path: Path, page: Page) -> None:
    (tmp_path / "a.0.slot").write_bytes(bytes(300))
    figures = agent_figures(tmp_path)
    wanted = {name for name, metric in CATALOGUE.items() if metric.server == "agent"}
    communication = {
        name for name in wanted if "communication_predicted" in name or "communication_measured" in name
    }
    assert len(communication) == 2
    assert communication.isdisjoint(sample.name for sample in figures()), "nobody measured it yet"
    page.communication({"experts": (0.5, 0.25)})
    optional = {name for name in wanted if CATALOGUE[name].needs_gpu}
    assert wanted - optional <= {sample.name for sample in figures()} <= wanted
    values = exposed("agent", NODE, figures)
    assert values["picotron_node_slot_bytes"] == 300
    assert values["picotron_node_workers"] == 1
    assert values["picotron_node_served_snapshot_bytes_total"] == 77
    assert values["picotron_node_log_lost_lines_total"] == 3
    assert values["picotron_worker_resident_bytes a"] > 1e6
    assert values["picotron_worker_snapshot_wait_seconds_total a"] == 0.125
    assert values["picotron_worker_memory_mode a"] == 2
    assert values["picotron_worker_memory_peak_bytes a"] == 50
    assert values["picotron_worker_memory_bytes activation a"] == 20
    assert values["picotron_worker_communication_predicted_seconds experts a"] == 0.5
    assert values["picotron_worker_communication_measured_seconds experts a"] == 0.25
    page.put(cuda_allocated_bytes=7, cuda_reserved_bytes=9)
    assert exposed("agent", NODE, figures)["picotron_worker_cuda_reserved_bytes a"] == 9


def test_an_agent_serves_windows_over_the_last_steps(tmp_path: Path, page: Page) -> None:
    del page
    values = exposed("agent", NODE, agent_figures(tmp_path))
    window = {key: values[f"picotron_worker_phase_seconds backward {key} a"] for key in Window._fields}
    assert window == pytest.approx({"mean": 3.7, "max": 4.2, "min": 3.2, "std": 0.5})
    assert values["picotron_worker_bubble_ratio a"] == pytest.approx(0.3 / 4.1)
    assert (values["picotron_worker_sent_bytes dp a"], values["picotron_worker_sent_bytes pp a"]) == (4, 2)
    assert values["picotron_worker_peak_bytes a"] == 700
    assert values["picotron_worker_fragmentation_ratio a"] == pytest.approx(1 - 8 / 995)
    assert values["picotron_worker_utilization_ratio a"] == pytest.approx(3.8 / 4.1)
    assert values["picotron_worker_largest_free_bytes a"] == 8


def test_steps_are_counted_each_with_their_exact_time(tmp_path: Path, page: Page) -> None:
    del page
    values = exposed("agent", NODE, agent_figures(tmp_path))
    name = "picotron_worker_step_seconds"
    assert values[f"{name}_sum a"] == 0.25 + 0.015 + 130.0 + 0.25
    assert values[f"{name}_count a"] == 4
    buckets = [values[f"{name}_bucket {bound} a"] for bound in (*map(str, STEP_BUCKETS_S), "+Inf")]
    assert buckets == [0, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 4]


@pytest.mark.parametrize(
    "sample",
    [
        Sample("picotron_training_nonsense", 1.0),
        Sample("picotron_node_workers", 1.0),  # an agent's
        Sample("picotron_training_steps", 1.0, {"worker": "a"}),
        Sample("picotron_elastic_state", 1.0),
    ],
)
def test_what_the_catalogue_does_not_know_is_refused(sample: Sample) -> None:
    with pytest.raises(ValueError, match="not in the catalogue"):
        exposed("coordinator", RUN, lambda: [sample])


def closed(exporter: Exporter) -> bool:
    """Whether it closes; one that does not is left to its thread."""
    closing = threading.Thread(target=exporter.close, daemon=True)
    closing.start()
    closing.join(5)
    return not closing.is_alive()


@pytest.fixture(scope="module")
def exporter() -> Iterator[Exporter]:
    made = Exporter("coordinator", RUN, lambda: [Sample("picotron_training_steps", 3.0)], "127.0.0.1", 0)
    yield made
    assert closed(made)


def test_an_endpoint_that_is_closed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Exporter("coordinator", RUN, list, "127.0.0.1", 0)
    joined: list[bool] = []
    thread = made._thread

    def join() -> None:
        thread.join(5)
        joined.append(not thread.is_alive())

    monkeypatch.setattr(made, "_thread", SimpleNamespace(join=join))
    assert closed(made)
    assert joined == [True]
    assert port_taken("127.0.0.1", made.port) == ""


def test_an_endpoint_serves_only_the_catalogue(exporter: Exporter) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert [family.name for family in families] == ["picotron_training_steps"]


def test_a_port_that_is_taken_is_named(exporter: Exporter) -> None:
    with pytest.raises(PortTakenError, match=f"127.0.0.1:{exporter.port}"):
        Exporter("agent", NODE, list, "127.0.0.1", exporter.port)


def test_a_port_that_is_taken_is_refused_before_anything_starts(exporter: Exporter) -> None:
    taken = MetricsConfig(port=exporter.port)
    end = "Address already in use; choose another, or 0 for a free one"
    at = f"127.0.0.1 port {exporter.port}"
    assert refusal(taken, local=True) == f"metrics.port: cannot listen at {at}: {end}"
    check_ports(taken, local=False)  # agents are elsewhere
    check_ports(taken.model_copy(update={"enabled": False}), local=True)
    own = MetricsConfig(coordinator_port=exporter.port)
    at = f"any address port {exporter.port}"
    assert refusal(own, local=False) == f"metrics.coordinator_port: cannot listen at {at}: {end}"
    elsewhere = MetricsConfig(host="127.0.0.2", port=exporter.port)
    check_ports(elsewhere, local=True)
    check_ports(MetricsConfig(), local=True)
    check_ports(MetricsConfig(port=0, coordinator_port=0), local=True)


def refusal(metrics: MetricsConfig, local: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        check_ports(metrics, local)
    return str(caught.value)


def test_a_host_that_is_not_this_machines_is_refused_where_ray_is_its_own() -> None:
    for host in ("192.0.2.7", "300.1.1.1"):
        with pytest.raises(ConfigError, match=f"metrics.host: cannot listen at {host}: .*; give an address"):
            check_ports(MetricsConfig(host=host), local=True)
    check_ports(MetricsConfig(host="192.0.2.7"), local=False)  # the head's, perhaps


def test_a_port_is_taken_while_something_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_taken("127.0.0.1", port) == "Address already in use"
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()  # ours first: it stays in TIME_WAIT
        client.close()
    assert port_taken("127.0.0.1", port) == ""


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_a_port_may_be_asked_for_by_ipv6() -> None:
    assert port_taken("::1", 0) == ""


def test_a_distribution_of_other_buckets_is_refused() -> None:
    wrong = Sample("picotron_elastic_recovery_seconds", Distribution((1, 2), 3.0))
    with pytest.raises(ValueError, match="zip"):
        exposed("coordinator", RUN, lambda: [wrong])


def test_one_port_for_both_is_refused_where_both_are_on_one_machine() -> None:
    with pytest.raises(ConfigError, match=r"which is metrics\.port too"):
        check_ports(MetricsConfig(port=9400, coordinator_port=9400), local=True)


def test_a_distributions_sum_is_exact() -> None:
    assert Distribution.of([0.1, 0.3, 5.0], (0.2, 1.0)) == Distribution((1, 1, 1), 0.1 + 0.3 + 5.0)


def test_an_endpoint_on_all_addresses_is_reached_at_its_nodes() -> None:
    assert address("0.0.0.0", "10.0.0.7", 9400) == "10.0.0.7:9400"
    assert address("127.0.0.1", "10.0.0.7", 9400) == "127.0.0.1:9400"
    assert address("::", "fd00::7", 9400) == "[fd00::7]:9400"
