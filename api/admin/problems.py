"""Errors as ``application/problem+json`` (RFC 9457): every answer that is none says why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ...tiers.errors import (
    AccessDeniedError,
    CapacityError,
    ClosedError,
    ColdTierError,
    ColdTierFullError,
    ColdTierUnavailableError,
    CommandError,
    ConfigError,
    KVPagerError,
    LayoutError,
    MemoryUnavailableError,
    NotInPlaceError,
    RequestError,
    ServiceError,
    ServiceUnavailableError,
    StaleHandleError,
)
from .models import Invalid, Problem

__all__ = ["MEDIA_TYPE", "add_handlers", "documented", "problem_answer"]

_log = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
_RETRY_SECONDS: Final = 1
_OF_EVERY_ROUTE: Final = (400, 401, 429)
_MOST_INVALID: Final = 20
_STATUSES: Final[Sequence[tuple[type[KVPagerError], HTTPStatus]]] = (
    (ConfigError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (RequestError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (CapacityError, HTTPStatus.INSUFFICIENT_STORAGE),
    (MemoryUnavailableError, HTTPStatus.INSUFFICIENT_STORAGE),
    (ColdTierFullError, HTTPStatus.INSUFFICIENT_STORAGE),
    (ColdTierUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (ColdTierError, HTTPStatus.BAD_GATEWAY),
    (ServiceUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (CommandError, HTTPStatus.CONFLICT),
    (NotInPlaceError, HTTPStatus.CONFLICT),
    (AccessDeniedError, HTTPStatus.BAD_GATEWAY),
    (ServiceError, HTTPStatus.BAD_GATEWAY),
    (ClosedError, HTTPStatus.SERVICE_UNAVAILABLE),
    (StaleHandleError, HTTPStatus.CONFLICT),
    (LayoutError, HTTPStatus.CONFLICT),
)
"""Of each kind of error; the first that it is counts, and any other is 500."""


def add_handlers(app: FastAPI) -> None:
    """Have every error of an application answered as a problem."""
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(KVPagerError, _of_error)
    app.add_exception_handler(Exception, _of_fault)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI is told of the problems that a route may answer with, beside those of every route."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted({*_OF_EVERY_ROUTE, *statuses})
    }


def problem_answer(
    status: int,
    detail: str,
    path: str,
    *,
    kind: str | None = None,
    setting: str | None = None,
    invalid: Sequence[Invalid] = (),
    headers: dict[str, str] | None = None,
) -> Response:
    """A problem as an answer.

    Args:
        kind: names it, where the status does not say enough.
        path: what was asked for.
    """
    phrase = HTTPStatus(status).phrase
    problem = Problem(
        type=f"urn:kvpager:problem:{kind or phrase.lower().replace(' ', '-')}",
        title=phrase,
        status=status,
        detail=detail,
        instance=path,
        setting=setting,
        invalid=list(invalid),
    )
    return JSONResponse(problem.model_dump(mode="json"), status, headers, MEDIA_TYPE)


def _of_http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise TypeError("called for another kind of error")
    return problem_answer(
        error.status_code, error.detail, request.url.path, headers=dict(error.headers or {})
    )


def _of_validation(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise TypeError("called for another kind of error")
    # What was sent is not said again: it may be a prompt.
    invalid = [
        Invalid(where=".".join(map(str, one["loc"])), problem=one["msg"])
        for one in error.errors()[:_MOST_INVALID]
    ]
    detail = "; ".join(f"{one.where}: {one.problem}" for one in invalid[:3])
    status = HTTPStatus.UNPROCESSABLE_ENTITY
    return problem_answer(status, detail, request.url.path, kind="invalid-request", invalid=invalid)


def _of_error(request: Request, error: Exception) -> Response:
    status = next((known for kind, known in _STATUSES if isinstance(error, kind)), None)
    if status is None:
        return _of_fault(request, error)
    headers = {"Retry-After": str(_RETRY_SECONDS)} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
    return problem_answer(
        status,
        str(error) or type(error).__name__,
        request.url.path,
        kind=_spelled(type(error).__name__),
        setting=getattr(error, "setting", None),
        headers=headers,
    )


def _of_fault(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    detail = "a fault of the admin process, which its log tells of"
    return problem_answer(HTTPStatus.INTERNAL_SERVER_ERROR, detail, request.url.path)


def _spelled(name: str) -> str:
    """``ColdTierFullError`` as ``cold-tier-full``."""
    name = name.removesuffix("Error")
    return "".join(
        f"-{letter.lower()}" if letter.isupper() and at and not name[at - 1].isupper() else letter.lower()
        for at, letter in enumerate(name)
    )
