"""The admin application: the routes under ``/v1``, what probes ask, the dashboard, and who may ask.

`create_app` makes it over a connection to a sidecar, which may be one in the same process: a program that
embeds the store serves it as a `Sidecar` on its own loop, connects to that, and mounts the application
wherever it likes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles

from ... import __version__
from ..client_async import AsyncConnection
from . import engine_routes, event_routes, prefix_routes, setting_routes, status_routes, tier_routes
from .context import Admin
from .models import Problem, StoreEvent
from .problems import add_handlers
from .reference_page import reference_page
from .safety import Bounds, Safety
from .tokens import Tokens

__all__ = ["create_app"]

_STATIC: Final = Path(__file__).with_name("static")
_ROUTERS: Final = (
    status_routes.router,
    tier_routes.router,
    prefix_routes.router,
    engine_routes.router,
    setting_routes.router,
    event_routes.router,
)
_LOOKUP: Final = "lookup_v1_prefixes_lookup_post"
_ABOUT: Final = (
    "What operators see of a sidecar and have it do. Reading needs no token on the sidecar's own machine; "
    "changing anything needs one of role operate."
)


class _StaticFiles(StaticFiles):
    """Files that are asked for again each time, since a sidecar may be upgraded under an open page."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers["Cache-Control"] = "no-cache"
        return response


def create_app(
    connection: AsyncConnection,
    connect: Callable[[], AsyncConnection],
    tokens: Tokens,
    *,
    group: bytes,
    bounds: Bounds | None = None,
) -> FastAPI:
    """The application. To be served on the loop of its connection.

    Args:
        connection: to the sidecar, as an operator, and strict; it stays the caller's.
        connect: makes another one, to hear of events on; it is closed here.
        tokens: who may do what.
        group: the client group of these connections, 16 bytes.
        bounds: how much one address may ask.
    """
    admin = Admin(connection, connect, group)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await admin.close()

    app = FastAPI(
        title="kvpager",
        version=__version__,
        description=_ABOUT,
        docs_url=None,  # a page of others' scripts, from others' hosts
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.admin = admin
    add_handlers(app)
    for router in _ROUTERS:
        app.include_router(router, prefix="/v1")
    app.include_router(status_routes.probes)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(reference_page(app.openapi()))

    @app.get("/", include_in_schema=False)
    async def dashboard() -> FileResponse:
        return FileResponse(_STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/static", _StaticFiles(directory=_STATIC))
    app.add_middleware(Safety, tokens=tokens, bounds=bounds)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Have OpenAPI tell of tokens, and of models that no route returns as they are."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            parts = made.setdefault("components", {})
            schemas = parts.setdefault("schemas", {})
            for model in (Problem, StoreEvent):
                schema = model.model_json_schema(
                    ref_template="#/components/schemas/{model}", mode="serialization"
                )
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
            # Answers to what is not valid are problems, too.
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            parts["securitySchemes"] = {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "a line of the token file, without its role",
                }
            }
            for path in made["paths"].values():
                for method, operation in path.items():
                    needed = method != "get" and operation["operationId"] != _LOOKUP
                    operation["security"] = [{"token": []}] if needed else [{}, {"token": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
