"""docs/rest.md says what the admin API is: every route, what it takes and what it answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

from kvpager.api.admin import models
from kvpager.api.admin.app import create_app
from kvpager.api.admin.models import Role
from kvpager.api.admin.reference_page import reference_page
from kvpager.api.admin.tokens import Tokens
from kvpager.api.client_async import AsyncConnection

PAGE = Path(__file__).resolve().parents[1] / "docs" / "rest.md"
ROW = re.compile(
    r"^\| `(GET|PUT|POST|PATCH|DELETE) ([^`]+)` \| (none|read|operate) \| (.*?)→ (.*?) \|", re.MULTILINE
)


def document() -> dict[str, Any]:
    """The OpenAPI document, for which no sidecar is needed."""
    connection = cast(AsyncConnection, None)
    tokens = Tokens({"x" * 16: Role.READ})
    made: dict[str, Any] = create_app(connection, lambda: connection, tokens, group=bytes(16)).openapi()
    return made


def named(schema: dict[str, Any]) -> set[str]:
    """The models that a schema names, as the page has them."""
    if "anyOf" in schema:
        return set().union(*map(named, schema["anyOf"]))
    if "$ref" not in schema:
        return set()
    name = schema["$ref"].rpartition("/")[2]
    return {re.sub(r"^(Page|Listed)_(\w+)_$", r"\1[\2]", name)}


def test_the_page_has_every_route_with_what_it_takes_and_answers() -> None:
    rows = {
        (method, path): (right, takes, answers)
        for method, path, right, takes, answers in ROW.findall(PAGE.read_text())
    }
    operations = {
        (method.upper(), path): operation
        for path, methods in document()["paths"].items()
        for method, operation in methods.items()
    }
    assert set(rows) == set(operations)
    for route, operation in operations.items():
        right, takes, answers = rows[route]
        body = (
            operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        )
        assert set(re.findall(r"`(\w+)`", takes)) == named(body), route
        answer = (
            operation["responses"]["200"].get("content", {}).get("application/json", {}).get("schema", {})
        )
        assert not named(answer) or named(answer) <= set(re.findall(r"`([\w\[\]]+)`", answers)), route
        assert (right == "operate") == (operation["security"] == [{"token": []}]), route


def test_every_model_says_what_it_is_and_every_number_what_it_is_of() -> None:
    for name, schema in document()["components"]["schemas"].items():
        assert schema.get("description") or name.startswith(("Page_", "Listed_")), name
        for field, values in schema.get("properties", {}).items():
            if values.get("type") == "number":
                assert values.get("description"), (name, field)
            if field.endswith(("bytes", "blocks", "tokens")) and values.get("type") == "integer":
                assert values.get("description"), (name, field)


def test_every_model_is_used() -> None:
    known = set(document()["components"]["schemas"])
    generic = {"Page", "Listed"}
    constants = {name for name in models.__all__ if name.isupper() or name == "Hex"}
    assert set(models.__all__) - constants - generic <= {
        *known,
        "EventKind",
        "PrefixOrder",
        "TierName",
        "Role",
    }


def test_the_reference_page_has_every_route_and_model() -> None:
    made = document()
    page = reference_page(made)
    for path in made["paths"]:
        assert path in page
    for name in made["components"]["schemas"]:
        assert f'id="{name}"' in page
    assert "<script" not in page
    assert "http" not in page
