"""The job file of `satrap deploy render`: what runs, on how many pods of which size, in which images. Values only.

A TOML file, whose tables are the classes below; docs/deploy.md describes its keys. Sizes are those of one process: a
server, a worker or a trainer. `per_pod` processes share a pod, which gets the sum.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from satrap.byte_sizes import parse_bytes
from satrap.config.location import Location
from satrap.config.validation import Serializable, check_flag, check_integer, describe, set_field
from satrap.errors import ConfigError

VOLUME_PATH = "/shared"
"""Where the shared volume is mounted in every pod."""
MAX_NAME = 40
"""KubeRay permits 47 characters, and plain Kubernetes appends "-trainers-" and a number."""
_OWN_LABELS = ("app.kubernetes.io/", "kueue.x-k8s.io/", "ray.io/")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_TAINT = re.compile(rf"({_LABEL.pattern})(=(?P<value>{_LABEL_VALUE.pattern}))?:(NoSchedule|NoExecute|PreferNoSchedule)")
_ANY_TEXT, _SOME_TEXT = re.compile("(?s).*"), re.compile("(?s).+")
_OWN_KEYS = (
    ("trainers", "gpus", 0, "only trainers use GPUs"),
    ("trainers", "per_pod", 1, "only trainers share pods"),
    ("servers", "rows", None, "only servers hold rows"),
    ("servers", "on_stop", "move", "only servers hold rows"),
)
"""Keys that only one role may have, with their usual values."""
_MIN_SPARE = 1 << 30  # bytes that a server needs for its process and its requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Image(Serializable):
    """The container images. Each has Satrap and the script."""

    cpu: str
    """Image of servers, workers, the head of Ray, and trainers without GPUs."""
    gpu: str | None = None
    """Image of trainers with GPUs; None: the same."""

    def __post_init__(self) -> None:
        for name in ("cpu", "gpu"):
            value: Any = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not re.fullmatch(r"[\w./:@-]+", value)):
                raise ConfigError(
                    f"image: {name} is {describe(value)}; expected the name of an image, such as satrap:1"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage(Serializable):
    """Where checkpoints and data are."""

    checkpoints: Sequence[str] = ()
    """Directories and URLs that servers may write below."""
    data: Sequence[str] = ()
    """Directories and URLs that workers may read below."""
    volume: str | None = None
    """PersistentVolumeClaim that many nodes may write to (ReadWriteMany), mounted at /shared; None: none."""
    credentials: str | None = None
    """Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID; None: the service account's."""

    def __post_init__(self) -> None:
        for name in ("checkpoints", "data"):
            paths = _check_list("storage", name, getattr(self, name), _SOME_TEXT, "a list of folders and URLs")
            set_field(self, name, paths)
            for path in paths:
                self._require_reachable(name, path)
        for name in ("volume", "credentials"):
            _check_object_name("storage", name, getattr(self, name))

    def _require_reachable(self, name: str, path: str) -> None:
        if Location.parse(path, f"storage: {name}").is_url:
            return
        if self.volume is None:
            raise ConfigError(
                f"storage: {name} has {path!r}, a folder of one pod; expected a URL, or a folder below "
                f"{VOLUME_PATH} together with volume"
            )
        if not f"{path}/".startswith(f"{VOLUME_PATH}/") or ".." in path.split("/"):
            raise ConfigError(
                f"storage: {name} has {path!r}; expected a URL, or a folder below {VOLUME_PATH}, where the volume is"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Role(Serializable):
    """The processes of one role."""

    count: int = 1
    """Number of processes."""
    per_pod: int = 1
    """Number of processes in each pod."""
    cpus: int = 4
    """CPUs and threads of each process."""
    memory: str = "16GiB"
    """Memory of each process, a server's rows included."""
    rows: str | None = None
    """Part of a server's memory that is for rows, in /dev/shm; None: all but a tenth."""
    on_stop: str = "move"
    """What happens when a server's pod is asked to stop: "move" its rows to the other servers, or "keep" none, and
    then the run goes back to its last checkpoint."""
    gpus: int = 0
    """GPUs of each trainer."""
    machine: str | None = None
    """Machine type, the nodes' label node.kubernetes.io/instance-type; None: any that has room."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels that the nodes must have, such as cloud.google.com/gke-spot = "true"."""
    tolerations: Sequence[str] = ()
    """Taints of nodes that the pods tolerate, as `kubectl taint` writes them: KEY=VALUE:EFFECT or KEY:EFFECT."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the containers, beside those of the job."""
    disk: str | None = None
    """Space on the node's disk for logs and temporary files of each process (ephemeral-storage): reserved, and the
    limit; None: as much as there happens to be."""
    grace_seconds: int = 120
    """Time for a pod to stop after SIGTERM."""

    def __post_init__(self) -> None:
        for name, low in (("count", 0), ("per_pod", 1), ("cpus", 1), ("gpus", 0), ("grace_seconds", 30)):
            check_integer("Role", name, getattr(self, name), low, 1 << 20)
        for name in ("memory", "rows", "disk"):
            size: Any = getattr(self, name)
            if not isinstance(size, str | None):
                raise ConfigError(f"Role: {name} is {describe(size)}; expected a size, such as '64GiB'")
        _check_texts("Role", "env", self.env, _ENV_NAME)
        _check_texts("Role", "node_labels", self.node_labels, _LABEL, _LABEL_VALUE)
        example = "a list of taints as kubectl writes them, such as 'cloud.google.com/gke-spot=true:NoSchedule'"
        set_field(self, "tolerations", _check_list("Role", "tolerations", self.tolerations, _TAINT, example))
        if self.machine is not None and not isinstance(self.machine, str):
            raise ConfigError(
                f"Role: machine is {describe(self.machine)}; expected a machine type, such as 'c2-standard-30'"
            )
        label = next((label for label in self.node_labels if "accelerator" in label), None)
        if label is not None and not self.gpus:
            raise ConfigError(
                f"Role: node_labels has {label!r}, which nodes without GPUs lack, and gpus is 0; set gpus, or remove "
                "the label"
            )
        if self.on_stop not in ("move", "keep"):
            raise ConfigError(f"Role: on_stop is {describe(self.on_stop)}; expected 'move' or 'keep'")
        if self.count % self.per_pod:
            raise ConfigError(
                f"Role: count is {self.count} and per_pod {self.per_pod}; expected a count that is a multiple of it"
            )
        if self.memory_bytes < 2 * _MIN_SPARE:
            raise ConfigError(f"Role: memory is {self.memory!r}; expected at least 2GiB")
        if self.disk_bytes == 0:
            raise ConfigError(f"Role: disk is {self.disk!r}; expected a size above 0, or none")
        if not 0 < self.rows_bytes <= self.memory_bytes - _MIN_SPARE:
            raise ConfigError(
                f"Role: rows is {self.rows!r} and memory {self.memory!r}; expected at least 1GiB beside the rows"
            )

    @property
    def pods(self) -> int:
        """Number of pods."""
        return self.count // self.per_pod

    @property
    def memory_bytes(self) -> int:
        """Memory of one process."""
        return parse_bytes("memory", self.memory)

    @property
    def disk_bytes(self) -> int | None:
        """Disk space of one process."""
        return None if self.disk is None else parse_bytes("disk", self.disk)

    @property
    def rows_bytes(self) -> int:
        """Memory of one server for rows."""
        if self.rows is not None:
            return parse_bytes("rows", self.rows)
        memory = self.memory_bytes
        return memory - max(memory // 10, _MIN_SPARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployJob(Serializable):
    """A training run on Kubernetes."""

    name: str
    """Name of the run; the names of all objects begin with it."""
    script: str
    """Absolute path of the script in the images; relative to `working_dir` if there is one."""
    image: Image
    working_dir: str | None = None
    """URL of a zip file with the script, which Ray copies to every pod, so that a change of the script needs no image;
    None: the script is in the images. For KubeRay only."""
    arguments: Sequence[str] = ()
    """Arguments of the script."""
    namespace: str | None = None
    """Namespace of all objects; None: that of the command that applies them."""
    zone: str | None = None
    """Zone of all pods; None: any, but the same one for all."""
    queue: str | None = None
    """LocalQueue of Kueue, which starts the pods when there is room for all of them; None: Kubernetes starts them one
    by one."""
    priority: str | None = None
    """PriorityClass of the pods; None: the cluster's default."""
    service_account: str | None = None
    """ServiceAccount of the pods; None: the namespace's default."""
    pull_secrets: Sequence[str] = ()
    """Secrets with which nodes pull the images."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all containers."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels of all objects and pods."""
    network_policy: bool = True
    """Whether a NetworkPolicy admits only the run's pods, KubeRay and readers of metrics."""
    pod_monitor: bool = False
    """Whether a PodMonitor of the Prometheus operator has every process scraped."""
    ray_tls: str | None = None
    """Secret with ca.crt and ca.key, from which each pod of Ray gets a certificate; None: Ray's connections are not
    encrypted. Keys, which Ray sends to processes, are then as safe as the network."""
    ray_version: str = "2.60.0"
    """Version of Ray in the images, which KubeRay must know."""
    storage: Storage = field(default_factory=Storage)
    head: Role = field(default_factory=Role)
    """Pod of Ray's head, in which `satrap run` runs."""
    servers: Role = field(default_factory=Role)
    workers: Role = field(default_factory=lambda: Role(count=0))
    trainers: Role = field(default_factory=Role)

    def __post_init__(self) -> None:
        self._check_names()
        self._check_script()
        set_field(self, "arguments", _check_list("job", "arguments", self.arguments, _ANY_TEXT, "a list of strings"))
        _check_texts("job", "env", self.env, _ENV_NAME)
        _check_texts("job", "labels", self.labels, _LABEL, _LABEL_VALUE)
        if taken := sorted(name for name in self.labels if name.startswith(_OWN_LABELS)):
            raise ConfigError(f"job: labels has {taken[0]!r}, which Satrap sets; choose another name")
        for name in ("network_policy", "pod_monitor"):
            check_flag("job", name, getattr(self, name))
        secrets = _check_list("job", "pull_secrets", self.pull_secrets, _OBJECT_NAME, "a list of names of Secrets")
        set_field(self, "pull_secrets", secrets)
        for role, low in (("servers", 1), ("trainers", 1), ("head", 1)):
            check_integer(role, "count", getattr(self, role).count, low, 1 if role == "head" else 1 << 20)
        for owner, key, usual, why in _OWN_KEYS:
            for role in ("head", "servers", "workers", "trainers"):
                if role != owner and (value := getattr(getattr(self, role), key)) != usual:
                    raise ConfigError(f"{role}: {key} is {value!r}; {why}: remove it")

    def _check_script(self) -> None:
        script: Any = self.script
        if self.working_dir is not None and not Location.parse(self.working_dir, "working_dir").is_url:
            raise ConfigError(
                f"working_dir is {describe(self.working_dir)}; expected a URL, such as 'gs://bucket/train.zip'"
            )
        where = "a path in the image, such as '/app/train.py'"
        if self.working_dir is not None:
            where = "a path in working_dir, such as 'train.py'"
        parts = script.split("/") if isinstance(script, str) else [".."]
        if not script or ".." in parts or (parts[0] == "") is not (self.working_dir is None):
            raise ConfigError(f"script is {describe(script)}; expected {where}")

    def _check_names(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME.fullmatch(name):
            raise ConfigError(
                f"name is {describe(name)}; expected 1 to {MAX_NAME} lower-case letters, digits and -, a letter first"
            )
        for key in ("namespace", "queue", "priority", "service_account", "ray_tls"):
            _check_object_name("job", key, getattr(self, key))
        if not isinstance(self.ray_version, str) or not re.fullmatch(r"\d+\.\d+\.\d+", self.ray_version):
            raise ConfigError(f"ray_version is {describe(self.ray_version)}; expected a version, such as '2.60.0'")
        if self.zone is not None and not isinstance(self.zone, str):
            raise ConfigError(f"zone is {describe(self.zone)}; expected a zone, such as 'us-central1-a'")

    @property
    def trainer_image(self) -> str:
        """The image of the trainers."""
        return self.image.gpu if self.trainers.gpus and self.image.gpu is not None else self.image.cpu


def parse_job(files: Sequence[tuple[str, str]], changes: Sequence[str] = ()) -> DeployJob:
    """Return the job that files describe, with the changes of the command line, each KEY=VALUE.

    files: name and text of each; a later one replaces values of the earlier ones.
    """
    data: dict[str, Any] = {}
    for name, text in files:
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{name} is not TOML: {error}; expected a job file") from None
        for key, value in content.items():
            old = data.get(key)
            data[key] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    for change in changes:
        _apply(data, change)
    names = ", ".join([*(name for name, _ in files), *(f"--set {change}" for change in changes)])
    for name, kind in _TABLES.items():
        if name in data:
            _from_dict(f"{names}: [{name}]", kind, data[name])
    job: DeployJob = _from_dict(names, DeployJob, data)
    return job


def _from_dict(where: str, kind: type[Serializable], data: Mapping[str, Any]) -> Any:
    """Return an object of the job file. where: the file and the table, which errors name instead of the class."""
    try:
        return kind.from_dict(data)
    except ConfigError as error:
        text = re.sub(rf"^{kind.__name__}: ", "", str(error), flags=re.IGNORECASE)
        raise ConfigError(f"{where}: {text}") from None


_TABLES: dict[str, type[Serializable]] = {
    "image": Image,
    "storage": Storage,
    **dict.fromkeys(("head", "servers", "workers", "trainers"), Role),
}


def _apply(data: dict[str, Any], change: str) -> None:
    """Replace one value. A value that TOML reads as a number, a list or the like is one; others are text."""
    key, separator, value = change.partition("=")
    *tables, last = key.strip().split(".")
    if not separator or not last:
        raise ConfigError(f"--set is {change!r}; expected KEY=VALUE, such as servers.count=8")
    for table in tables:
        data = data.setdefault(table, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set is {change!r}, but {table} is not a table; expected KEY=VALUE of a table")
    try:
        data[last] = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        data[last] = value


def _check_list(where: str, key: str, texts: object, form: re.Pattern[str], expected: str) -> tuple[str, ...]:
    """Return a list of texts of this form as a tuple."""
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and form.fullmatch(text) for text in texts):
        raise ConfigError(f"{where}: {key} is {describe(texts)}; expected {expected}")
    return tuple(texts)


def _check_texts(where: str, key: str, texts: Any, names: re.Pattern[str], values: re.Pattern[str] = _ANY_TEXT) -> None:
    """Check a table of texts. values: their form."""
    if not isinstance(texts, Mapping):
        raise ConfigError(f"{where}: {key} is {describe(texts)}; expected a table of texts, such as {{A = 'b'}}")
    for name, value in texts.items():
        if not isinstance(name, str) or not names.fullmatch(name):
            raise ConfigError(f"{where}: {key} has the name {describe(name)}; expected one that Kubernetes permits")
        if not isinstance(value, str) or not values.fullmatch(value):
            raise ConfigError(f"{where}: {key}.{name} is {describe(value)}; expected a text that Kubernetes permits")


def _check_object_name(where: str, key: str, name: object) -> None:
    if name is not None and (not isinstance(name, str) or not _OBJECT_NAME.fullmatch(name)):
        raise ConfigError(f"{where}: {key} is {describe(name)}; expected the name of an object of Kubernetes")
