"""The HTTP server: web page, OpenAI's API and metrics. A separate thread generates the completions."""

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from megatron.common.processes import ExitSignal
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.template import ChatPrompts
from megatron.tools.inference.continuous_batch import Piece
from megatron.tools.serving.access import check_host, check_key
from megatron.tools.serving.protocol import (
    CompletionRequest,
    RequestError,
    RequestLimits,
    error_body,
    read_chat,
    read_completion,
)
from megatron.tools.serving.responses import ChatResponse, CompletionResponse
from megatron.tools.serving.scheduler import Driver, RankBroadcast, RequestBatch, RequestQueue, run_worker

_PAGE = Path(__file__).with_name("page.html")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_ADDRESSES = (
    "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/NAME, GET /health, GET /metrics, "
    "GET /"
)
_BODY_SECONDS = 20.0
"""Time limit for receiving the body of a request, unless the limit of the entire request is shorter."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Service:
    """The served model and the access rules."""

    model: str
    """Name of the model in the API."""
    created: int
    """Time at which the model was saved, in seconds since 1970."""
    tokenizer: Tokenizer
    limits: RequestLimits
    chat: ChatPrompts | None
    """The chat template; None for a model without one."""
    most_body_bytes: int
    api_key: str | None
    local_only: bool
    """Whether only this machine can reach the server."""


def build_app(service: Service, queue: RequestQueue) -> FastAPI:
    """The application: web page, OpenAI's endpoints under /v1, /health and /metrics."""

    async def host_allowed(request: Request) -> None:
        if service.local_only:
            check_host(request.headers.get("host"))

    async def key_valid(request: Request) -> None:
        check_key(request.headers.get("authorization"), service.api_key)

    app = FastAPI(openapi_url=None, redirect_slashes=False, dependencies=[Depends(host_allowed)])

    @app.exception_handler(RequestError)
    async def rejected(_: Request, error: RequestError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        headers |= {"Retry-After": "1"} if error.retry else {}
        return JSONResponse(error_body(error), error.status, headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        """Answer requests to unknown paths, or with unsupported methods."""
        message = f"{error.detail}: this server has {_ADDRESSES}"
        return await rejected(request, RequestError(message, status=error.status_code))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # the client is gone

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE.read_bytes(), headers=_PAGE_HEADERS)

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "ok", "requests": queue.pending}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics_text(queue), media_type="text/plain; version=0.0.4")

    app.include_router(_openai(service, queue), prefix="/v1", dependencies=[Depends(key_valid)])
    return app


def metrics_text(queue: RequestQueue) -> str:
    """The load of the server in Prometheus' text format."""
    running = min(queue.running, queue.pending)  # the thread notices only at its next step that a request has ended
    values = (
        ("num_requests_running", "gauge", "Requests whose tokens are being generated.", running),
        ("num_requests_waiting", "gauge", "Requests that wait for room in the batch.", queue.pending - running),
        ("generation_tokens_total", "counter", "Tokens generated since the start.", queue.generated_tokens),
    )
    return "".join(
        f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name} {value}\n" for name, kind, text, value in values
    )


def _openai(service: Service, queue: RequestQueue) -> APIRouter:
    router = APIRouter()
    # A template may take seconds. One thread, since it renders one conversation at a time.
    reader = ThreadPoolExecutor(1, "reader")
    model = {"id": service.model, "object": "model", "created": service.created, "owned_by": "this server"}

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != service.model:
            raise RequestError(f"no model {name!r} here", status=404, param="model", code="model_not_found")
        return model

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        read = partial(read_completion, model=service.model, tokenizer=service.tokenizer, limits=service.limits)
        return await answer(request, read, CompletionResponse)

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        read = partial(read_chat, model=service.model, chat=service.chat, limits=service.limits)
        return await answer(request, read, ChatResponse)

    async def answer(
        request: Request, read: Callable[[bytes], CompletionRequest], kind: type[CompletionResponse]
    ) -> Response:
        started = time.monotonic()
        body = await _read_body(request, service.most_body_bytes, min(_BODY_SECONDS, queue.seconds))
        parsed = await asyncio.get_running_loop().run_in_executor(reader, read, body)
        job = queue.submit(parsed, spent=time.monotonic() - started)
        response, pieces = kind(parsed, service.model, service.tokenizer), job.pieces()
        if not parsed.stream:
            return JSONResponse(await _unless_disconnected(request, response.complete(pieces)))
        # Wait for the first piece, so that an error before it can still set the HTTP status.
        first = await _unless_disconnected(request, anext(pieces))
        return StreamingResponse(
            response.events(_chained(first, pieces)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return router


async def _read_body(request: Request, most_bytes: int, seconds: float) -> bytes:
    """The body of a JSON request, which must arrive within ``seconds``.

    The content type is required since pages of other sites cannot send it without a CORS preflight.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("send JSON, and Content-Type: application/json", status=415)

    too_large = RequestError(f"the body has more than {most_bytes} bytes", status=413)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > most_bytes):
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most_bytes:
                raise too_large
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), seconds)
    except TimeoutError as error:
        raise RequestError(f"the body was not received within {seconds:g} s", status=408) from error
    except asyncio.CancelledError as error:
        raise RequestError("the server is shutting down", status=503, retry=True) from error


async def _unless_disconnected(request: Request, work: Awaitable[_T]) -> _T:
    """The result of ``work``, which is cancelled if the client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _chained(first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in rest:
        yield piece


_MOST_CONNECTIONS = 512


def serve(
    app: FastAPI,
    listener: socket.socket,
    queue: RequestQueue,
    batch: RequestBatch,
    ranks: RankBroadcast,
    *,
    grace: float,
    threads: int,
    ready: str,
) -> None:
    """Serve on ``listener`` until SIGTERM or SIGINT, then finish open requests for at most ``grace`` seconds.

    Prints ``ready`` once it handles these signals. The generator thread runs with ``threads`` torch threads.

    Raises the error of the generator thread, if this thread ended first.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=int(grace) + 5,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # uvicorn handles them, and raises them again after its shutdown

    def generate() -> None:
        torch.set_num_threads(threads)
        Driver(queue, batch, ranks).run()

    with ThreadPoolExecutor(1, "generator") as pool:
        generation = pool.submit(generate)
        try:
            _Server(config, queue, generation, grace, ready).run([listener])
        finally:
            queue.jobs.put(None)
    generation.result()


class _Server(uvicorn.Server):
    """Also shuts down if the generator thread has ended; open requests get an error first."""

    def __init__(
        self, config: uvicorn.Config, queue: RequestQueue, generation: Future[None], grace: float, ready: str
    ) -> None:
        super().__init__(config)
        self._queue, self._generation, self._grace, self._ready = queue, generation, grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._ready, flush=True)

    async def on_tick(self, counter: int) -> bool:
        return self._generation.done() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._queue.end_all(0 if self._generation.done() else self._grace, "the server is shutting down")
        await super().shutdown(sockets)


def serve_worker(batch: RequestBatch, ranks: RankBroadcast) -> None:
    """Serve on a rank other than the first. After a signal, continue until the first rank ends or a second signal."""
    ExitSignal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_worker(batch, ranks)
