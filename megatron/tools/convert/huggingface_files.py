"""Files of a Hugging Face folder that conversions copy: tokenizer, chat templates, settings. No torch here."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.common.errors import CheckpointError, UserError
from megatron.common.files import as_json
from megatron.common.reading import LARGEST_JSON, check_regular, is_present
from megatron.common.tokenizer_files import CHAT_TEMPLATE, OTHER_TEMPLATES, PUBLISHED, SENTENCEPIECE, TOKENIZER_FILES
from megatron.config import ModelConfig
from megatron.data.fingerprint import tokenizer_hash
from megatron.model.huggingface import HF_CONFIG
from megatron.tokenizer.published import HuggingFaceTokenizer
from megatron.tools.chat.files import recorded_template
from megatron.tools.chat.template import ChatPrompts
from megatron.tools.convert.vocabulary import (
    ADDED,
    SENTENCEPIECE_MODEL,
    SETTINGS,
    TOKENIZER,
    Vocabulary,
    read_folder_tokenizer,
    settings_in,
)

GENERATION = "generation_config.json"
CARRIED = (
    HF_CONFIG,
    TOKENIZER,
    SETTINGS,
    "special_tokens_map.json",
    ADDED,
    SENTENCEPIECE_MODEL,
    GENERATION,
    CHAT_TEMPLATE,
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files of a Hugging Face folder that from-hf and to-hf copy."""


def carried_files(folder: Path) -> dict[str, Path]:
    """The files of ``folder`` to copy, by name. Raises CheckpointError for one that is no file, or too large."""
    others = sorted(f"{OTHER_TEMPLATES}/{file.name}" for file in (folder / OTHER_TEMPLATES).glob("*.jinja"))
    files = {name: folder / name for name in (*CARRIED, *others) if is_present(folder / name)}
    for file in files.values():
        try:
            check_regular(file)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    if large := [file for file in files.values() if file.stat().st_size > LARGEST_JSON]:
        raise CheckpointError(f"{large[0]}: more than the {LARGEST_JSON:,} bytes that such a file has")
    return files


def files_for_huggingface(
    folder: Path | None, description: Mapping[str, Any], config: ModelConfig, tokenizer: Vocabulary | None
) -> dict[str, Path]:
    """The files to copy for the model ``config`` with this ``run.json``, saved in ``folder``.

    They are the files of the Hugging Face folder that the model is from, or else those next to the tokenizer that the
    run read: whichever has the tokenizer of the run. ``tokenizer`` is the run's if it is converted.
    """
    data, saved = (description["config"].get(section, {}) for section in ("data", "checkpoint"))
    kind, own = data.get("tokenizer_type"), _files_of_tokenizer(data)

    def tokenizer_in(files: Mapping[str, Path]) -> Vocabulary | str | None:
        """The tokenizer among ``files``, of one that is copied its hash; None if there is none."""
        if tokenizer is not None:
            with suppress(UserError):
                return read_folder_tokenizer(next(iter(files.values())).parent, config)
        elif kind in PUBLISHED and (file := files.get(TOKENIZER_FILES[kind][0])):
            return tokenizer_hash(kind, str(file), None, eod=config.eod_token)
        return None

    if kind in PUBLISHED:
        expected = tokenizer or data.get("tokenizer_hash") or tokenizer_in(own)
    else:  # a vocabulary that is not converted is in no folder
        expected = tokenizer or data.get("vocab_file")
    places = (carried_files(Path(place)) for place in (folder, saved.get("load_hf"), saved.get("load")) if place)
    of_model = next((files for files in places if HF_CONFIG in files), {})
    return next((files for files in (of_model, own) if files and expected in (None, tokenizer_in(files))), {})


def _files_of_tokenizer(data: Mapping[str, Any]) -> dict[str, Path]:
    """The files at the place where a run with the settings ``data`` read its tokenizer."""
    kind = data.get("tokenizer_type")
    if (named := data.get("tokenizer_model") or (data.get("vocab_file") if kind in PUBLISHED else None)) is None:
        return {}
    path, name = Path(named), SENTENCEPIECE_MODEL if kind == SENTENCEPIECE else TOKENIZER
    if path.is_file() and path.name != name:
        return {name: path}
    return carried_files(path.parent if path.is_file() else path)


def keep_chat_template(folder: Path, description: Mapping[str, Any]) -> None:
    """Write the chat templates of a fine-tuning, and their special tokens, into the tokenizer's settings in ``folder``,
    in place of any others. ``description`` is the ``run.json`` of the model."""
    if not (record := description["config"]["data"].get("chat_template")):
        return
    content = json.loads(record)
    tokens = {name: text for name, text in content["special_tokens"].items() if text}
    settings = settings_in(folder) | tokens | {"chat_template": content["chat_template"]}
    (folder / SETTINGS).write_text(as_json(settings, indent=2) + "\n", encoding="utf-8")
    (folder / CHAT_TEMPLATE).unlink(missing_ok=True)
    shutil.rmtree(folder / OTHER_TEMPLATES, ignore_errors=True)
    if (folder / TOKENIZER).is_file():
        with suppress(UserError):  # a tokenizer that the template does not fit
            _end_at_answers(folder, record)


def _end_at_answers(folder: Path, record: str) -> None:
    """Let ``transformers`` end a text at the special token with which the template of ``record`` ends an answer."""
    tokenizer = HuggingFaceTokenizer(str(folder / TOKENIZER))
    end = ChatPrompts(recorded_template(record, tokenizer), tokenizer).end
    if end is not None and end not in tokenizer.other_ends:
        ends = dict.fromkeys((tokenizer.eod, *sorted(tokenizer.other_ends), end))
        settings = settings_in(folder, GENERATION) | {"eos_token_id": [*ends]}
        (folder / GENERATION).write_text(as_json(settings, indent=2) + "\n", encoding="utf-8")


def copy_carried(files: Mapping[str, Path], folder: Path) -> None:
    """Copy ``files``, the result of ``carried_files``, into ``folder``."""
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / name)
