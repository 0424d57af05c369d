"""The files of a rendering: their names and their content. Values only.

The objects of a run beside its pods are made here: who may connect to the pods, how many may be drained, who reads
their metrics. They select pods by the labels that `pods.labels` writes.
"""

from typing import Any

from satrap.deploy import kubernetes, pods
from satrap.deploy.job_file import DeployJob, Role
from satrap.deploy.kuberay import ray_job
from satrap.deploy.yaml_text import Note, document
from satrap.errors import ConfigError

MARK = "# Rendered by satrap deploy render"
"""How each file begins."""
_KUSTOMIZATION = "kustomization.yaml"
_ROLES = ("head", "servers", "workers", "trainers")
_RAY_DASHBOARD_PORT = 8265


def objects(job: DeployJob, target: str) -> dict[str, list[dict[str, Any]]]:
    """Return the objects of Kubernetes, by the name of their file. target: kuberay or kubernetes."""
    beside = {"policies.yaml": _policies(job, target), "monitor.yaml": _pod_monitor(job)}
    if target == "kuberay":
        return {name: objects for name, objects in ({"rayjob.yaml": [ray_job(job)]} | beside).items() if objects}
    if job.working_dir is not None:
        raise ConfigError(
            f"working_dir is {job.working_dir!r}, which only Ray copies; use --target kuberay or remove it"
        )
    return {name: objects for name, objects in (kubernetes.objects(job) | beside).items() if objects}


def manifests(job: DeployJob, target: str) -> dict[str, str]:
    """Return the files, by their names, with a kustomization of them all."""
    files = objects(job, target)
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(files)}
    texts = {name: _file(job, target, "---\n".join(map(document, objects))) for name, objects in files.items()}
    return texts | {_KUSTOMIZATION: _file(job, target, document(kustomization))}


def _file(job: DeployJob, target: str, text: str) -> str:
    lines = [f"{MARK} --target {target} for the run {job.name}; change the job file instead and render it again."]
    if target == "kubernetes":
        lines.append(f"# Needs the Secret {job.name}-keys: satrap keys keys/, then")
        lines.append(f"#     kubectl create secret generic {job.name}-keys --from-file keys/")
    elif job.ray_tls is not None:
        lines.append(
            f"# Needs the Secret {job.ray_tls}, with ca.crt and ca.key of a certificate authority for this run."
        )
    return "\n".join(lines) + "\n" + text


def _policies(job: DeployJob, target: str) -> list[dict[str, Any]]:
    """Return the NetworkPolicy, unless the job wants none, and a PodDisruptionBudget for each role."""
    roles = [role for role in _ROLES if getattr(job, role).count and (role != "head" or target == "kuberay")]
    budgets = [_budget(job, role) for role in roles]
    return [*([_network_policy(job, target)] if job.network_policy else []), *budgets]


def _pod_monitor(job: DeployJob) -> list[dict[str, Any]]:
    """Return the PodMonitor, which has a Prometheus of the Prometheus operator scrape every process."""
    if not job.pod_monitor:
        return []
    keep = [{"sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_component"], "targetLabel": "role"}]
    names = pods.http_ports(job.trainers.per_pod)
    spec = {
        "selector": {"matchLabels": pods.labels(job)},
        "podMetricsEndpoints": [
            {"port": name, "path": "/metrics", "interval": "15s", "relabelings": keep} for name in names
        ],
    }
    metadata = pods.metadata(job, job.name)
    return [{"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": metadata, "spec": spec}]


def _network_policy(job: DeployJob, target: str) -> dict[str, Any]:
    """Ray's dashboard, its client and its head run anyone's code; the run's own pods and KubeRay need them."""
    first, last = pods.HTTP_PORT, pods.HTTP_PORT + job.trainers.per_pod - 1
    metrics: dict[str, Any] = {"port": first, "protocol": "TCP"}
    if last > first:
        metrics["endPort"] = last
    ingress: list[Any] = [
        Note("The pods of the run.", {"from": [{"podSelector": {"matchLabels": pods.labels(job)}}]}),
        Note("Metrics, for Prometheus in any namespace: nothing can be changed through them.", {"ports": [metrics]}),
    ]
    if target == "kuberay":
        submitter = {"podSelector": {"matchLabels": {"batch.kubernetes.io/job-name": job.name}}}
        operator = {
            "namespaceSelector": {},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
        }
        text = "KubeRay's operator, and the pod that submits the job: a peer that reaches the dashboard runs code."
        port = {"port": _RAY_DASHBOARD_PORT, "protocol": "TCP"}
        ingress.append(Note(text, {"from": [operator, submitter], "ports": [port]}))
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": pods.metadata(job, job.name),
        "spec": {"podSelector": {"matchLabels": pods.labels(job)}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _budget(job: DeployJob, role: str) -> dict[str, Any]:
    """Drains of nodes: one server at a time, which moves its rows first; no other pod, since the run would go back to
    its last checkpoint."""
    size: Role = getattr(job, role)
    moves = role == "servers" and size.on_stop == "move" and size.pods > 1
    text = "A drain of nodes waits"
    text += ", but for one server at a time, which moves its rows." if moves else " until the run has ended."
    least = size.pods - 1 if moves else size.pods
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": pods.metadata(job, f"{job.name}-{role}", role),
        "spec": {"minAvailable": Note(text, least), "selector": {"matchLabels": pods.labels(job, role)}},
    }
