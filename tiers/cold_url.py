"""One way to name a cold tier in a setting: its URL."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from .cold import ColdTier
from .cold_disk import DEFAULT_DEADLINE as DISK_DEADLINE
from .cold_disk import DiskColdTier
from .errors import ConfigError
from .settings import expect_path, shown_url

__all__ = ["cold_folder", "open_cold_tier", "public_url"]

_SECRET_OPTIONS: Final = frozenset({"password", "ssl_password"})
_REDIS_SCHEMES: Final = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")


def open_cold_tier(
    url: str | os.PathLike[str],
    *,
    capacity_bytes: int | None = None,
    secret: str | bytes | None = None,
    ttl: int | None = None,
    connections: int | None = None,
    deadline: float | None = None,
    fsync: bool = False,
) -> ColdTier:
    """Open the cold tier that a URL names.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://`` or ``rediss+cluster://``
            (`RedisColdTier`); ``disk:///path`` or a bare path (`DiskColdTier`).
        capacity_bytes: most bytes on disk; needed for a disk, and not for a Redis, which has `maxmemory`.
        secret: seal payloads with AES-256-GCM.
        ttl: Redis only: seconds until a record expires.
        connections: Redis only.
        deadline: seconds that a call may take where it does not say; None takes the tier's default.
        fsync: disk only: records survive a loss of power as soon as they are acknowledged.

    Raises:
        ConfigError: the scheme is unknown, or a setting does not go with it or is out of range.
        ColdTierUnavailableError: something answers there that is no Redis.
    """
    url = expect_path("cold.url", url)
    path = cold_folder(url)
    if path is None:
        if capacity_bytes is not None:
            raise ConfigError("cold.capacity_bytes", "is for a disk; limit a Redis with its own maxmemory")
        if fsync is not False:
            raise ConfigError("cold.fsync", "is for a disk")
        # Here, since redis takes a good part of the time in which a sidecar starts that has none.
        from .cold_redis import DEFAULT_CONNECTIONS, RedisColdTier
        from .cold_redis import DEFAULT_DEADLINE as REDIS_DEADLINE

        return RedisColdTier(
            url,
            secret=secret,
            ttl=ttl,
            connections=DEFAULT_CONNECTIONS if connections is None else connections,
            deadline=REDIS_DEADLINE if deadline is None else deadline,
        )
    if capacity_bytes is None:
        raise ConfigError("cold.capacity_bytes", "is needed for a cold tier on disk")
    if ttl is not None or connections is not None:
        raise ConfigError("cold.ttl" if ttl is not None else "cold.connections", "is for a Redis")
    return DiskColdTier(
        path,
        capacity_bytes=capacity_bytes,
        secret=secret,
        fsync=fsync,
        deadline=DISK_DEADLINE if deadline is None else deadline,
    )


def cold_folder(url: str) -> str | None:
    """The folder of the cold tier that a URL names; None where it names a Redis.

    Raises:
        ConfigError: it names neither.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme.lower() in _REDIS_SCHEMES:
        return None
    if separator and scheme != "disk":
        known = ", ".join(f"{one}://" for one in _REDIS_SCHEMES)
        raise ConfigError(
            "cold.url", f"must begin with {known} or disk:///, or be a folder's path, got {shown_url(url)}"
        )
    path = rest if separator else url
    if not path:
        raise ConfigError("cold.url", f"{url!r} names no folder")
    if separator and not path.startswith("/"):
        raise ConfigError("cold.url", f"{url!r} needs an absolute path: disk:///{path}")
    return path


def public_url(url: str) -> str:
    """A URL of `open_cold_tier` without what is secret in it: passwords, wherever they stand.

    Raises:
        ConfigError: it names no cold tier.
    """
    if cold_folder(url) is not None:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{url.partition('://')[0]}://"
    user, separator, host = parts.netloc.rpartition("@")
    place = f"{user.partition(':')[0]}@{host}" if separator and user.partition(":")[0] else host
    options = [one for one in parse_qsl(parts.query) if one[0] not in _SECRET_OPTIONS]
    return parts._replace(netloc=place, query=urlencode(options)).geturl()
