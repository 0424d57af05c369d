"""Unix sockets: who may connect, who may listen, and what happens to the socket of a killed server."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpc_parts import Calls, Served, server_process
from satrap.errors import ConfigError
from satrap.rpc import Client, Keys, Service
from satrap.rpc.address import MAX_PATH_BYTES
from satrap.rpc.keys import create_keys
from waiting import DEADLINE_SECONDS

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, too")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path with a short name, unlike tmp_path, that every user can reach. It does not exist yet."""
    place = Path(tempfile.mkdtemp(prefix="satrap-unix-"))
    place.chmod(0o755)
    yield place / "sockets"
    shutil.rmtree(place)


def test_the_folder_is_created_for_this_user_alone(folder: Path) -> None:
    with Service(Served(), Calls, f"ipc://{folder}/0") as service, Client(Calls, service.address) as client:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert service.address == f"ipc://{folder}/0" and client.call.add(2) == 2
        assert stat.S_ISSOCK((folder / "0").stat().st_mode)
    assert not list(folder.iterdir())


def test_any_free_name(folder: Path) -> None:
    with Service(Served(), Calls, f"ipc://{folder}/*") as one, Service(Served(), Calls, f"ipc://{folder}/*") as two:
        assert one.address != two.address
        for each in (one, two):
            with Client(Calls, each.address) as client:
                assert client.call.add(2) == 2


def test_with_keys(folder: Path, tmp_path: Path) -> None:
    server, key = (Keys.read(path) for path in create_keys(tmp_path))
    with (
        Service(Served(), Calls, f"ipc://{folder}/*", server) as service,
        Client(Calls, service.address, key) as client,
    ):
        assert client.call.add(2) == 2


def mode(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o710)


def link(folder: Path) -> None:
    folder.with_name("elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")


def file(folder: Path) -> None:
    folder.touch(0o700)


def another(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, STRANGER, STRANGER)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (mode, r"may be used by others \(mode 710, 10 too many\)"),
        (link, "is a symbolic link"),
        (file, "is not a folder"),
        pytest.param(another, f"belongs to user {STRANGER}, and this is user 0", marks=needs_root),
    ],
)
def test_folders_that_are_not_private(folder: Path, make: Callable[[Path], None], words: str) -> None:
    make(folder)
    address = f"ipc://{folder}/0"
    for what in (lambda: Service(Served(), Calls, address), lambda: Client(Calls, address)):
        with pytest.raises(ConfigError, match=f"of a Unix socket {words}; expected .*`mkdir -m 700`"):
            what()


def test_a_folder_that_cannot_be_created(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used: No such file or directory"):
        Client(Calls, f"ipc://{folder}/deeper/0")


def test_names_that_are_too_long(folder: Path) -> None:
    fits = "x" * (MAX_PATH_BYTES - len(str(folder)) - 1)
    with Service(Served(), Calls, f"ipc://{folder}/{fits}") as service, Client(Calls, service.address) as client:
        assert client.call.add(2) == 2
    with pytest.raises(ConfigError, match=rf"a path of 108 bytes; a Unix socket's path has at most {MAX_PATH_BYTES}"):
        Service(Served(), Calls, f"ipc://{folder}/{fits}x")


def test_two_live_servers_at_one_path(folder: Path) -> None:
    with Service(Served(), Calls, f"ipc://{folder}/0") as service, Client(Calls, service.address) as client:
        with pytest.raises(ConfigError, match="another server listens there; stop it, or choose another name"):
            Service(Served(), Calls, service.address)
        assert client.call.add(2) == 2
    with Service(Served(), Calls, service.address):
        pass


def test_a_server_replaces_the_socket_of_a_killed_one(folder: Path) -> None:
    with (
        server_process(f"ipc://{folder}/0") as (process, address),
        Client(Calls, address, deadline=DEADLINE_SECONDS) as client,
    ):
        assert client.call.add(2) == 2
        process.kill()
        process.wait()
        assert (folder / "0").exists()
        with Service(Served(), Calls, address):
            assert client.call.add(3) == 3


@needs_root
def test_another_user_cannot_use_the_sockets(folder: Path) -> None:
    """Another user can neither call a server there, nor replace it, nor receive calls for it."""
    program = f"""
import os, socket
os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})
folder, path = {str(folder)!r}, {str(folder / "0")!r}
connect = socket.socket(socket.AF_UNIX).connect
tries = [(connect, path), (os.unlink, path), (os.listdir, folder), (os.rename, folder, folder + "x")]
for work, *given in tries:
    try:
        work(*given)
    except PermissionError:
        print("refused")
"""
    served = Served()
    with Service(served, Calls, f"ipc://{folder}/0") as service, Client(Calls, service.address) as client:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["refused"] * 4, done
        assert client.call.add(2) == 2 and served.num_runs == 1
