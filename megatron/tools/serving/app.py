"""What is answered at which address."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from megatron.tokenizer import Tokenizer
from megatron.tools.inference.generator import Piece
from megatron.tools.serving.access import check_host, check_key
from megatron.tools.serving.request import CompletionRequest, RequestError, RequestLimits, read_completion
from megatron.tools.serving.request_queue import Desk

_KINDS = {401: "authentication_error", 500: "server_error", 503: "server_error", 504: "server_error"}


def error_body(error: RequestError) -> dict[str, Any]:
    """What OpenAI's clients read of an error."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


class Answer:
    """The answer to one request, whole or as server-sent events. The choices of the first prompt come first."""

    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._request = request
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        echoed = request.texts if request.echo else [""] * len(request.prompts)
        self._beginnings = [text for text in echoed for _ in range(request.n)]
        self._tokens = 0

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        """All at once, when all is there."""
        choices = [_choice(index, text) for index, text in enumerate(self._beginnings)]
        async for piece in pieces:
            choice = choices[self._count(piece)]
            choice["text"] += piece.text
            choice["finish_reason"] = piece.finish_reason
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """A server-sent event for each piece with something in it. An error that comes up is the last of them."""
        for index, text in enumerate(self._beginnings):
            if text:
                yield self._event([_choice(index, text)])
        try:
            async for piece in pieces:
                index = self._count(piece)
                if piece.text or piece.finish_reason:
                    yield self._event([_choice(index, piece.text, piece.finish_reason)])
        except RequestError as error:
            yield _line(error_body(error))
            return
        if self._request.include_usage:
            yield self._event([], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _count(self, piece: Piece) -> int:
        """Number of the choice that a piece belongs to, its token counted."""
        self._tokens += piece.token is not None
        return piece.prompt * self._request.n + piece.sample

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._request.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
        }

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return _line({**self._head, "choices": choices, **more})


def _choice(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


_PAGE = Path(__file__).with_name("page.html")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_BODY_SECONDS = 20.0
"""How long the body of a request may take to come in."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Service:
    """What is served, and to whom."""

    model: str
    """The name that clients know it by."""
    created: int
    """When it was saved, in seconds since 1970."""
    tokenizer: Tokenizer
    limits: RequestLimits
    most_body_bytes: int
    api_key: str | None
    only_here: bool
    """Whether the server can be reached from this machine alone."""


def build_app(service: Service, desk: Desk) -> FastAPI:
    """The page, OpenAI's addresses under /v1, and /health."""

    async def may_call(request: Request) -> None:
        if service.only_here:
            check_host(request.headers.get("host"))

    async def may_use(request: Request) -> None:
        check_key(request.headers.get("authorization"), service.api_key)

    app = FastAPI(openapi_url=None, dependencies=[Depends(may_call)])

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        headers |= {"Retry-After": "1"} if error.retry else {}
        return JSONResponse(error_body(error), error.status, headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        """No such address, no such method."""
        return await refused(request, RequestError(str(error.detail), status=error.status_code))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # which nobody reads

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE.read_bytes(), headers=_PAGE_HEADERS)

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "ok", "requests": desk.requests}

    app.include_router(_openai(service, desk), prefix="/v1", dependencies=[Depends(may_use)])
    return app


def _openai(service: Service, desk: Desk) -> APIRouter:
    router = APIRouter()
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
        body = await _read_body(request, service.most_body_bytes)
        asked = read_completion(body, service.model, service.tokenizer, service.limits)
        answer, pieces = Answer(asked, service.model), desk.submit(asked).pieces()
        if not asked.stream:
            return JSONResponse(await _unless_gone(request, answer.whole(pieces)))
        # What goes wrong before the first piece has a status of its own.
        first = await _unless_gone(request, anext(pieces))
        return StreamingResponse(
            answer.events(_chained(first, pieces)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return router


async def _read_body(request: Request, most_bytes: int) -> bytes:
    """The body of a request that says it is JSON, which no page of another site can send unasked."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("send JSON, and Content-Type: application/json", status=415)

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most_bytes:
                raise RequestError(f"the body has more than {most_bytes} bytes", status=413)
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), _BODY_SECONDS)
    except asyncio.TimeoutError as error:
        raise RequestError(f"the body did not come within {_BODY_SECONDS:g} s", status=408) from error


async def _unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """What ``work`` comes to; given up when the client goes away."""

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
