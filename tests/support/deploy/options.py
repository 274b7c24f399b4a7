"""Rules for the options of deploy/components: groups, failure domains, control state, budgets, queues."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.support.deploy.pods import container_of
from tests.support.deploy.render import Object, cluster_spec, ray_objects

Problems = Iterator[str]
ZONE_LABEL = "ray.io/availability-zone"
YUNIKORN = ("yunikorn.apache.org/app-id", "yunikorn.apache.org/queue")
GANG = "ray.io/gang-scheduling-enabled"
ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+")


def groups(objects: list[Object]) -> Problems:
    """Groups have names of their own, and the one that may go first is asked for last."""
    for found in ray_objects(objects):
        workers = cluster_spec(found)["workerGroupSpecs"]
        names = [group["groupName"] for group in workers]
        if len(set(names)) < len(names):
            yield f"groups {names} share a name"
        spot = [group for group in workers if _variable(group, "RAY_NODE_MARKET_TYPE") == "spot"]
        rest = [group.get("priority", 0) for group in workers if group not in spot]
        if spot and min(rest, default=0) <= max(group.get("priority", 0) for group in spot):
            yield "spot machines are asked for before reserved ones: priority"
        if spot and sum(group["minReplicas"] for group in spot):
            yield "spot machines in minReplicas: the run would depend on them"


def _variable(group: Object, name: str) -> Object | str | None:
    for variable in container_of(group["template"]).get("env", ()):
        if variable["name"] == name:
            found: Object | str = variable.get("value") or variable["valueFrom"]
            return found
    return None


def failure_domains(objects: list[Object]) -> Problems:
    """Each worker's node has the label that cluster.failure_domain_label names, or none has any."""
    for found in ray_objects(objects):
        words = found["spec"].get("entrypoint", "")
        asked = re.search(r"cluster\.failure_domain_label=(\S+)", words)
        label = asked[1] if asked else ZONE_LABEL
        workers = cluster_spec(found)["workerGroupSpecs"]
        given = [
            set(group.get("labels", {})) | ({ZONE_LABEL} if _variable(group, "RAY_NODE_ZONE") else set())
            for group in workers
        ]
        if any(given) and not all(label in labels for labels in given) and found["kind"] == "RayJob":
            yield f"cluster.failure_domain_label {label} is on no node, or not on all: {given}"
        for group in workers:
            placed = group["template"]["spec"].get("nodeSelector", {})
            wrong = {k for k, value in group.get("labels", {}).items() if placed.get(k) != value}
            if wrong:
                yield f"{group['groupName']}: labels {sorted(wrong)} are not those of its machines"


def control_state(objects: list[Object]) -> Problems:
    """gcsFaultToleranceOptions as KubeRay 1.7 takes them, the password from a Secret."""
    for found in ray_objects(objects):
        options = cluster_spec(found).get("gcsFaultToleranceOptions")
        if options is None:
            continue
        redis = {"redisAddress", "redisPassword", "redisUsername"} & options.keys()
        if options.get("backend") == "rocksdb" and (redis or "storage" not in options):
            yield f"backend rocksdb takes a storage and nothing of Redis, saw {sorted(options)}"
        if options.get("backend") == "redis":
            if "storage" in options or "redisAddress" not in options:
                yield f"backend redis takes a redisAddress and no storage, saw {sorted(options)}"
            if "secretKeyRef" not in options.get("redisPassword", {}).get("valueFrom", {}):
                yield "redisPassword has its value in the manifest, or is missing: name a Secret"
        head = container_of(cluster_spec(found)["headGroupSpec"]["template"])
        named = {variable["name"] for variable in head.get("env", ())}
        for name in sorted(named & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "RAY_gcs_storage"}):
            yield f"{name} is the operator's to set beside gcsFaultToleranceOptions"


def budgets(objects: list[Object]) -> Problems:
    """Budgets select our pods, keep the head, and let a machine of workers be drained."""
    replicas = sum(
        group["replicas"]
        for found in ray_objects(objects)
        for group in cluster_spec(found)["workerGroupSpecs"]
    )
    for found in (found for found in objects if found["kind"] == "PodDisruptionBudget"):
        name, spec = found["metadata"]["name"], found["spec"]
        least, labels = spec.get("minAvailable"), spec["selector"].get("matchLabels", {})
        if not isinstance(least, int) or "maxUnavailable" in spec:
            yield f"{name}: without a controller that scales, a budget takes minAvailable as a number only"
            continue
        if labels.get("app.kubernetes.io/part-of") != "picotron-ray":
            yield f"{name}: selects pods of others"
        kind = labels.get("ray.io/node-type")
        if kind not in ("head", "worker"):
            yield f"{name}: ray.io/node-type {kind!r} is neither head nor worker"
        if kind == "head" and least != 1:
            yield f"{name}: the head may be evicted"
        if kind == "worker" and least >= replicas:
            yield f"{name}: minAvailable {least} of {replicas} pods lets no machine be drained"


def queues(objects: list[Object]) -> Problems:
    """Labels for schedulers are complete, and stand where the operator reads them."""
    for found in ray_objects(objects):
        labels = found["metadata"].get("labels", {})
        if {*YUNIKORN, GANG} & labels.keys() and not {*YUNIKORN, GANG} <= labels.keys():
            yield f"YuniKorn wants all of {[*YUNIKORN, GANG]}"
        for name in ("kueue.x-k8s.io/queue-name", "volcano.sh/queue-name"):
            if labels.get(name) == "":
                yield f"{name} is empty"
        if "kueue.x-k8s.io/queue-name" in labels and len(cluster_spec(found)["workerGroupSpecs"]) > 7:
            yield "Kueue takes 8 sets of pods: a head and 7 groups"


def identity(objects: list[Object]) -> Problems:
    """A role of AWS is well-formed, and no key takes its place."""
    for found in (found for found in objects if found["kind"] == "ServiceAccount"):
        role = found["metadata"].get("annotations", {}).get("eks.amazonaws.com/role-arn")
        if role is None:
            continue
        if not ROLE.fullmatch(role):
            yield f"{role!r} is no ARN of a role"
        for ray in ray_objects(objects):
            spec = cluster_spec(ray)
            for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                if "envFrom" in container_of(group["template"]):
                    yield "keys in the environment take precedence over the pods' identity: drop envFrom"


OPTION_RULES: tuple[Callable[[list[Object]], Problems], ...] = (
    groups, failure_domains, control_state, budgets, queues, identity,
)  # fmt: skip
