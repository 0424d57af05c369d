"""The files of a rendering: their names and their content. Values only."""

from typing import Any

from satrap.deploy import cluster_objects, kubernetes
from satrap.deploy.job_file import DeployJob
from satrap.deploy.kuberay import ray_job
from satrap.deploy.yaml_text import document
from satrap.errors import ConfigError

MARK = "# Rendered by satrap deploy render"
"""How each file begins."""
_KUSTOMIZATION = "kustomization.yaml"


def objects(job: DeployJob, target: str) -> dict[str, list[dict[str, Any]]]:
    """Return the objects of Kubernetes, by the name of their file. target: kuberay or kubernetes."""
    beside = {"policies.yaml": cluster_objects.policies(job, target), "monitor.yaml": cluster_objects.pod_monitor(job)}
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
