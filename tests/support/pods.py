"""Pods of Kubernetes as processes of this machine: each has its own network, host name, files and process ids.

A bridge connects the networks of all pods, and /etc/hosts has the names that a headless Service gives them; there is no
DNS. The root of a pod is this machine's, with the pod's volumes mounted over it. So what a manifest says of commands,
volumes, environment and names is carried out; images, limits, users and probes are not. Nothing has a name outside:
networks and mounts disappear with the last process in them. Needs root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from waiting import wait_until

_BIN = str(Path(sys.executable).parent)
_SUBNET = "10.214.0"
_SCRATCH = "/scratch"  # the pod's /tmp: this machine's has the directories that are mounted
_NAMESPACES = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--propagation", "private")
_ROOT = """\
set -eu
mount -t tmpfs pod {root}
for each in /*; do
  if [ -L "$each" ]; then cp -a "$each" {root}/
  elif [ -d "$each" ]; then mkdir {root}"$each"; [ "$each" = /proc ] || mount --rbind "$each" {root}"$each"
  fi
done
mount -t proc proc {root}/proc
mount --bind {hosts} {root}/etc/hosts
mount --bind /dev/null {root}/etc/resolv.conf
echo {name} > /proc/sys/kernel/hostname
ip link set lo up
read -r started
ip address add {address}/24 dev pod0
ip link set pod0 up
mkdir {root}{scratch}
mount -t tmpfs scratch {root}{scratch}
{volumes}
exec chroot {root} /usr/bin/env -i -C / {command}
"""


@dataclass(slots=True)
class Pod:
    """A pod that was started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    environment: Mapping[str, str]

    def kill_node(self) -> None:
        """Ends the pod as the loss of its node does: all processes, its memory and its network at once."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        """Asks the first process of the pod to stop, as Kubernetes does."""
        os.kill(self._first_process(), signal.SIGTERM)

    def run(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command in the pod's container, with its environment, as `kubectl exec` does."""
        enter = ["nsenter", "--net", "--mount", "--uts", "--pid", "--root", "--wd", "--target"]
        own = ["env", "-i", *(f"{name}={value}" for name, value in self.environment.items())]
        return subprocess.Popen(
            [*enter, str(self._first_process()), *own, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _first_process(self) -> int:
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)


@dataclass(slots=True)
class Pods:
    """The pods of one test, on one bridge."""

    folder: Path
    """For the pods' logs, roots and /etc/hosts."""
    volumes: Mapping[str, Path]
    """Directories of persistent volumes, by claim, and of Secrets, by name."""
    image: Mapping[str, Path]
    """Directories of the image, by their path in it."""
    bridge: subprocess.Popen[bytes]
    pods: list[Pod] = field(default_factory=list)
    addresses: dict[str, str] = field(default_factory=dict)
    """The line of each pod in /etc/hosts."""
    num_addresses: int = 0

    def start(self, name: str, service: str, spec: Mapping[str, Any], index: int) -> Pod:
        """Starts the pod of a template: its init containers, one after the other, then its container."""
        if name not in self.addresses or any(each.name == name for each in self.pods):
            self.name(name, service)
        for container in spec.get("initContainers", []):
            first = self._start(name, spec, container, index)
            assert first.process.wait(timeout=300) == 0, first.log.read_text()
        return self._start(name, spec, spec["containers"][0], index)

    def name(self, pod: str, service: str) -> None:
        """Gives a pod an address, before others look for it, or another one before it starts again."""
        self.num_addresses += 1
        self.addresses[pod] = f"{_SUBNET}.{self.num_addresses + 1} {pod}.{service} {pod}\n"
        with open(self.folder / "hosts", "w") as file:  # the same file, which is mounted in all pods
            file.write("127.0.0.1 localhost\n" + "".join(self.addresses.values()))

    def _start(self, name: str, spec: Mapping[str, Any], container: Mapping[str, Any], index: int) -> Pod:
        root = self.folder / "root"
        root.mkdir(exist_ok=True)
        environment = _environment(container, index)
        words = [*container["command"], *container.get("args", ())]
        words = [word.replace("$(POD_INDEX)", str(index)).replace("$$(", "$(") for word in words]
        script = _ROOT.format(
            root=root,
            hosts=self.folder / "hosts",
            name=name,
            address=self.addresses[name].split()[0],
            scratch=_SCRATCH,
            volumes="\n".join(self._mounts(root, spec, container)),
            command=shlex.join([*(f"{key}={value}" for key, value in environment.items()), *words]),
        )
        log = self.folder / f"{name}-{len(self.pods)}.log"
        with open(log, "ab") as output:  # to which a process may also append by /proc/1/fd/1
            process = subprocess.Popen(
                [*_NAMESPACES, "sh", "-c", script], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
            )
        self.pods.append(pod := Pod(name, process, log, environment))
        self._plug_in(pod)
        return pod

    def _plug_in(self, pod: Pod) -> None:
        """Connects a pod to the bridge, and lets it start."""
        inside = f"/proc/{pod.process.pid}/ns/net"
        wait_until(lambda: os.readlink(inside) != os.readlink("/proc/self/ns/net"))
        bridge = ["nsenter", "--net", "--target", str(self.bridge.pid), "ip", "link"]
        port = f"port{len(self.pods)}"
        _run(*bridge, "add", "name", port, "type", "veth", "peer", "name", "pod0", "netns", inside)
        _run(*bridge, "set", port, "master", "bridge0")
        _run(*bridge, "set", port, "up")
        assert pod.process.stdin is not None
        pod.process.stdin.write(b"\n")
        pod.process.stdin.close()

    def _mounts(self, root: Path, spec: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
        """Yields the commands that mount the image's directories and the volumes of a container."""
        for path, source in self.image.items():
            yield f"mkdir -p {root}{path} && mount --bind {source} {root}{path}"
        volumes = {each["name"]: each for each in spec.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            volume, at = volumes[mount["name"]], f"{root}{mount['mountPath']}"
            yield f"mkdir -p {at}"
            if "emptyDir" in volume:
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
                yield f"mount -t tmpfs -o size={size} {mount['name']} {at}"
            elif "secret" in volume:
                secret = volume["secret"]
                yield f"mount -t tmpfs {mount['name']} {at}"
                for item in secret["items"]:
                    source = self.volumes[secret["secretName"]] / item["key"]
                    yield f"install -m {secret['defaultMode']:o} {source} {at}/{item['path']}"
            else:
                yield f"mount --bind {self.volumes[volume['persistentVolumeClaim']['claimName']]} {at}"


@contextmanager
def pods(folder: Path, volumes: Mapping[str, Path], image: Mapping[str, Path]) -> Iterator[Pods]:
    """Opens the bridge; skips the test where namespaces or bridges cannot be created."""
    if os.geteuid() != 0 or not all(shutil.which(each) for each in ("unshare", "nsenter", "ip", "chroot")):
        pytest.skip("networks and mounts of pods need root, util-linux and the command `ip`")
    script = "ip link add name bridge0 type bridge && ip link set bridge0 up && echo up && exec cat"
    bridge = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    opened = Pods(folder, volumes, image, bridge)
    try:
        assert bridge.stdout is not None
        if bridge.stdout.readline() != b"up\n":
            pytest.skip(f"no network namespace or bridge can be created here: {bridge.communicate()[1].decode()}")
        yield opened
    finally:
        for pod in opened.pods:
            pod.kill_node()
        bridge.kill()
        bridge.communicate()


def _environment(container: Mapping[str, Any], index: int) -> dict[str, str]:
    """Returns the environment of a container. A field of the pod that it may name is its index."""
    given = {each["name"]: each.get("value", str(index)) for each in container.get("env", [])}
    return {"PATH": f"{_BIN}:/usr/bin:/bin", "HOME": _SCRATCH, "TMPDIR": _SCRATCH} | given


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
