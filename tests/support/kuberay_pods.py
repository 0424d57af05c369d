"""What the operator KubeRay makes of a RayJob: the pods of its cluster, with the commands and the environment that the
operator adds to the templates of the manifest.

An oracle for tests, after the source of KubeRay: pods are started with `ray start`, whose parameters come from
`rayStartParams` and from the labels, the resources and the limits of the group. Left out are the dashboard, which
starts a dozen processes, the container that waits for the head, and variables that only report the usage of Ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

GCS_PORT = 6379
_UNITS = {"Gi": 1 << 30, "Mi": 1 << 20, "Ki": 1 << 10}


def ray_pods(ray_job: Mapping[str, Any], head: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """Returns the number of pods of each group, and their specification.

    head: the name of the head's Service."""
    cluster = ray_job["spec"]["rayClusterSpec"]
    found = {"head": (1, _spec(cluster["headGroupSpec"], None))}
    for group in cluster["workerGroupSpecs"]:
        found[group["groupName"]] = (group["replicas"], _spec(group, head))
    return found


def _spec(group: Mapping[str, Any], head: str | None) -> dict[str, Any]:
    spec = group["template"]["spec"]
    container, *others = spec["containers"]
    assert "command" not in container, "KubeRay would run it before `ray start`"
    environment = {
        "RAY_ADDRESS": f"{head or '127.0.0.1'}:{GCS_PORT}",
        "RAY_PORT": str(GCS_PORT),
        "FQ_RAY_IP": head or "127.0.0.1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    own = {
        "command": ["/bin/bash", "-c", "--"],
        "args": [f"ulimit -n 65536; ray start {_flags(group, head)}"],
        "env": [*container.get("env", []), *({"name": name, "value": each} for name, each in environment.items())],
    }
    return {**spec, "containers": [container | own, *others]}


def _flags(group: Mapping[str, Any], head: str | None) -> str:
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    params = dict(group["rayStartParams"])
    params |= {"num-cpus": limits["cpu"], "memory": str(_bytes(limits["memory"]))}
    custom = {}
    for name, amount in group.get("resources", {}).items():
        if name.lower() == "cpu":
            params["num-cpus"] = amount
        else:
            custom[name] = float(amount)
    if custom:
        params["resources"] = f"'{json.dumps(custom)}'"
    if labels := group.get("labels"):
        params["labels"] = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    params |= {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
    params |= {"include-dashboard": "false"} if head is None else {"address": f"{head}:{GCS_PORT}"}
    flags = ["--head"] if head is None else []
    return " ".join([*flags, "--block", *(f"--{name}={value}" for name, value in sorted(params.items()))])


def _bytes(quantity: str) -> int:
    return next((int(quantity[:-2]) * size for unit, size in _UNITS.items() if quantity.endswith(unit)), 0)
