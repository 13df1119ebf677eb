"""Images of prompts: reading them, and their placeholders among the tokens. Does not import torch."""

import base64
import binascii
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.common.errors import DataError, counted, one_line
from megatron.common.reading import read_bytes
from megatron.config import ModelConfig
from megatron.config.vision import STRETCH

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "<image>"
"""Marks the place of an image in a text."""
MOST_PIXELS = 1 << 24
"""Images with more pixels are rejected before they are decoded."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")


class ImagePrompt(tuple[int, ...]):
    """Tokens of a prompt with placeholders of images, and these images.

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
    """Tokenize ``text``, with each mark replaced by the placeholders of ``model`` for an image.

    Raises DataError if the numbers of marks and images differ, or if the text itself has placeholder tokens.
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
    """Raise DataError if the number of placeholders in ``tokens`` does not match the number of ``images``."""
    if tokens.count(model.image_token_id) != images * model.image_tokens:
        raise DataError(f"the text has token {model.image_token_id}, which only images may have: remove it")


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of prompts at the resolution of ``model``."""

    model: ModelConfig
    shared: Sequence[np.ndarray] = ()
    """Images that every prompt begins with."""
    folder: Path = Path()
    """The folder that paths in records are relative to."""

    def images(self, record: Mapping[str, Any]) -> list[np.ndarray]:
        """The shared images, then the images at the path or paths in the record's ``image`` or ``images``.

        Raises DataError as ``read_image``, or for a path outside of the folder.
        """
        shape = self.model.vision_image_size, self.model.image_fit
        return [*self.shared, *(read_image_within(self.folder, path, *shape) for path in images_of(record))]

    def tokens(self, text: str, record: Mapping[str, Any], tokenize: Callable[[str], Sequence[int]]) -> ImagePrompt:
        """Tokenize a text with the images of its record, see ``with_images``."""
        return with_images(text, self.images(record), self.model, tokenize)

    def marked(self, text: str, record: Mapping[str, Any]) -> str:
        """``text``, with a mark for each image in front if it has no marks."""
        return marked(text, len(self.shared) + len(images_of(record)))


def marked(text: str, images: int) -> str:
    """``text``, with a mark for each of the ``images`` in front if it has no marks."""
    return text if MARK in text else f"{MARK}\n" * images + text


IMAGES = ("image", "images")
"""Keys of records with images."""


def images_of(record: Any) -> list[Any]:
    """The images that a record names, in a list, alone or not at all. Raises DataError if it has both keys for them."""
    images = only(record, IMAGES) if isinstance(record, Mapping) else None
    return images if isinstance(images, list) else [images] if images else []


def only(record: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The value under one of ``keys``, or None. Raises DataError if there are several."""
    values = [record[key] for key in keys if record.get(key)]
    if len(values) > 1:
        raise DataError(f"there are {' and '.join(keys)}: give one")
    return values[0] if values else None


def read_image_within(folder: Path, path: Any, size: int, fit: str) -> np.ndarray:
    """Read the image at ``path`` in ``folder``, as ``read_image``. Raises DataError if the path leaves the folder."""
    inside = folder.resolve()
    if not isinstance(path, str) or "\0" in path or not (inside / path).resolve().is_relative_to(inside):
        raise DataError(f"the image {one_line(str(path))} is no path within {folder}")
    return read_image(folder / path, size, fit)


def read_image(path: Path, size: int, fit: str = STRETCH) -> np.ndarray:
    """Read an image file as uint8 [size, size, 3]. Raises DataError as ``decoded``, or if it cannot be read."""
    try:
        return decoded(read_bytes(path), size, fit)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def decoded(content: bytes, size: int, fit: str = STRETCH) -> np.ndarray:
    """Decode an image file's ``content`` and resize it to uint8 [size, size, 3]; for ``fit`` see ``VisionConfig``.

    Raises DataError if it is not an image, is damaged, or has several frames or more than ``MOST_PIXELS`` pixels.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(content), formats=FORMATS) as image:
            warnings.simplefilter("ignore")  # about damaged metadata, and many pixels
            if image.width * image.height > MOST_PIXELS:
                raise DataError(f"{image.width} x {image.height} pixels are more than {MOST_PIXELS:,}: make it smaller")
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise DataError(f"an image of {frames} frames: give one frame")
            if image.mode[0] in "IF":  # conversion would cut off what is over 255
                raise DataError("an image of more than 8 bits a color: give one of 8 bits")
            square = _fitted(image.convert("RGB"), size, fit)
    except UnidentifiedImageError:
        raise DataError(f"no image: give one of {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"the image is damaged ({one_line(str(error))})") from None
    return np.asarray(square)


def _fitted(image: "Image", size: int, fit: str) -> "Image":
    """The square of ``size`` pixels that transformers' processors of CLIP, LLaVA and SigLIP make of an RGB image."""
    from PIL import Image

    edges = image.size
    if fit == "crop":  # the shorter edge becomes ``size``, and the middle of the longer one is left
        width, height = (int(size * edge / min(edges)) for edge in edges)
        left, top = (width - size) // 2, (height - size) // 2
        if width * height > MOST_PIXELS:
            raise DataError(f"an image of {edges[0]} x {edges[1]} pixels is too narrow: cut it")
        return image.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))
    if fit != STRETCH:
        edge = max(edges)
        if edge * edge > 4 * MOST_PIXELS:
            raise DataError(f"an image of {edges[0]} x {edges[1]} pixels is too large to be padded: make it smaller")
        square = Image.new("RGB", (edge, edge), fit.removeprefix("pad "))
        square.paste(image, ((edge - edges[0]) // 2, (edge - edges[1]) // 2))
        image = square
    return image.resize((size, size), Image.Resampling.BICUBIC)


def images_of_messages(
    messages: Sequence[Mapping[str, Any]], model: ModelConfig, most: int
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """OpenAI messages with images replaced by marks, and these images, at most ``most`` of them.

    Raises DataError for URLs other than data URLs (nothing is fetched), a broken image, or a mark in a text.
    """
    images: list[np.ndarray] = []
    changed = [
        {**message, "content": _without_images(message.get("content"), images, model, most)} for message in messages
    ]
    return changed, images


def _without_images(content: Any, images: list[np.ndarray], model: ModelConfig, most: int) -> Any:
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
        file = bytes_of_url(address.get("url") if isinstance(address, dict) else address)
        images.append(decoded(file, model.vision_image_size, model.image_fit))
        changed.append({"type": "text", "text": f"{MARK}\n"})
    return changed


def bytes_of_url(url: Any) -> bytes:
    """The content of a data URL. Raises DataError for other URLs, and for invalid base64."""
    begin = _DATA_URL.match(url) if isinstance(url, str) else None
    if begin is None:
        raise DataError("an image must be a data URL (data:image/png;base64,...): nothing is fetched from an address")
    try:
        return base64.b64decode(url[begin.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise DataError("the data URL of an image is not base64") from None
