"""The manifests of deploy/: each overlay, as the real tool renders it, is sound; a planted mistake is not."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.support.deploy.mistakes import CORE, CRD, POD, POLICY, Mistake
from tests.support.deploy.pods import quantity
from tests.support.deploy.policy import policy_problems, the_job
from tests.support.deploy.render import (
    CRDS,
    DEPLOY,
    OVERLAYS,
    ROOT,
    Object,
    cluster_spec,
    core_problems,
    crd_problems,
    pod_problems,
    ray_objects,
    render,
    schema_problems,
    tool,
)  # fmt: skip

rendered = pytest.mark.skipif(tool() is None, reason="neither kubectl nor kustomize is installed")
with_crds = pytest.mark.skipif(not CRDS.exists(), reason="KubeRay's CRDs do not lie beside the repository")


@rendered
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_is_sound(overlay: str) -> None:
    objects = render(overlay)
    assert schema_problems(objects) + policy_problems(objects) == []
    kind = "RayCluster" if overlay.endswith("cluster") else "RayJob"
    assert [found["kind"] for found in ray_objects(objects)] == [kind]


@rendered
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_rayjob_makes_the_cluster_that_its_overlay_shows(device: str) -> None:
    job, standing = render(device), render(f"{device}/cluster")
    assert cluster_spec(ray_objects(job)[0]) == cluster_spec(ray_objects(standing)[0])


def planted(mistake: Mistake) -> list[Object]:
    objects = render(mistake.overlay)
    mistake.plant(objects)
    return objects


@rendered
@with_crds
@pytest.mark.parametrize("mistake", CRD.values(), ids=CRD)
def test_crd_refuses(mistake: Mistake) -> None:
    (problem,) = crd_problems(planted(mistake))
    assert mistake.said in problem


@rendered
@pytest.mark.parametrize("mistake", CORE.values(), ids=CORE)
def test_core_schema_refuses(mistake: Mistake) -> None:
    touched = [found for found in planted(mistake) if found["kind"] == mistake.kind]
    (problem,) = core_problems(touched)
    assert mistake.said in problem


@rendered
@pytest.mark.parametrize("mistake", POD.values(), ids=POD)
def test_pod_schema_refuses(mistake: Mistake) -> None:
    (problem,) = pod_problems(planted(mistake))
    assert mistake.said in problem


@rendered
@pytest.mark.parametrize("mistake", POLICY.values(), ids=POLICY)
def test_policy_finds(mistake: Mistake) -> None:
    problems = policy_problems(planted(mistake))
    assert any(mistake.said in problem for problem in problems), problems


@rendered
def test_a_secret_in_an_overlay_is_found() -> None:
    template = yaml.safe_load((DEPLOY / "secrets" / "s3.example.yaml").read_text())
    assert schema_problems([template]) == []
    assert set(template["stringData"].values()) == {"REPLACE_ME"}
    problems = policy_problems([*render("gpu"), template])
    assert problems == ["Secret picotron-s3"]


def test_the_secrets_name_is_the_one_that_pods_read() -> None:
    template = yaml.safe_load((DEPLOY / "secrets" / "s3.example.yaml").read_text())
    cluster = yaml.safe_load((DEPLOY / "base" / "raycluster.yaml").read_text())
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["envFrom"][0]["secretRef"]["name"] == template["metadata"]["name"]


@rendered
def test_ray_is_the_images_ray() -> None:
    pins = (ROOT / "docker" / "lock" / "common.txt").read_text()
    for overlay in OVERLAYS:
        version = cluster_spec(ray_objects(render(overlay))[0])["rayVersion"]
        assert f"\nray=={version} \\\n" in pins


@rendered
def test_runs_of_the_overlays_differ_in_their_device() -> None:
    assert [the_job(render(overlay)).cluster.device for overlay in ("cpu", "gpu")] == ["cpu", "cuda"]


def test_quantities() -> None:
    assert [quantity(text) for text in ("500m", "8Gi", "2", 4)] == [0.5, 8 * 2**30, 2, 4]
    with pytest.raises(ValueError, match="quantity"):
        quantity("8 GB")


def test_every_path_that_the_readme_names_exists() -> None:
    named = re.findall(r"`?(deploy/[\w./-]+\w|docker/[\w./-]+\w)", (DEPLOY / "README.md").read_text())
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).exists()] == []
