"""Make the Helm chart from the kustomize overlays: ``python deploy/helm/make_chart.py``, which needs kubectl.

The chart is deploy/base, rendered, with the places of the values below taken out of it, so that both say the
same. ``--values OVERLAY`` prints an overlay's values instead, such as those of a size.yaml that
``picotron-ray plan --for cluster --write-size`` wrote.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

HERE = Path(__file__).resolve().parent
CHART = HERE / "picotron-ray"
OVERLAYS = HERE.parent / "overlays"
MADE = "Made by deploy/helm/make_chart.py: do not edit."
Object = dict[str, Any]
QUANTITY = r"^[0-9.]+([kMGT]i?|m)?$"


class Typed(BaseModel):
    """A part of the values; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class Image(Typed):
    repository: str
    tag: str = Field(pattern=r"^[\w.-]*[0-9][\w.-]*$", description="a fixed one, such as 0.1.0-cuda")


class Head(Typed):
    resources: dict[str, str] = Field(description="requests and limits alike")
    shm: str = Field(pattern=QUANTITY, description="size of /dev/shm")


class Workers(Head):
    minReplicas: int = Field(ge=0, description="what the autoscaler brings back after a loss")
    replicas: int = Field(ge=0, description="where the cluster starts")
    maxReplicas: int = Field(ge=1)
    drainSeconds: str = Field(pattern=r"^\d+$", description="how long Ray waits for the run to move off")
    graceSeconds: int = Field(ge=1, description="more than drainSeconds: what follows is SIGKILL")
    tolerations: list[Object] = []
    nodeSelector: dict[str, str] = {}


class Values(Typed):
    """What a chart's user sets."""

    standing: bool = Field(default=False, description="a cluster that stays, instead of one run")
    image: Image
    head: Head
    workers: Workers
    serviceAnnotations: dict[str, str] = Field(default={}, description="of the account: a cloud's identity")
    labels: dict[str, str] = Field(default={}, description="of the RayJob or RayCluster: queues, schedulers")
    gcsFaultToleranceOptions: Object = Field(default={}, description="as of RayCluster; empty: off")
    overrides: list[str] = Field(default=[], description="key=value of the run's config")
    job: str = Field(description="the run's config as text: --set-file job=job.yaml")


def render(overlay: Path) -> list[Object]:
    """The objects of an overlay."""
    command = ["kubectl", "kustomize", str(overlay)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return list(yaml.safe_load_all(text))


def one(objects: list[Object], kind: str) -> Object:
    (found,) = [item for item in objects if item["kind"] == kind]
    return found


def values_of(objects: list[Object], job: str) -> Values:
    """The values that make the chart render a standing cluster's overlay."""
    spec = one(objects, "RayCluster")["spec"]
    head, worker = (
        group["template"]["spec"] for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0])
    )
    group, box = spec["workerGroupSpecs"][0], worker["containers"][0]
    repository, _, tag = box["image"].rpartition(":")
    return Values(
        image=Image(repository=repository, tag=tag),
        head=Head(resources=head["containers"][0]["resources"]["limits"], shm=shm(head)["sizeLimit"]),
        workers=Workers(
            **{key: group[key] for key in ("minReplicas", "replicas", "maxReplicas")},
            resources=box["resources"]["limits"],
            shm=shm(worker)["sizeLimit"],
            drainSeconds=box["env"][0]["value"],
            graceSeconds=worker["terminationGracePeriodSeconds"],
            tolerations=worker.get("tolerations", []),
            nodeSelector=worker.get("nodeSelector", {}),
        ),
        job=job,
    )


def shm(spec: Object) -> Object:
    return next(volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm")  # type: ignore[no-any-return]


def put(expression: str) -> str:
    """A place for a value, as JSON, which is YAML of one line."""
    return f"<<toJson .Values.{expression}>>"


def cluster_template(spec: Object) -> str:
    """The RayCluster's spec with places for the values."""
    for name, group in (("head", spec["headGroupSpec"]), ("workers", spec["workerGroupSpecs"][0])):
        pod = group["template"]["spec"]
        box = pod["containers"][0]
        box["image"] = '<<printf "%s:%s" .Values.image.repository .Values.image.tag | toJson>>'
        box["resources"] = {side: put(f"{name}.resources") for side in ("limits", "requests")}
        shm(pod)["sizeLimit"] = put(f"{name}.shm")
        pod["serviceAccountName"] = "<<.Release.Name>>"
    spec["headGroupSpec"]["template"]["spec"]["volumes"][-1]["configMap"]["name"] = "<<.Release.Name>>-job"
    group = spec["workerGroupSpecs"][0]
    for key in ("minReplicas", "replicas", "maxReplicas"):
        group[key] = put(f"workers.{key}")
    pod["terminationGracePeriodSeconds"] = put("workers.graceSeconds")
    box["env"][0]["value"] = put("workers.drainSeconds")
    for key in ("tolerations", "nodeSelector"):
        pod[key] = f"<<optional workers.{key}>>"
    spec["gcsFaultToleranceOptions"] = "<<optional gcsFaultToleranceOptions>>"
    return f'{{{{- define "picotron-ray.cluster" -}}}}\n{text(spec)}{{{{- end }}}}\n'


def text(tree: Any) -> str:
    """YAML with its places turned into Helm's expressions."""
    dumped = yaml.safe_dump(tree, width=1000, sort_keys=True)
    whole = r"(?m)^( *)(\w+): <<optional ([\w.]+)>>$"
    dumped = re.sub(whole, r"{{- with .Values.\3 }}\n\1\2: {{ toJson . }}\n{{- end }}", dumped)
    dumped = re.sub(r" '?<<- (.*?)>>'?", r" {{- \1 }}", dumped)
    return re.sub(r"'?<<(.*?)>>([\w-]*)'?", r"{{ \1 }}\2", dumped)


def named(found: Object, suffix: str = "") -> Object:
    """An object under the release's name and in its namespace."""
    found["metadata"] |= {"name": f"<<.Release.Name>>{suffix}", "namespace": "<<.Release.Namespace>>"}
    return found


def templates(overlay: Path) -> dict[str, str]:
    """The chart's templates by file name."""
    objects, standing = render(overlay), render(overlay / "cluster")
    job, ray, config = one(objects, "RayJob"), one(standing, "RayCluster"), one(standing, "ConfigMap")
    account = named(one(objects, "ServiceAccount"))
    account["metadata"]["annotations"] = "<<optional serviceAnnotations>>"
    config["data"]["job.yaml"] = put("job")
    submitter = job["spec"]["submitterPodTemplate"]["spec"]
    submitter["containers"][0]["image"] = (
        '<<printf "%s:%s" .Values.image.repository .Values.image.tag | toJson>>'
    )
    submitter["serviceAccountName"] = "<<.Release.Name>>"
    job["spec"]["entrypoint"] += "<<range .Values.overrides>> <<.>><<end>>"
    job["spec"]["rayClusterSpec"] = '<<- include "picotron-ray.cluster" . | nindent 4>>'
    cluster = cluster_template(ray["spec"])
    ray["spec"] = '<<- include "picotron-ray.cluster" . | nindent 2>>'
    for found in (job, ray):
        labels = found["metadata"]["labels"]
        found["metadata"]["labels"] = f"<<merge (dict {pairs(labels)}) .Values.labels | toJson>>"
    return {
        "_cluster.tpl": cluster,
        "serviceaccount.yaml": text(account),
        "networkpolicy.yaml": text(named(one(objects, "NetworkPolicy"))),
        "podmonitor.yaml": text(named(one(objects, "PodMonitor"))),
        "job.yaml": text(named(config, "-job")),
        "rayjob.yaml": f"{{{{- if not .Values.standing }}}}\n{text(named(job))}{{{{- end }}}}\n",
        "raycluster.yaml": f"{{{{- if .Values.standing }}}}\n{text(named(ray))}{{{{- end }}}}\n",
    }


def pairs(labels: dict[str, str]) -> str:
    return " ".join(f'"{key}" "{value}"' for key, value in labels.items())


def chart() -> dict[str, str]:
    """Every file of the chart that is made, by its path."""
    project = (HERE.parents[1] / "pyproject.toml").read_text()
    version = re.search(r'(?m)^version = "(.+)"', project)
    assert version is not None
    about = {
        "apiVersion": "v2",
        "name": "picotron-ray",
        "description": "A run of picotron-ray on KubeRay",
        "type": "application",
        "version": version[1],
        "appVersion": version[1],
        "kubeVersion": ">=1.30.0-0",
    }
    files = {f"templates/{name}": body for name, body in templates(OVERLAYS / "gpu").items()}
    files = {name: (f"{{{{- /* {MADE} */ -}}}}\n{body}") for name, body in files.items()}
    files["Chart.yaml"] = f"# {MADE}\n{yaml.safe_dump(about, sort_keys=False)}"
    gpu, cpu = (OVERLAYS / device / "cluster" for device in ("gpu", "cpu"))
    files["values.yaml"] = f"# {MADE}\n{values_text(gpu)}"
    files["values-cpu.yaml"] = f"# {MADE}\n{values_text(cpu, beside=gpu)}"
    files["values.schema.json"] = json.dumps(Values.model_json_schema(), indent=1) + "\n"
    return files


def values_text(overlay: Path, beside: Path | None = None) -> str:
    """An overlay's values as YAML, to be given over those of another."""

    class Dumper(yaml.SafeDumper):
        pass

    def block(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, block)
    values = values_of(render(overlay), (overlay / "job.yaml").read_text()).model_dump()
    if beside is not None:  # Helm lays mappings over each other: what is not there has to be taken out
        for part in ("head", "workers"):
            kept = values[part]["resources"]
            values[part]["resources"] = {**dict.fromkeys(_resources(beside, part)), **kept}
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, width=1000)


def _resources(overlay: Path, part: str) -> dict[str, str]:
    found: Head = getattr(values_of(render(overlay), ""), part)
    return found.resources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument(
        "--values", type=Path, metavar="OVERLAY", help="print the values of a cluster's overlay"
    )
    given = parser.parse_args()
    if given.values is not None:
        print(values_text(given.values), end="")
        return
    for name, body in chart().items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)


if __name__ == "__main__":
    main()
