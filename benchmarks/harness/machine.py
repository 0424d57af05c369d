"""The origin of a result: machine, commit, versions, date. Nothing here names the machine or its folders, so that
results can be published as they are.
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def describe_machine() -> dict[str, Any]:
    """Return the processor, the memory, and the kernel settings that change the figures."""
    return {
        "cpu": _cpu(),
        "l3": _text("/sys/devices/system/cpu/cpu0/cache/index3/size"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shared_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def describe_commit() -> str:
    """Return the commit, with "+changes" if the tree differs from it; "unknown" outside a git checkout."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return f"{commit}+changes" if changes else commit


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages."""
    return {name: importlib.metadata.version(name) for name in packages}


def imported_versions() -> dict[str, str]:
    """Return the versions of the packages that this process has imported, and the SIMD path that Satrap uses."""
    names = {"satrap": "satrap", "torch": "torch", "numpy": "numpy", "zmq": "pyzmq", "pyarrow": "pyarrow"}
    names |= {"fbgemm_gpu": "fbgemm-gpu-cpu", "torchrec": "torchrec", "paddle": "paddlepaddle"}
    imported = versions(*(package for module, package in names.items() if module in sys.modules))
    core = sys.modules.get("satrap._core")
    return imported | ({"simd": core.simd_paths()[0]} if core else {})


def now() -> str:
    """Return the date and time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    """Return the name, and the numbers that tell models apart which a hypervisor gives one name ("AMD EPYC")."""
    name, *numbers = (_field("/proc/cpuinfo", field) for field in ("model name", "cpu family", "model", "stepping"))
    return "{} (family {}, model {}, stepping {})".format(name, *numbers)


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0" if path == "/proc/meminfo" else "unknown"


def _chosen(path: str) -> str:
    """Return the bracketed word of a kernel setting such as "always [madvise] never"."""
    return next((word.strip("[]") for word in _text(path).split() if word.startswith("[")), "unknown")
