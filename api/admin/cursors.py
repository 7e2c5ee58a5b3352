"""Cursors: where a list goes on, as a word that says nothing to its reader."""

from __future__ import annotations

import base64
import json
from http import HTTPStatus
from typing import Annotated

from fastapi import Query
from starlette.exceptions import HTTPException

__all__ = ["Cursor", "read_cursor", "write_cursor"]

Cursor = Annotated[
    str | None,
    Query(max_length=4096, description="`next_cursor` of the part before; none: from the beginning"),
]


def write_cursor(*place: int | str) -> str:
    """A place as a cursor."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def read_cursor(cursor: str, *kinds: type[int] | type[str]) -> list[int | str]:
    """The place that a cursor names: one value of each of these kinds.

    Raises:
        HTTPException: it is no cursor of this list.
    """
    try:
        place = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except ValueError:
        place = None
    if not isinstance(place, list) or [type(one) for one in place] != list(kinds):
        raise HTTPException(HTTPStatus.NOT_FOUND, "the cursor is none of this list")
    if any(isinstance(one, int) and not -(1 << 62) < one < 1 << 62 for one in place):
        raise HTTPException(HTTPStatus.NOT_FOUND, "the cursor is none of this list")
    return place
