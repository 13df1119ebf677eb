"""Questions about images, with the answers of a model, for the report."""

import base64
import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from megatron.common.errors import ConfigError, DataError
from megatron.common.reading import parse_json
from megatron.tools.inference.images import read_image

_MOST = 12
_PIXELS = 192


class Answer(NamedTuple):
    """A row of the table."""

    image: str
    """A data URL; empty without an image."""
    question: str
    answer: str
    predicted: str
    right: bool


def read_answers(path: Path) -> list[Answer]:
    """The first answers in a file that tools/evaluate.py has written, and their images from the folder of its input.

    Raises ConfigError if the file or an image cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            records = [parse_json(line) for line, _ in zip(file, range(_MOST), strict=False)]
        return [
            Answer(_url(one), one["question"], _text(one["answer"]), one["predicted"], bool(one["right"]))
            for one in records
        ]
    except OSError as error:
        raise ConfigError(f"--predictions {path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, DataError) as error:
        raise ConfigError(f"--predictions {path}: not what tools/evaluate.py --predictions writes ({error})") from None


def _text(answer: str | list[str]) -> str:
    return answer if isinstance(answer, str) else " or ".join(answer)


def _url(record: dict) -> str:
    """The first image of a question as a small PNG."""
    images = record.get("image") or []
    first = images if isinstance(images, str) else next(iter(images), "")
    if not first:
        return ""
    file = io.BytesIO()
    Image.fromarray(read_image(Path(record["folder"]) / first, _PIXELS)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
