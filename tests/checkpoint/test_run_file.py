"""The model's configuration, read back from the ``run.json`` of a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_lines import parse

from megatron.checkpoint.run_file import SavedRun, describe
from megatron.model.partition import layer_groups


@pytest.mark.parametrize("words", ["", "--lora-rank 4 --lora-target query_key_value dense", "--num-experts 4"])
def test_the_configuration_is_the_one_that_was_saved(words: str, tmp_path: Path) -> None:
    """Equal, and as good a key of a cache: JSON knows no tuples."""
    model = parse(words).model
    description = json.loads(json.dumps(describe(parse(words), 6)))
    config = SavedRun(tmp_path, "global_step6", description).whole_model_config()
    assert config == replace(model, padded_vocab_size=config.vocab_size, dtype=config.dtype)
    assert layer_groups(config) == layer_groups(config)


def test_fields_of_earlier_versions_are_left_out(tmp_path: Path) -> None:
    description = json.loads(json.dumps(describe(parse(""), 6)))
    description["config"]["model"]["flex_attention"] = False
    config = SavedRun(tmp_path, "global_step6", description).whole_model_config()
    assert config.hidden_size == parse("").model.hidden_size
