"""What no schema holds: the operator's own checks, Pod Security, and what our parts expect of one another.

The operator's are those of KubeRay 1.7 (validation.go, and the CEL rules of its CRDs). A rule yields one
line per problem.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterator
from decimal import Decimal

import yaml

from picotron_ray.config.load import load_job, parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.planner.model_sizes import parameter_count
from tests.support.deploy.options import OPTION_RULES
from tests.support.deploy.pods import POD_RULES, container_of, quantity
from tests.support.deploy.render import Object, cluster_spec, pod_templates, ray_objects

Problems = Iterator[str]
SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
CONFIG_FOLDER = "/etc/picotron"
QUEUE = "kueue.x-k8s.io/queue-name"
STATE_BYTES = 12
"""Per parameter: fp32 master weight and two moments of AdamW."""


def policy_problems(objects: list[Object]) -> list[str]:
    """Every broken rule of a rendered overlay."""
    return [problem for rule in (*RULES, *POD_RULES, *OPTION_RULES) for problem in rule(objects)]


def the_job(objects: list[Object]) -> JobConfig:
    """The run's config: the ConfigMap's, with the overrides of a RayJob's entrypoint."""
    (config,) = [found for found in objects if found["kind"] == "ConfigMap"]
    jobs = [found for found in objects if found["kind"] == "RayJob"]
    words = shlex.split(jobs[0]["spec"]["entrypoint"]) if jobs else []
    return _parsed(config["data"]["job.yaml"], tuple(word for word in words if "=" in word))


@functools.cache
def _parsed(text: str, overrides: tuple[str, ...]) -> JobConfig:
    return parse_job(yaml.safe_load(text), overrides)


def rayjob(objects: list[Object]) -> Problems:
    """RayJob's fields, as the operator and the CRD's CEL rules judge them."""
    for spec in (found["spec"] for found in objects if found["kind"] == "RayJob"):
        mode = spec.get("submissionMode")
        if mode not in SUBMISSION_MODES:
            yield f"submissionMode {mode!r} is none of {SUBMISSION_MODES}"
        if mode == "SidecarMode" and ("submitterPodTemplate" in spec or "submitterConfig" in spec):
            yield "SidecarMode takes neither submitterPodTemplate nor submitterConfig"
        if mode == "K8sJobMode" and "submitterPodTemplate" not in spec:
            yield "the operator's own submitter has no securityContext: Pod Security would refuse it"
        if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
            yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
        if spec.get("clusterSelector") and spec.get("backoffLimit"):
            yield "backoffLimit does not go with clusterSelector"
        if spec.get("managedBy", "ray.io/kuberay-operator") not in (
            "ray.io/kuberay-operator",
            "kueue.x-k8s.io/multikueue",
        ):
            yield f"managedBy {spec['managedBy']!r} is nobody"
        yield from _deletion(spec.get("deletionStrategy"))


def _deletion(strategy: Object | None) -> Problems:
    if strategy is None:
        return
    legacy = {"onSuccess", "onFailure"} & strategy.keys()
    if bool(legacy) == bool(strategy.get("deletionRules")) or len(legacy) == 1:
        yield "deletionStrategy takes either both of onSuccess and onFailure, or deletionRules"


def entrypoint(objects: list[Object]) -> Problems:
    """launch gets a config that is mounted and valid, and may take its time to stop."""
    for found in (found for found in objects if found["kind"] == "RayJob"):
        words = shlex.split(found["spec"]["entrypoint"])
        if words[:3] != ["python", "-m", "picotron_ray.launch"] or words[3:4] != [
            f"{CONFIG_FOLDER}/job.yaml"
        ]:
            yield f"entrypoint {words} does not launch {CONFIG_FOLDER}/job.yaml"
            continue
        try:
            load_job("tiny", words[4:])
        except ConfigError as error:
            yield f"entrypoint: {error}"
        yield from _stop_time(found)


def _final_wait(found: Object, job: JobConfig) -> Problems:
    """A deadline of the RayJob must not end a run that waits for storage to take its last state."""
    deadline = found["spec"].get("activeDeadlineSeconds")
    needed = job.storage.final_wait_s + job.cluster.start_timeout_s
    if deadline is not None and deadline <= needed:
        yield (
            f"activeDeadlineSeconds {deadline} ends a run that waits for storage.final_wait_s:"
            f" more than {needed:g} s are needed beside the training"
        )


def _stop_time(found: Object) -> Problems:
    variables = (yaml.safe_load(found["spec"].get("runtimeEnvYAML", "")) or {}).get("env_vars", {})
    wait = variables.get("RAY_JOB_STOP_WAIT_TIME_S", "3")
    head = cluster_spec(found)["headGroupSpec"]["template"]["spec"]
    if not 10 <= float(wait) < head.get("terminationGracePeriodSeconds", 30):
        yield f"RAY_JOB_STOP_WAIT_TIME_S {wait}: too short for a commit, or past the head's grace period"


def cluster(objects: list[Object]) -> Problems:
    """Names, authentication, autoscaler and group sizes."""
    for found in ray_objects(objects):
        spec, name = cluster_spec(found), found["metadata"]["name"]
        if not NAME.match(name) or len(name) > (47 if found["kind"] == "RayJob" else 53):
            yield f"{found['kind']} name {name!r} is no DNS-1035 label, or too long for the operator"
        if spec.get("authOptions", {}).get("mode") != "token":
            yield f"{found['kind']}: calls need no token"
        if spec.get("authOptions", {}).get("enableK8sTokenAuth") and found["kind"] == "RayJob":
            yield "enableK8sTokenAuth does not work with RayJob"
        yield from _autoscaler(spec, queued=QUEUE in found["metadata"].get("labels", {}))
        for group in spec["workerGroupSpecs"]:
            yield from _sizes(group)


def _autoscaler(spec: Object, queued: bool) -> Problems:
    if queued and spec.get("enableInTreeAutoscaling"):
        yield "Kueue admits no cluster that Ray's autoscaler changes"
    if not queued and not spec.get("enableInTreeAutoscaling"):
        yield "enableInTreeAutoscaling is off"
    if spec.get("enableInTreeAutoscaling") and spec.get("autoscalerOptions", {}).get("version") != "v2":
        yield "the autoscaler is not v2"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        policy = group["template"]["spec"].get("restartPolicy")
        if policy != "Never":
            yield f"restartPolicy {policy!r}, autoscaler v2 wants Never"
        if "labels" in group.get("rayStartParams", {}):
            yield "labels belong beside rayStartParams, not into it"
        for key in group.get("labels", {}):
            if key.startswith("ray.io/"):
                yield f"label {key!r}: Ray refuses to start with a label of its own"


def _sizes(group: Object) -> Problems:
    low, start, high = (group.get(key, -1) for key in ("minReplicas", "replicas", "maxReplicas"))
    if not 0 <= low <= start <= high:
        yield f"out of order: minReplicas {low}, replicas {start}, maxReplicas {high}"


def job_fits(objects: list[Object]) -> Problems:
    """The run's config asks for what the worker group can give."""
    try:
        job = the_job(objects)
    except ConfigError as error:
        yield f"job.yaml: {error}"
        return
    if not job.storage.url.startswith("s3://"):
        yield f"storage.url {job.storage.url!r}: pods share no folder"
    for found in ray_objects(objects):
        yield from _final_wait(found, job)
        spec = cluster_spec(found)
        yield from _workers(job, spec)
        for group in spec["workerGroupSpecs"]:
            yield from _slots(job, group)


def _workers(job: JobConfig, spec: Object) -> Problems:
    """As many workers as the pods of all groups have room for."""
    groups, scaled = spec["workerGroupSpecs"], bool(spec.get("enableInTreeAutoscaling"))
    most, least = Decimal(0), Decimal(0)
    for group in groups:
        limits = container_of(group["template"])["resources"]["limits"]
        if (job.cluster.device == "cuda") != ("nvidia.com/gpu" in limits):
            yield f"cluster.device {job.cluster.device} does not go with limits {limits}"
        by_cpu = quantity(limits["cpu"]) / Decimal(str(job.cluster.cpus_per_worker))
        slots = quantity(limits.get("nvidia.com/gpu", by_cpu))
        most += slots * group["maxReplicas" if scaled else "replicas"]
        least += slots * group["minReplicas"]
    if job.cluster.max_workers != most:
        yield f"cluster.max_workers {job.cluster.max_workers} is not the {most} workers of all pods"
    if job.cluster.min_workers > least:
        yield f"cluster.min_workers {job.cluster.min_workers} is more than the {least} of minReplicas"
    if job.cluster.autoscale != scaled:
        yield f"cluster.autoscale {job.cluster.autoscale}, but enableInTreeAutoscaling {scaled}"


def _slots(job: JobConfig, group: Object) -> Problems:
    volumes = group["template"]["spec"]["volumes"]
    memory = [
        volume["emptyDir"] for volume in volumes if volume.get("emptyDir", {}).get("medium") == "Memory"
    ]
    limits = [folder.get("sizeLimit", 0) for folder in memory]
    store = int(group["rayStartParams"].get("object-store-memory", 0))
    needed = job.snapshot.slots * STATE_BYTES * parameter_count(job.model) + store
    if sum(map(quantity, limits)) < needed:
        yield f"/dev/shm of {limits} does not hold {job.snapshot.slots} slots and objects: {needed} bytes"


def references(objects: list[Object]) -> Problems:
    """What is named exists, in the one namespace that Pod Security holds."""
    named = {(found["kind"], found["metadata"]["name"]) for found in objects}
    spaces = {found["metadata"].get("namespace") for found in objects if found["kind"] != "Namespace"}
    (space,) = [found for found in objects if found["kind"] == "Namespace"]
    if spaces != {space["metadata"]["name"]}:
        yield f"namespaces {spaces}"
    if space["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
        yield "the namespace does not enforce Pod Security restricted"
    for where, template in pod_templates(objects):
        wanted = {("ServiceAccount", template["spec"].get("serviceAccountName"))}
        for volume in template["spec"].get("volumes", ()):
            wanted |= {("ConfigMap", volume["configMap"]["name"])} if "configMap" in volume else set()
        yield from (f"{where}: there is no {kind} {name!r}" for kind, name in sorted(wanted - named, key=str))


def no_secrets(objects: list[Object]) -> Problems:
    """Secrets are made by hand or by KubeRay, and no value of one stands in a manifest."""
    yield from (f"Secret {found['metadata']['name']}" for found in objects if found["kind"] == "Secret")
    for where, template in pod_templates(objects):
        for variable in container_of(template).get("env", ()):
            if re.search(r"TOKEN|SECRET|PASSWORD|ACCESS_KEY", variable["name"]) and "value" in variable:
                yield f"{where}: {variable['name']} has its value in the manifest"


RULES: tuple[Callable[[list[Object]], Problems], ...] = (
    rayjob, entrypoint, cluster, job_fits, references, no_secrets,
)  # fmt: skip
