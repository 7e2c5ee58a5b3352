"""What `kvpager doctor` says of the sidecar on a socket, or behind a URL."""

from __future__ import annotations

import os
import ssl
import time
from typing import Final

from .. import __version__
from ..tiers.errors import AccessDeniedError, ConfigError, KVPagerError, ProtocolError, TLSError
from ..tiers.memory import format_bytes
from .client import connect
from .endpoint import Endpoint, TcpEndpoint, UnixEndpoint, endpoint_of
from .findings import Finding, ok, problem, warning
from .listening import default_socket_path
from .serve_settings import TOKEN_VARIABLE

__all__ = ["check_sidecar"]

_NOT_VALID_NOW: Final = (9, 10)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and _HAS_EXPIRED."""
_ANOTHER_HOST: Final = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH."""
_TIMEOUT: Final = 2.0
"""Seconds that a sidecar may take to answer."""


def check_sidecar(
    socket: str | None = None, *, usual: str | None = None, token: str | None = None, ca: str | None = None
) -> Finding:
    """Whether a sidecar answers, and what it has.

    Args:
        socket: path of its socket, or its URL; None: where it is by default. There it may be absent.
        usual: where that is; None: where this user's is if nobody says otherwise.
        token, ca: as for `connect`.
    """
    endpoint, place = None, socket or ""
    try:
        place = socket if socket is not None else usual or default_socket_path()
        if socket is None and not os.path.lexists(place):
            return ok("sidecar", f"none on {place}", "kvpager serve starts one")
        endpoint = endpoint_of(place, token, ca)
        with connect(place, name="kvpager doctor", timeout=_TIMEOUT, token=token, ca=ca) as client:
            began = time.monotonic()
            stats = client.stats()
            seconds = time.monotonic() - began
    except KVPagerError as error:
        return problem("sidecar", str(error), _advice(error, endpoint, place))
    arena, counts, host = stats["arena"], stats["sidecar"], stats["host"]
    version = counts.get("version", "of an unknown version")
    found = (
        f"{place} answers in {seconds * 1e3:.1f} ms: kvpager {version}, "
        f"{format_bytes(arena['ready_bytes'])} of {format_bytes(arena['capacity_bytes'])} there, "
        # The doctor is one of them.
        f"{counts['clients'] - 1} clients, {counts['leased']} leases, {counts['reserved']} reservations, "
        f"{host['committed']} blocks committed, {host['dropped']} dropped"
    )
    if version != __version__:
        return warning("sidecar", found, f"this is kvpager {__version__}: run the same on both sides")
    return ok("sidecar", found)


def _advice(error: KVPagerError, endpoint: Endpoint | None, place: str) -> str:
    """What to do about a sidecar that cannot be asked.

    Args:
        endpoint: where it is; None where what was given names no place.
        place: what was given.
    """
    if isinstance(error, ConfigError):
        return _advice_on_options(error.setting, place)
    if isinstance(error, TLSError):
        return _advice_on_tls(error, endpoint)
    if isinstance(error, ProtocolError):
        return "see that it is a sidecar that listens there, and run the same kvpager on both sides"
    if isinstance(error, AccessDeniedError):
        if isinstance(endpoint, TcpEndpoint):
            return f"give a token of its --token-file: --token-file FILE, or the variable {TOKEN_VARIABLE}"
        return (
            "run this as the sidecar's user, or start it with --allow-uid; in containers, in the same pid "
            "namespace"
        )
    if isinstance(endpoint, TcpEndpoint):
        return (
            "start it there (kvpager serve --listen HOST:PORT), or see its log; see that host and port are "
            "right and that this machine reaches them"
        )
    if isinstance(endpoint, UnixEndpoint) and os.path.exists(endpoint.path):
        if not os.access(endpoint.path, os.W_OK):
            return "run this as the sidecar's user, or start it with --allow-uid"
        return "see its log; if it is not running, start it (kvpager serve)"
    return "start it (kvpager serve), or name its socket (--socket)"


def _advice_on_options(setting: str, place: str) -> str:
    if setting not in ("token", "ca"):
        return "give --socket the path of its socket, or its URL"
    if not place.startswith(("kvpager://", "kvpagers://")):
        return "leave it out, or name a sidecar over TCP: --socket kvpagers://host:port"
    if setting == "token":
        return f"give one of the sidecar's: --token-file FILE, or the variable {TOKEN_VARIABLE}"
    if place.startswith("kvpager://"):
        return "leave it out, or have TLS: --socket kvpagers://host:port"
    return "give a file of certificates, PEM"


def _advice_on_tls(error: TLSError, endpoint: Endpoint | None) -> str:
    if isinstance(endpoint, TcpEndpoint) and endpoint.context is None:
        return (
            f"use --socket kvpagers://{endpoint.place}, with --ca FILE where the system does not know its "
            "authority"
        )
    if isinstance(error.__cause__, ssl.SSLCertVerificationError):
        code = error.__cause__.verify_code
        if code in _NOT_VALID_NOW:
            return (
                "give the sidecar a certificate that is valid now (--tls-cert), or set this machine's clock"
            )
        if code in _ANOTHER_HOST:
            return "name the host in --socket as its certificate does"
        return "give the authority of its certificate (--ca FILE)"
    return "see that the sidecar has --tls-cert and --tls-key; one that speaks plain TCP is kvpager://"
