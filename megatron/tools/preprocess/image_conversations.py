"""Tokenizes conversations with images into tokens with image placeholders, a loss mask, and pixels."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.common.errors import DataError
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.template import ChatTemplate
from megatron.tools.chat.tokens import Text, tokenize_texts
from megatron.tools.inference.images import MARK, bytes_of_url, decoded, images_of, only, read_image_within
from megatron.tools.preprocess.corpus import Chunk
from megatron.tools.preprocess.image_records import CONVERSATIONS, Record, read_records
from megatron.tools.preprocess.job import LOSS_MASK, TOKENS, ImageSettings, Job
from megatron.tools.preprocess.tokenize_chunk import (
    Documents,
    LineError,
    Tokenized,
    chat_template_of,
    joined,
    tokenizer_of,
)

_ROLES = {"human": "user", "gpt": "assistant"}
"""LLaVA's names of roles -> OpenAI's names."""
_RECORDS = 8
"""Conversations in a chunk; each may have several images."""


def read_image_chunks(path: Path) -> Iterator[Chunk]:
    """The conversations of a file, in chunks. Raises DataError or ConfigError as ``read_records``."""
    records = read_records(path)
    while lines := list(islice(records, _RECORDS)):
        yield Chunk(path, 1, lines, 0)


def tokenize_images(job: Job, chunk: Chunk) -> Tokenized:
    """Read, resize and tokenize the conversations of a chunk; runs in a worker."""
    tokenizer, template = tokenizer_of(job), chat_template_of(job)
    assert job.images is not None and template is not None, "--format images sets both"
    documents: Documents = {TOKENS: [], LOSS_MASK: []}
    images, errors, text_bytes = [], [], 0
    for number, record in enumerate(chunk.lines):
        try:
            document = _document(job, tokenizer, template, record)
        except DataError as error:
            errors.append(LineError(number, f"{record.where}: {error}", is_empty=False))
            if not job.skip_errors:
                break
            continue
        documents[TOKENS].append([np.array(document.ids)])
        documents[LOSS_MASK].append([np.array(document.counted)])
        images.append(document.images)
        text_bytes += document.text_bytes
    return joined(job, chunk, documents, errors, text_bytes)._replace(images=images)


class _Document(NamedTuple):
    ids: list[int]
    counted: list[int]
    """For each token 1 if it counts in the loss, else 0."""
    images: list[np.ndarray]
    """Each uint8 [size, size, 3]."""
    text_bytes: int


def _document(job: Job, tokenizer: Tokenizer, template: ChatTemplate, record: Record) -> _Document:
    assert job.images is not None
    if record.error:
        raise DataError(record.error)
    sources: list[Any] = []
    if record.tokens is None:
        text = template.conversation(_messages(record.content, sources), record.content.get("tools"))
        if (marks := text.text.count(MARK)) != len(sources):
            raise DataError(f"{marks} times {MARK}, and {len(sources)} images")
        ids, counted = _tokens(job.images, tokenizer, text)
        text_bytes = len(text.text.encode())
    else:
        sources, text_bytes = record.content["image"], 0
        if record.tokens and not 0 <= min(record.tokens) <= max(record.tokens) < tokenizer.vocab_size:
            raise DataError(
                f"a token is not in the vocabulary of {tokenizer.vocab_size}: give the tokenizer of the data"
            )
        tokens = record.tokens
        while tokens[-2:] == [tokenizer.eod] * 2:  # Megatron-LM pads texts with them
            tokens.pop()
        ids = [job.images.token] * job.images.tokens * len(sources) + tokens
        counted = [0] * (len(ids) - len(tokens)) + [1] * len(tokens)
    if job.append_eod and (record.tokens is None or ids[-1:] != [tokenizer.eod]):
        ids, counted = [*ids, tokenizer.eod], [*counted, *counted[-1:]]
    counted[:1] = [0]
    if not any(counted):
        raise DataError("no message of the assistant: nothing to train on")
    return _Document(ids, counted, [_image(job.images, image) for image in sources], text_bytes)


def _messages(record: Any, images: list[Any]) -> list[dict[str, Any]]:
    """The messages of a record in LLaVA's or OpenAI's format, with a mark for each image; adds images to ``images``."""
    turns = only(record, CONVERSATIONS) if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise DataError('no "conversations" (LLaVA) or "messages" (OpenAI) in it')
    images += (given := images_of(record))
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise DataError("a turn is not an object")
        turn = {key: value for key, value in turn.items() if value is not None}  # Parquet has each key in each turn
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str):
            raise DataError("a turn has no role")
        parts = content if isinstance(content, list) else [content]
        text = "".join(_part(part, images) for part in parts)
        messages.append({**turn, "role": _ROLES.get(role, role), "content": text})
    if given and len(images) > len(given):
        raise DataError("images are named beside the messages and in them, in no order: name them in one place")
    return messages


def _part(part: Any, images: list[Any]) -> str:
    """The text of a part of a message; an image in the part is added to ``images``."""
    kind = part.get("type") if isinstance(part, Mapping) else "text"
    value = part.get(kind) if isinstance(part, Mapping) else part
    if kind in ("image", "image_url"):
        image = value.get("url") if isinstance(value, Mapping) and "url" in value else value
        if image is not None:
            images.append(image)
        return f"{MARK}\n"
    if kind != "text" or not isinstance(value, str):
        raise DataError(f"a part of a message is {kind}, and can be text or image_url")
    return value


def _image(settings: ImageSettings, image: Any) -> np.ndarray:
    """The pixels of an image, given as a path within the image folder, a data URL, or the bytes of a file."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and image.startswith("data:"):
        image = bytes_of_url(image)
    if isinstance(image, bytes):
        return decoded(image, settings.size, settings.fit)
    return read_image_within(settings.folder, image, settings.size, settings.fit)


def _tokens(settings: ImageSettings, tokenizer: Tokenizer, text: Text) -> tuple[list[int], list[int]]:
    """Token ids with placeholders for each mark, and their loss mask; parts are tokenized separately, like prompts."""
    parts, begin = [], 0
    for part in text.text.split(MARK):
        end = begin + len(part)
        inside = [(max(first, begin) - begin, min(last, end) - begin) for first, last in text.counted]
        parts.append(Text(part, [span for span in inside if span[0] < span[1]]))
        begin = end + len(MARK)
    placeholders, zeros = [settings.token] * settings.tokens, [0] * settings.tokens
    first, *others = tokenize_texts(tokenizer, parts)
    ids, counted = list(first[0]), list(first[1])
    for part_ids, part_counted in others:
        ids += placeholders + part_ids
        counted += zeros + part_counted
    return ids, counted
