"""Key files: readable by their owner only, never replaced, refused if damaged. And the addresses that require them."""

import errno
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from network import only_ipv6
from rpc_parts import LOOPBACK, Calls, Served
from satrap.cli.main import main
from satrap.errors import ConfigError
from satrap.monitor.endpoint import HttpEndpoint
from satrap.rpc import Client, Keys, Service
from satrap.rpc.address import advertised_address, join_address, split_address
from satrap.rpc.keys import _distrust, create_keys


def test_each_file_holds_its_own_pair_and_the_others_public_key(tmp_path: Path) -> None:
    server, client = (Keys.read(path) for path in create_keys(tmp_path / "new" / "keys"))
    assert (server.role, client.role) == ("server", "client")
    assert server.peer == client.public and client.peer == server.public
    assert len({server.secret, client.secret, server.public, client.public}) == 4
    assert server.secret.decode() not in repr(server)
    files = sorted((tmp_path / "new" / "keys").iterdir())
    assert [file.name for file in files] == ["client.key", "server.key"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "new" / "keys").stat().st_mode) == 0o700


@pytest.mark.parametrize("there", ["server.key", "client.key"])
def test_no_file_is_ever_replaced(tmp_path: Path, there: str) -> None:
    (tmp_path / there).symlink_to("nowhere")
    with pytest.raises(ConfigError, match=f"{there} already exists; choose another folder"):
        create_keys(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [there]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_keys_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    server, client = (Keys.read(path) for path in create_keys(tmp_path))
    assert server.peer == client.public
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["client.key", "server.key"]
    with pytest.raises(ConfigError, match="already exists"):
        create_keys(tmp_path)


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [Path(line.partition(":")[0]).name for line in out] == ["server.key", "client.key"]
    assert Keys.read(tmp_path / "client.key").role == "client"
    assert main(["keys", str(tmp_path)]) == 1
    assert "already exists" in capsys.readouterr().err
    assert main(["keys", str(tmp_path / "client.key" / "x")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o444, 0o641, 0o777])
def test_a_key_that_others_may_read(tmp_path: Path, mode: int) -> None:
    path, _ = create_keys(tmp_path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"other users may read .*\\(mode {mode:o}\\); create new keys, or chmod"):
        Keys.read(path)


@given(mode=st.integers(0, 0o777), owner=st.sampled_from([0, 1000, 1001]), user=st.sampled_from([0, 1000]))
def test_who_may_read_a_key(mode: int, owner: int, user: int) -> None:
    """No user but the owner has access; of a file of root, its group may read it."""
    status = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 2000, 9, 0, 0, 0))
    permitted = 0o740 if owner == 0 else 0o700 if owner == user else None
    assert (_distrust(status, user) is None) == (permitted is not None and mode & ~permitted == 0)


READ_AS = """
import os, sys
from satrap.rpc import Keys
os.setgroups([2000]), os.setgid(65534), os.setuid(65534)
print(Keys.read(sys.argv[1]).role)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write files of root for another user")
def test_a_secret_as_kubernetes_mounts_it() -> None:
    """A Secret with fsGroup 2000: files of root, links to links, read by a process that is not root."""
    with tempfile.TemporaryDirectory() as name:
        (data := (folder := Path(name)) / "..2026_11_23").mkdir()
        (folder / "..data").symlink_to(data.name)
        for path in create_keys(data):
            (folder / path.name).symlink_to(f"..data/{path.name}")
            os.chown(path, 0, 2000)
            path.chmod(0o440)
        folder.chmod(0o755)
        command = [sys.executable, "-c", READ_AS, str(folder / "client.key")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.stdout == "client\n", done.stderr
        os.chown(data / "client.key", 0, 2001)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert "cannot be read: [Errno 13] Permission denied" in done.stderr
        (data / "client.key").chmod(0o444)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert "other users may read or change it (mode 444)" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user(tmp_path: Path) -> None:
    path, _ = create_keys(tmp_path)
    os.chown(path, 65534, -1)
    with pytest.raises(ConfigError, match="it belongs to user 65534, who may know its secret; create new keys"):
        Keys.read(path)


def test_a_torn_key(tmp_path: Path) -> None:
    path, _ = create_keys(tmp_path)
    whole = path.read_bytes()
    for size in range(len(whole) - 2):  # the last two bytes are "}" and a newline
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="not a key file, or a damaged one"):
            Keys.read(path)


@pytest.mark.parametrize("name", ["format", "role", "secret", "public", "peer", "checksum"])
def test_a_changed_field(tmp_path: Path, name: str) -> None:
    path, other = create_keys(tmp_path)
    theirs = json.loads(other.read_text())[name]
    data = json.loads(path.read_text())
    for value in ("x" if theirs == data[name] else theirs, None, 1, ["a"]):
        path.write_text(json.dumps({**data, name: value}))
        with pytest.raises(ConfigError, match="damaged"):
            Keys.read(path)


def test_files_that_are_not_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*; create keys with `satrap keys DIR`"):
        Keys.read(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"keys is '.*', a folder; expected a key file in it, such as client\.key"):
        Keys.read(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match=r"cannot be read: .*it is a FIFO; expected a regular file"):
        Keys.read(tmp_path / "fifo")
    os.close(os.open(tmp_path / "foreign", os.O_CREAT | os.O_WRONLY, 0o600))
    for text in ("", "[]", "{}", "-----BEGIN", "[" * 4000, "9" * 4096):
        (tmp_path / "foreign").write_text(text)
        with pytest.raises(ConfigError, match="not a key file"):
            Keys.read(tmp_path / "foreign")


def test_a_key_of_the_wrong_side(tmp_path: Path) -> None:
    server, client = (Keys.read(path) for path in create_keys(tmp_path))
    with pytest.raises(ConfigError, match=r"keys of a client, expected those of a server; read server\.key"):
        Service(Served(), Calls, LOOPBACK, client)
    with pytest.raises(ConfigError, match="keys of a server, expected those of a client"):
        Client(Calls, "tcp://127.0.0.1:5", server)


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["tcp://0.0.0.0:0", "tcp://*:*", "tcp://[::]:0", "tcp://192.0.2.7:5555", LOOPBACK, "tcp://localhost:0"]
)
def test_tcp_without_keys_is_refused_on_loopback_too(text: str) -> None:
    with pytest.raises(ConfigError, match=r"without keys: .*listen at ipc:///.*`satrap keys DIR`.*--insecure"):
        Service(Served(), Calls, text)


@pytest.mark.parametrize("text", [LOOPBACK, "tcp://127.0.0.1:*", "tcp://localhost:0", "tcp://127.9.9.9:0", "tcp://*:0"])
def test_insecure_tcp_without_keys(text: str) -> None:
    with Service(Served(), Calls, text, insecure=True) as service:
        _, port = split_address(service.address)
        assert port > 0
        with Client(Calls, service.address if "*:0" not in text else join_address("127.0.0.1", port)) as client:
            assert client.call.add(2) == 2


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no ::1: {error}")
    with Service(Served(), Calls, "tcp://[::1]:0", insecure=True) as service, Client(Calls, service.address) as client:
        assert service.address.startswith("tcp://[::1]:")
        assert client.call.add(2) == 2


def test_every_address_of_a_machine_that_has_only_ipv6() -> None:
    with (
        only_ipv6(),
        Service(Served(), Calls, "tcp://*:0", insecure=True) as service,
        Client(Calls, join_address("fd00::1", split_address(service.address)[1])) as client,
        HttpEndpoint("*:0", list, str) as endpoint,
        urllib.request.urlopen(f"http://[fd00::1]:{endpoint.address.rpartition(':')[2]}/healthz", timeout=5) as page,
    ):
        assert (client.call.add(2), page.status) == (2, 200)


@pytest.mark.parametrize("command", ["server", "worker"])
def test_the_commands_require_keys(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--listen", LOOPBACK]) == 1
    assert "--insecure" in capsys.readouterr().err
    server, _ = create_keys(tmp_path)
    assert main([command, "--listen", LOOPBACK, "--insecure", "--keys", str(server)]) == 1
    assert "both --keys and --insecure were given; expected one of them" in capsys.readouterr().err


def test_keys_work_at_every_address(tmp_path: Path) -> None:
    server, client = (Keys.read(path) for path in create_keys(tmp_path))
    with Service(Served(), Calls, "tcp://*:0", server) as service:
        host, port = split_address(service.address)
        assert host == os.uname().nodename
        with Client(Calls, join_address("127.0.0.1", port), client) as caller:
            assert caller.call.add(2) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:1",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:65536",
        "ipc://*",
        "ipc://x",
        "ipc:///x",
        "ipc:///tmp/..",
        "tcp://::1:5",
        None,
        "tcp://a b:1/",
        "tcp://:1",
        "inproc://x",
    ],
)
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"the address is .*; expected .*e\.g\. tcp://10\.0\.0\.5:5555"):
        Service(Served(), Calls, text)


def test_addresses_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the host 'x{64}' cannot be resolved"):
        Service(Served(), Calls, f"tcp://{'x' * 64}:0", insecure=True)
    server = Keys.read(create_keys(tmp_path)[0])
    for keys in (None, server):
        with (
            Service(Served(), Calls, LOOPBACK, keys, insecure=keys is None) as service,
            pytest.raises(ConfigError, match=r"cannot be served: .*; use a free port"),
        ):
            Service(Served(), Calls, service.address, keys, insecure=keys is None)
    for text in ("tcp://*:5", "tcp://127.0.0.1:0", "tcp://0.0.0.0:5", f"ipc://{tmp_path}/*"):
        with pytest.raises(ConfigError, match="expected that of one server"):
            Client(Calls, text)


@pytest.mark.parametrize(
    ("advertise", "bound", "expected"),
    [
        (None, "tcp://0.0.0.0:5555", "tcp://0.0.0.0:5555"),
        (None, "ipc:///run/x/0", "ipc:///run/x/0"),
        ("tcp://server-0.jobs:5555", "tcp://10.0.0.5:7", "tcp://server-0.jobs:5555"),
        ("tcp://server-0.jobs:0", "tcp://10.0.0.5:7", "tcp://server-0.jobs:7"),
        ("tcp://[fd00::5]:*", "tcp://[::]:7", "tcp://[fd00::5]:7"),
    ],
)
def test_the_advertised_address(advertise: str | None, bound: str, expected: str) -> None:
    assert advertised_address(advertise, bound) == expected


@pytest.mark.parametrize(
    ("advertise", "listen", "problem"),
    [
        ("server-0", LOOPBACK, "the address is 'server-0'; expected e.g."),
        ("tcp://0.0.0.0:5", LOOPBACK, "which names no machine; expected e.g. tcp://server-0"),
        ("tcp://*:5", LOOPBACK, "which names no machine"),
        ("tcp://a:5", "ipc:///run/x/0", "the service listens at ipc:///run/x/0; expected a tcp:// address there"),
    ],
)
@pytest.mark.parametrize("command", ["server", "worker"])
def test_an_address_that_cannot_be_advertised(
    command: str, advertise: str, listen: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--listen", listen, "--insecure", "--advertise", advertise]) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "problem"),
    [("server-0", "the address is 'server-0'; expected e.g."), (LOOPBACK, "would be served without keys")],
)
def test_an_address_that_is_refused_before_a_server_starts(
    address: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is all that the command says: no server has looked for its rows yet."""
    assert main(["server", "--listen", address]) == 1
    found = capsys.readouterr()
    assert problem in found.err and found.err.count("\n") == 1 and not found.out, "one line"


@pytest.mark.parametrize(
    ("address", "problem"),
    [("server-0", "the address is 'server-0'; expected e.g."), ("tcp://*:5", "expected that of one server")],
)
def test_an_address_that_cannot_be_joined(address: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server", "--listen", LOOPBACK, "--insecure", "--join", address]) == 1
    assert problem in capsys.readouterr().err
