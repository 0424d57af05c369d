"""Limits of control groups: trees of files as the kernel writes them, in both versions, and one real group."""

import json
import math
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.cgroups import MemoryGroup, cpu_limit, memory_groups
from satrap.config import cores

MIB = 1 << 20
NO_LIMIT_1 = 9223372036854771712


class Tree:
    """The mounts and groups that a process sees."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mounted = folder / "proc", folder / "with space/cgroup"
        (self.proc / "self").mkdir(parents=True)
        self._mounts = ["22 1 0:20 / /proc rw - proc proc rw", "23 1 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw"]
        self._groups: list[str] = []

    def mount(self, name: str, kind: str, options: str, root: str = "/") -> Path:
        """Mount a hierarchy. root: the group that is visible at the mount point."""
        (point := self.mounted / name).mkdir(parents=True, exist_ok=True)
        escaped = str(point).replace(" ", "\\040")
        self._mounts.append(f"{40 + len(self._mounts)} 23 0:30 {root} {escaped} rw shared:9 - {kind} cgroup {options}")
        (self.proc / "self/mountinfo").write_text("\n".join(self._mounts) + "\n")
        return point

    def join(self, controllers: str, group: str) -> None:
        self._groups.append(f"{len(self._groups)}:{controllers}:{group}")
        (self.proc / "self/cgroup").write_text("\n".join(self._groups) + "\n")


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".", 1)).write_text(f"{content}\n")


def write_memory_2(folder: Path, limit: object, used: int = 0, droppable: int = 0) -> None:
    stat = f"anon 5\nshmem 4096\ninactive_anon 4096\ninactive_file {droppable}\nactive_file 77"
    write(folder, memory__max=limit, memory__current=used, memory__stat=stat)


def write_memory_1(folder: Path, limit: int, used: int = 0, droppable: int = 0, hierarchical: int = NO_LIMIT_1) -> None:
    stat = (
        f"cache 9\ninactive_file 3\nhierarchical_memory_limit {hierarchical}\n"
        f"total_shmem 4096\ntotal_inactive_file {droppable}"
    )
    write(folder, memory__limit_in_bytes=limit, memory__usage_in_bytes=used, memory__stat=stat)


def test_version_2_counts_every_group_up_to_the_visible_root(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    root = tree.mount("", "cgroup2", "rw,nsdelegate")
    tree.join("", "/pod/container/job")
    write_memory_2(root / "pod", 1000 * MIB, 900 * MIB, 100 * MIB)
    write_memory_2(root / "pod/container", 400 * MIB, 50 * MIB, 20 * MIB)
    write_memory_2(root / "pod/container/job", "max", 9 * MIB)
    write_memory_2(root / "other", MIB)
    write(root / "pod", cpu__max="150000 100000")
    write(root / "pod/container", cpu__max="max 100000")
    assert memory_groups(tree.proc) == [
        MemoryGroup(30 * MIB, 400 * MIB),  # shared memory is in `memory.current`, and is no file that can be dropped
        MemoryGroup(800 * MIB, 1000 * MIB),
    ]
    assert cpu_limit(tree.proc) == 1.5


def test_version_1_has_a_hierarchy_for_each_controller(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    memory = tree.mount("memory", "cgroup", "rw,memory")
    cpu = tree.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    tree.mount("cpuset", "cgroup", "rw,cpuset")
    tree.mount("unified", "cgroup2", "rw")
    for controllers, group in (("cpuset", "/"), ("cpu,cpuacct", "/jobs/one"), ("memory", "/docker/abc"), ("", "/x")):
        tree.join(controllers, group)
    write_memory_1(memory, NO_LIMIT_1, 7 * MIB)
    write_memory_1(memory / "docker", NO_LIMIT_1, 6 * MIB)
    write_memory_1(memory / "docker/abc", 400 * MIB, 60 * MIB, 10 * MIB)
    write(cpu, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    write(cpu / "jobs", cpu__cfs_quota_us=25000, cpu__cfs_period_us=50000)
    write(cpu / "jobs/one", cpu__cfs_quota_us=200000, cpu__cfs_period_us=100000)
    assert memory_groups(tree.proc) == [MemoryGroup(50 * MIB, 400 * MIB)]
    assert cpu_limit(tree.proc) == 0.5


def test_a_container_sees_its_group_at_the_mount_point(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    memory = tree.mount("memory", "cgroup", "rw,memory", root="/kubepods/pod1/abc")
    tree.join("memory", "/kubepods/pod1/abc")
    write_memory_1(memory, NO_LIMIT_1, 10, hierarchical=300 * MIB)  # the limit is that of the pod, which is not visible
    assert memory_groups(tree.proc) == [MemoryGroup(10, 300 * MIB)]


@pytest.mark.parametrize("group", ["/../../elsewhere", "/other", "/"])
def test_a_group_outside_the_mount_has_at_least_the_limits_of_its_root(tmp_path: Path, group: str) -> None:
    tree = Tree(tmp_path)
    root = tree.mount("", "cgroup2", "rw", root="/" if ".." in group else "/docker/abc")
    tree.join("", group)
    write_memory_2(root, 5 * MIB)
    assert memory_groups(tree.proc) == [MemoryGroup(0, 5 * MIB)]


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_groups(tmp_path) == [] and cpu_limit(tmp_path) is None
    tree = Tree(tmp_path)
    tree.join("", "/a")
    root = tree.mount("", "cgroup2", "rw")
    assert memory_groups(tree.proc) == [] and cpu_limit(tree.proc) is None
    write(root / "a", cpu__max="max 100000", memory__max="max", memory__current="1")
    assert memory_groups(tree.proc) == [] and cpu_limit(tree.proc) is None
    (tree.proc / "self/mountinfo").write_text("torn\n")
    assert memory_groups(tree.proc) == [] and cpu_limit(tree.proc) is None


level = st.tuples(st.none() | st.integers(1, 1 << 45), st.none() | st.integers(1000, 10_000_000))


@given(levels=st.lists(level, min_size=1, max_size=5), version=st.sampled_from([1, 2]), hidden=st.integers(0, 4))
def test_the_tightest_of_all_visible_groups_counts(
    tmp_path_factory: pytest.TempPathFactory, levels: list[tuple[int | None, int | None]], version: int, hidden: int
) -> None:
    """levels: limit of memory and quota of each group, the process's own last. hidden: how many are above the mount."""
    tree = Tree(tmp_path_factory.mktemp("groups"))
    hidden = min(hidden, len(levels) - 1)
    names = [f"g{number}" for number in range(len(levels))]
    root = "/" + "/".join(names[:hidden])
    if version == 2:
        points = [tree.mount("", "cgroup2", "rw", root)] * 2
        tree.join("", "/" + "/".join(names))
    else:
        points = [tree.mount(each, "cgroup", f"rw,{each}", root) for each in ("memory", "cpu")]
        for each in ("memory", "cpu"):
            tree.join(each, "/" + "/".join(names))
    visible = levels[hidden - 1 if hidden else 0 :]
    folders = ["/".join(names[hidden:end]) for end in range(hidden if hidden else 1, len(names) + 1)]
    for folder, (limit, quota) in zip(folders, visible, strict=True):
        if version == 2:
            write_memory_2(points[0] / folder, "max" if limit is None else limit)
            write(points[1] / folder, cpu__max=f"{'max' if quota is None else quota} 100000")
        else:
            write_memory_1(points[0] / folder, NO_LIMIT_1 if limit is None else limit)
            write(points[1] / folder, cpu__cfs_quota_us=-1 if quota is None else quota, cpu__cfs_period_us=100000)
    limits = [limit for limit, _ in reversed(visible) if limit is not None]
    assert [group.limit_bytes for group in memory_groups(tree.proc)] == limits
    quotas = [quota / 100000 for _, quota in visible if quota is not None]
    assert cpu_limit(tree.proc) == min(quotas, default=None)


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (0.2, 1), (1.0, 1), (1.01, 2), (3.5, 4), (64.0, 8)])
def test_a_part_of_a_core_counts_as_one(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "cpu_limit", lambda: quota)
    assert cores.num_cores() == cores.thread_count(None) == expected
    assert cores.thread_count(5) == 5


# -- a real group ------------------------------------------------------------------------------------------------------

CHILD = """
import json, mmap, os, sys, tempfile
for group in sys.argv[2:]:
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
from satrap.cgroups import memory_groups
from satrap.config.cores import num_cores
from satrap.monitor.memory import memory, memory_limit
used = lambda: min(memory_groups(), key=lambda group: group.limit_bytes).used_bytes
before = used()
with tempfile.TemporaryFile(dir="/dev/shm") as file:
    file.truncate(int(sys.argv[1]))
    with mmap.mmap(file.fileno(), 0) as rows:
        for page in range(0, len(rows), mmap.PAGESIZE):
            rows[page] = 1
        print(json.dumps({"limit": memory_limit("/dev/shm/x"), "machine": memory()["machine"], "cores": num_cores(),
                          "rows": used() - before}))
"""


@contextmanager
def real_groups(limit: int, quota: int) -> Iterator[list[Path]]:
    """Make groups with this limit of memory and this quota of CPU time, in 100,000; skip the test if that fails."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    name = f"satrap-test-{uuid.uuid4().hex[:12]}"
    version_2 = [Path(point) for _, point, kind, *_ in mounts if kind == "cgroup2"]
    made: dict[Path, dict[str, object]] = {}
    for _, point, kind, options, *_ in mounts:
        controllers = {"memory", "cpu"} & set(options.split(","))
        for each in controllers if kind == "cgroup" else ():
            file = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us"}[each]
            made.setdefault(Path(point) / name, {})[file] = limit if each == "memory" else quota
    if not made and version_2:
        made[version_2[0] / name] = {"memory.max": limit, "cpu.max": f"{quota} 100000"}
    with ExitStack() as stack:
        try:
            for folder, files in made.items():
                folder.mkdir()
                stack.callback(folder.rmdir)
                for file, value in files.items():
                    (folder / file).write_text(str(value))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        if not made:
            pytest.skip("no control groups are mounted here")
        yield list(made)


def test_a_process_in_a_real_group_knows_its_limits() -> None:
    with real_groups(400 * MIB, 150_000) as groups:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(32 * MIB), *map(str, groups)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        with suppress(OSError):  # what the kernel still counts of the child does not delay the removal
            (groups[0] / "memory.force_empty").write_text("0")
    found = json.loads(done.stdout)
    assert found["limit"] == 400 * MIB and found["machine"][1] <= 400 * MIB
    assert found["cores"] == min(2, len(os.sched_getaffinity(0))) == math.ceil(min(1.5, found["cores"]))
    assert 31 * MIB <= found["rows"] < 48 * MIB, "shared memory counts"  # what the process freed meanwhile does not


CONTENTS = ["max", "max 100000", "0", "-1", "", "\n", "1 0", "0 100000", "100000 100000", "-1 100000", "1e9", "x y z"]
CONTENTS += ["9" * 400, "\xff\xfe", "anon 5\n\ninactive_file 7", "inactive_file", "inactive_file -9", "5000000", "\0"]
FILES = ["memory.max", "memory.current", "memory.stat", "memory.limit_in_bytes", "memory.usage_in_bytes", "cpu.max"]
FILES += ["cpu.cfs_quota_us", "cpu.cfs_period_us"]


def test_any_content_is_a_limit_or_none(tmp_path: Path, seed: int) -> None:
    """A file that is no kernel's, such as one of a container runtime that emulates them, limits nothing."""
    rng = random.Random(seed)
    for number in range(300):
        tree = Tree(tmp_path / str(number))
        points = [tree.mount("two", "cgroup2", "rw"), tree.mount("one", "cgroup", "rw,memory,cpu")]
        tree.join("", rng.choice(["/", "/a", "/a/b", "/../x", "a"]))
        tree.join("memory,cpu", rng.choice(["/", "/a", "/..", "x"]))
        for folder in (place for point in points for place in (point, point / "a")):
            folder.mkdir(exist_ok=True)
            for name in rng.sample(FILES, 6):
                (folder / name).write_bytes(rng.choice(CONTENTS).encode("latin1"))
        if rng.random() < 0.3:
            mounts = bytearray((tree.proc / "self/mountinfo").read_bytes())
            mounts[rng.randrange(len(mounts))] = rng.randrange(256)
            (tree.proc / "self/mountinfo").write_bytes(mounts)
        assert all(group.limit_bytes >= 0 and group.used_bytes >= 0 for group in memory_groups(tree.proc))
        quota = cpu_limit(tree.proc)
        assert quota is None or 0 < quota < math.inf
