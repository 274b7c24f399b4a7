"""Rules for the pods of deploy/: Pod Security "restricted", volumes, grace period, ports, images."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from tests.support.deploy.render import Object, cluster_spec, pod_templates, ray_objects

Problems = Iterator[str]
UNITS = {"": 1, "m": Decimal("0.001"), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
PORT_NAME = re.compile(r"^(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*$")
KUBERAYS_PORTS = {"metrics"}
WRITABLE = ("/tmp", "/home/picotron")
METRICS_PORT = ("train-metrics", 9400)
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def quantity(text: Any) -> Decimal:
    """A Kubernetes quantity as a number: ``500m``, ``8Gi``, ``2``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-zA-Z]*)", str(text))
    if match is None or match[2] not in UNITS:
        raise ValueError(f"saw {text!r}, expected a Kubernetes quantity")
    return Decimal(match[1]) * UNITS[match[2]]


def container_of(template: Object) -> Object:
    """The Ray container, which KubeRay takes to be the first."""
    first: Object = template["spec"]["containers"][0]
    return first


def pod_security(objects: list[Object]) -> Problems:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, level restricted."""
    for where, template in pod_templates(objects):
        spec, context = template["spec"], template["spec"].get("securityContext", {})
        if any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{where}: uses a namespace of the host"
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            yield f"{where}: may run as root"
        if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{where}: no seccomp profile"
        for volume in spec.get("volumes", ()):
            yield from (f"{where}: volume of kind {kind}" for kind in volume.keys() - {"name"} - VOLUMES)
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            yield from _container_security(
                f"{where}/{container['name']}", container.get("securityContext", {})
            )
    for found in ray_objects(objects):  # the autoscaler's container is KubeRay's, with this context
        if cluster_spec(found).get("enableInTreeAutoscaling"):
            options = cluster_spec(found).get("autoscalerOptions", {})
            yield from _container_security("autoscaler", options.get("securityContext", {}))


def _container_security(where: str, context: Object) -> Problems:
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield f"{where}: may gain privileges"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield f"{where}: keeps capabilities"
    if context.get("runAsNonRoot") is False or context.get("runAsUser") == 0:
        yield f"{where}: may run as root"
    if context.get("readOnlyRootFilesystem") is not True:
        yield f"{where}: may write to its image"


def writable(objects: list[Object]) -> Problems:
    """Where the image cannot be written to, Ray's folder and the user's home are bounded volumes."""
    for where, template in pod_templates(objects):
        folders = {
            volume["name"]: volume.get("emptyDir", {}) for volume in template["spec"].get("volumes", ())
        }
        for container in template["spec"]["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
            for path in WRITABLE:
                if "sizeLimit" not in (folders.get(mounts.get(path, "")) or {}):
                    yield f"{where}/{container['name']}: {path} is no volume of bounded size"
    for found in ray_objects(objects):
        options = cluster_spec(found).get("autoscalerOptions", {"volumeMounts": [{"mountPath": "/tmp"}]})
        if "/tmp" not in {mount["mountPath"] for mount in options.get("volumeMounts", ())}:
            yield "autoscaler: /tmp is no volume"


def resources(objects: list[Object]) -> Problems:
    """Ray pods get what they asked for; extended resources cannot be overcommitted."""
    for where, template in pod_templates(objects):
        given = container_of(template).get("resources", {})
        if not {"cpu", "memory"} <= given.get("limits", {}).keys():
            yield f"{where}: no limit on CPU or memory, from which KubeRay tells Ray what there is"
        if where != "submitter" and given.get("requests") != given.get("limits"):
            yield f"{where}: requests differ from limits"


def shared_memory(objects: list[Object]) -> Problems:
    """/dev/shm is memory, bounded, and leaves room in the container's limit."""
    for where, template in pod_templates(objects):
        if where == "submitter":
            continue
        container = container_of(template)
        mounts = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        found = [volume for volume in template["spec"]["volumes"] if [volume["name"]] == mounts]
        folder = found[0].get("emptyDir", {}) if found else {}
        if folder.get("medium") != "Memory" or "sizeLimit" not in folder:
            yield f"{where}: /dev/shm is no memory with a size"
        elif quantity(folder["sizeLimit"]) > quantity(container["resources"]["limits"]["memory"]) / 2:
            yield f"{where}: /dev/shm may take more than half of the memory limit that it counts against"


def grace_period(objects: list[Object]) -> Problems:
    """Longer than the preStop hook and Ray's drain together: what follows is SIGKILL."""
    for where, template in pod_templates(objects):
        if where == "submitter":
            continue
        given = {
            variable["name"]: variable.get("value") for variable in container_of(template).get("env", ())
        }
        drain, hook = float(given.get(DRAIN) or 30), hook_s(container_of(template))
        grace = template["spec"].get("terminationGracePeriodSeconds", 30)
        if grace <= drain + hook:
            yield (
                f"{where}: terminationGracePeriodSeconds {grace} is not above the drain timeout"
                f" {drain:g} and the hook's {hook:g}"
            )


def hook_s(container: Object) -> float:
    """Seconds that the preStop hook may take; 0 without one."""
    hook = container.get("lifecycle", {}).get("preStop")
    return float(hook["exec"]["command"][-1]) if hook else 0.0


def ports(objects: list[Object]) -> Problems:
    """Workers serve their metrics, and what is scraped or let through by name exists."""
    there: dict[str, int] = {}
    for where, template in pod_templates(objects):
        mine = {
            port.get("name", ""): port["containerPort"] for port in container_of(template).get("ports", ())
        }
        there |= mine
        for name in mine:
            if len(name) > 15 or not PORT_NAME.match(name):
                yield f"{where}: {name!r} is no name of a port: 15 of a-z, 0-9 and -"
        if where not in ("head", "submitter") and METRICS_PORT not in mine.items():
            yield f"{where}: no port {METRICS_PORT}"
    for name in _named_ports(objects):
        if name not in there.keys() | KUBERAYS_PORTS:
            yield f"no container has a port {name!r}"


def _named_ports(objects: list[Object]) -> Iterator[str]:
    for found in objects:
        if found["kind"] == "PodMonitor":
            yield from (endpoint["port"] for endpoint in found["spec"]["podMetricsEndpoints"])
        if found["kind"] == "NetworkPolicy":
            for rule in found["spec"]["ingress"]:
                yield from (port["port"] for port in rule.get("ports", ()) if isinstance(port["port"], str))


def monitored(objects: list[Object]) -> Problems:
    """The PodMonitor's labels are among those that KubeRay gives every pod of Ray."""
    monitors = [found["spec"]["selector"] for found in objects if found["kind"] == "PodMonitor"]
    if monitors != [{"matchLabels": {"ray.io/is-ray-node": "yes"}}]:
        yield f"PodMonitor selects {monitors}"


def images(objects: list[Object]) -> Problems:
    """One image for all, by a fixed tag: head, workers and submitter must hold the same Ray."""
    found = {container_of(template)["image"] for _, template in pod_templates(objects)}
    if len(found) != 1:
        yield f"several images: {sorted(found)}"
    for image in found:
        tag = image.rpartition("/")[2].partition(":")[2]
        if tag in ("", "latest"):
            yield f"image {image!r} has no fixed tag"


POD_RULES: tuple[Callable[[list[Object]], Problems], ...] = (
    pod_security, writable, resources, shared_memory, grace_period, ports, monitored, images,
)  # fmt: skip
