"""Real Redis servers on loopback, for tests and benchmarks: started, tormented, and always cleaned up."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import redis

__all__ = ["RedisServer", "TLSFiles", "free_port", "make_tls_files", "require_redis", "three_masters"]

_START_SECONDS = 15.0


def require_redis() -> str:
    """The path of redis-server; skips the calling test where there is none."""
    path = shutil.which("redis-server")
    if path is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    return path


def free_port() -> int:
    """A TCP port of loopback that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """One redis-server process, listening on TCP and on a Unix socket. A context manager.

    Args:
        folder: where its socket and log go.
        options: further command line options, such as ``"--maxmemory", "64mb"``.
        tls: its TCP port speaks TLS.
        password: what `client` authenticates with.
    """

    def __init__(self, folder: Path, *options: str, tls: bool = False, password: str | None = None) -> None:
        self._binary = require_redis()
        self.folder = folder
        self.port = free_port()
        self._tls = tls
        self.socket_path = folder / f"redis-{self.port}.sock"
        self._options = options
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """``redis://`` URL."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        """``unix://`` URL."""
        return f"unix://{self.socket_path}"

    def client(self) -> redis.Redis:
        """A plain redis-py client over the Unix socket."""
        return redis.Redis(unix_socket_path=str(self.socket_path), password=self._password)

    def start(self) -> None:
        """Start the process and wait until it answers."""
        command = [self._binary, "--bind", "127.0.0.1", "--save", ""]
        command += ["--port", "0", "--tls-port"] if self._tls else ["--port"]
        command += [str(self.port)]
        command += ["--appendonly", "no", "--dir", str(self.folder), "--unixsocket", str(self.socket_path)]
        log = self.folder / f"redis-{self.port}.log"
        self._process = subprocess.Popen(
            [*command, *self._options, "--logfile", str(log)], stdin=subprocess.DEVNULL
        )
        until = time.monotonic() + _START_SECONDS
        with self.client() as client:
            while True:
                try:
                    client.ping()
                except redis.RedisError:
                    if self._process.poll() is not None or time.monotonic() > until:
                        said = log.read_text(errors="replace") if log.exists() else ""
                        self.kill()
                        raise RuntimeError(f"redis-server does not start:\n{said}") from None
                    time.sleep(0.01)
                else:
                    return

    def stall(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("the server does not run")
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


@contextmanager
def three_masters(folder: Path) -> Iterator[list[RedisServer]]:
    """A Cluster of three masters without replicas, each with a third of the slots."""
    bounds = [0, 5461, 10923, 16384]
    with ExitStack() as stack:
        servers = []
        for index in range(3):
            home = folder / f"node{index}"
            home.mkdir()
            server = RedisServer(
                home,
                *("--cluster-enabled", "yes", "--cluster-node-timeout", "2000"),
                *("--cluster-config-file", str(home / "nodes.conf"), "--cluster-port", str(free_port())),
            )
            stack.enter_context(server)
            servers.append(server)
            with server.client() as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        with servers[0].client() as client:
            for server in servers[1:]:
                bus = _bus_port(server)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        until = time.monotonic() + _START_SECONDS
        while not all(_cluster_is_whole(server) for server in servers):
            if time.monotonic() > until:
                raise RuntimeError("the Cluster does not form")
            time.sleep(0.05)
        yield servers


def _bus_port(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.config_get("cluster-port")["cluster-port"])


def _cluster_is_whole(server: RedisServer) -> bool:
    with server.client() as client:
        info = client.execute_command("CLUSTER INFO")
    return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3")


class TLSFiles:
    """Paths of a certificate authority, and of a server's certificate and key."""

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca.pem"
        self.certificate = folder / "server.pem"
        self.key = folder / "server.key"


def make_tls_files(folder: Path) -> TLSFiles:
    """Make a certificate authority and a certificate for 127.0.0.1, good for an hour."""
    pytest.importorskip("cryptography", reason="certificates are made with the package cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    files = TLSFiles(folder)
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def begin(subject: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("kvpager test authority"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    authority = (
        begin("kvpager test authority", ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(True, False, False, False, False, True, True, False, False), critical=True
        )
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        begin("127.0.0.1", key.public_key())
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    files.ca.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return files
