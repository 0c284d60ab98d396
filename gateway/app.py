"""The HTTP side: routes, API keys, limits, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import prometheus_client
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

from gateway.errors import ApiError, BadRequest, ModelNotFound, TooLarge, shown
from gateway.fields import ChatFields, CompletionFields, DetokenizeFields, GenerationFields, TokenizeFields
from gateway.formats import ChatFormat, Format
from gateway.generation import Generation
from gateway.jobs import Job
from gateway.methods import served_methods
from gateway.metrics import Metrics
from gateway.middleware import Guard, to_response
from gateway.parsing import parse
from gateway.replicas import Replicas
from gateway.settings import Settings, SettingsError
from gateway.tokenizer import Checkpoint, read_checkpoint

PAGE = Path(__file__).parent / "playground"
Result = TypeVar("Result")


@dataclass(eq=False)
class Gateway:
    """What the routes share."""

    settings: Settings
    checkpoint: Checkpoint
    replicas: Replicas
    metrics: Metrics = field(default_factory=Metrics)

    def job(self, fields: GenerationFields, prompts: list[dict[str, Any]], form: type[Format], echo: list[str]) -> Job:
        """Return the job of a request; prompts: the inputs that differ from prompt to prompt. Raises BadRequest."""
        self.check_model(fields.model)
        num_sequences = len(prompts) * fields.n
        if num_sequences > self.settings.max_sequences:
            raise BadRequest(
                f"prompts × n must be at most {self.settings.max_sequences}, got {len(prompts)} × {fields.n}", "n"
            )
        inputs = fields.inputs()
        limit_s = min(self.settings.request_timeout_s, (fields.timeout_ms or 86_400_000) / 1000)
        deadline_s = time.monotonic() + limit_s
        sequences = [
            Generation(
                inputs | prompt | ({"sequence_index": index} if index else {}),
                self.replicas,
                self.settings,
                self.metrics,
                deadline_s,
            )
            for prompt in prompts
            for index in range(fields.n)
        ]
        shape = form(self.checkpoint, inputs["seed"], fields.num_top, fields.return_token_ids, fields.return_steps)
        repeated = [text for text in echo for _ in range(fields.n)]
        return Job(sequences, shape, self.metrics, fields.n, repeated, fields.stream_options.include_usage)

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound for a model that is not served here."""
        if name not in ("", self.checkpoint.name):
            raise ModelNotFound(f"model {shown(name)} is not served here (available: {self.checkpoint.name})", "model")

    def model_card(self) -> dict[str, Any]:
        """Return the model as /v1/models shows it."""
        return {"id": self.checkpoint.name, "object": "model", "created": 0, "owned_by": "specserve"}


def create_app(settings: Settings, replicas: Replicas | None = None) -> FastAPI:
    """Return the gateway as an ASGI application; raises SettingsError."""
    checkpoint = read_checkpoint(settings.tokenizer, settings.chat_template, settings.model_name)
    gateway = Gateway(settings, checkpoint, replicas or Replicas(settings))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(gateway.replicas.watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await gateway.replicas.close()

    app = FastAPI(title="specserve gateway", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gateway = gateway
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(404, _on_unknown_path)
    app.add_exception_handler(405, _on_unknown_path)
    app.add_exception_handler(Exception, _on_exception)
    _add_generation(app, gateway)
    _add_tokenizer(app, gateway)
    _add_operations(app, gateway)
    _add_playground(app, gateway)
    app.add_middleware(Guard, keys=_keys(settings), metrics=gateway.metrics)
    return app


def _keys(settings: Settings) -> frozenset[bytes]:
    """Return the accepted API keys; raises SettingsError if their file cannot be read or has none."""
    keys = settings.api_keys.split(",")
    if settings.api_keys_file:
        try:
            keys += Path(settings.api_keys_file).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise SettingsError(f"cannot read the API keys in {settings.api_keys_file}: {error.strerror}") from None
    found = frozenset(key.strip().encode() for key in keys if key.strip())
    if settings.api_keys_file and not found:
        raise SettingsError(f"{settings.api_keys_file} holds no API key (--api-keys-file)")
    return found


def _add_generation(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        fields = parse(CompletionFields, await _body(request, gateway))
        prompts = fields.prompts()
        inputs = [{"text_input": prompt} if isinstance(prompt, str) else {"input_ids": prompt} for prompt in prompts]
        texts = [prompt if isinstance(prompt, str) else gateway.checkpoint.decode(prompt) for prompt in prompts]
        return await _answer(request, fields.stream, gateway.job(fields, inputs, Format, texts if fields.echo else []))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        fields = parse(ChatFields, await _body(request, gateway))
        ids = gateway.checkpoint.chat_ids(
            [message.for_template() for message in fields.messages],
            {"add_generation_prompt": fields.add_generation_prompt, **fields.chat_template_kwargs},
        )
        return await _answer(request, fields.stream, gateway.job(fields, [{"input_ids": ids}], ChatFormat, []))


def _add_tokenizer(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        fields = parse(TokenizeFields, await _body(request, gateway))
        gateway.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise BadRequest("prompt or messages must be there, and not both", "prompt")
        if fields.messages is None:
            ids = gateway.checkpoint.encode(fields.prompt or "", fields.add_special_tokens)
        else:
            arguments = {"add_generation_prompt": fields.add_generation_prompt}
            ids = gateway.checkpoint.chat_ids([message.for_template() for message in fields.messages], arguments)
        strings = (
            [gateway.checkpoint.tokenizer.id_to_token(token) for token in ids] if fields.return_token_strs else None
        )
        return JSONResponse({"count": len(ids), "tokens": ids, "token_strs": strings})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        fields = parse(DetokenizeFields, await _body(request, gateway))
        gateway.check_model(fields.model)
        if wrong := [token for token in fields.tokens if not 0 <= token < gateway.checkpoint.vocab_size]:
            raise BadRequest(f"tokens must be in 0..{gateway.checkpoint.vocab_size - 1}, got {wrong[0]}", "tokens")
        return JSONResponse({"prompt": gateway.checkpoint.decode(fields.tokens)})


def _add_operations(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [gateway.model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        gateway.check_model(name)
        return gateway.model_card()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        states = {replica.address: replica.is_usable for replica in gateway.replicas.all.values()}
        return JSONResponse({"replicas": states}, 200 if gateway.replicas.is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        for replica in gateway.replicas.all.values():
            gateway.metrics.replica_ready.labels(replica.address).set(replica.is_usable)
            gateway.metrics.replica_running.labels(replica.address).set(replica.num_running)
        text = prometheus_client.generate_latest(gateway.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


def _add_playground(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/")
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": "default-src 'self'"})

    @app.get("/playground/methods")
    async def methods() -> dict[str, Any]:
        return {"model": gateway.checkpoint.name, "methods": await served_methods(gateway.replicas)}

    app.mount("/playground", StaticFiles(directory=PAGE))


async def _body(request: Request, gateway: Gateway) -> dict[str, Any]:
    """Return a request's JSON object; raises TooLarge before the whole of a long body has been read."""
    raw, limit = bytearray(), gateway.settings.max_body_bytes
    async for part in request.stream():
        raw += part
        if len(raw) > limit:
            raise TooLarge(f"the body must be at most {limit} bytes (max_body_bytes)")
    try:
        body = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(body).__name__}")
    return body


async def _answer(request: Request, stream: bool, job: Job) -> Response:
    if not stream:
        return JSONResponse(await _unless_gone(request, job.response()))
    # The status goes out with the first event: a request that is refused gets its own.
    events = job.events()
    first = await _unless_gone(request, anext(events))

    async def all_events() -> AsyncIterator[str]:
        async with contextlib.aclosing(events):
            yield first
            async for event in events:
                yield event

    return StreamingResponse(all_events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Await work; cancel it when the client disconnects. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client has gone")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ClientGone(ApiError):
    """Nobody reads the response; the status is for the log and the metrics alone."""

    status, type, code = 499, "client_error", "client_closed_request"


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return to_response(error)


async def _on_unknown_path(request: Request, error: Exception) -> Response:
    body = ApiError(f"no such endpoint: {request.method} {request.url.path}").body()
    body["error"] |= {"type": "invalid_request_error", "code": "unknown_url"}
    return JSONResponse(body, getattr(error, "status_code", 404))


async def _on_exception(_: Request, error: Exception) -> Response:
    return JSONResponse(ApiError("internal error; the gateway's log has the cause").body(), 500)
