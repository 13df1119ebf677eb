"""Responses in OpenAI's formats, as one body or as server-sent events. Does not import torch."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron.tokenizer import Tokenizer
from megatron.tools.serving.protocol import CompletionRequest, RequestError, error_body

if TYPE_CHECKING:
    from megatron.tools.inference.continuous_batch import Piece
    from megatron.tools.inference.decoding import Logprobs

_Entry = tuple[int, "Logprobs", int]
"""A token, its log-probabilities, and the offset of its first character in the text."""


class CompletionResponse:
    """The response to a completions request. Choices are in the order of the prompts."""

    prefix, kind, part_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        echoed = request.texts if request.echo else [""] * len(request.prompts)
        self._beginnings = [text for text in echoed for _ in range(request.n)]
        self._tokens = 0

    async def complete(self, pieces: AsyncIterator["Piece"]) -> dict[str, Any]:
        """The complete response."""
        texts = list(self._beginnings)
        reasons: list[str | None] = [None] * len(texts)
        entries: list[list[_Entry]] = [[] for _ in texts]
        async for piece in pieces:
            index, new_entries = self._count(piece)
            texts[index] += piece.text
            reasons[index] = piece.finish_reason
            entries[index] += new_entries
        choices = [
            self._choice(index, text, reason, self._logprobs(choice_entries))
            for index, (text, reason, choice_entries) in enumerate(zip(texts, reasons, entries, strict=True))
        ]
        return {"object": self.kind, **self._head, "choices": choices, "usage": self._usage()}

    async def events(self, pieces: AsyncIterator["Piece"]) -> AsyncIterator[str]:
        """A server-sent event for each piece that is not empty. An error is the last event."""
        for index, text in enumerate(self._beginnings):
            for first in self._first(index, text):
                yield self._event([first])
        try:
            async for piece in pieces:
                index, entries = self._count(piece)
                if piece.text or piece.finish_reason or entries:
                    yield self._event([self._part(index, piece.text, piece.finish_reason, self._logprobs(entries))])
        except RequestError as error:
            yield _line(error_body(error))
            return
        if self._request.stream_options.include_usage:
            yield self._event([], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    _part = _choice

    def _first(self, index: int, text: str) -> list[dict[str, Any]]:
        """The parts of a choice to send before its first piece."""
        return [self._part(index, text, None, None)] if text else []

    def _logprobs(self, entries: Sequence[_Entry]) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        return {
            "tokens": [self._text(token) for token, _, _ in entries],
            "token_logprobs": [logprobs.chosen for _, logprobs, _ in entries],
            "top_logprobs": [
                {self._text(other): value for other, value in (*logprobs.top, (token, logprobs.chosen))}
                for token, logprobs, _ in entries
            ],
            "text_offset": [offset for _, _, offset in entries],
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.detokenize([token])

    def _count(self, piece: "Piece") -> tuple[int, list[_Entry]]:
        """Count the token of a piece. Returns the index of its choice, and its log-probabilities if it has any."""
        self._tokens += piece.token is not None
        index = piece.prompt * self._request.n + piece.sample
        if piece.token is None or piece.logprobs is None:
            return index, []
        return index, [(piece.token, piece.logprobs, piece.offset)]

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._request.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
        }

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        usage = {"usage": None} if self._request.stream_options.include_usage else {}
        return _line({"object": self.part_kind, **self._head, "choices": choices, **usage, **more})


class ChatResponse(CompletionResponse):
    """The response to a chat completions request."""

    prefix, kind, part_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _part(self, index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _first(self, index: int, text: str) -> list[dict[str, Any]]:
        return [{**self._part(index, "", None, None), "delta": {"role": "assistant", "content": ""}}]

    def _logprobs(self, entries: Sequence[_Entry]) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        content = [
            {
                **self._token_logprob(token, logprobs.chosen),
                "top_logprobs": [self._token_logprob(other, value) for other, value in logprobs.top],
            }
            for token, logprobs, _ in entries
        ]
        return {"content": content, "refusal": None}

    def _token_logprob(self, token: int, value: float) -> dict[str, Any]:
        text = self._text(token)
        is_valid = "\N{REPLACEMENT CHARACTER}" not in text
        return {"token": text, "logprob": value, "bytes": list(text.encode()) if is_valid else None}


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
