"""Conversations with images as a data set: tokens with placeholders, a loss mask, and the pixels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.common.errors import DataError
from megatron.common.files import replace_file
from megatron.config.data import chat_template_file, loss_mask_prefix
from megatron.data.fingerprint import write_tokenizer
from megatron.data.image_store import image_writer
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder, best_dtype
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.files import record_of
from megatron.tools.chat.template import ChatTemplate, Text
from megatron.tools.chat.tokens import tokenize_texts
from megatron.tools.inference.images import MARK, as_list, bytes_of_url, decoded, read_image_within
from megatron.tools.preprocess.image_records import Record, read_records

_ROLES = {"human": "user", "gpt": "assistant"}
"""LLaVA's names of roles."""


@dataclass(frozen=True)
class ImageJob:
    """What to convert, and for which encoder."""

    inputs: Sequence[Path]
    image_folder: Path
    output_prefix: str
    size: int
    """Height and width of the images in pixels."""
    tokens: int
    """Placeholders of each image."""
    token: int
    """The placeholder."""


class _Document(NamedTuple):
    text: Text
    images: list[np.ndarray]
    """Each uint8 [size, size, 3]."""


@dataclass
class ImageSummary:
    """What was converted."""

    documents: int = 0
    tokens: int = 0
    images: int = 0
    skipped: int = 0


def preprocess_images(
    job: ImageJob, tokenizer: Tokenizer, template: ChatTemplate, log_skipped: Callable[[str], None] | None = None
) -> ImageSummary:
    """Write the data set, a document at a time.

    ``log_skipped`` is called with the error of each document that is skipped. Without it, a document that is wrong, or
    an image that is missing, damaged or outside of the folder, raises DataError, and nothing is written.
    """
    prefix, done = job.output_prefix, ImageSummary()
    with (
        IndexedDatasetBuilder(prefix, best_dtype(tokenizer.vocab_size)) as ids,
        IndexedDatasetBuilder(loss_mask_prefix(prefix), "u1") as flags,
        image_writer(prefix, job.size) as add_images,
    ):
        for document in _documents(job, template, done, log_skipped):
            of_document, counted = _tokens(job, tokenizer, document.text)
            ids.add_document(of_document)
            flags.add_document(counted)
            add_images(document.images)
            done.documents += 1
            done.tokens += len(of_document)
            done.images += len(document.images)
        if not done.documents:
            raise DataError(f"no conversation in {', '.join(map(str, job.inputs))}")
    with replace_file(Path(chat_template_file(prefix)), text=True) as file:
        file.write(record_of(template))
    write_tokenizer(prefix, tokenizer)
    return done


def _documents(
    job: ImageJob, template: ChatTemplate, done: ImageSummary, log_skipped: Callable[[str], None] | None
) -> Iterator[_Document]:
    for record in (record for path in job.inputs for record in read_records(path)):
        try:
            yield _document(job, template, record)
        except DataError as error:
            message = f"{record.where}: {error}"
            if log_skipped is None:
                raise DataError(f"{message} (--on-error skip skips such documents)") from None
            log_skipped(message)
            done.skipped += 1


def _document(job: ImageJob, template: ChatTemplate, record: Record) -> _Document:
    if record.error:
        raise DataError(record.error)
    images: list[Any] = []
    text = template.conversation(_messages(record.content, images))
    if (marks := text.text.count(MARK)) != len(images):
        raise DataError(f"{marks} times {MARK}, and {len(images)} images")
    return _Document(text, [_image(job, image) for image in images])


def _messages(record: Any, images: list[Any]) -> list[dict[str, Any]]:
    """Messages, also of LLaVA's conversations, with a mark for each image; their images are added to ``images``."""
    if not isinstance(record, dict) or not isinstance(
        turns := record.get("conversations") or record.get("messages"), list
    ):
        raise DataError('no "conversations" (LLaVA) or "messages" (OpenAI) in it')
    images += as_list(record.get("image") or record.get("images"))
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise DataError("a turn is no object")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str):
            raise DataError("a turn has no role")
        parts = content if isinstance(content, list) else [content]
        text = "".join(_part(part, images) for part in parts)
        messages.append({"role": _ROLES.get(role, role), "content": text})
    return messages


def _part(part: Any, images: list[Any]) -> str:
    """The text of a part of a message; the image that it holds is added, if it is not among those of the record."""
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


def _image(job: ImageJob, image: Any) -> np.ndarray:
    """The pixels of a path within the folder, a data URL, or the content of a file."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and image.startswith("data:"):
        image = bytes_of_url(image)
    if isinstance(image, bytes):
        return decoded(image, job.size)
    return read_image_within(job.image_folder, image, job.size)


def _tokens(job: ImageJob, tokenizer: Tokenizer, text: Text) -> tuple[list[int], list[int]]:
    """Ids with placeholders for each mark, and which count in the loss: as prompts are tokenized, part by part."""
    parts, begin = [], 0
    for part in text.text.split(MARK):
        end = begin + len(part)
        inside = [(max(first, begin) - begin, min(last, end) - begin) for first, last in text.counted]
        parts.append(Text(part, [span for span in inside if span[0] < span[1]]))
        begin = end + len(MARK)
    first, *others = tokenize_texts(tokenizer, parts)
    ids, counted = list(first[0]), list(first[1])
    for more, flags in others:
        ids += [job.token] * job.tokens + more
        counted += [0] * job.tokens + flags
    return ids, [0, *counted[1:]]
