"""What `kubectl apply -k` would send: the overlays of deploy/, rendered by kubectl or kustomize itself.

Schemas: core kinds by kubernetes-validate, ray.io kinds by the CRDs of KubeRay 1.7 where these lie beside
the repository. Pod templates inside ray.io kinds are held against the schema of a Pod as well.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
CRDS = ROOT.parent / "shared" / "kuberay"
OPTIONS = tuple(sorted(folder.name for folder in (DEPLOY / "overlays").glob("gpu-*")))
OVERLAYS = ("cpu", "cpu/cluster", "gpu", "gpu/cluster", *OPTIONS)
UNCHECKED = ("PodMonitor",)
"""Kinds whose schemas no package at hand carries."""
KUBERNETES = "1.34"


def tool() -> list[str] | None:
    """The command that renders a folder; None where neither kubectl nor kustomize is installed."""
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


@functools.cache
def _rendered(overlay: str) -> list[Object]:
    command = [*(tool() or []), str(DEPLOY / "overlays" / overlay)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return list(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader))


def render(overlay: str) -> list[Object]:
    """The objects of one overlay, for the caller to keep."""
    return copy.deepcopy(_rendered(overlay))


def cluster_spec(found: Object) -> Object:
    """The RayCluster's spec, wherever it stands."""
    return found["spec"]["rayClusterSpec"] if found["kind"] == "RayJob" else found["spec"]


def ray_objects(objects: list[Object]) -> list[Object]:
    return [found for found in objects if found["apiVersion"].startswith("ray.io/")]


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every pod template with its name: head, worker groups, submitter."""
    for found in ray_objects(objects):
        spec = cluster_spec(found)
        yield "head", spec["headGroupSpec"]["template"]
        for group in spec["workerGroupSpecs"]:
            yield group["groupName"], group["template"]
        if "submitterPodTemplate" in found["spec"]:
            yield "submitter", found["spec"]["submitterPodTemplate"]


@functools.cache
def _crd(kind: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((CRDS / f"{kind}.v1.schema.json").read_text()))


def schema_problems(objects: list[Object]) -> list[str]:
    """One line per object that its schema refuses; UNCHECKED kinds are the policy's alone."""
    return crd_problems(objects) + core_problems(objects) + pod_problems(objects)


def crd_problems(objects: list[Object]) -> list[str]:
    """Objects of ray.io against KubeRay's CRDs; nothing where those are absent."""
    found = ((_crd(ray["kind"]), ray) for ray in ray_objects(objects) if CRDS.exists())
    return [f"{error.json_path}: {error.message}" for crd, ray in found for error in crd.iter_errors(ray)]


def core_problems(objects: list[Object]) -> list[str]:
    """Kubernetes' own kinds, unknown fields refused."""
    own = [found for found in objects if found["kind"] not in UNCHECKED and found not in ray_objects(objects)]
    return [problem for found in own for problem in _core(found)]


def pod_problems(objects: list[Object]) -> list[str]:
    """Pod templates inside ray.io kinds, as the pods that they will be."""
    return [
        problem
        for name, template in pod_templates(objects)
        for problem in _core({"metadata": {"name": name}, **template, "apiVersion": "v1", "kind": "Pod"})
    ]


def _core(found: Object) -> list[str]:
    return _core_of(json.dumps(found, sort_keys=True))


@functools.cache  # the library reads all of its schemas anew for each object, and overlays share most objects
def _core_of(text: str) -> list[str]:
    found = json.loads(text)
    try:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{found['kind']} {error.json_path}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [error.message]
    return []
