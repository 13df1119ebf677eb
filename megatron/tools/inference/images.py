"""Images of prompts: reading them, and the placeholders that stand for them in tokens. No torch here."""

import base64
import binascii
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.common.errors import DataError, counted, one_line
from megatron.common.reading import read_bytes
from megatron.config import ModelConfig

MARK = "<image>"
"""Stands in a text for an image."""
MOST_PIXELS = 1 << 24
"""Images with more pixels are rejected before they are decoded."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")


class ImagePrompt(tuple[int, ...]):
    """Tokens of a prompt, and the images whose placeholders are among them.

    Attributes:
        images: uint8 [n, size, size, 3]; None without images.
    """

    images: np.ndarray | None

    def __new__(cls, tokens: Iterable[int], images: np.ndarray | None = None) -> "ImagePrompt":
        """Tokens with images."""
        prompt = super().__new__(cls, tokens)
        prompt.images = images
        return prompt


def with_images(
    text: str, images: Sequence[np.ndarray], model: ModelConfig, tokenize: Callable[[str], Sequence[int]]
) -> ImagePrompt:
    """``text`` as tokens, in which ``model``'s placeholders take the place of each mark.

    Raises DataError if there are not as many marks as images, or if the text itself has placeholders.
    """
    first, *others = text.split(MARK)
    if len(others) != len(images):
        raise DataError(f"the text has {len(others)} times {MARK}, and {counted(len(images), 'image')}: give as many")
    tokens = [*tokenize(first)] if first else []
    for part in others:
        tokens += [model.image_token_id] * model.image_tokens + ([*tokenize(part)] if part else [])
    check_placeholders(tokens, len(images), model)
    return ImagePrompt(tokens, np.stack(images) if images else None)


def check_placeholders(tokens: Sequence[int], images: int, model: ModelConfig) -> None:
    """Raise DataError if ``tokens`` have other placeholders than those of so many images."""
    if tokens.count(model.image_token_id) != images * model.image_tokens:
        raise DataError(f"the text has token {model.image_token_id}, which only images may have: remove it")


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of prompts to ``model``."""

    model: ModelConfig
    of_all: Sequence[np.ndarray] = ()
    """Images of every prompt."""
    folder: Path = Path()
    """Where the paths of records begin."""

    def images(self, record: Mapping[str, Any]) -> list[np.ndarray]:
        """Those of all prompts, then those in the files of the record's ``image``, a path or several.

        Raises DataError as ``read_image``, or for a path that leaves the folder.
        """
        size = self.model.vision_image_size
        return [*self.of_all, *(read_image_within(self.folder, path, size) for path in as_list(record.get("image")))]

    def tokens(self, text: str, record: Mapping[str, Any], tokenize: Callable[[str], Sequence[int]]) -> ImagePrompt:
        """A text as tokens, with the images of its record, see ``with_images``."""
        return with_images(text, self.images(record), self.model, tokenize)

    def marked(self, text: str, record: Mapping[str, Any]) -> str:
        """``text`` with a mark for each image before it, if it has none."""
        return marked(text, len(self.of_all) + len(as_list(record.get("image"))))


def marked(text: str, images: int) -> str:
    """``text``, before which a mark for each image is put if it has none."""
    return text if MARK in text else f"{MARK}\n" * images + text


def as_list(images: Any) -> list[Any]:
    """The images of a record, which names several, one, or none."""
    return images if isinstance(images, list) else [images] if images else []


def read_image_within(folder: Path, path: Any, size: int) -> np.ndarray:
    """The image in the file at ``path`` in ``folder``, as ``read_image``. Raises DataError if it leads elsewhere."""
    inside = folder.resolve()
    if not isinstance(path, str) or "\0" in path or not (inside / path).resolve().is_relative_to(inside):
        raise DataError(f"the image {one_line(str(path))} is no path within {folder}")
    return read_image(folder / path, size)


def read_image(path: Path, size: int) -> np.ndarray:
    """The image in a file, uint8 [size, size, 3]. Raises DataError as ``decoded``, or if it cannot be read."""
    try:
        return decoded(read_bytes(path), size)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def decoded(content: bytes, size: int) -> np.ndarray:
    """The image in a file's ``content``, resized to uint8 [size, size, 3].

    Raises DataError if it is no image, is damaged, has several frames, or more than ``MOST_PIXELS``.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(content), formats=FORMATS) as image:
            warnings.simplefilter("ignore")  # about damaged metadata, and many pixels
            if image.width * image.height > MOST_PIXELS:
                raise DataError(f"{image.width} x {image.height} pixels are more than {MOST_PIXELS:,}: make it smaller")
            if getattr(image, "n_frames", 1) > 1:
                raise DataError(f"an image of {image.n_frames} frames: give one frame")
            if image.mode[0] in "IF":  # conversion would cut off what is over 255
                raise DataError("an image of more than 8 bits a color: give one of 8 bits")
            resized = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    except UnidentifiedImageError:
        raise DataError(f"no image: give one of {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"the image is damaged ({one_line(str(error))})") from None
    return np.asarray(resized)


def images_of_messages(
    messages: Sequence[Mapping[str, Any]], size: int, most: int
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """OpenAI's messages with a mark for each image, and the images, at most ``most`` of them.

    Raises DataError for an address, from which nothing is fetched, a broken image, or a mark in a text.
    """
    images: list[np.ndarray] = []
    changed = [
        {**message, "content": _without_images(message.get("content"), images, size, most)} for message in messages
    ]
    return changed, images


def _without_images(content: Any, images: list[np.ndarray], size: int, most: int) -> Any:
    parts = content if isinstance(content, list) else [content]
    if any(MARK in str(part.get("text") if isinstance(part, dict) else part) for part in parts):
        raise DataError(f"a text contains {MARK}, which only images may stand for: remove it")
    if not isinstance(content, list):
        return content
    changed: list[Any] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "image_url":
            changed.append(part)
            continue
        if len(images) == most:
            raise DataError(f"more than {counted(most, 'image')}: the model's context has no room for them")
        address = part.get("image_url")
        images.append(decoded(bytes_of_url(address.get("url") if isinstance(address, dict) else address), size))
        changed.append({"type": "text", "text": f"{MARK}\n"})
    return changed


def bytes_of_url(url: Any) -> bytes:
    """What a data URL holds. Raises DataError for another address, and for one that is damaged."""
    begin = _DATA_URL.match(url) if isinstance(url, str) else None
    if begin is None:
        raise DataError("an image must be a data URL (data:image/png;base64,...): nothing is fetched from an address")
    try:
        return base64.b64decode(url[begin.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise DataError("the data URL of an image is not base64") from None
