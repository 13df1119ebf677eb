"""Finds and reads chat templates: in files, folders of tokenizers, data sets and checkpoints."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError
from megatron.common.files import as_json
from megatron.common.reading import parse_json
from megatron.common.tokenizer_files import CHAT_TEMPLATE, OTHER_TEMPLATES
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import EOD, read_object, read_text
from megatron.tools.chat.template import ChatTemplate
from megatron.tools.chat.tokens import special_tokens
from megatron.tools.convert.inspection import FoundCheckpoint, read_description
from megatron.tools.inference.images import MARK

SETTINGS, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_DEFAULT = "default"


def chat_template(file: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Read the template in a template file or a ``tokenizer_config.json``.

    Raises ConfigError if there is none, or if it writes special tokens that the tokenizer lacks.
    """
    texts: dict[int | None, str] = {id: text for text, id in special_tokens(tokenizer).items()}
    names = {"bos_token": texts.get(tokenizer.bos, ""), "eos_token": texts.get(tokenizer.eod, EOD)}
    folders = [Path(place).parent for place in (*tokenizer.source[1:2], file) if place]
    named_in_files = next(filter(None, map(_special_texts, folders)), {})
    return _build_template(file, _read_templates(file), names | named_in_files, tokenizer)


def recorded_template(record: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template in a ``record``, the result of ``record_of``. Raises ConfigError as ``chat_template``."""
    content = parse_json(record)
    return _build_template("the checkpoint", named(content["chat_template"]), content["special_tokens"], tokenizer)


def template_of_model(checkpoint: FoundCheckpoint, tokenizer: Tokenizer, chosen: str | None) -> ChatTemplate:
    """The chat template of a model: the file ``chosen``, the template of its fine-tuning, or of its tokenizer.

    Raises ConfigError if there is none.
    """
    folder = checkpoint.path
    if checkpoint.kind != "huggingface":
        data = (read_description(checkpoint) or {})["config"]["data"]
        if chosen is None and data.get("chat_template"):
            return recorded_template(data["chat_template"], tokenizer)
        folder = Path(data.get("vocab_file") or ".").parent
    return chat_template(find_chat_template(chosen, folder, "a chat with this model"), tokenizer)


def record_of(template: ChatTemplate) -> str:
    """The template and its special tokens as JSON, to store with a data set and in a checkpoint."""
    source: Any = template.source
    if template.others:
        sources = {_DEFAULT: source} | template.others
        source = [{"name": name, "template": text} for name, text in sources.items()]
    return as_json({"chat_template": source, "special_tokens": template.special})


def _build_template(
    place: str, sources: Mapping[str, str], special: Mapping[str, str], tokenizer: Tokenizer
) -> ChatTemplate:
    if _DEFAULT not in sources:
        raise ConfigError(f'{place} has no "chat_template": give one with --chat-template')
    if not all(map(str.strip, sources.values())):
        raise ConfigError(f"{place}: the chat template is empty: give another one with --chat-template")
    known = special_tokens(tokenizer)
    others = {name: text for name, text in sources.items() if name != _DEFAULT}
    reserved = [text for text in known if text != MARK]
    added = [text for text in getattr(tokenizer, "added_tokens", ()) if text != MARK]
    try:
        template = ChatTemplate(sources[_DEFAULT], special, reserved, others, tokenizer.respelled_tokens, added)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    for mark in template.marks:
        if mark not in known and ((ids := tokenizer.tokenize(mark)) == [tokenizer.unk] or len(ids) != 1):
            raise ConfigError(
                f"the chat template of {place} writes {mark}, which is not a token of the tokenizer: give the "
                "template of its model, or one without special tokens such as examples/chat_template.jinja"
            )
    return template


@cache
def _read_templates(file: str) -> dict[str, str]:
    """The templates in a file and in the folder of others beside it."""
    path, text = Path(file), read_text(file)
    sources = named(_settings_in(path).get("chat_template") if path.suffix == ".json" else text)
    return sources | {other.stem: read_text(str(other)) for other in other_templates(file)}


@cache
def _special_texts(folder: Path) -> dict[str, str]:
    """The special tokens by their names in a template, from the settings of a tokenizer in a folder; empty for null."""
    settings = _settings_in(folder / SPECIAL_TOKENS) | _settings_in(folder / SETTINGS)
    others = settings.get("extra_special_tokens")
    named_so = {name: value for name, value in settings.items() if name.endswith("_token")}
    named_so |= others if isinstance(others, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named_so.items()}
    return {name: text or "" for name, text in texts.items() if isinstance(text or "", str)}


def named(templates: Any) -> dict[str, str]:
    """The templates by name of a ``chat_template``: a text, or a list of objects with name and template."""
    if isinstance(templates, str):
        return {_DEFAULT: templates}
    entries = [entry for entry in templates if isinstance(entry, dict)] if isinstance(templates, list) else []
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def other_templates(file: str | None) -> list[Path]:
    """The files of further templates beside the ``file`` of a tokenizer's template, as transformers writes them."""
    path = Path(file or "")
    is_own = path.name in (CHAT_TEMPLATE, SETTINGS)
    return sorted((path.parent / OTHER_TEMPLATES).glob("*.jinja")) if is_own else []


def find_chat_template(chosen: str | None, folder: Path, what: str) -> str:
    """The path of the chat template: ``chosen``, or a file in the tokenizer's folder.

    Raises ConfigError, which says that ``what`` needs one, if it is absent.
    """
    if chosen is not None:
        if not Path(chosen).exists():
            raise ConfigError(f"--chat-template {chosen}: no such file")
        return chosen
    for path in (folder / CHAT_TEMPLATE, folder / SETTINGS):
        if os.path.lexists(path) and (path.suffix != ".json" or "chat_template" in _settings_in(path)):
            return str(path)
    raise ConfigError(
        f"{what} needs a chat template, and {folder} has neither chat_template.jinja nor a {SETTINGS} with one: give "
        "--chat-template"
    )


def _settings_in(path: Path) -> dict[str, Any]:
    """The object in a file of settings of a tokenizer; empty without the file. Raises DataError if it is broken."""
    return read_object(str(path)) if os.path.lexists(path) else {}
