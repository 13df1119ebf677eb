"""Read and write folders of Hugging Face's GPT-2, Llama family and BERT, with one weight in memory at a time."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from megatron.checkpoint.huggingface import our_weights, their_weights
from megatron.checkpoint.tensor_files import outlines_of
from megatron.model.huggingface import HF_CONFIG, read_config, read_json, write_config
from megatron.tools.convert.huggingface_files import Vocabulary, write_tokenizer
from megatron.tools.convert.whole_model import (
    WholeModel,
    check_sizes,
    read_tensors,
    without_padding,
    write_tensors,
)


def read_huggingface(folder: Path, *, vocab_size: int | None = None) -> WholeModel:
    """The model in a Hugging Face folder.

    If its tokenizer has only ``vocab_size`` tokens, further rows of the table of GPT-2 and BERT, which are padding, are
    dropped.
    Raises CheckpointError for a model that is none of ours, and for files that are missing or not whole.
    """
    config, tensors = read_config(folder, vocab_size=vocab_size), read_tensors(folder)
    check_sizes(config, len(tensors), str(folder))
    weights = our_weights(tensors, read_config(folder), str(folder))
    return WholeModel(config, without_padding(weights, config))


def write_huggingface(
    folder: Path,
    model: WholeModel,
    tokenizer: Vocabulary | None,
    *,
    max_shard_size: int,
    carried: Mapping[str, Path],
) -> None:
    """Write ``config.json``, the weights, the tokenizer if there is one, and ``carried`` files, into a new ``folder``.

    A config.json among them is that of the folder that the model was read from. Raises ConfigError if Hugging Face's
    model does not support a setting, ResourceError if the disk is too small.
    """
    dtype = str(next(iter(outlines_of(model.weights).values())).dtype).removeprefix("torch.")
    source = carried.get(HF_CONFIG)
    config = write_config(model.config, dtype, read_json(source) if source else None)
    if tokenizer is not None:
        config |= tokenizer.model_settings
    folder.mkdir(exist_ok=True)
    (folder / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(their_weights(model.weights, model.config), folder, max_shard_size=max_shard_size, metadata={})
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder, positions=model.config.max_position_embeddings)
    for name, file in carried.items():
        if name != HF_CONFIG:
            shutil.copyfile(file, folder / name)
