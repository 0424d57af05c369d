"""deploy/gke: the cluster of the paper on GKE. base/ is what the renderer writes, and the overlay fits it."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import kubernetes_schemas
from deploy_jobs import pods_of, rendered
from satrap.byte_sizes import parse_bytes
from satrap.deploy.job_file import parse_job
from satrap.deploy.render import manifests

FOLDER = Path(__file__).parents[2] / "deploy/gke"
PAGE = FOLDER.parents[1] / "docs/deploy.md"
JOB = parse_job([("deploy.toml", (FOLDER / "deploy.toml").read_text())])
ALLOCATABLE = {
    "n2-standard-16": (1, 15, "56GiB"),
    "m2-ultramem-416": (30, 412, "11500GiB"),
    "c2-standard-30": (100, 29, "108GiB"),
    "a2-highgpu-8g": (8, 95, "650GiB"),
}
"""The paper's machines: their number, and what GKE leaves of the cores and memory of each for pods, rounded down."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_the_base_is_what_the_renderer_writes() -> None:
    """If not: satrap deploy render deploy/gke/deploy.toml --output deploy/gke/base."""
    files = {each.name: each.read_text() for each in (FOLDER / "base").iterdir()}
    assert files == manifests(JOB, "kuberay")


def test_the_pods_fit_the_machines_of_the_paper() -> None:
    places: Counter[str] = Counter()
    for name in ("head", "servers", "workers", "trainers"):
        role = getattr(JOB, name)
        _, cores, memory = ALLOCATABLE[role.machine]
        in_one = min(
            cores // (role.cpus * role.per_pod), parse_bytes("memory", memory) // (role.memory_bytes * role.per_pod)
        )
        assert in_one > 0 and role.pods % in_one == 0
        places[role.machine] += role.pods // in_one
    assert places == {machine: count for machine, (count, _, _) in ALLOCATABLE.items()}
    assert JOB.servers.count * JOB.servers.rows_bytes > 222e12, "100 trillion parameters in fp16, with row-wise state"


def test_the_queue_has_room_for_one_run() -> None:
    objects = documents("queue.yaml")
    (queue,) = [each["spec"] for each in objects if each["kind"] == "ClusterQueue"]
    flavors = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "ResourceFlavor"}
    (group,) = queue["resourceGroups"]
    for flavor in group["flavors"]:
        machine = flavors[flavor["name"]]["nodeLabels"]["node.kubernetes.io/instance-type"]
        count, cores, memory = ALLOCATABLE[machine]
        quota = {each["name"]: each["nominalQuota"] for each in flavor["resources"]}
        assert list(quota) == group["coveredResources"]
        (role,) = [each for each in (JOB.head, JOB.servers, JOB.workers, JOB.trainers) if each.machine == machine]
        assert role.count * role.cpus <= quota["cpu"] <= count * cores
        assert (
            role.count * role.memory_bytes
            <= parse_bytes("memory", f"{quota['memory']}B")
            <= count * parse_bytes("memory", memory)
        )
        assert role.count * role.gpus == quota["nvidia.com/gpu"]
    (local,) = [each for each in objects if each["kind"] == "LocalQueue"]
    assert (local["metadata"]["name"], local["metadata"]["namespace"]) == (JOB.queue, JOB.namespace)


def test_the_overlay_names_what_the_base_refers_to() -> None:
    for name in ("namespace.yaml", "priority.yaml", "service-account.yaml", "queue.yaml", "provisioning.yaml"):
        for each in documents(name):
            kubernetes_schemas.validate(each)
    (account,), (priority,), (namespace,) = map(documents, ("service-account.yaml", "priority.yaml", "namespace.yaml"))
    assert (account["metadata"]["name"], account["metadata"]["namespace"]) == (JOB.service_account, JOB.namespace)
    assert priority["metadata"]["name"] == JOB.priority and namespace["metadata"]["name"] == JOB.namespace
    (kustomization,) = documents("kustomization.yaml")
    for_the_page = [
        "kueue-config.yaml",
        "node-config.yaml",
        "provisioning.yaml",
        "provisioning-patch.yaml",
    ]  # named in its commands
    named = {*kustomization["resources"], *for_the_page, "deploy.toml", "kustomization.yaml"}
    assert named == {each.name for each in FOLDER.iterdir()}
    assert all(f"deploy/gke/{name}" in PAGE.read_text() for name in for_the_page)


def test_huge_pages_are_permitted_on_the_nodes_of_the_servers() -> None:
    (daemons,) = documents("huge-pages.yaml")
    kubernetes_schemas.validate(daemons)
    spec = daemons["spec"]["template"]["spec"]
    _, servers = pods_of(rendered(JOB, "kuberay"))["servers"]
    assert spec["nodeSelector"].items() <= servers["spec"]["nodeSelector"].items()
    assert spec["tolerations"] == servers["spec"]["tolerations"]


def test_provisioning_asks_for_the_machines_of_all_flavors_but_the_heads() -> None:
    check, config = documents("provisioning.yaml")
    assert check["spec"]["parameters"]["name"] == config["metadata"]["name"]
    flavors = [each["metadata"]["name"] for each in documents("queue.yaml") if each["kind"] == "ResourceFlavor"]
    (queue,) = [each for each in documents("queue.yaml") if each["kind"] == "ClusterQueue"]
    (patch,) = documents("provisioning-patch.yaml")
    queue["spec"] |= patch["spec"]
    kubernetes_schemas.validate(queue)
    (use,) = queue["spec"]["admissionChecksStrategy"]["admissionChecks"]
    assert use["name"] == check["metadata"]["name"] and use["onFlavors"] == flavors[1:]


def test_a_start_that_lacks_machines_ends() -> None:
    (found,) = documents("kueue-config.yaml")
    assert found["waitForPodsReady"]["blockAdmission"] is True and found["waitForPodsReady"]["timeout"] == "30m"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, to apply the overlay")
def test_kustomize_builds_what_kubernetes_takes() -> None:
    command = ["kubectl", "kustomize", str(FOLDER)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    objects = list(yaml.safe_load_all(text))
    for each in objects:
        kubernetes_schemas.validate(each)
    (job,) = [each for each in objects if each["kind"] == "RayJob"]
    _, trainers = pods_of([job])["trainers"]
    assert trainers["spec"]["nodeSelector"]["cloud.google.com/gke-accelerator"] == "nvidia-tesla-a100"
