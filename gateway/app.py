"""The HTTP side: routes, API keys, limits, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import prometheus_client
from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles

from gateway import __version__
from gateway.answers import IGNORED_FIELDS, answer
from gateway.bodies import Bodies
from gateway.errors import ApiError, Busy, UnknownUrl
from gateway.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from gateway.jobs import Job
from gateway.keys import ApiKeys
from gateway.methods import served_methods
from gateway.middleware import REQUEST_ID, Guard, to_response
from gateway.replicas import MOST_URGENT, Replicas
from gateway.service import Gateway
from gateway.settings import Settings
from gateway.tenants import OfTenant, of_tenant
from gateway.tokenizer import read_checkpoint
from gateway.workers import off_loop

PAGE = Path(__file__).parent / "playground"
#: Load balancers and `wget --spider` probe with HEAD, which FastAPI does not add to GET by itself.
READ = ["GET", "HEAD"]


def create_app(settings: Settings) -> FastAPI:
    """Return the gateway as an ASGI application; raises SettingsError."""
    checkpoint = read_checkpoint(
        settings.tokenizer, settings.chat_template, settings.model_name, settings.max_model_len
    )
    gateway = Gateway(settings, checkpoint, Replicas(settings))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(gateway.replicas.watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await gateway.replicas.close()

    app = FastAPI(
        title="specserve gateway",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # Behind a proxy for TLS, a redirect from /v1/completions/ would name http://: clients would send in clear.
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(404, _on_unknown_path)
    app.add_exception_handler(405, _on_unknown_path)
    app.add_exception_handler(Exception, _on_exception)
    bodies = Bodies(settings)
    _add_generation(app, gateway, bodies)
    _add_tokenizer(app, gateway, bodies)
    _add_operations(app, gateway)
    _add_playground(app, gateway)
    app.add_middleware(Guard, keys=ApiKeys(settings), metrics=gateway.metrics, send_limit_s=settings.send_limit_s)
    if origins := [origin.strip() for origin in settings.allowed_origins.split(",") if origin.strip()]:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, IGNORED_FIELDS, "Retry-After"],
        )
    return app


def _add_generation(app: FastAPI, gateway: Gateway, bodies: Bodies) -> None:
    ping_interval_s = gateway.settings.ping_interval_s

    async def fields_of(model: type[OfTenant], request: Request) -> OfTenant:
        replicas, salt_by_key = gateway.replicas, gateway.settings.salt_by_key
        try:
            replicas.check_room()  # before the body is read: refusals must be cheap
        except Busy as busy:
            if salt_by_key:
                raise
            replicas.check_room(MOST_URGENT)
            fields = await bodies.urgent_fields(model, request, busy)
            replicas.check_room(fields.priority or 0)
        else:
            fields = await bodies.fields(model, request)
        return of_tenant(fields, request.state.api_key) if salt_by_key else fields

    async def job_of(
        model: type[OfTenant], make: Callable[[OfTenant, str, str], Job], request: Request
    ) -> tuple[bool, Job]:
        """Return whether to stream, and the job; the fields, which may be large, do not outlive this call."""
        fields = await fields_of(model, request)
        return fields.stream, await off_loop(make, fields, request.state.request_id, request.state.key_label)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, *await job_of(CompletionFields, gateway.completion, request), ping_interval_s)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, *await job_of(ChatFields, gateway.chat, request), ping_interval_s)


def _add_tokenizer(app: FastAPI, gateway: Gateway, bodies: Bodies) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        fields = await bodies.fields(TokenizeFields, request)
        # The response is also serialised on that thread, so that a list of a million ids delays no other request.
        return await off_loop(lambda: JSONResponse(gateway.tokenize(fields)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        fields = await bodies.fields(DetokenizeFields, request)
        return await off_loop(lambda: JSONResponse(gateway.detokenize(fields)))


def _add_operations(app: FastAPI, gateway: Gateway) -> None:
    @app.api_route("/v1/models", methods=READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [gateway.model_card()]}

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str) -> dict[str, Any]:
        gateway.check_model(name)
        return gateway.model_card()

    @app.api_route("/version", methods=READ)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.api_route("/health", methods=READ)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/ready", methods=READ)
    async def ready() -> Response:
        # Probes have no key, so the replicas' addresses are only in the metrics.
        usable = [replica.is_usable for replica in gateway.replicas.all.values()]
        body = {"num_replicas": len(usable), "num_usable": sum(usable)}
        return JSONResponse(body, 200 if gateway.replicas.is_ready else 503)

    if gateway.settings.metrics_port is None:

        @app.api_route("/metrics", methods=READ)
        async def metrics() -> Response:
            text = prometheus_client.generate_latest(gateway.metrics.registry)
            return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


def _add_playground(app: FastAPI, gateway: Gateway) -> None:
    @app.api_route("/", methods=READ)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": "default-src 'self'"})

    @app.api_route("/playground/methods", methods=READ)
    async def methods() -> dict[str, Any]:
        return {"model": gateway.checkpoint.name, "methods": await served_methods(gateway.replicas)}

    app.mount("/playground", StaticFiles(directory=PAGE))


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return to_response(error)


async def _on_unknown_path(request: Request, error: Exception) -> Response:
    headers: dict[str, str] = getattr(error, "headers", None) or {}
    allowed = f" (allowed: {headers['Allow']})" if "Allow" in headers else ""
    body = UnknownUrl(f"no such endpoint: {request.method} {request.url.path}{allowed}").body()
    return JSONResponse(body, getattr(error, "status_code", UnknownUrl.status), headers)


async def _on_exception(request: Request, _: Exception) -> Response:
    body = ApiError("internal error; the gateway's log has the cause").body()
    return JSONResponse(body, 500, {REQUEST_ID: request.state.request_id})
