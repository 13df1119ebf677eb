"""Conversations with images as a data set: tokens with placeholders, a loss mask, and the pixels."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.common.errors import DataError
from megatron.common.files import replace_file
from megatron.common.reading import parse_json, read_bytes
from megatron.config.data import chat_template_file, loss_mask_prefix
from megatron.data.fingerprint import write_tokenizer
from megatron.data.image_store import write_images
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder, best_dtype
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.files import record_of
from megatron.tools.chat.template import ChatTemplate, Text
from megatron.tools.chat.tokens import tokenize_texts
from megatron.tools.inference.images import MARK, read_image

_ROLES = {"human": "user", "gpt": "assistant"}
"""LLaVA's names of roles."""


@dataclass(frozen=True)
class ImageJob:
    """What to convert, and for which encoder."""

    input: Path
    image_folder: Path
    output_prefix: str
    size: int
    """Height and width of the images in pixels."""
    tokens: int
    """Placeholders of each image."""
    token: int
    """The placeholder."""


class _Document(NamedTuple):
    where: str
    text: Text
    images: list[str]


def preprocess_images(job: ImageJob, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[int, int, int]:
    """Write the data set. Returns the numbers of documents, tokens and images.

    Raises DataError for a document that is wrong, and for an image that is missing, damaged, or out of the folder; then
    nothing is written but the images before it.
    """
    documents = list(_documents(job, template))
    write_images(job.output_prefix, job.size, [one.images for one in documents], lambda path: _image(job, path))
    tokens, mask = job.output_prefix, loss_mask_prefix(job.output_prefix)
    count = 0
    with (
        IndexedDatasetBuilder(tokens, best_dtype(tokenizer.vocab_size)) as ids,
        IndexedDatasetBuilder(mask, "u1") as flags,
    ):
        for document in documents:
            of_document, counted = _tokens(job, tokenizer, document.text)
            ids.add_document(of_document)
            flags.add_document(counted)
            count += len(of_document)
    with replace_file(Path(chat_template_file(tokens)), text=True) as file:
        file.write(record_of(template))
    write_tokenizer(tokens, tokenizer)
    return len(documents), count, sum(len(one.images) for one in documents)


def _documents(job: ImageJob, template: ChatTemplate) -> Iterator[_Document]:
    for where, record in _records(job.input):
        try:
            images: list[str] = []
            messages = _messages(record, images)
            text = template.conversation(messages)
            marks = text.text.count(MARK)
            if marks != len(images):
                raise DataError(f"{marks} times {MARK}, and {len(images)} images")
            yield _Document(where, text, images)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Location and content of each object: of the lines of JSONL, or of the list in a file of JSON."""
    try:
        text = read_bytes(path).decode("utf-8")
        if path.suffix == ".json":
            yield from ((f"{path}: object {n}", one) for n, one in enumerate(json.loads(text), start=1))
        else:
            yield from (
                (f"{path}:{n}", parse_json(line)) for n, line in enumerate(text.splitlines(), 1) if line.strip()
            )
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not JSON of conversations ({error})") from None


def _messages(record: Any, images: list[str]) -> list[dict[str, Any]]:
    """Messages, also of LLaVA's conversations, with a mark for each image; their paths are added to ``images``."""
    if not isinstance(record, dict) or not isinstance(
        turns := record.get("conversations", record.get("messages")), list
    ):
        raise DataError('no "conversations" (LLaVA) or "messages" (OpenAI) in it')
    paths = record.get("image") or []
    images += [paths] if isinstance(paths, str) else paths
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


def _part(part: Any, images: list[str]) -> str:
    """The text of a part of a message."""
    kind = part.get("type") if isinstance(part, Mapping) else "text"
    value = part.get(kind) if isinstance(part, Mapping) else part
    if kind in ("image", "image_url"):
        images.append(value.get("url") if isinstance(value, Mapping) else value)  # type: ignore[arg-type]
        return f"{MARK}\n"
    if kind != "text" or not isinstance(value, str):
        raise DataError(f"a part of a message is {kind}, and can be text or image_url")
    return value


def _image(job: ImageJob, path: Any) -> Any:
    folder = job.image_folder.resolve()
    if not isinstance(path, str) or not (folder / path).resolve().is_relative_to(folder):
        raise DataError(f"the image {str(path)[:80]!r} is no path within {job.image_folder}")
    return read_image(job.image_folder / path, job.size)


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
