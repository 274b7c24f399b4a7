"""Mistakes to plant into rendered overlays: path, value, part of what must be said, kind, overlay, name."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

from tests.support.deploy.render import Object

CLUSTER = "spec.rayClusterSpec"
HEAD = f"{CLUSTER}.headGroupSpec.template.spec"
GROUP = f"{CLUSTER}.workerGroupSpecs.0"
WORKER = f"{GROUP}.template.spec"
RAY = f"{WORKER}.containers.0"
SHM = f"{WORKER}.volumes.0"
LAUNCH = "python -m picotron_ray.launch"
SMALL = {"cpu": "8", "memory": "256Gi"}
HOST_FOLDER = {"name": "shm", "hostPath": {"path": "/dev/shm"}}
ABSENT = object()


class Mistake(NamedTuple):
    """One field set to what it must not be; ABSENT takes it out."""

    path: str
    value: Any
    said: str
    kind: str = "RayJob"
    overlay: str = "gpu"
    name: str = ""

    def plant(self, objects: list[Object]) -> None:
        """Change the only object of its kind (and name). A slash in the path stands for a dot in a key.

        A key with slashes of its own is the last part of the path, and begins with one.
        """
        (target,) = [
            found
            for found in objects
            if found["kind"] == self.kind and self.name in ("", found["metadata"]["name"])
        ]
        if "./" in self.path:
            path, _, key = self.path.partition("./")
            node = reduce(
                lambda node, part: node[int(part) if part.isdecimal() else part], path.split("."), target
            )
            node[key] = self.value
            return
        *parents, last = (
            int(part) if part.isdecimal() else part.replace("/", ".") for part in self.path.split(".")
        )
        target = reduce(lambda node, part: node[part], parents, target)
        if self.value is ABSENT:
            del target[last]
        else:
            target[last] = self.value


CRD = {
    "an unknown field of RayJob": Mistake("spec.entryPoint", "python", "entryPoint"),
    "an unknown field deep in a pod": Mistake(
        f"{WORKER}.terminationGracePeriod", 120, "terminationGracePeriod"
    ),
    "a number of replicas in quotes": Mistake(f"{GROUP}.maxReplicas", "4", "maxReplicas: '4'"),
    "no minReplicas": Mistake(f"{GROUP}.minReplicas", ABSENT, "'minReplicas' is a required"),
    "an autoscaler of version 3": Mistake(f"{CLUSTER}.autoscalerOptions.version", "v3", "'v3' is not one of"),
    "an unknown authentication": Mistake(
        f"{CLUSTER}.authOptions.mode", "password", "'password' is not one of"
    ),
    "a start parameter that is a number": Mistake(f"{GROUP}.rayStartParams.num-cpus", 4, "4 is not of type"),
}

CORE = {
    "an unknown field of NetworkPolicy": Mistake("spec.ingres", [], "'ingres'", "NetworkPolicy"),
    "a number as a label": Mistake("metadata.labels.level", 1, "1 is not of type", "Namespace"),
    "a switch in quotes": Mistake("automountServiceAccountToken", "no", "'no' is not", "ServiceAccount"),
    "data that is no text": Mistake("data.job/yaml", {"steps": 5}, "is not of type", "ConfigMap"),
}

POD = {
    "a port without a number": Mistake(f"{RAY}.ports.0", {"name": "x"}, "'containerPort' is a required"),
    "a volume without a name": Mistake(f"{SHM}.name", ABSENT, "'name' is a required"),
    "a grace period in quotes": Mistake(f"{WORKER}.terminationGracePeriodSeconds", "9", "'9' is not of type"),
}

OPERATOR = {
    "an unknown submission mode": Mistake("spec.submissionMode", "K8sJob", "submissionMode 'K8sJob'"),
    "a sidecar with a submitter": Mistake("spec.submissionMode", "SidecarMode", "SidecarMode takes neither"),
    "the operator's own submitter": Mistake(
        "spec.submitterPodTemplate", ABSENT, "the operator's own submitter"
    ),
    "a time to live, no shutdown": Mistake("spec.shutdownAfterJobFinishes", False, "ttlSecondsAfterFinished"),
    "retries on a chosen cluster": Mistake("spec.clusterSelector", {"a": "b"}, "clusterSelector"),
    "half a deletion strategy": Mistake("spec.deletionStrategy", {"onSuccess": {}}, "deletionStrategy"),
    "somebody else's job": Mistake("spec.managedBy", "me", "managedBy 'me'"),
    "a name in capitals": Mistake("metadata.name", "Picotron", "RayJob name 'Picotron'"),
    "a name of 48 characters": Mistake("metadata.name", 48 * "a", "too long"),
    "restarting heads": Mistake(f"{HEAD}.restartPolicy", "Always", "restartPolicy 'Always'"),
    "restarting workers": Mistake(f"{WORKER}.restartPolicy", "OnFailure", "restartPolicy 'OnFailure'"),
    "autoscaling off": Mistake(f"{CLUSTER}.enableInTreeAutoscaling", False, "enableInTreeAutoscaling"),
    "the first autoscaler": Mistake(f"{CLUSTER}.autoscalerOptions.version", "v1", "not v2"),
    "no token": Mistake(f"{CLUSTER}.authOptions", {"mode": "disabled"}, "no token"),
    "Kubernetes tokens": Mistake(f"{CLUSTER}.authOptions.enableK8sTokenAuth", True, "enableK8sTokenAuth"),
    "more at least than at most": Mistake(f"{GROUP}.minReplicas", 5, "out of order"),
    "labels as a start parameter": Mistake(f"{GROUP}.rayStartParams.labels", "a=b", "labels belong"),
}

RUN = {
    "an unknown override": Mistake("spec.entrypoint", f"{LAUNCH} /etc/picotron/job.yaml stepz=5", "stepz"),
    "a config that is not mounted": Mistake("spec.entrypoint", f"{LAUNCH} /job.yaml", "does not launch"),
    "no time to commit at a stop": Mistake("spec.runtimeEnvYAML", "", "RAY_JOB_STOP_WAIT_TIME_S 3"),
    "no time to wait for storage": Mistake("spec.activeDeadlineSeconds", 5400, "ends a run that waits for"),
    "a typo in the run's config": Mistake("data.job/yaml", "name: a\nstepz: 5\n", "stepz", "ConfigMap"),
    "a run without S3": Mistake("data.job/yaml", "name: a\n", "pods share no folder", "ConfigMap"),
    "fewer pods than workers": Mistake(f"{GROUP}.maxReplicas", 2, "max_workers 32 is not"),
    "a smallest size below the run's": Mistake(f"{GROUP}.minReplicas", 0, "min_workers 8"),
    "no GPUs": Mistake(f"{RAY}.resources", {"requests": SMALL, "limits": SMALL}, "cluster.device cuda"),
    "requests below limits": Mistake(f"{RAY}.resources.requests.memory", "1Gi", "requests differ"),
    "drain as long as grace": Mistake(f"{WORKER}.terminationGracePeriodSeconds", 60, "workers: termination"),
    "the default grace period": Mistake(f"{HEAD}.terminationGracePeriodSeconds", ABSENT, "head: termination"),
    "/dev/shm on disk": Mistake(f"{SHM}.emptyDir", {"sizeLimit": "64Gi"}, "no memory with a size"),
    "/dev/shm without a size": Mistake(f"{SHM}.emptyDir", {"medium": "Memory"}, "no memory with a size"),
    "/dev/shm beyond the memory limit": Mistake(f"{SHM}.emptyDir.sizeLimit", "300Gi", "more than half"),
    "/dev/shm too small for the slots": Mistake(f"{SHM}.emptyDir.sizeLimit", "16Gi", "does not hold 3 slots"),
    "/dev/shm not mounted": Mistake(f"{RAY}.volumeMounts.0.mountPath", "/shm", "no memory with a size"),
    "an image without a tag": Mistake(f"{RAY}.image", "localhost:5000/picotron-ray", "no fixed tag"),
    "the latest image": Mistake(f"{RAY}.image", "picotron-ray:latest", "no fixed tag"),
    "two images": Mistake(f"{RAY}.image", "picotron-ray:0.2.0-cuda", "several images"),
}

SECURITY = {
    "a root user": Mistake(f"{WORKER}.securityContext.runAsUser", 0, "may run as root"),
    "no promise of another user": Mistake(f"{HEAD}.securityContext.runAsNonRoot", ABSENT, "may run as root"),
    "no seccomp profile": Mistake(f"{WORKER}.securityContext.seccompProfile", ABSENT, "no seccomp profile"),
    "escalation": Mistake(f"{RAY}.securityContext.allowPrivilegeEscalation", True, "may gain privileges"),
    "a bare autoscaler": Mistake(f"{CLUSTER}.autoscalerOptions.securityContext", ABSENT, "autoscaler: keeps"),
    "a capability": Mistake(f"{RAY}.securityContext.capabilities.add", ["IPC_LOCK"], "keeps capabilities"),
    "a folder of the host": Mistake(SHM, HOST_FOLDER, "volume of kind hostPath"),
    "the host's network": Mistake(f"{WORKER}.hostNetwork", True, "namespace of the host"),
    "a free namespace": Mistake("metadata.labels", {}, "does not enforce", "Namespace"),
    "a token": Mistake(f"{RAY}.env.0", {"name": "RAY_AUTH_TOKEN", "value": "x"}, "has its value in"),
}

NAMES = {
    "a port's name of 16 characters": Mistake(f"{RAY}.ports.0.name", "picotron-metrics", "no name of a port"),
    "another metrics port": Mistake(f"{RAY}.ports.0.containerPort", 9401, "no port ('train-metrics', 9400)"),
    "no such port to scrape": Mistake(
        "spec.podMetricsEndpoints.0.port", "x", "no container has", "PodMonitor"
    ),
    "other pods to scrape": Mistake(
        "spec.selector.matchLabels", {"a": "b"}, "PodMonitor selects", "PodMonitor"
    ),
    "no such port to let in": Mistake(
        "spec.ingress.2.ports.0.port", "x", "no container has", "NetworkPolicy"
    ),
    "no such account": Mistake(f"{WORKER}.serviceAccountName", "x", "there is no ServiceAccount 'x'"),
    "no such config map": Mistake(f"{HEAD}.volumes.3.configMap.name", "x", "there is no ConfigMap 'x'"),
    "another namespace": Mistake("metadata.namespace", "default", "namespaces {", "NetworkPolicy"),
}

GCS = f"{CLUSTER}.gcsFaultToleranceOptions"
SECOND = f"{CLUSTER}.workerGroupSpecs.1"
HOOK = ["python", "-m", "picotron_ray.runtime.ray_cluster.pre_stop", "120"]
BUDGET = ("PodDisruptionBudget", "gpu-disruption", "picotron-workers")

OPTIONS = {
    "an image that can be written to": Mistake(
        f"{RAY}.securityContext.readOnlyRootFilesystem", False, "may write to its image"
    ),
    "no folder for Ray": Mistake(f"{WORKER}.volumes.1.emptyDir", ABSENT, "/tmp is no volume of bounded size"),
    "a home without a limit": Mistake(f"{HEAD}.volumes.2.emptyDir", {}, "/home/picotron is no volume"),
    "an autoscaler without a folder": Mistake(
        f"{CLUSTER}.autoscalerOptions.volumeMounts", ABSENT, "autoscaler: /tmp"
    ),
    "no autoscaler for a run that asks": Mistake(
        "data.job/yaml", "name: a\nstorage: {url: 's3://bucket'}\n", "cluster.autoscale False", "ConfigMap"
    ),
    "spot before reserved": Mistake(f"{SECOND}.priority", 20, "asked for before", overlay="gpu-spot"),
    "a run that depends on spot": Mistake(f"{SECOND}.minReplicas", 1, "depend on them", overlay="gpu-spot"),
    "two groups of one name": Mistake(f"{SECOND}.groupName", "workers", "share a name", overlay="gpu-spot"),
    "more spot pods than the run's": Mistake(f"{SECOND}.maxReplicas", 9, "of all pods", overlay="gpu-spot"),
    "a drain longer than spot's warning": Mistake(
        f"{SECOND}.template.spec.containers.0.env.0.value", "60", "spot: termination", overlay="gpu-spot"
    ),
    "a label of Ray's own": Mistake(f"{GROUP}.labels", {"ray.io/x": "y"}, "refuses to start"),
    "a rack without a label": Mistake(f"{SECOND}.labels", ABSENT, "not on all", overlay="gpu-racks"),
    "another rack than the machines'": Mistake(
        f"{SECOND}.labels./example.com/rack", "a", "not those of its machines", overlay="gpu-racks"
    ),
    "racks that the run does not ask for": Mistake(
        "spec.entrypoint", f"{LAUNCH} /etc/picotron/job.yaml", "is on no node", overlay="gpu-racks"
    ),
    "RocksDB beside Redis": Mistake(
        f"{GCS}.redisAddress", "x:6379", "nothing of Redis", overlay="gpu-gcs-rocksdb"
    ),
    "Redis without an address": Mistake(
        f"{GCS}.redisAddress", ABSENT, "takes a redisAddress", overlay="gpu-gcs-redis"
    ),
    "Redis's password in the manifest": Mistake(
        f"{GCS}.redisPassword", {"value": "x"}, "name a Secret", overlay="gpu-gcs-redis"
    ),
    "Redis by hand as well": Mistake(
        f"{HEAD}.containers.0.env.0",
        {"name": "RAY_REDIS_ADDRESS", "value": "x"},
        "is the operator's",
        overlay="gpu-gcs-redis",
    ),
    "a budget in per cent": Mistake("spec.minAvailable", "50%", "as a number only", *BUDGET),
    "a budget that keeps all pods": Mistake("spec.minAvailable", 2, "lets no machine", *BUDGET),
    "a budget for heads and workers": Mistake(
        "spec.selector.matchLabels./ray.io/node-type", "pod", "neither head nor worker", *BUDGET
    ),
    "a budget of others' pods": Mistake(
        "spec.selector.matchLabels./app.kubernetes.io/part-of", "x", "pods of others", *BUDGET
    ),
    "a head that may be evicted": Mistake(
        "spec.minAvailable",
        0,
        "head may be evicted",
        "PodDisruptionBudget",
        "gpu-disruption",
        "picotron-head",
    ),
    "a hook as long as grace": Mistake(
        f"{RAY}.lifecycle.preStop.exec.command", HOOK, "and the hook's 120", overlay="gpu-disruption"
    ),
    "a queue beside the autoscaler": Mistake(
        f"{CLUSTER}.enableInTreeAutoscaling", True, "Kueue admits no", overlay="gpu-kueue"
    ),
    "a queue, and workers that nobody makes": Mistake(
        "spec.entrypoint",
        f"{LAUNCH} /etc/picotron/job.yaml cluster.autoscale=false",
        "of all pods",
        overlay="gpu-kueue",
    ),
    "a queue without a name": Mistake(
        "metadata.labels./volcano.sh/queue-name", "", "is empty", overlay="gpu-volcano"
    ),
    "half of YuniKorn's labels": Mistake(
        "metadata.labels", {"yunikorn.apache.org/queue": "root"}, "wants all of", overlay="gpu-yunikorn"
    ),
    "a role that is none": Mistake(
        "metadata.annotations./eks.amazonaws.com/role-arn", "picotron", "no ARN", "ServiceAccount", "gpu-irsa"
    ),
    "keys beside a role": Mistake(
        f"{RAY}.envFrom", [{"secretRef": {"name": "picotron-s3"}}], "take precedence", overlay="gpu-irsa"
    ),
    "RDMA that is asked for only": Mistake(
        f"{RAY}.resources.requests./rdma/hca_shared_devices_a", "2", "requests differ", overlay="gpu-rdma"
    ),
}

POLICY = OPERATOR | RUN | SECURITY | NAMES | OPTIONS
