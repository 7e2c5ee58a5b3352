"""Who may ask what, how much and how often: seen before a request reaches a route.

Looking needs no token on this machine: the other side's address is loopback, and so is the host that it asks
for, which a page of another site cannot have (DNS rebinding), and nobody passes it on for somebody else.
Changing anything needs a token that may, always. There is no CORS: no other site's page reads an answer.
Sources: RFC 6750 (bearer tokens), RFC 9110, W3C CSP3, fetch metadata (Sec-Fetch-Site).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .address import is_loopback
from .models import Role
from .problems import problem_answer
from .tokens import Tokens

__all__ = ["Bounds", "Safety", "is_loopback_host", "role_of"]

_OPEN: Final = ("/", "/healthz", "/readyz", "/favicon.ico")
"""Without any right: probes, and the dashboard's page, which asks for the rest."""
_OPEN_BELOW: Final = "/static/"
_READS: Final = ("GET", "HEAD", "OPTIONS")
_READ_BY_POST: Final = "/v1/prefixes/lookup"
_PASSED_ON: Final = ("forwarded", "x-forwarded-for", "via")
"""Headers of a proxy, behind which everybody would be of this machine."""
_BEARER: Final = "bearer "
_MOST_PEERS: Final = 1024
_TOO_LARGE: Final = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class Bounds:
    """What one address may ask.

    Args:
        body_bytes: of one request.
        requests: in a row, and
        requests_per_second: for long.
        refusals: wrong tokens in a row, and
        refusals_per_second: for long.
    """

    body_bytes: int = 2 << 20
    requests: int = 400
    requests_per_second: float = 200.0
    refusals: int = 60
    refusals_per_second: float = 2.0


class _Buckets:
    """What is left to each address: it fills up as time goes by."""

    def __init__(self, size: float, per_second: float) -> None:
        self._size = size
        self._per_second = per_second
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, who: str) -> bool:
        """Whether there was one left."""
        now = time.monotonic()
        left, at = self._left.get(who, (self._size, now))
        left = min(self._size, left + (now - at) * self._per_second)
        self._left[who] = left - 1 if left >= 1 else left, now
        self._left.move_to_end(who)
        if len(self._left) > _MOST_PEERS:
            self._left.popitem(last=False)
        return left >= 1


class Safety:
    """ASGI middleware that lets through what may pass, with `role` in the request's state.

    Args:
        app: what is behind it.
        tokens: who may do what.
        bounds: how much of it.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, bounds: Bounds | None = None) -> None:
        self._app = app
        self._tokens = tokens
        self._bounds = bounds or Bounds()
        self._requests = _Buckets(self._bounds.requests, self._bounds.requests_per_second)
        self._refusals = _Buckets(self._bounds.refusals, self._bounds.refusals_per_second)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        guarded = _with_headers(send)
        headers = Headers(scope=scope)
        who = scope["client"][0] if scope.get("client") else ""
        refused = self._refused(scope, headers, who)
        if refused is not None:
            await refused(scope, receive, guarded)
            return
        if scope["method"] == "HEAD":
            # What would be got, without its body (RFC 9110, 9.3.2): probes ask so.
            scope, guarded = {**scope, "method": "GET"}, _with_no_body(guarded)
        await self._app(scope, _bounded(receive, self._bounds.body_bytes), guarded)

    def _refused(self, scope: Scope, headers: Headers, who: str) -> ASGIApp | None:
        """Why it is not let through, as an answer; None: it is, and its role stands in the scope."""
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        if not self._requests.take(who):
            return _too_often(path, "too many requests from this address")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._bounds.body_bytes:
            return self._too_large(path)
        said = headers.get("authorization", "")
        role: Role | None = None
        if said:
            if said[: len(_BEARER)].lower() == _BEARER:
                role = self._tokens.role_of(said[len(_BEARER) :].strip())
            if role is None and not self._refusals.take(who):
                # Not for right ones: others of this address are not to be locked out.
                return _too_often(path, "too many wrong tokens from this address")
            if role is None:
                return _unauthorized(path, "the token is none that is known", "invalid_token")
        elif self._is_local(headers, who):
            role = Role.READ
        scope.setdefault("state", {})["role"] = role
        if path in _OPEN or path.startswith(_OPEN_BELOW):
            return None
        if role is None:
            return _unauthorized(path, "a token is needed: Authorization: Bearer TOKEN", None)
        changes = scope["method"] not in _READS and path != _READ_BY_POST
        if changes and not said:
            return _unauthorized(path, "changing anything needs a token of role operate", None)
        if changes and role != Role.OPERATE:
            return problem_answer(
                HTTPStatus.FORBIDDEN, "the token is of role read, this needs one of role operate", path
            )
        return None

    def _is_local(self, headers: Headers, who: str) -> bool:
        if not is_loopback(who) or any(name in headers for name in _PASSED_ON):
            return False
        return is_loopback_host(headers.getlist("host")) and headers.get("sec-fetch-site") != "cross-site"

    def _too_large(self, path: str) -> ASGIApp:
        detail = f"a body has {self._bounds.body_bytes} bytes at most"
        return problem_answer(_TOO_LARGE, detail, path, headers={"Connection": "close"})


def is_loopback_host(hosts: Iterable[str]) -> bool:
    """Whether the one ``Host`` that is asked for can be this machine alone."""
    given = list(hosts)
    if len(given) != 1:
        return False
    name = given[0].lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    else:
        name = name.rpartition(":")[0] if ":" in name else name
    return name == "localhost" or is_loopback(name)


def _unauthorized(path: str, detail: str, error: str | None) -> ASGIApp:
    challenge = 'Bearer realm="kvpager"' + (f', error="{error}"' if error else "")
    return problem_answer(HTTPStatus.UNAUTHORIZED, detail, path, headers={"WWW-Authenticate": challenge})


def _too_often(path: str, detail: str) -> ASGIApp:
    return problem_answer(HTTPStatus.TOO_MANY_REQUESTS, detail, path, headers={"Retry-After": "1"})


def _bounded(receive: Receive, most: int) -> Receive:
    """The same, of `most` bytes of body at most."""
    came = 0

    async def bounded() -> MutableMapping[str, Any]:
        nonlocal came
        message = await receive()
        came += len(message.get("body", b""))
        if came > most:
            raise HTTPException(_TOO_LARGE, f"a body has {most} bytes at most", {"Connection": "close"})
        return message

    return bounded


def _with_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return guarded


def _with_no_body(send: Send) -> Send:
    """The same, ended where a body would begin: one of events would have no end."""
    ended = False

    async def headers_alone(message: Message) -> None:
        nonlocal ended
        if message["type"] == "http.response.start":
            await send(message)
        elif not ended:
            ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return headers_alone


def role_of(request: Request) -> Role | None:
    """What who asks may do; None: nothing but what is open."""
    role: Role | None = request.scope.get("state", {}).get("role")
    return role
