"""Parses and validates requests in the format of OpenAI's /v1/completions. No torch here."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from megatron.common.errors import DataError, one_line
from megatron.tokenizer import Tokenizer

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


@dataclass(frozen=True)
class CompletionRequest:
    """A valid request."""

    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    """The prompts as they were sent."""
    n: int
    """Completions for each prompt."""
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    stop: tuple[str, ...]
    seed: int
    echo: bool
    stream: bool
    include_usage: bool


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
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] = Field(default_factory=list)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    echo: bool = False
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    user: str = ""


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
    return CompletionRequest(
        prompts=prompts,
        texts=texts,
        n=fields.n,
        max_tokens=fields.max_tokens,
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        repetition_penalty=fields.repetition_penalty,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop),
        seed=secrets.randbits(31) if fields.seed is None else fields.seed,
        echo=fields.echo,
        stream=fields.stream,
        include_usage=fields.stream_options.include_usage,
    )


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
