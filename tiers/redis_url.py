"""URLs of Redis servers: what they may say, and what redis-py makes of them.

What is wrong with a URL is told by the option that is wrong, before anything is connected to.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from redis.connection import Connection, parse_url
from redis.exceptions import RedisError

from .errors import ConfigError
from .redis_wire import CONNECT_ERRORS, Wire, describe
from .settings import expect_text, shown, shown_url

__all__ = ["URL_SETTING", "Address"]

URL_SETTING: Final = "cold.url"
_CLUSTER_SCHEMES: Final = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
_TLS_OPTIONS: Final = frozenset(
    {
        *("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile", "ssl_keyfile", "ssl_password"),
        *("ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers", "ssl_min_version"),
        *("ssl_include_verify_flags", "ssl_exclude_verify_flags"),
    }
)
_URL_OPTIONS: Final = _TLS_OPTIONS | {"db", "username", "password", "client_name", "socket_keepalive"}
"""What a URL's query may say: other arguments of redis-py are objects, set here, or passed over in a URL."""
_SECRET_OPTIONS: Final = frozenset({"password", "ssl_password"})
_LAST_DATABASE: Final = (1 << 31) - 1


@dataclass(frozen=True)
class Address:
    """A parsed URL: how to make connections. Never shown whole, since it holds a password."""

    options: dict[str, Any]
    cluster: bool

    @property
    def host(self) -> str:
        return str(self.options.get("host", "localhost"))

    @property
    def port(self) -> int:
        return int(self.options.get("port", 6379))

    @property
    def label(self) -> str:
        """The server's place, without credentials."""
        path = self.options.get("path")
        return f"unix:{path}" if path is not None else f"{self.host}:{self.port}"

    def at(self, host: str, port: int) -> Address:
        """The same for another server of the Cluster."""
        if (host, port) == (self.host, self.port):
            return self
        return Address({**self.options, "host": host, "port": port}, self.cluster)

    def wire(self) -> Wire:
        """An unconnected connection."""
        options = dict(self.options)
        return Wire(options.pop("connection_class", Connection), options)

    @staticmethod
    def parse(url: str) -> Address:
        """Read a URL.

        Raises:
            ConfigError: it is not one that leads to a Redis.
        """
        url = expect_text(URL_SETTING, url)
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(URL_SETTING, f"cannot be used: {describe(error)}") from error
        cluster = parts.scheme in _CLUSTER_SCHEMES
        scheme = _CLUSTER_SCHEMES.get(parts.scheme, parts.scheme)
        if scheme not in ("redis", "rediss", "unix"):
            raise ConfigError(
                URL_SETTING,
                "must begin with redis://, rediss://, unix://, redis+cluster:// or rediss+cluster://, "
                f"got {shown_url(url)}",
            )
        try:
            for name, value in parse_qsl(parts.query, keep_blank_values=True):
                _check_option(parts.scheme, scheme, name, value)
            options = dict(parse_url(scheme + url[len(parts.scheme) :]))  # type: ignore[no-untyped-call]
            if scheme == "unix" and not options.get("path"):
                raise ConfigError(URL_SETTING, "unix:// needs the path of a socket: unix:///run/redis.sock")
            # redis-py passes over a path that is no number, and over port 0.
            path = "" if scheme == "unix" else unquote(parts.path).strip("/")
            database = str(options.get("db", path))
            if not all(number.isascii() and number.isdecimal() for number in (path, database) if number):
                raise ConfigError(
                    URL_SETTING, f"a database is a number from 0 up, got {path or database!r:.40}"
                )
            if options.get("db", 0) > _LAST_DATABASE:
                raise ConfigError(URL_SETTING, f"the server has no such database: {database:.40}")
            if scheme != "unix" and parts.port == 0:
                raise ConfigError(URL_SETTING, "there is no port 0")
            if cluster and options.get("db", 0) != 0:
                raise ConfigError(URL_SETTING, "a Cluster has database 0 only")
            address = Address(options, cluster)
            address.wire()
            if scheme == "rediss":
                _check_tls(options)
        except ConfigError:
            raise
        except (ValueError, TypeError, *CONNECT_ERRORS) as error:
            raise ConfigError(URL_SETTING, f"cannot be used: {describe(error)}") from error
        return address


def _check_option(written: str, scheme: str, name: str, value: str) -> None:
    """Refuse an option that is none, is none of this scheme, or has a value that redis-py does not take.

    Args:
        written: the scheme as the URL has it.
        scheme: as redis-py has it.
    """
    if name not in _URL_OPTIONS:
        raise ConfigError(URL_SETTING, f"{shown(name)[1:-1]} cannot be set in the URL")
    if not value:
        raise ConfigError(URL_SETTING, f"{name} has no value")
    try:
        options = dict(parse_url(f"{scheme}://localhost/?{name}={quote(value)}"))  # type: ignore[no-untyped-call]
        Address(options, False).wire()
    except TypeError as error:
        if name in _TLS_OPTIONS:
            secure = {"redis": "rediss", "redis+cluster": "rediss+cluster"}.get(written)
            advice = f"use {secure}://" if secure else "there is none on a socket of this machine"
            raise ConfigError(URL_SETTING, f"{name} is for TLS: {advice}") from error
        raise ConfigError(URL_SETTING, f"{name} is no option of {written}://") from error
    except (ValueError, RedisError) as error:
        what = "that" if name in _SECRET_OPTIONS else shown(value)
        raise ConfigError(URL_SETTING, f"{name} cannot be {what}") from error


def _check_tls(options: dict[str, Any]) -> None:
    """Use what the options say, as redis-py does at every connection, and name the one that does not work."""
    context = ssl.create_default_context()
    file, folder, data = (options.get(f"ssl_ca_{kind}") for kind in ("certs", "path", "data"))
    if file is not None:
        _check_file("ssl_ca_certs", file)
        with _named("ssl_ca_certs", f"{file} holds no certificates that can be read"):
            context.load_verify_locations(cafile=file)
    if folder is not None:
        with _named("ssl_ca_path", f"{folder} is no folder that can be read"):
            os.listdir(folder)
    if data is not None:
        with _named("ssl_ca_data", "holds no certificates that can be read"):
            context.load_verify_locations(cadata=data)
    certificate, key = options.get("ssl_certfile"), options.get("ssl_keyfile")
    if certificate is None and key is not None:
        raise ConfigError(URL_SETTING, "ssl_keyfile goes with ssl_certfile")
    if certificate is not None:
        _check_file("ssl_certfile", certificate)
        if key is not None:
            _check_file("ssl_keyfile", key)
        # Without a password OpenSSL would ask for it on the terminal.
        password = options.get("ssl_password", "")
        both = certificate if key is None else f"{certificate} and ssl_keyfile={key}"
        with _named(
            "ssl_certfile",
            f"{both} are no certificate and key that belong together, or the key wants another ssl_password",
        ):
            context.load_cert_chain(certificate, key, password)
    if "ssl_min_version" in options:
        version = options["ssl_min_version"]
        with _named("ssl_min_version", f"{version} is no version of TLS: 771 is 1.2, 772 is 1.3"):
            context.minimum_version = version
    if "ssl_ciphers" in options:
        with _named("ssl_ciphers", "names none that OpenSSL has"):
            context.set_ciphers(options["ssl_ciphers"])


def _check_file(name: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(URL_SETTING, f"{name}: {path} cannot be read: {why}") from error


@contextmanager
def _named(option: str, problem: str) -> Iterator[None]:
    """What is raised within is the option's fault."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:  # ssl.SSLError is one
        raise ConfigError(URL_SETTING, f"{option}: {problem}") from error
