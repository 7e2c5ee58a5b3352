"""`GET /docs`: the OpenAPI document as one page without a script, since nothing is fetched from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any, Final

__all__ = ["reference_page"]

_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>kvpager: admin API</title><link rel="stylesheet" href="static/reference.css"></head><body><main>
<h1>kvpager: admin API</h1>
"""


def reference_page(document: dict[str, Any]) -> str:
    """The page.

    Args:
        document: OpenAPI 3.1.
    """
    return _HEAD + "\n".join(_parts(document)) + "\n</main></body></html>\n"


def _parts(document: dict[str, Any]) -> Iterator[str]:
    yield f"<p>{escape(document['info']['description'])}"
    yield ' The document itself: <a href="openapi.json">openapi.json</a>.</p>'
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield from _operation(path, method, operation)
    yield "<h2>Models</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield from _model(name, schema)


def _operation(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<section><h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    parameters = operation.get("parameters", [])
    if parameters:
        yield "<table><tr><th>parameter</th><th>in</th><th>type</th><th></th></tr>"
        for one in parameters:
            type_ = _type(one.get("schema", {}))
            said = escape(one.get("description", ""))
            name, place = escape(one["name"]), one["in"]
            yield f"<tr><td><code>{name}</code></td><td>{place}</td><td>{type_}</td><td>{said}</td></tr>"
        yield "</table>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        yield f"<p>Body: {_type(body)}</p>"
    yield "<ul>"
    for status, answer in operation["responses"].items():
        contents = answer.get("content", {}).values()
        kinds = ", ".join(_type(content.get("schema", {})) for content in contents)
        yield f"<li>{status}: {escape(answer['description'])}{': ' if kinds else ''}{kinds}</li>"
    yield "</ul></section>"


def _model(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<section><h3 id="{escape(name)}">{escape(name)}</h3>'
    yield f"<p>{escape(schema.get('description', ''))}</p>"
    if "properties" in schema:
        yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
        for field, values in schema["properties"].items():
            said = escape(values.get("description", ""))
            yield f"<tr><td><code>{escape(field)}</code></td><td>{_type(values)}</td><td>{said}</td></tr>"
        yield "</table>"
    if "enum" in schema:
        yield f"<p>One of {', '.join(f'<code>{escape(str(one))}</code>' for one in schema['enum'])}.</p>"
    if "examples" in schema:
        yield f"<pre>{escape(json.dumps(schema['examples'][0], indent=2))}</pre>"
    yield "</section>"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(one))}</code>" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any")))
