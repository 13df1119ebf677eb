"""Parses and checks requests of OpenAI's completions and chat completions APIs, and tokenizes their prompts.

Does not import torch.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatron.common.errors import DataError, one_line
from megatron.common.reading import parse_json
from megatron.config import ModelConfig
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.template import ChatPrompts
from megatron.tools.inference.images import images_of_messages, with_images
from megatron.tools.inference.prompts import prompt_tokens

_NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "logit_bias": {},
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "store": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
}
"""Unsupported fields, each with the value that is accepted because it has no effect."""


class RequestError(Exception):
    """An error response to a request, with HTTP status and the parameter at fault, as in OpenAI's API."""

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
    """Maximum number of tokens of a prompt and its completion: the model's context length."""
    max_tokens: int
    """Maximum number of tokens of a completion."""
    max_choices: int
    """Maximum number of completions, over all prompts."""
    reads_images: ModelConfig | None = None
    """The model, if it takes images."""


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


_TYPE_MESSAGES = {
    "messages": "messages must be a list of objects with role and content",
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
    """A text or a list of texts as a tuple; other values are returned unchanged, and rejected later."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class _SharedFields(BaseModel):
    """Fields that both kinds of requests have, with their types, limits and defaults."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    temperature: Annotated[float, AfterValidator(_is_temperature)] = Field(1.0, ge=0, le=2)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    n: int = Field(1, ge=1)
    stop: Annotated[tuple[_Stop, ...], Field(max_length=16), BeforeValidator(_as_tuple)] = ()
    seed: int = Field(default_factory=lambda: secrets.randbits(31), ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    user: str = ""


class _CompletionBody(_SharedFields):
    prompt: str | Annotated[list[str], Field(min_length=1)] | _Ids | Annotated[list[_Ids], Field(min_length=1)]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False


class _ChatBody(_SharedFields):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)


_Fields = TypeVar("_Fields", bound=_SharedFields)


class CompletionRequest(_SharedFields):
    """A valid request of either kind, with its tokenized prompts."""

    max_tokens: int
    logprobs: int | None = None
    """Number of most likely tokens to return with each token; None without log-probabilities."""
    echo: bool = False
    hidden: tuple[str, ...] = ()
    """Special tokens that are not written."""
    has_seed: bool = True
    """Whether the seed is from the request."""
    prompts: tuple[tuple[int, ...], ...]
    """The prompts as tokens."""
    texts: tuple[str, ...]
    """The prompts as text."""


def read_completion(body: bytes, model: str, tokenizer: Tokenizer, limits: RequestLimits) -> CompletionRequest:
    """Parse the body of a completions request to the model named ``model``. Raises RequestError if it is invalid."""
    fields = _fields(body, model, _CompletionBody)
    if fields.echo and fields.logprobs is not None:
        raise RequestError("logprobs: there are none of the prompt; leave out echo", param="logprobs")
    prompts, texts = _prompts(fields.prompt, tokenizer)
    return _request(fields, fields.max_tokens, limits, logprobs=fields.logprobs, prompts=prompts, texts=texts)


def read_chat(body: bytes, model: str, chat: ChatPrompts | None, limits: RequestLimits) -> CompletionRequest:
    """Parse the body of a chat request; ``chat`` has the model's template. Raises RequestError if it is invalid."""
    fields = _fields(body, model, _ChatBody)
    if chat is None:
        raise RequestError("this model has no chat template: start the server with --chat-template, or use completions")
    if not all(isinstance(message.get("role"), str) for message in fields.messages):
        raise RequestError("messages: each needs a role and a content", param="messages")
    if len({fields.max_tokens, fields.max_completion_tokens} - {None}) > 1:
        raise RequestError(
            f"max_tokens {fields.max_tokens} and max_completion_tokens {fields.max_completion_tokens} are the same "
            "setting: give one",
            param="max_completion_tokens",
        )
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    try:
        prompt = _chat_prompt(fields.messages, chat, limits)
    except DataError as error:
        raise RequestError(f"messages: {error}", param="messages") from error
    room = max(min(limits.max_tokens, limits.context - len(prompt)), 1)
    max_tokens = fields.max_completion_tokens or fields.max_tokens or room
    top = fields.top_logprobs if fields.logprobs else None
    stop = (*fields.stop, *chat.stop)
    values = {"logprobs": top, "prompts": (prompt,), "texts": ("",), "stop": stop, "hidden": chat.hidden}
    return _request(fields, max_tokens, limits, **values)


def _chat_prompt(messages: list[dict[str, Any]], chat: ChatPrompts, limits: RequestLimits) -> tuple[int, ...]:
    model = limits.reads_images
    if model is None:
        return tuple(chat.tokens(messages))
    texts, images = images_of_messages(messages, model, limits.context // model.image_tokens)
    return with_images(chat.text(texts), images, model, chat.tokenize)


def _request(fields: _SharedFields, max_tokens: int, limits: RequestLimits, **values: Any) -> CompletionRequest:
    param = "messages" if isinstance(fields, _ChatBody) else "prompt"
    _check_sizes(max_tokens, fields.n, values["prompts"], limits, param)
    shared = {name: value for name, value in fields if name in CompletionRequest.model_fields}
    values |= {"max_tokens": max_tokens, "has_seed": "seed" in fields.model_fields_set}
    return CompletionRequest.model_construct(**{**shared, **values})


def _fields(body: bytes, model: str, kind: type[_Fields]) -> _Fields:
    try:
        given = parse_json(body, parse_constant=_refused)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestError("the body is not a JSON object")
    # In OpenAI's API, null is the same as an absent field.
    named = {one_line(name): value for name, value in given.items()}  # a name may have half of a surrogate pair
    given = {name: value for name, value in named.items() if value is not None and value != _NEUTRAL.get(name)}
    try:
        fields = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            api = "completions" if kind is _CompletionBody else "chat completions"
            raise RequestError(f"{name} is not a field of this server's {api}", param=name) from error
        if first["type"] == "missing":
            raise RequestError(f"{name} is missing", param=name) from error
        raise RequestError(
            _TYPE_MESSAGES.get(name, f"{name}: {first['msg'].lower().removeprefix('value error, ')}"), param=name
        ) from error
    if fields.model not in (None, model):
        raise RequestError(
            f"no model {fields.model!r} here; the one served is {model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return fields


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")


def _prompts(
    prompt: str | list[str] | list[int] | list[list[int]], tokenizer: Tokenizer
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """The prompts of a request as tokens and as texts."""
    several: list[Any] = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    try:
        if isinstance(several[0], str):
            texts, tokens = several, [prompt_tokens(text, tokenizer) for text in several]
        else:
            texts, tokens = [tokenizer.detokenize(ids) for ids in several], several
    except DataError as error:
        raise RequestError(f"prompt: {error}", param="prompt") from error
    if not all(tokens):
        raise RequestError("prompt: one is empty; give the text to continue", param="prompt")
    return tuple(map(tuple, tokens)), tuple(texts)


def _check_sizes(
    max_tokens: int, n: int, prompts: tuple[tuple[int, ...], ...], limits: RequestLimits, param: str
) -> None:
    if max_tokens > limits.max_tokens:
        raise RequestError(
            f"max_tokens: {max_tokens} is more than this server's {limits.max_tokens}", param="max_tokens"
        )
    if len(prompts) * n > limits.max_choices:
        raise RequestError(
            f"n: {len(prompts)} prompts of {n} completions are more than this server's {limits.max_choices} "
            "in one request",
            param="n",
        )
    longest = max(map(len, prompts))
    if longest + max_tokens > limits.context:
        raise RequestError(
            f"the model takes {limits.context} tokens, and {longest} of the prompt and {max_tokens} of the "
            "completion were asked for; shorten the prompt or lower max_tokens",
            param=param,
            code="context_length_exceeded",
        )


_KINDS = {500: "server_error", 503: "server_error", 504: "server_error"}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the format of OpenAI's API."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
