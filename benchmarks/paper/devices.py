"""NVIDIA's DLRM of 4.2 and 113 billion parameters, modelled: no figure here was measured on a GPU.

The time of a sample is that of its products plus that of its bytes, at shares of the data sheet that such kernels
usually reach. What a host does per id is measured: the resolving of ids, by the newest record of
`benchmarks.store --case resolve`.
"""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.harness.machine import ROOT
from benchmarks.paper.cell import CannotRunError, Cell, Done, Figures

BOTTOM, TOP, DIM, NUM_IDS = (13, 512, 256, 128), (479, 1024, 1024, 512, 256, 1), 128, 26
PASSES = 6
"""Times that an activation or its gradient is read or written; a compiler fuses two of them away."""
PUBLISHED = {"small, TF32": 2.84e6, "small, mixed": 4.55e6, "large, TF32": 9.76e6, "large, mixed": 11.5e6}
"""NVIDIA's samples/s for DLRM in TensorFlow 2 on one A100 and on eight."""
CORES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An A100 with 80 GB, by its data sheet, and the shares of it that kernels reach."""

    tensor_flops: float = 312e12
    tf32_flops: float = 156e12
    bytes_per_second: float = 2.0e12
    link_bytes_per_second: float = 300e9
    flops_share: float = 0.35
    bytes_share: float = 0.7
    launch_seconds: float = 6e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the model is trained."""

    is_mixed: bool = True
    is_fused: bool = True
    """Whether one kernel reads the rows of all tables."""
    is_compiled: bool = True
    gpus: int = 1
    batch: int = 65_536


def seconds_of(form: Form, device: Device) -> float:
    """Return the seconds of a sample on one GPU of `form.gpus`."""
    products = 3 * 2 * sum(a * b for layers in (BOTTOM, TOP) for a, b in pairwise(layers)) + 3 * 2 * 27 * 27 * DIM
    flops = (device.tensor_flops if form.is_mixed else device.tf32_flops) * device.flops_share
    size = 2 if form.is_mixed else 4
    passes = PASSES - 2 * form.is_compiled
    activations = passes * size * sum(BOTTOM[1:] + TOP)
    rows = NUM_IDS * DIM * (4 + 2 * size + 4 + 4)  # read and written on, the gradient, the update
    own_bytes = (activations + rows) / (device.bytes_per_second * device.bytes_share)
    exchanged = 2 * NUM_IDS * DIM * size * (form.gpus - 1) / form.gpus
    across = exchanged / (device.link_bytes_per_second * device.bytes_share)
    # Forward, backward and optimizer; a layer has about four kernels each way, and a fused table two.
    kernels = 3 * (2 if form.is_fused else 2 * NUM_IDS) + 8 * (len(BOTTOM) + len(TOP)) * (
        0.5 if form.is_compiled else 1
    )
    return products / flops + own_bytes + across + kernels * device.launch_seconds * form.gpus / form.batch


def cells() -> list[Cell]:
    """Return the published settings and the ablation."""
    return [Cell("devices/published", 1, "computed", published), Cell("devices/ablation", 1, "computed", ablation)]


def published(done: Done) -> Figures:
    """Compare the model with what NVIDIA published."""
    rates = {}
    for name, rate in PUBLISHED.items():
        gpus = 1 if name.startswith("small") else 8
        form = Form(is_mixed=name.endswith("mixed"), gpus=gpus)
        rates[name] = {"model": gpus / seconds_of(form, Device()), "published": rate}
    return {"samples_per_s": rates, "host_samples_per_s": CORES * _resolved_per_s() / NUM_IDS}


def _resolved_per_s() -> float:
    """Return the ids that one thread resolves in a second."""
    for path in sorted(Path(ROOT, "benchmarks", "results").glob("gpu-*.jsonl"), reverse=True):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if line.get("case") == "resolve/20Mx16/zipf/1t":
                return float(line["figures"]["resolve_rows_per_s"]["median"])
    raise CannotRunError("no record of `benchmarks.store --case resolve`: its figure is needed")


def ablation(done: Done) -> Figures:
    """Return how much slower the small model is without each of three features."""
    whole = seconds_of(Form(), Device())
    without = {
        "mixed precision": {"is_mixed": False},
        "fused tables": {"is_fused": False},
        "compilation": {"is_compiled": False},
    }
    return {name: seconds_of(replace(Form(), **change), Device()) / whole for name, change in without.items()}
