"""The tokens that operators say: a file of them, made at the first start, and who may do what.

A line of the file is ``ROLE:TOKEN``, the roles ``read`` and ``operate``; empty lines and lines that begin
with ``#`` are passed over. Nobody but its owner can read it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping

from ...tiers.errors import ConfigError
from ...tiers.settings import expect_path
from ..remote_access import check_token
from ..secret_file import read_secret_file
from .models import Role

__all__ = ["Tokens", "make_token_file"]

_MOST_FILE = 1 << 16
_RANDOM_BYTES = 32


class Tokens:
    """Tokens and their roles. What they are is never shown.

    Args:
        roles: of each token.

    Raises:
        ConfigError: one is too short, too long, or has characters that a line does not have.
    """

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self._digests = [
            (hashlib.sha256(check_token("token", token).encode()).digest(), role)
            for token, role in roles.items()
        ]

    @classmethod
    def read(cls, setting: str, path: str | os.PathLike[str]) -> Tokens:
        """The tokens in a file.

        Raises:
            ConfigError: it cannot be read, others than its owner can read it, a line is no ``ROLE:TOKEN``
                (which is told by its number, and not shown), or there is none.
        """
        try:
            text = read_secret_file(setting, path, most=_MOST_FILE).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(setting, f"{path} is no text") from error
        roles: dict[str, Role] = {}
        for number, line in enumerate(text.split("\n"), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, separator, token = line.partition(":")
            if not separator or name not in list(Role):
                raise ConfigError(
                    setting, f"line {number} of {path} is no ROLE:TOKEN, the role read or operate"
                )
            try:
                check_token(setting, token)
            except ConfigError as error:
                raise ConfigError(setting, f"line {number} of {path} {error.problem}") from error
            # Said for both, it may do what either says.
            roles[token] = Role.OPERATE if Role.OPERATE in (roles.get(token), name) else Role.READ
        if not roles:
            raise ConfigError(setting, f"{path} has no token")
        return cls(roles)

    def role_of(self, said: str) -> Role | None:
        """What who says this may do; None: it is no token. Takes as long whatever it is: all are compared."""
        digest = hashlib.sha256(said.encode(errors="surrogateescape")).digest()
        found = [role for known, role in self._digests if hmac.compare_digest(digest, known)]
        return found[0] if found else None


def make_token_file(path: str | os.PathLike[str]) -> None:
    """Make a file with one token of each role, unless there is one.

    Raises:
        ConfigError: it cannot be made.
    """
    path = expect_path("--admin-token-file", path)
    # Under another name until it is whole, so that no half of one is ever read; one that is there stays.
    fresh = f"{path}.{os.getpid()}.new"
    lines = "".join(f"{role.value}:{secrets.token_urlsafe(_RANDOM_BYTES)}\n" for role in Role)
    try:
        if os.path.lexists(path):
            return
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(lines)
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass  # somebody else was first
        finally:
            os.unlink(fresh)
    except OSError as error:
        raise ConfigError("--admin-token-file", f"{path} cannot be made: {error.strerror}") from error
