"""The certificates that pods of Ray make: two of them connect to each other, and to no other authority's."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from satrap.deploy.kuberay import TLS_SCRIPT

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
AUTHORITY = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=satrap-ray "
    "-keyout ca.key -out ca.crt"
)


def authority(folder: Path) -> Path:
    folder.mkdir()
    subprocess.run(AUTHORITY.split(), cwd=folder, check=True, capture_output=True)
    return folder


def pod(folder: Path, authority: Path) -> Path:
    folder.mkdir()
    names = {"POD_IP": "127.0.0.1", "POD_NAMESPACE": "training", "CA_FOLDER": str(authority), "TLS_FOLDER": str(folder)}
    command = ["bash", "-c", TLS_SCRIPT]
    subprocess.run(command, env=os.environ | names, check=True, capture_output=True, timeout=60)
    assert sorted(path.name for path in folder.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    assert (folder / "tls.key").stat().st_mode & 0o077 == 0
    return folder


def context(folder: Path, protocol: int) -> ssl.SSLContext:
    """Return a context like that of Ray for gRPC: both sides show a certificate."""
    found = ssl.SSLContext(protocol)
    found.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    found.load_verify_locations(folder / "ca.crt")
    found.verify_mode = ssl.CERT_REQUIRED
    return found


def connects(server: Path, client: Path, name: str) -> bool:
    def answer() -> None:
        with listener.accept()[0] as plain:
            try:
                with context(server, ssl.PROTOCOL_TLS_SERVER).wrap_socket(plain, server_side=True) as secure:
                    secure.sendall(b"ready")
            except (ssl.SSLError, ConnectionError):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), timeout=60) as plain:
                secure = context(client, ssl.PROTOCOL_TLS_CLIENT).wrap_socket(plain, server_hostname=name)
                with secure:
                    return secure.recv(5) == b"ready"
        except (ssl.SSLError, ConnectionError):
            return False
        finally:
            thread.join()


def test_pods_of_one_authority_connect_by_address_and_by_the_name_of_the_head(tmp_path: Path) -> None:
    own, other = authority(tmp_path / "own"), authority(tmp_path / "other")
    head, worker, stranger = (
        pod(tmp_path / "head", own),
        pod(tmp_path / "worker", own),
        pod(tmp_path / "stranger", other),
    )
    assert connects(head, worker, "127.0.0.1")
    assert connects(head, worker, "clicks-raycluster-x7d2k-head-svc.training.svc.cluster.local")
    assert not connects(head, worker, "head.elsewhere.svc.cluster.local")
    assert not connects(head, stranger, "127.0.0.1") and not connects(stranger, worker, "127.0.0.1")
