"""The catalogue of metrics is consistent, and the dashboard is made of nothing else."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.observability.catalogue import CATALOGUE, GROUPS
from picotron_ray.observability.dashboard import dashboard
from picotron_ray.observability.metric import Metric, bucket_of, series_of

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "dashboards"
UNITS = {
    "1", "adaptations", "bytes", "bytes_per_second", "celsius", "commits", "errors", "events", "failures",
    "generations", "hertz", "lines", "nats", "operations", "ratio", "seconds", "snapshots", "steps", "tokens",
    "tokens_per_second", "watts", "workers",
}  # fmt: skip
TABLES = {
    "picotron_ray.observability.agent_metrics": ("WORKER", "MEMORY", "NODE"),
    "picotron_ray.observability.step_metrics": ("STEPS",),
    "picotron_ray.observability.machine_metrics": ("GPU", "HOST"),
    "picotron_ray.observability.coordinator_metrics": ("TRAINING", "ELASTIC", "CHECKPOINT"),
}


@pytest.mark.parametrize("metric", CATALOGUE.values(), ids=CATALOGUE.keys())
def test_entry(metric: Metric) -> None:
    assert re.fullmatch(r"picotron_[a-z]+(_[a-z]+)+", metric.name)
    assert metric.unit in UNITS
    stem = metric.name.removesuffix("_total")
    assert (stem != metric.name) == (metric.kind == "counter")
    assert metric.unit == "1" or stem.endswith(f"_{metric.unit}")
    assert metric.unit != "1" or not any(stem.endswith(f"_{unit}") for unit in UNITS)
    assert metric.help.endswith(".")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert not (metric.in_ray and (metric.kind != "gauge" or metric.labels))  # Ray is given plain gauges
    assert len(set(metric.all_labels)) == len(metric.all_labels)


def tables() -> dict[str, Metric]:
    """The catalogue's entries of modules executed anew, so that coverage knows who looks at them."""
    found: dict[str, Metric] = {}
    for module, names in TABLES.items():
        spec = find_spec(module)
        assert spec is not None
        assert spec.loader is not None
        fresh = module_from_spec(spec)
        spec.loader.exec_module(fresh)
        found |= {metric.name: metric for name in names for metric in getattr(fresh, name)}
    return found


def test_ray_is_given_the_essentials() -> None:
    assert sorted(name.removeprefix("picotron_") for name, metric in tables().items() if metric.in_ray) == [
        "checkpoint_newest_steps", "elastic_generation", "elastic_term", "elastic_workers",
        "training_eval_loss_nats", "training_gradient_norm", "training_learning_rate", "training_loss_nats",
        "training_steps", "training_target_steps", "training_tokens_per_second",
    ]  # fmt: skip


def test_figures_of_gpus_need_one() -> None:
    assert tables() == CATALOGUE
    for name, metric in tables().items():
        assert metric.needs_gpu == name.startswith(("picotron_gpu_", "picotron_worker_cuda_")), name


def test_no_name_is_used_twice() -> None:
    assert len(CATALOGUE) == sum(map(len, GROUPS.values()))


def test_a_bound_belongs_to_its_bucket() -> None:
    assert [bucket_of(value, (1.0, 2.0)) for value in (0.5, 1.0, 1.5, 2.0, 3.0)] == [0, 0, 1, 1, 2]


def names_in(expression: str) -> set[str]:
    """Metrics in a PromQL expression: identifiers before a brace or a range."""
    return set(re.findall(r"\b([a-z_:][a-z0-9_:]*)(?=[{[])", expression))


def test_the_dashboard_shows_each_metric_once_and_no_other() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    shown: list[str] = []
    for panel in panels:
        assert panel["description"]
        assert panel["targets"]
        found = set().union(*(names_in(target["expr"]) for target in panel["targets"]))
        (metric,) = (m for m in CATALOGUE.values() if found & set(series_of(m)))
        assert found <= set(series_of(metric))
        shown.append(metric.name)
    assert sorted(shown) == sorted(CATALOGUE)


def test_the_dashboards_panels_have_their_own_place() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 24 - 1


def test_its_variables_ask_for_metrics_that_there_are() -> None:
    (query,) = [v["definition"] for v in dashboard()["templating"]["list"] if v["type"] == "query"]
    assert re.fullmatch(r"label_values\((\w+), run\)", query)[1] in CATALOGUE  # type: ignore[index]


def test_the_command_line_prints_both() -> None:
    runner = CliRunner()
    rows = json.loads(runner.invoke(app, ["metrics", "--json"]).output)
    assert [(row["metric"], tuple(row["labels"])) for row in rows] == [
        (metric.name, metric.all_labels) for metric in CATALOGUE.values()
    ]
    assert json.loads(runner.invoke(app, ["metrics", "--grafana"]).output) == dashboard()


def test_the_copy_for_kubernetes_is_up_to_date() -> None:
    """`picotron-ray metrics --grafana > deploy/dashboards/picotron.json` makes it again."""
    assert json.loads((DEPLOY / "picotron.json").read_text()) == dashboard()
    (generator,) = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["configMapGenerator"]
    assert generator["files"] == ["picotron.json"]
