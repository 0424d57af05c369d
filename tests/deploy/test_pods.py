"""The parts that the pods of both targets share, as Kubernetes gets them, and sizes as it writes them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy_jobs import plain
from satrap.deploy.job_file import DeployJob, Image, Role, Storage
from satrap.deploy.pods import (
    credentials,
    environment,
    http_ports,
    labels,
    literal,
    metadata,
    placement,
    pod_metadata,
    probe,
    quantity,
    resources,
    security,
    shared_memory,
    volumes,
)
from satrap.monitor.endpoint import address_of_processes, split_http_address

UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
SATRAP = {"app.kubernetes.io/name": "satrap", "app.kubernetes.io/instance": "run"}


def job(**fields: Any) -> DeployJob:
    required: dict[str, Any] = {"name": "run", "script": "/app/train.py", "image": Image(cpu="satrap:1")}
    return DeployJob(**required | fields)


@given(st.integers(1, 1 << 14), st.sampled_from(sorted(UNITS)))
def test_a_quantity_is_exact_and_in_the_largest_unit(count: int, unit: str) -> None:
    num_bytes = count * UNITS[unit]
    found = quantity(num_bytes)
    digits = found.rstrip("KMGi")
    assert int(digits) * UNITS[found.removeprefix(digits)] == num_bytes
    assert all(num_bytes % size or size <= UNITS[found.removeprefix(digits)] for size in UNITS.values())


def test_kubernetes_reads_a_literal_as_it_is() -> None:
    assert literal("$(HOME) $ $$") == "$$(HOME) $$ $$$$"


def test_labels_and_metadata() -> None:
    assert labels(job()) == SATRAP
    assert labels(job(), "servers") == SATRAP | {"app.kubernetes.io/component": "servers"}
    assert metadata(job(), "run-x") == {"name": "run-x", "labels": SATRAP}
    queued = job(namespace="training", queue="satrap")
    assert metadata(queued, "run-x") == {"name": "run-x", "namespace": "training", "labels": SATRAP}
    assert metadata(queued, "run-x", "head", queued=True)["labels"] == (
        SATRAP | {"app.kubernetes.io/component": "head", "kueue.x-k8s.io/queue-name": "satrap"}
    )
    assert metadata(job(), "run-x", queued=True) == metadata(job(), "run-x")


def test_the_metadata_of_a_pod() -> None:
    kept = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    served = {"scrape": "true", "port": "9100", "path": "/metrics"}
    found = plain(pod_metadata(job(labels={"team": "ads"}), "workers"))
    assert found["annotations"] == kept | {f"prometheus.io/{key}": value for key, value in served.items()}
    assert found["labels"] == labels(job(), "workers") | {"team": "ads"}


def test_the_resources_of_a_pod_are_those_of_its_processes() -> None:
    amounts = {"cpu": "12", "memory": "6Gi"}
    role = Role(count=6, per_pod=3, cpus=4, memory="2GiB")
    assert resources(role) == {"requests": amounts, "limits": amounts}
    assert resources(Role(count=6, per_pod=3, cpus=4, memory="2GiB", disk="5GiB"))["limits"] == (
        amounts | {"ephemeral-storage": "15Gi"}
    )
    with_gpus = resources(Role(count=4, per_pod=2, gpus=2))
    assert with_gpus["limits"]["nvidia.com/gpu"] == with_gpus["requests"]["nvidia.com/gpu"] == "4"


def test_where_a_pod_runs() -> None:
    dedicated = {"key": "dedicated", "operator": "Equal", "value": "satrap-servers", "effect": "NoSchedule"}
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    trainers = Role(gpus=1, machine="a3", grace_seconds=77)
    placed = job(zone="b", trainers=trainers, service_account="satrap", priority="high")
    assert placement(placed, "trainers") == {
        "serviceAccountName": "satrap",
        "priorityClassName": "high",
        "nodeSelector": {"topology.kubernetes.io/zone": "b", "node.kubernetes.io/instance-type": "a3"},
        "tolerations": [gpu],
        "terminationGracePeriodSeconds": 77,
    }
    assert placement(placed, "servers")["tolerations"] == [dedicated]
    spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    taints = ["cloud.google.com/gke-spot=true:NoSchedule", "nvidia.com/gpu:NoSchedule"]
    cheap = Role(gpus=1, tolerations=taints, node_labels={"cloud.google.com/gke-spot": "true"})
    found = placement(job(trainers=cheap, pull_secrets=["registry"]), "trainers")
    assert found["tolerations"] == [gpu, spot] and found["imagePullSecrets"] == [{"name": "registry"}]
    assert found["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    term = {"labelSelector": {"matchLabels": SATRAP}, "topologyKey": "topology.kubernetes.io/zone"}
    assert plain(placement(job(), "trainers")) == {
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}},
        "terminationGracePeriodSeconds": 120,
    }


@pytest.mark.parametrize(
    ("role", "spare", "limit"),
    [
        ("servers", 0, "90Gi"),
        ("servers", 1 << 30, "91Gi"),
        ("trainers", 0, "4Gi"),  # an eighth
        ("workers", 0, None),
        ("workers", 1 << 20, "1Mi"),
    ],
)
def test_shared_memory(role: str, spare: int, limit: str | None) -> None:
    sized = job(servers=Role(memory="100GiB", rows="90GiB"), trainers=Role(count=2, per_pod=2, memory="16GiB"))
    found = shared_memory(sized, role, spare)
    assert (found is None) == (limit is None)
    if found is not None:
        wanted = {"medium": "Memory", "sizeLimit": limit}
        assert plain(found) == {"name": "shared-memory", "emptyDir": wanted}
        mounted, mounts = volumes(sized, role, spare)
        assert [plain(each) for each in mounted] == [plain(found)]
        assert mounts == [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    assert plain(shared_memory(job(), "trainers", 0))["emptyDir"]["sizeLimit"] == "2Gi"
    small = job(trainers=Role(memory="4GiB"))
    assert plain(shared_memory(small, "trainers", 0))["emptyDir"]["sizeLimit"] == "1Gi", "at least"


def test_the_shared_volume_and_credentials() -> None:
    claimed = job(storage=Storage(volume="runs", credentials="keys"))
    assert volumes(claimed, "workers") == (
        [{"name": "shared", "persistentVolumeClaim": {"claimName": "runs"}}],
        [{"name": "shared", "mountPath": "/shared"}],
    )
    assert volumes(job(), "workers") == ([], [])
    assert credentials(claimed) == {"envFrom": [{"secretRef": {"name": "keys"}}]} and credentials(job()) == {}


def test_a_pod_runs_without_root_as_the_user_of_the_images() -> None:
    found = plain(security())
    assert found["runAsNonRoot"] is True
    assert [found[key] for key in ("runAsUser", "runAsGroup", "fsGroup")] == [1000] * 3


def test_the_environment_of_a_role_replaces_that_of_the_job() -> None:
    found = job(env={"A": "1", "B": "$(A)"}, trainers=Role(env={"A": "2"}))
    assert environment(found, "servers") == [{"name": "A", "value": "1"}, {"name": "B", "value": "$$(A)"}]
    assert environment(found, "trainers")[0] == {"name": "A", "value": "2"}


def test_the_ports_of_a_pod_are_those_that_its_processes_take() -> None:
    """With --http '*:9100', each process of a run takes the first free port from there on."""
    assert list(http_ports(3).items()) == [("satrap-http", 9100), ("satrap-http-1", 9101), ("satrap-http-2", 9102)]
    assert set(http_ports(200).values()) <= set(split_http_address(address_of_processes("*:9100"))[1])


def test_a_probe() -> None:
    assert probe("/readyz", 9100, period=3, failures=7, initialDelaySeconds=2) == {
        "httpGet": {"path": "/readyz", "port": 9100},
        "initialDelaySeconds": 2,
        "periodSeconds": 3,
        "timeoutSeconds": 5,
        "failureThreshold": 7,
    }
