"""Jobs to render for tests, drawn at random, and what a reader of the YAML gets from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from hypothesis import strategies as st

from satrap.deploy.job_file import DeployJob, Image, Role, Storage
from satrap.deploy.render import manifests
from satrap.deploy.yaml_text import Command, Note

NAME = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
ARGUMENT = st.one_of(
    st.sampled_from(["--epochs", "3", "$HOME", "$(POD_INDEX)", "$$", "a b", "it's", '"', "*", "", "--"])
)


def roles(low: int, *, gpus: int = 0, per_pod: int = 1, rows: bool = False) -> st.SearchStrategy[Role]:
    """low: the least number of processes, of pods with `per_pod` of them."""
    return st.builds(
        lambda pods, **fields: Role(count=pods * per_pod, per_pod=per_pod, gpus=gpus, **fields),
        pods=st.integers(low, 3),
        cpus=st.integers(1, 64),
        memory=st.sampled_from(["2GiB", "16GiB", "3000MiB", "11TiB"]),
        rows=st.sampled_from([None, "1GiB", "1000MiB"]) if rows else st.none(),
        machine=st.sampled_from([None, "c2-standard-30"]),
        grace_seconds=st.integers(30, 3600),
        on_stop=st.sampled_from(["move", "keep"]) if rows else st.just("move"),
        disk=st.sampled_from([None, "10GiB"]),
        env=st.sampled_from([{}, {"NCCL_DEBUG": "INFO", "LIST": "$(HOME) a"}]),
        node_labels=st.sampled_from([{}, {"cloud.google.com/gke-spot": "true"}]),
        tolerations=st.sampled_from([(), ("cloud.google.com/gke-spot=true:NoSchedule", "spare:NoExecute")]),
    )


def optional(name: str) -> st.SearchStrategy[str | None]:
    return st.sampled_from([None, name])


STORAGE = st.one_of(
    st.builds(
        Storage,
        checkpoints=st.just(["gs://bucket/runs"]),
        data=st.lists(st.sampled_from(["s3://bucket/a b", "gs://bucket/data"]), max_size=2),
        credentials=optional("bucket-credentials"),
    ),
    st.builds(Storage, checkpoints=st.just(["/shared/runs"]), volume=st.just("runs")),
)
TRAINERS = st.one_of(roles(1), roles(1, gpus=1, per_pod=8), roles(1, gpus=4))
JOBS = st.builds(
    DeployJob,
    name=NAME,
    script=st.just("/app/train.py"),
    image=st.builds(Image, cpu=st.just("registry.example.com/satrap:1.0"), gpu=optional("satrap-gpu:1.0")),
    arguments=st.lists(ARGUMENT, max_size=3),
    namespace=optional("training"),
    zone=optional("europe-west4-a"),
    queue=optional("satrap"),
    priority=optional("high"),
    service_account=optional("satrap"),
    ray_tls=optional("ray-ca"),
    pull_secrets=st.sampled_from([(), ("registry",)]),
    env=st.sampled_from([{}, {"TZ": "UTC"}]),
    labels=st.sampled_from([{}, {"team": "ads", "example.com/cost-center": "7"}]),
    network_policy=st.booleans(),
    pod_monitor=st.booleans(),
    storage=STORAGE,
    servers=roles(1, rows=True),
    workers=roles(0),
    trainers=TRAINERS,
)


def rendered(job: DeployJob, target: str) -> list[dict[str, Any]]:
    """Returns the objects of the rendered files, as Kubernetes reads them, the kustomization left out."""
    files = manifests(job, target)
    kustomization = yaml.safe_load(files.pop("kustomization.yaml"))
    assert kustomization["resources"] == list(files)
    return [each for text in files.values() for each in yaml.load_all(text, yaml.CSafeLoader)]


def pods_of(objects: list[dict[str, Any]]) -> dict[str, tuple[int, dict[str, Any]]]:
    """Returns the number of pods of each role, and their template."""
    found = {}
    for each in objects:
        spec = each["spec"]
        if each["kind"] == "RayJob":
            cluster = spec["rayClusterSpec"]
            found["head"] = (1, cluster["headGroupSpec"]["template"])
            found |= {
                group["groupName"]: (group["replicas"], group["template"]) for group in cluster["workerGroupSpecs"]
            }
        elif each["kind"] == "JobSet":
            jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
            found |= {role: (job["completions"], job["template"]) for role, job in jobs.items()}
        elif each["kind"] in ("StatefulSet", "Job"):
            count = spec["replicas"] if each["kind"] == "StatefulSet" else spec["completions"]
            found[spec["template"]["metadata"]["labels"]["app.kubernetes.io/component"]] = (count, spec["template"])
    return found


def host(job: DeployJob, role: str, number: int) -> str:
    """Returns the name that Kubernetes gives to a pod without Ray."""
    if job.queue is not None:  # see enableDNSHostnames of JobSet
        return f"{job.name}-{role}-0-{number}.{job.name}"
    return f"{job.name}-{role}-{number}.{job.name}-{role}"


def plain(value: Any) -> Any:
    """Return the value without notes, as a reader of the YAML gets it."""
    match value:
        case Note():
            return plain(value.value)
        case Command():
            return str(value)
        case Mapping():
            return {key: plain(element) for key, element in value.items()}
        case list() | tuple():
            return [plain(element) for element in value]
        case _:
            return value
