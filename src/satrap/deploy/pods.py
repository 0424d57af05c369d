"""What the pods of both targets have in common: labels, resources, where they are scheduled, volumes and probes.

A role is "head", "servers", "workers" or "trainers". Values only.
"""

from collections.abc import Mapping
from typing import Any

from satrap.deploy.job_file import VOLUME_PATH, DeployJob, Role
from satrap.deploy.yaml_text import Note

HTTP_PORT = 9100
"""Where the first process of a pod serves /metrics, /healthz and /readyz; further trainers take the next ports."""
EXIT_SECONDS = 10
"""Part of the grace period for a server to exit after it has moved its rows."""
SHARED_MEMORY = "/dev/shm"
STANDARD_OUTPUT = "/proc/1/fd/1"
"""Standard output of a container's first process: what `kubectl logs` shows."""
USER = 1000
"""The user of the images."""
GIB = 1 << 30
_UNITS = (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10))
ZONE_LABEL = "topology.kubernetes.io/zone"
MACHINE_LABEL = "node.kubernetes.io/instance-type"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def quantity(num_bytes: int) -> str:
    """Return a size as Kubernetes writes it: 64Gi."""
    return next((f"{num_bytes // size}{unit}" for unit, size in _UNITS if num_bytes % size == 0), str(num_bytes))


def literal(text: str) -> str:
    """Escape an argument of a command: Kubernetes reads $$ as $ there, and replaces $(NAME)."""
    return text.replace("$", "$$")


def labels(job: DeployJob, role: str | None = None) -> dict[str, str]:
    """Return the labels of an object.

    role: the role that the object belongs to; None: the whole job.
    """
    shared = {"app.kubernetes.io/name": "satrap", "app.kubernetes.io/instance": job.name}
    return shared if role is None else shared | {"app.kubernetes.io/component": role}


def http_ports(per_pod: int = 1) -> dict[str, int]:
    """Return the ports at which the processes of a pod serve their metrics, by name."""
    return {"satrap-http" + (f"-{i}" if i else ""): HTTP_PORT + i for i in range(per_pod)}


def environment(job: DeployJob, role: str) -> list[Any]:
    """Return the variables that the job file sets."""
    own: Role = getattr(job, role)
    return [{"name": name, "value": literal(value)} for name, value in (dict(job.env) | dict(own.env)).items()]


def metadata(job: DeployJob, name: str, role: str | None = None, *, queued: bool = False) -> dict[str, Any]:
    """Return the metadata of an object. queued: whether Kueue admits it."""
    namespace = {} if job.namespace is None else {"namespace": job.namespace}
    own: dict[str, Any] = {"name": name, **namespace, "labels": dict(job.labels) | labels(job, role)}
    if queued and job.queue is not None:
        own["labels"][QUEUE_LABEL] = job.queue
    return own


def pod_metadata(job: DeployJob, role: str) -> dict[str, Any]:
    """Return the metadata of a pod. Annotations name one port; further trainers of a pod need a PodMonitor."""
    annotations: dict[str, Any] = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(HTTP_PORT),
        "prometheus.io/path": "/metrics",
    }
    kept = Note("An autoscaler of nodes must not move a pod of a run.", "false")
    return {
        "labels": dict(job.labels) | labels(job, role),
        "annotations": annotations | {"cluster-autoscaler.kubernetes.io/safe-to-evict": kept},
    }


def resources(role: Role) -> dict[str, Any]:
    """Return requests and limits of a pod's container: equal, so the pod is the last to be evicted."""
    amounts = {"cpu": str(role.cpus * role.per_pod), "memory": quantity(role.memory_bytes * role.per_pod)}
    if role.disk_bytes is not None:
        amounts["ephemeral-storage"] = quantity(role.disk_bytes * role.per_pod)
    if role.gpus:
        amounts["nvidia.com/gpu"] = str(role.gpus * role.per_pod)
    return {"requests": dict(amounts), "limits": dict(amounts)}


def placement(job: DeployJob, role: str) -> dict[str, Any]:
    """Return the parts of a pod's spec that say under which account and on which nodes it runs, and how long it may
    take to stop."""
    size: Role = getattr(job, role)
    labels_of_nodes = {ZONE_LABEL: job.zone, MACHINE_LABEL: size.machine, **size.node_labels}
    given = {
        "serviceAccountName": job.service_account,
        "priorityClassName": job.priority,
        "imagePullSecrets": [{"name": pull_secret} for pull_secret in job.pull_secrets],
        "nodeSelector": {name: value for name, value in labels_of_nodes.items() if value is not None},
        "tolerations": _tolerations(role, size),
    }
    placed: dict[str, Any] = {key: value for key, value in given.items() if value}
    if job.zone is None:
        term = {"labelSelector": {"matchLabels": labels(job)}, "topologyKey": ZONE_LABEL}
        affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        placed["affinity"] = Note("All pods of the run in one zone: each step crosses the network.", affinity)
    placed["terminationGracePeriodSeconds"] = size.grace_seconds
    return placed


def _tolerations(role: str, size: Role) -> list[dict[str, str]]:
    taints = ["dedicated=satrap-servers:NoSchedule"] if role == "servers" else []
    taints += ["nvidia.com/gpu:NoSchedule"] if size.gpus else []
    tolerations = []
    for key in dict.fromkeys([*taints, *size.tolerations]):
        taint, _, effect = key.rpartition(":")
        key, equals, value = taint.partition("=")
        how = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        tolerations.append({"key": key, **how, "effect": effect})
    return tolerations


def security() -> dict[str, Any]:
    """Return the security context of a pod: no root, and files of volumes belong to the group of its user."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": Note("Do not visit every file of a large volume at each start.", "OnRootMismatch"),
    }


def container_security() -> dict[str, Any]:
    """Return the security context of a container."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def shared_memory(job: DeployJob, role: str, spare_bytes: int) -> Any:
    """Return the volume for /dev/shm; None if a role needs none. What is in it counts as memory of the container.

    spare_bytes: for others than Satrap.
    """
    size: Role = getattr(job, role)
    match role:
        case "servers":
            limit = size.rows_bytes
            text = f"The rows, {quantity(limit)}. They survive a restart of the container, not of the pod."
        case "trainers":
            limit = max(GIB, size.memory_bytes * size.per_pod // 8)
            text = "For batches and NCCL: the 64 MiB that containers have otherwise are too few."
        case _:
            limit, text = 0, "For Ray."
    if not limit + spare_bytes:
        return None
    size_limit = Note(text, quantity(limit + spare_bytes))
    return {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size_limit}}


def volumes(job: DeployJob, role: str, spare_bytes: int = 0) -> tuple[list[Any], list[Any]]:
    """Return the volumes of a pod, and where its container mounts them: shared memory and the shared volume.

    spare_bytes: shared memory for others than Satrap.
    """
    declared: list[Any] = []
    mounts: list[Any] = []
    if (memory := shared_memory(job, role, spare_bytes)) is not None:
        declared.append(memory)
        mounts.append({"name": "shared-memory", "mountPath": SHARED_MEMORY})
    if job.storage.volume is not None:
        declared.append({"name": "shared", "persistentVolumeClaim": {"claimName": job.storage.volume}})
        mounts.append({"name": "shared", "mountPath": VOLUME_PATH})
    return declared, mounts


def credentials(job: DeployJob) -> dict[str, Any]:
    """Return the environment that a container takes from the Secret with the credentials of the buckets."""
    if job.storage.credentials is None:
        return {}
    return {"envFrom": [{"secretRef": {"name": job.storage.credentials}}]}


def probe(path: str, port: int | str, *, period: int, failures: int, **more: int) -> dict[str, Any]:
    """Return a probe over HTTP."""
    timing: Mapping[str, int] = {"periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}
    return {"httpGet": {"path": path, "port": port}, **more, **timing}
