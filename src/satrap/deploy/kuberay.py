"""The RayJob of a run: KubeRay starts the pods of a Ray cluster, and `satrap run` on its head starts the processes.

Each role has pods with a custom resource of Ray, satrap_server and so on, as many as processes fit, and each process
requests one: Ray then places servers on the pods with much memory, and nothing else there. Values only.
"""

import shlex
from collections.abc import Sequence
from typing import Any

from satrap.deploy import pods
from satrap.deploy.job_file import VOLUME_PATH, DeployJob, Role
from satrap.deploy.pods import GIB, HTTP_PORT
from satrap.deploy.yaml_text import Command, Note, document

RAY_RESOURCES = {"servers": "satrap_server", "workers": "satrap_worker", "trainers": "satrap_trainer"}
RUN_FOLDER = "/run/satrap"
TLS_FOLDER = "/tls"
TLS_SCRIPT = """\
set -eu
umask 077
openssl req -x509 -config /dev/null -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \\
  -CA "$CA_FOLDER/ca.crt" -CAkey "$CA_FOLDER/ca.key" -days 365 -subj "/CN=ray" \\
  -addext "subjectAltName=IP:$POD_IP,IP:127.0.0.1,DNS:localhost,DNS:*.$POD_NAMESPACE.svc.cluster.local" \\
  -addext "basicConstraints=critical,CA:FALSE" -addext "extendedKeyUsage=serverAuth,clientAuth" \\
  -keyout "$TLS_FOLDER/tls.key" -out "$TLS_FOLDER/tls.crt"
cp "$CA_FOLDER/ca.crt" "$TLS_FOLDER/ca.crt"
"""
_CA_FOLDER = "/ca"
_GCS_PORT, _DASHBOARD_PORT, _CLIENT_PORT, _RAY_METRICS_PORT, _AGENT_PORT = 6379, 8265, 10001, 8080, 52365
_OBJECT_STORE_BYTES = 128 << 20
_SHARED_MEMORY_BYTES = 512 << 20  # for Ray: its object store, and what it allocates besides
_PLACEMENT_SECONDS = 1800


def ray_job(job: DeployJob) -> dict[str, Any]:
    """Return the RayJob."""
    groups = [_worker_group(job, role) for role in RAY_RESOURCES if getattr(job, role).count]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": pods.metadata(job, job.name, queued=True),
        "spec": {
            "entrypoint": entrypoint(job),
            **_runtime_env(job),
            "backoffLimit": Note("If the head is lost, another cluster resumes the last checkpoint.", 3),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": Note("Time to read the logs of a run that has ended.", 600),
            "rayClusterSpec": {
                "rayVersion": job.ray_version,
                "enableInTreeAutoscaling": Note("The number of pods is fixed, and all of them start together.", False),
                "headGroupSpec": _head_group(job),
                "workerGroupSpecs": groups,
            },
        },
    }


def entrypoint(job: DeployJob) -> Command:
    """Return the command line of the run."""
    words = ["satrap", "run", job.script, "--cluster", "ray", "--address", "auto"]
    folder = RUN_FOLDER if job.storage.volume is None else f"{VOLUME_PATH}/{job.name}/run"
    words += ["--placement-seconds", str(_PLACEMENT_SECONDS), "--folder", folder]
    words += ["--http", f"*:{HTTP_PORT}", "--log-format", "json", "--node-output", pods.STANDARD_OUTPUT]
    for role, resource in RAY_RESOURCES.items():
        size: Role = getattr(job, role)
        if not size.count:
            continue
        one = role.removesuffix("s")
        words += [f"--{role}", str(size.count), f"--{one}-cpus", str(size.cpus)]
        if role == "servers":
            words += ["--server-memory", _size(size.rows_bytes)]
        if size.gpus:
            words += ["--trainer-gpus", str(size.gpus)]
        words += [f"--{one}-resource", f"{resource}=1"]
    for option in ("checkpoints", "data"):
        words += [word for path in getattr(job.storage, option) for word in (f"--{option}", path)]
    if job.arguments:
        words += ["--", *job.arguments]
    return Command([pods.literal(shlex.quote(word)) for word in words])


def _runtime_env(job: DeployJob) -> dict[str, str]:
    return {} if job.working_dir is None else {"runtimeEnvYAML": document({"working_dir": job.working_dir})}


def _size(num_bytes: int) -> str:
    """Return a size as `satrap run` reads it."""
    text = pods.quantity(num_bytes)
    return f"{text}B" if text.endswith("i") else text


def _head_group(job: DeployJob) -> dict[str, Any]:
    ports = {
        "gcs-server": _GCS_PORT,
        "dashboard": _DASHBOARD_PORT,
        "client": _CLIENT_PORT,
        "metrics": _RAY_METRICS_PORT,
        **pods.http_ports(),
    }
    probes = {
        "livenessProbe": _raylet_probe(failures=60),
        "readinessProbe": pods.probe("/api/gcs_healthz", "dashboard", period=10, failures=12),
    }
    folder: list[Any] = []
    if job.storage.volume is None:
        text = "State and logs of the run. Checkpoints are elsewhere, so a new head resumes without it."
        folder = [Note(text, {"name": "run", "emptyDir": {}})]
    mounts = [{"name": "run", "mountPath": RUN_FOLDER}] if folder else []
    return {
        "resources": Note("None of its CPUs are for processes of the run.", {"cpu": "0"}),
        "rayStartParams": _ray_start_params(),
        "template": _pod(job, "head", job.image.cpu, ports, probes, folder, mounts),
    }


def _worker_group(job: DeployJob, role: str) -> dict[str, Any]:
    size: Role = getattr(job, role)
    probes = {"livenessProbe": _raylet_probe(failures=60), "readinessProbe": _raylet_probe(failures=12)}
    image = job.trainer_image if role == "trainers" else job.image.cpu
    ports = {"metrics": _RAY_METRICS_PORT, **pods.http_ports(size.per_pod)}
    return {
        "groupName": role,
        "replicas": size.pods,
        "minReplicas": size.pods,
        "maxReplicas": size.pods,
        "labels": Note("Labels of the Ray node: its dashboard shows them.", {"satrap-role": role}),
        "resources": Note(
            "A process of this role requests one, and no other process does.", {RAY_RESOURCES[role]: str(size.per_pod)}
        ),
        "rayStartParams": _ray_start_params(),
        "template": _pod(job, role, image, ports, probes, [], []),
    }


def _ray_start_params() -> dict[str, Any]:
    text = "In bytes. Ray carries commands and reports only; by default it would take a third of the memory."
    return {"object-store-memory": Note(text, str(_OBJECT_STORE_BYTES))}


def _raylet_probe(failures: int) -> dict[str, Any]:
    return pods.probe("/api/local_raylet_healthz", _AGENT_PORT, period=10, failures=failures, initialDelaySeconds=30)


def _pod(
    job: DeployJob,
    role: str,
    image: str,
    ports: dict[str, int],
    probes: dict[str, Any],
    more_volumes: Sequence[Any],
    more_mounts: Sequence[Any],
) -> dict[str, Any]:
    volumes, mounts = pods.volumes(job, role, _SHARED_MEMORY_BYTES)
    volumes, mounts = [*volumes, *more_volumes], [*mounts, *more_mounts]
    env = pods.environment(job, role)
    if role == "servers":
        text = "Off: Ray would kill the server when its rows fill the memory. The limit of the container is enough."
        env += [
            Note(text, {"name": "RAY_memory_monitor_refresh_ms", "value": "0"}),
            {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": _drain_seconds(job.servers)},
        ]
    first: dict[str, Any] = {}
    if job.ray_tls is not None:
        names = {"SERVER_CERT": "tls.crt", "SERVER_KEY": "tls.key", "CA_CERT": "ca.crt"}
        env += [{"name": "RAY_USE_TLS", "value": "1"}]
        env += [{"name": f"RAY_TLS_{name}", "value": f"{TLS_FOLDER}/{file}"} for name, file in names.items()]
        volumes += [
            {"name": "ray-tls", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "ray-ca", "secret": {"secretName": job.ray_tls}},
        ]
        mounts.append({"name": "ray-tls", "mountPath": TLS_FOLDER, "readOnly": True})
        first = {"initContainers": [_tls_container(image)]}
    container = {
        "name": "ray-head" if role == "head" else "ray-worker",
        "image": image,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        **({"env": env} if env else {}),
        **pods.credentials(job),
        "resources": pods.resources(getattr(job, role)),
        "securityContext": pods.container_security(),
        **probes,
        "volumeMounts": mounts,
    }
    spec = pods.placement(job, role) | {"securityContext": pods.security()}
    return {
        "metadata": pods.pod_metadata(job, role),
        "spec": spec | first | {"containers": [container], "volumes": volumes},
    }


def _drain_seconds(size: Role) -> Any:
    """Return how long Ray keeps the node of a pod that stops, while servers move their rows."""
    if size.on_stop == "keep":
        return Note("A pod that stops moves no rows.", "0")
    text = "How long a pod that stops may take to move its rows to the other servers."
    return Note(text, str(size.grace_seconds - pods.EXIT_SECONDS))


def _tls_container(image: str) -> dict[str, Any]:
    """Return the container that makes the pod's certificate. The key of the CA is in no other container."""
    fields = {"POD_IP": "status.podIP", "POD_NAMESPACE": "metadata.namespace"}
    env: list[Any] = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    env += [{"name": "CA_FOLDER", "value": _CA_FOLDER}, {"name": "TLS_FOLDER", "value": TLS_FOLDER}]
    small = {"cpu": "100m", "memory": pods.quantity(GIB // 8)}
    return {
        "name": "ray-certificate",
        "image": image,
        "command": ["bash", "-c"],
        "args": [TLS_SCRIPT],
        "env": env,
        "resources": {"requests": dict(small), "limits": dict(small)},
        "securityContext": pods.container_security(),
        "volumeMounts": [
            {"name": "ray-ca", "mountPath": _CA_FOLDER, "readOnly": True},
            {"name": "ray-tls", "mountPath": TLS_FOLDER},
        ],
    }
