"""The Helm chart is made from the overlays, and Helm renders from it what kustomize renders from them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.conftest import REAL_HOME
from tests.support.deploy import helm
from tests.support.deploy.policy import policy_problems
from tests.support.deploy.render import DEPLOY, Object, render, schema_problems, tool

CHART = DEPLOY / "helm" / "picotron-ray"
pytestmark = pytest.mark.skipif(tool() is None, reason="neither kubectl nor kustomize is installed")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_chart", DEPLOY / "helm" / "make_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_chart"] = module  # where pydantic looks for the types that it is told by name
    spec.loader.exec_module(module)
    return module


def test_the_chart_is_the_one_that_is_made(maker: ModuleType) -> None:
    made = maker.chart()
    kept = {str(path.relative_to(CHART)): path.read_text() for path in CHART.rglob("*") if path.is_file()}
    assert kept == made, "run python deploy/helm/make_chart.py"


@pytest.fixture(scope="module")
def program() -> str:
    return helm.installed() or helm.fetched(REAL_HOME)


def rendered(program: str, *options: str) -> list[Object]:
    command = [program, "template", "picotron", str(CHART), "--namespace", "picotron", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return list(yaml.safe_load_all(done.stdout))


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """Objects by kind and name, but for the namespace, which is no chart's to make."""
    return {
        (found["kind"], found["metadata"]["name"]): found for found in objects if found["kind"] != "Namespace"
    }


CPU = ("--values", str(CHART / "values-cpu.yaml"))
STANDING = ("--set", "standing=true")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("overlay", "options"),
    [("gpu", ()), ("gpu/cluster", STANDING), ("cpu", CPU), ("cpu/cluster", (*CPU, *STANDING))],
)
def test_helm_renders_what_kustomize_renders(program: str, overlay: str, options: tuple[str, ...]) -> None:
    found, wanted = by_name(rendered(program, *options)), by_name(render(overlay))
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if found[key] != wanted[key]] == []


@pytest.mark.deep
def test_values_reach_their_places_and_are_checked(program: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text((DEPLOY / "overlays/gpu/cluster/job.yaml").read_text().replace("10000", "10000000"))
    options = ("--set-file", f"job={job}", "--set", "overrides={cluster.max_workers=24}")
    objects = rendered(program, *options, "--set", "workers.maxReplicas=3", "--set", "labels.team=a")
    namespace = [found for found in render("gpu") if found["kind"] == "Namespace"]
    assert schema_problems(objects) == []
    assert policy_problems([*namespace, *objects]) == []
    (run,) = [found for found in objects if found["kind"] == "RayJob"]
    assert run["metadata"]["labels"]["team"] == "a"
    mistakes = (
        ("workers.replicas=many", "replicas"),
        ("wokers.shm=1Gi", "wokers"),
        ("image.tag=latest", "tag"),
    )
    for mistake, said in mistakes:
        with pytest.raises(subprocess.CalledProcessError) as refused:
            rendered(program, "--set", mistake)
        assert said in refused.value.stderr
