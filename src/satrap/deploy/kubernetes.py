"""The objects of a run without Ray: a StatefulSet of servers, one of workers, and an Indexed Job of trainers; if Kueue
starts the run, a JobSet of three Indexed Jobs instead, since Kueue would admit several objects one after another.

Headless Services give every pod a name that stays when the pod restarts. The trainers find each other by torchrun, at
the name of their first pod. Values only.
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
_KEEP_SECONDS = 24 * 3600
"""How long Kubernetes keeps a run that has ended, for its logs."""
_HTTP = next(iter(pods.http_ports()))
_WAIT_FOR_FIRST = """\
if ((JOB_COMPLETION_INDEX)); then
  until (exec 3<>/dev/tcp/{host}/{port}) 2>/dev/null; do sleep 2; done
else
  until getent hosts {host} >/dev/null; do sleep 2; done
fi
"""


def objects(job: DeployJob) -> dict[str, list[dict[str, Any]]]:
    """Return the objects with the run's pods, by the name of their file."""
    if job.queue is not None:
        return {"jobset.yaml": [_job_set(job)]}
    files = {f"{role}.yaml": [_service(job, role), _stateful_set(job, role)] for role in ("servers", "workers")}
    if not job.workers.count:
        del files["workers.yaml"]
    name = f"{job.name}-trainers"
    metadata = pods.metadata(job, name, "trainers")
    own = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
    spec = _trainer_job(job) | {"ttlSecondsAfterFinished": _KEEP_SECONDS}
    return files | {"trainers.yaml": [_service(job, "trainers"), own | {"spec": spec}]}


def _job_set(job: DeployJob) -> dict[str, Any]:
    """Return the JobSet, which ends, and its servers and workers with it, when the trainers have."""
    jobs = {role: _replaced_job(job, role) for role in ("servers", "workers") if getattr(job, role).count}
    jobs["trainers"] = _trainer_job(job)
    text = "A process is ready after others have called it, so they must find it before."
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": Note(text, True)},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainers"]},
        "ttlSecondsAfterFinished": _KEEP_SECONDS,
        "replicatedJobs": [
            {"name": role, "replicas": 1, "template": {"metadata": {"labels": pods.labels(job, role)}, "spec": spec}}
            for role, spec in jobs.items()
        ],
    }
    metadata = pods.metadata(job, job.name, queued=True)
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _replaced_job(job: DeployJob, role: str) -> dict[str, Any]:
    """Return the specification of a Job of servers or workers, which restart whatever their exit status was."""
    template = _called_template(job, role)
    text = "A container that ends is started again in its pod, which keeps its rows; so often that it never fails."
    count = getattr(job, role).pods
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": Note(text, 1_000_000),
        "template": template | {"spec": {"restartPolicy": "OnFailure"} | template["spec"]},
    }


def _trainer_job(job: DeployJob) -> dict[str, Any]:
    size = job.trainers
    rules = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    return {
        "completionMode": Note("Each pod has a number, and a name that ends with it.", "Indexed"),
        "completions": size.pods,
        "parallelism": size.pods,
        "backoffLimit": Note("If one trainer fails, the pods of all of them may.", _RESTARTS * size.pods),
        "podFailurePolicy": Note("A pod that was evicted, or whose node was lost, does not count.", {"rules": rules}),
        "template": _trainer_pod(job),
    }


def _command(job: DeployJob, role: str) -> list[str]:
    """Return the command of a server or worker."""
    if role == "workers":
        return [
            "satrap",
            "worker",
            *_listen(job, role),
            *[f"--data={pods.literal(location)}" for location in job.storage.data],
        ]
    args = [
        *_listen(job, role),
        f"--shared={SHARED_MEMORY}/rows",
        f"--on-stop={job.servers.on_stop}",
        *[f"--checkpoints={pods.literal(checkpoint)}" for checkpoint in job.storage.checkpoints],
    ]
    if job.servers.on_stop == "move":
        args += [f"--grace={job.servers.grace_seconds - pods.EXIT_SECONDS}", "--join", *_addresses(job, role)]
    return ["satrap", "server", *args]


def address(job: DeployJob, role: str, number: int | str) -> str:
    """Return the address of a server or worker."""
    return f"tcp://{_host(job, role, number)}:{_PORTS[role]}"


def _addresses(job: DeployJob, role: str) -> list[str]:
    return [address(job, role, number) for number in range(getattr(job, role).count)]


def _host(job: DeployJob, role: str, number: int | str) -> str:
    """Return the name of a pod, as its Service or its JobSet gives it."""
    if job.queue is not None:
        return f"{job.name}-{role}-0-{number}.{job.name}"
    return f"{job.name}-{role}-{number}.{job.name}-{role}"


def _listen(job: DeployJob, role: str) -> list[str]:
    size: Role = getattr(job, role)
    return [
        f"--listen=tcp://*:{_PORTS[role]}",
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


def _stateful_set(job: DeployJob, role: str) -> dict[str, Any]:
    name = f"{job.name}-{role}"
    spec = {
        "serviceName": name,
        "replicas": getattr(job, role).pods,
        "podManagementPolicy": Note("All at once: none is ready before a trainer has called it.", "Parallel"),
        "updateStrategy": Note("A change of this file must not restart a live run.", {"type": "OnDelete"}),
        "selector": {"matchLabels": pods.labels(job, role)},
        "template": _called_template(job, role),
    }
    metadata = pods.metadata(job, name, role)
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def _called_template(job: DeployJob, role: str) -> dict[str, Any]:
    """Return the pod template of servers or workers, which others call."""
    owner = "apps.kubernetes.io/pod-index" if job.queue is None else "batch.kubernetes.io/job-completion-index"
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{owner}']"}}
    probes = {
        "startupProbe": pods.probe("/healthz", _HTTP, period=5, failures=60),
        "livenessProbe": pods.probe("/healthz", _HTTP, period=10, failures=30),
        "readinessProbe": pods.probe("/readyz", _HTTP, period=10, failures=1),
    }
    env = [{"name": "POD_INDEX", "valueFrom": index}]
    return _template(job, role, _container(job, role, job.image.cpu, _command(job, role), env) | probes)


def _trainer_pod(job: DeployJob) -> dict[str, Any]:
    size = job.trainers
    servers, workers = _addresses(job, "servers"), _addresses(job, "workers")
    args = [
        f"--nnodes={size.pods}",
        f"--nproc-per-node={size.per_pod}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={_host(job, 'trainers', 0)}:{RENDEZVOUS_PORT}",
        f"--rdzv-id={job.name}-trainers",
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
    first: dict[str, Any] = {} if job.queue is not None else {"subdomain": f"{job.name}-trainers"}
    first |= {"restartPolicy": "Never", "initContainers": [_wait_container(job)]}
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
