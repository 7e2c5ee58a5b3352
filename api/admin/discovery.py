"""Where the admin process of a socket is found: a file beside the socket names its URL and its tokens."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from ...tiers.errors import ServiceUnavailableError

__all__ = ["AdminPlace", "default_token_file", "find_admin", "place_file"]

_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class AdminPlace:
    """Where an admin process is.

    Args:
        url: of its root, without a slash at the end.
        token_file: the path of the file with its tokens.
    """

    url: str
    token_file: str

    def write(self, path: str) -> None:
        """Let it be found there, by this user alone."""
        fresh = f"{path}.{os.getpid()}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(asdict(self), file)
        os.rename(fresh, path)


def place_file(socket: str) -> str:
    """The file that says where the admin process of a socket is."""
    return f"{socket}.admin.json"


def default_token_file(socket: str) -> str:
    """The file of tokens where nobody names another one."""
    return f"{socket}.admin.token"


def find_admin(socket: str) -> AdminPlace:
    """Where the admin process of a socket is.

    Raises:
        ServiceUnavailableError: there is none, or it is another user's.
    """
    path = place_file(socket)
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_uid not in (os.getuid(), 0):
                raise ServiceUnavailableError(f"{path} is another user's")
            values = json.loads(file.read(_MOST_BYTES))
        return AdminPlace(str(values["url"]), str(values["token_file"]))
    except FileNotFoundError as error:
        raise ServiceUnavailableError(f"no admin process serves {socket}: {path} is not there") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServiceUnavailableError(f"{path} does not say where the admin process is: {error}") from error
