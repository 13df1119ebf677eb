"""OpenAI's /v1/completions: requests are parsed and checked, responses are sent complete or as server-sent events.

No torch here.
"""

import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from megatron.common.errors import DataError, one_line
from megatron.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.tools.inference.continuous_batch import Piece

_NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "frequency_penalty": 0,
    "logit_bias": {},
    "presence_penalty": 0,
    "suffix": "",
}
"""Unsupported fields, and the values with which they have no effect and are accepted."""


class RequestError(Exception):
    """A request that cannot be answered: the HTTP status and the parameter at fault, as in OpenAI's API."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, retry: bool = False
    ):
        self.message, self.status, self.param, self.code, self.retry = message, status, param, code, retry
        """``retry``: whether the same request may succeed later."""
        super().__init__(message)


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request."""

    context: int
    """Tokens of prompt and completion together: the model's longest sequence."""
    max_tokens: int
    """Tokens of one completion."""
    max_choices: int
    """Completions, of all prompts together."""


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


_TYPE_MESSAGES = {
    "prompt": "prompt must be text, a list of texts, or token ids",
    "stop": "stop must be a text or a list of at most 16, none of them empty",
}
"""Messages for fields that accept several types."""

_Ids = Annotated[list[int], Field(min_length=1)]
_Stop = Annotated[str, Field(min_length=1)]


_LEAST_TEMPERATURE = 1e-6


def _is_temperature(value: float) -> float:
    if 0 < value < _LEAST_TEMPERATURE:
        raise ValueError(f"input should be 0, which is greedy, or {_LEAST_TEMPERATURE:g} or more")
    return value


def _as_tuple(value: Any) -> Any:
    """A text or a list of texts as a tuple; anything else, which is an error, unchanged."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class _Body(BaseModel):
    """The fields, their types, limits and defaults."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    prompt: str | Annotated[list[str], Field(min_length=1)] | _Ids | Annotated[list[_Ids], Field(min_length=1)]
    max_tokens: int = Field(16, ge=1)
    temperature: Annotated[float, AfterValidator(_is_temperature)] = Field(1.0, ge=0, le=2)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    n: int = Field(1, ge=1)
    stop: Annotated[tuple[_Stop, ...], Field(max_length=16), BeforeValidator(_as_tuple)] = ()
    seed: int = Field(default_factory=lambda: secrets.randbits(31), ge=-(2**63), lt=2**63)
    echo: bool = False
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    user: str = ""


class CompletionRequest(_Body):
    """A valid request, with its prompts."""

    prompts: tuple[tuple[int, ...], ...]
    """Tokens."""
    texts: tuple[str, ...]
    """The prompts as they were sent."""


def read_completion(body: bytes, model: str, tokenizer: Tokenizer, limits: RequestLimits) -> CompletionRequest:
    """Parse the body of a request to the model named ``model``. Raises RequestError if it is invalid."""
    fields = _fields(body)
    if fields.model not in (None, model):
        raise RequestError(
            f"no model {fields.model!r} here; the one served is {model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    prompts, texts = _prompts(fields.prompt, tokenizer)
    _check_sizes(fields, prompts, limits)
    values = {name: value for name, value in fields if name not in ("model", "prompt", "user")}
    return CompletionRequest.model_construct(**values, prompts=prompts, texts=texts)


def _fields(body: bytes) -> _Body:
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestError("the body is not a JSON object")
    # In OpenAI's API, null is the same as an absent field.
    given = {name: value for name, value in given.items() if value is not None and value != _NEUTRAL.get(name)}
    try:
        return _Body.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            text = f"{one_line(name)} is not a field of this server's completions"
            raise RequestError(text, param=name) from error
        if first["type"] == "missing":
            raise RequestError(f"{name} is missing", param=name) from error
        raise RequestError(
            _TYPE_MESSAGES.get(name, f"{name}: {first['msg'].lower().removeprefix('value error, ')}"), param=name
        ) from error


def _prompts(
    prompt: str | list[str] | list[int] | list[list[int]], tokenizer: Tokenizer
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Each prompt as tokens and as text."""
    several: list[Any] = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    try:
        if isinstance(several[0], str):
            texts, tokens = several, tokenizer.tokenize_batch(several)
        else:
            texts, tokens = [tokenizer.detokenize(ids) for ids in several], several
    except DataError as error:
        raise RequestError(f"prompt: {error}", param="prompt") from error
    if not all(tokens):
        raise RequestError("prompt: one is empty; give the text to continue", param="prompt")
    return tuple(map(tuple, tokens)), tuple(texts)


def _check_sizes(fields: _Body, prompts: tuple[tuple[int, ...], ...], limits: RequestLimits) -> None:
    if fields.max_tokens > limits.max_tokens:
        raise RequestError(
            f"max_tokens: {fields.max_tokens} is more than this server's {limits.max_tokens}", param="max_tokens"
        )
    if len(prompts) * fields.n > limits.max_choices:
        raise RequestError(
            f"n: {len(prompts)} prompts of {fields.n} completions are more than this server's {limits.max_choices} "
            "in one request",
            param="n",
        )
    longest = max(map(len, prompts))
    if longest + fields.max_tokens > limits.context:
        raise RequestError(
            f"the model takes {limits.context} tokens, and {longest} of the prompt and {fields.max_tokens} of the "
            "completion were asked for; shorten the prompt or lower max_tokens",
            param="prompt",
            code="context_length_exceeded",
        )


_KINDS = {401: "authentication_error", 500: "server_error", 503: "server_error", 504: "server_error"}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the format of OpenAI's API."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


class CompletionResponse:
    """The response to one request, as one body or as server-sent events. The choices of the first prompt come first."""

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

    async def complete(self, pieces: AsyncIterator["Piece"]) -> dict[str, Any]:
        """The complete response."""
        choices = [_choice(index, text) for index, text in enumerate(self._beginnings)]
        async for piece in pieces:
            choice = choices[self._count(piece)]
            choice["text"] += piece.text
            choice["finish_reason"] = piece.finish_reason
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self, pieces: AsyncIterator["Piece"]) -> AsyncIterator[str]:
        """A server-sent event for each piece that is not empty. An error is the last event."""
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
        if self._request.stream_options.include_usage:
            yield self._event([], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _count(self, piece: "Piece") -> int:
        """Counts the token of a piece. Returns the index of its choice."""
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
