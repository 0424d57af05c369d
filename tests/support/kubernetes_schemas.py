"""Validates objects of Kubernetes as a strict API server would: unknown fields are errors.

Objects of KubeRay, JobSet, Kueue and the Prometheus operator against their own definitions (tests/fixtures/kubernetes);
pods of RayJobs, like all other objects, against the schemas of Kubernetes that the package kubernetes-validate ships.
"""

from __future__ import annotations

import gzip
import importlib.resources
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

SCHEMAS = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema/v1.32.0-local-strict"
"""The schemas of one release of Kubernetes. The package's own `validate` reads all of them again for each object."""
_DEFINITIONS = Path(__file__).parents[1] / "fixtures/kubernetes"
"""What is no part of Kubernetes, by group and name."""


def validate(found: dict[str, Any]) -> None:
    """Raises jsonschema's ValidationError with the field that is wrong."""
    validator_of(found["apiVersion"], found["kind"]).validate(found)
    if found["kind"] == "RayJob":
        cluster = found["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            validate({"apiVersion": "v1", "kind": "Pod"} | group["template"])


@cache
def validator_of(version: str, kind: str) -> Draft202012Validator:
    """Returns the validator of an API of Kubernetes or of an extension."""
    group, _, number = version.rpartition("/")
    if (path := _DEFINITIONS / f"{group}_{kind.lower()}s.yaml.gz").exists():
        return Draft202012Validator(_definition(path, number))
    name = "-".join([kind.lower(), *([group.partition(".")[0]] if group else []), number])
    return Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text()), registry=_definitions())


@cache
def _definitions() -> Registry[Any]:
    found = Resource.from_contents(json.loads((SCHEMAS / "_definitions.json").read_text()))
    return found @ Registry()


def _definition(path: Path, number: str) -> dict[str, Any]:
    definition = yaml.load(gzip.decompress(path.read_bytes()), yaml.CSafeLoader)
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == number]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    _forbid_unknown_fields(schema)
    return schema


def _forbid_unknown_fields(schema: dict[str, Any]) -> None:
    fields = schema.get("properties", {})
    if fields and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    if "pattern" in schema:  # Python has flags of a whole pattern at its beginning only
        schema["pattern"] = re.sub(r"^\^\(\?i\)", "(?i)^", schema["pattern"])
    others = [schema.get("items"), schema.get("additionalProperties")]
    for each in [*fields.values(), *(other for other in others if isinstance(other, dict))]:
        _forbid_unknown_fields(each)
