"""The objects of a run without Ray: a StatefulSet of servers, one of workers, and an Indexed Job of trainers.

Each of them has a headless Service, which gives every pod a name that stays when the pod restarts. The trainers of the
Job find each other by torchrun, at the name of its first pod. Values only.
"""

from typing import Any

from satrap.deploy import pods
from satrap.deploy.job_file import DeployJob, Role
from satrap.deploy.pods import HTTP_PORT, SHARED_MEMORY
from satrap.deploy.yaml_text import Note, Octal

SERVER_PORT, WORKER_PORT, RENDEZVOUS_PORT = 5555, 5556, 29400
KEYS_FOLDER = "/keys"
KEY_FILES = {
    "servers": ["server.key", "client.key"],
    "workers": ["server.key", "client.key"],
    "trainers": ["client.key"],
}
"""The files of the Secret that each role gets, the one of its --keys first."""
_PORTS = {"servers": SERVER_PORT, "workers": WORKER_PORT, "trainers": RENDEZVOUS_PORT}
_RESTARTS = 3
_HTTP = next(iter(pods.http_ports()))
_WAIT_FOR_FIRST = """\
if ((JOB_COMPLETION_INDEX)); then
  until (exec 3<>/dev/tcp/{host}/{port}) 2>/dev/null; do sleep 2; done
else
  until getent hosts {host} >/dev/null; do sleep 2; done
fi
"""


def servers(job: DeployJob) -> list[dict[str, Any]]:
    """Return the Service and the StatefulSet of the servers."""
    args = [
        *_listen(job, "servers"),
        f"--shared={SHARED_MEMORY}/rows",
        f"--on-stop={job.servers.on_stop}",
        *[f"--checkpoints={pods.literal(each)}" for each in job.storage.checkpoints],
    ]
    if job.servers.on_stop == "move":
        args += [f"--grace={job.servers.grace_seconds - pods.EXIT_SECONDS}", "--join", *_addresses(job, "servers")]
    return [_service(job, "servers"), _stateful_set(job, "servers", ["satrap", "server"], args)]


def workers(job: DeployJob) -> list[dict[str, Any]]:
    """Return the Service and the StatefulSet of the workers; nothing if there are none."""
    if not job.workers.count:
        return []
    args = [*_listen(job, "workers"), *[f"--data={pods.literal(each)}" for each in job.storage.data]]
    return [_service(job, "workers"), _stateful_set(job, "workers", ["satrap", "worker"], args)]


def trainers(job: DeployJob) -> list[dict[str, Any]]:
    """Return the Service and the Job of the trainers."""
    size, name = job.trainers, f"{job.name}-trainers"
    rules = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    spec = {
        "completionMode": Note("Each pod has a number and a name, NAME-trainers-0 and so on.", "Indexed"),
        "completions": size.pods,
        "parallelism": size.pods,
        "backoffLimit": Note("If one trainer fails, the pods of all of them may.", _RESTARTS * size.pods),
        "podFailurePolicy": Note("A pod that was evicted, or whose node was lost, does not count.", {"rules": rules}),
        "ttlSecondsAfterFinished": 24 * 3600,
        "template": _trainer_pod(job),
    }
    metadata = pods.metadata(job, name, "trainers", queued=True)
    return [_service(job, "trainers"), {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]


def address(job: DeployJob, role: str, number: int | str) -> str:
    """Return the address of a server or worker."""
    return f"tcp://{_host(job, role, number)}:{_PORTS[role]}"


def _addresses(job: DeployJob, role: str) -> list[str]:
    return [address(job, role, number) for number in range(getattr(job, role).count)]


def _host(job: DeployJob, role: str, number: int | str) -> str:
    return f"{job.name}-{role}-{number}.{job.name}-{role}"


def _listen(job: DeployJob, role: str) -> list[str]:
    size: Role = getattr(job, role)
    return [
        f"--listen=tcp://0.0.0.0:{_PORTS[role]}",
        f"--advertise={address(job, role, '$(POD_INDEX)')}",
        f"--keys={KEYS_FOLDER}/{KEY_FILES[role][0]}",
        f"--http=*:{HTTP_PORT}",
        f"--threads={size.cpus}",
        "--number=$(POD_INDEX)",
        "--log-format=json",
    ]


def _service(job: DeployJob, role: str) -> dict[str, Any]:
    ports: list[dict[str, Any]] = [{"name": "rendezvous" if role == "trainers" else "satrap", "port": _PORTS[role]}]
    per_pod = getattr(job, role).per_pod
    ports += [{"name": name, "port": port} for name, port in pods.http_ports(per_pod).items()]
    text = "A process is ready after others have called it, so they must find it before."
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": Note(text, True),
        "selector": pods.labels(job, role),
        "ports": ports,
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata(job, f"{job.name}-{role}", role),
        "spec": spec,
    }


def _stateful_set(job: DeployJob, role: str, command: list[str], args: list[str]) -> dict[str, Any]:
    size: Role = getattr(job, role)
    name = f"{job.name}-{role}"
    index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    probes = {
        "startupProbe": pods.probe("/healthz", _HTTP, period=5, failures=60),
        "livenessProbe": pods.probe("/healthz", _HTTP, period=10, failures=30),
        "readinessProbe": pods.probe("/readyz", _HTTP, period=10, failures=1),
    }
    env = [{"name": "POD_INDEX", "valueFrom": index}]
    container = _container(job, role, job.image.cpu, [*command, *args], env)
    template = _template(job, role, container | probes)
    spec = {
        "serviceName": name,
        "replicas": size.pods,
        "podManagementPolicy": Note("All at once: none is ready before a trainer has called it.", "Parallel"),
        "updateStrategy": Note("A change of this file must not restart a live run.", {"type": "OnDelete"}),
        "selector": {"matchLabels": pods.labels(job, role)},
        "template": template,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": pods.metadata(job, name, role, queued=True),
        "spec": spec,
    }


def _trainer_pod(job: DeployJob) -> dict[str, Any]:
    size, name = job.trainers, f"{job.name}-trainers"
    servers, workers = _addresses(job, "servers"), _addresses(job, "workers")
    args = [
        f"--nnodes={size.pods}",
        f"--nproc-per-node={size.per_pod}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={_host(job, 'trainers', 0)}:{RENDEZVOUS_PORT}",
        f"--rdzv-id={name}",
        f"--max-restarts={_RESTARTS}",
        *("-m", "satrap", "trainer", pods.literal(job.script)),
        f"--keys={KEYS_FOLDER}/{KEY_FILES['trainers'][0]}",
        f"--http=*:{HTTP_PORT}",
        "--log-format=json",
        "--clear",
        *("--servers", *servers),
        *(("--workers", *workers) if workers else ()),
        *(("--", *map(pods.literal, job.arguments)) if job.arguments else ()),
    ]
    text = "A store for each start: in a shared one, trainers find addresses of those before the last restart."
    store = Note(text, {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"})
    env = [{"name": "OMP_NUM_THREADS", "value": str(size.cpus)}, store]
    container = _container(job, "trainers", job.trainer_image, ["torchrun", *args], env)
    template = _template(job, "trainers", container)
    first = {"subdomain": name, "restartPolicy": "Never", "initContainers": [_wait_container(job)]}
    return template | {"spec": first | template["spec"]}


def _wait_container(job: DeployJob) -> dict[str, Any]:
    """Return the container that waits for all servers and workers to listen, and then for the first trainer's pod; a
    trainer would give up after a minute. The first pod waits until its own name is known."""
    loops = [
        f"for ((i = 0; i < {getattr(job, role).count}; i++)); do\n"
        f"  until (exec 3<>/dev/tcp/{_host(job, role, '$i')}/{_PORTS[role]}) 2>/dev/null; do sleep 2; done\n"
        "done\n"
        for role in ("servers", "workers")
        if getattr(job, role).count
    ]
    small = {"cpu": "100m", "memory": "64Mi"}
    return {
        "name": "wait-for-servers",
        "image": job.trainer_image,
        "command": ["bash", "-c"],
        "args": ["".join([*loops, _WAIT_FOR_FIRST.format(host=_host(job, "trainers", 0), port=RENDEZVOUS_PORT)])],
        "resources": {"requests": dict(small), "limits": dict(small)},
        "securityContext": pods.container_security(),
    }


def _container(job: DeployJob, role: str, image: str, command: list[str], env: list[Any]) -> dict[str, Any]:
    _, mounts = pods.volumes(job, role)
    ports = [{"name": "rendezvous" if role == "trainers" else "satrap", "containerPort": _PORTS[role]}]
    per_pod = getattr(job, role).per_pod
    ports += [{"name": name, "containerPort": port} for name, port in pods.http_ports(per_pod).items()]
    return {
        "name": role.removesuffix("s"),
        "image": image,
        "command": command,
        "ports": ports,
        "env": [*env, *pods.environment(job, role)],
        **pods.credentials(job),
        "resources": pods.resources(getattr(job, role)),
        "securityContext": pods.container_security(),
        "volumeMounts": [*mounts, {"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True}],
    }


def _template(job: DeployJob, role: str, container: dict[str, Any]) -> dict[str, Any]:
    """Return a pod template. The keys belong to the group of the pod's user, which may read them."""
    volumes, _ = pods.volumes(job, role)
    secret = {
        "secretName": f"{job.name}-keys",
        "defaultMode": Octal(0o440),
        "items": [{"key": file, "path": file} for file in KEY_FILES[role]],
    }
    spec = pods.placement(job, role) | {"securityContext": pods.security()}
    spec |= {"containers": [container], "volumes": [*volumes, {"name": "keys", "secret": secret}]}
    return {"metadata": pods.pod_metadata(job, role), "spec": spec}
