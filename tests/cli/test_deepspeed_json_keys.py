"""The legal keys of a config, compared with the installed DeepSpeed."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.deepspeed_json.file import OPTIMIZERS, TOP_KEYS, accepts, expected

ROOT = Path(__file__).resolve().parents[2]
ZERO_KEYS = TOP_KEYS["zero_optimization"]["properties"]


def refused(keys: Mapping[str, Any]) -> set[str]:
    return {name for name, schema in keys.items() if "refused" in schema}


class Recorder(dict):
    """A config that records the keys that are read."""

    def __init__(self) -> None:
        super().__init__(train_batch_size=1)
        self.read: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "Recorder":
        return self


def test_top_keys_are_those_deepspeed_reads() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = Recorder()
    DeepSpeedConfig(config)
    assert config.read - set(TOP_KEYS) == set()
    assert set(TOP_KEYS) - refused(TOP_KEYS) - config.read == set()


def test_keys_file_is_that_of_the_installed_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade of DeepSpeed that changes its config models fails here."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import write_deepspeed_keys

    installed = write_deepspeed_keys.as_text(write_deepspeed_keys.deepspeed_keys())
    assert write_deepspeed_keys.FILE.read_text() == installed, "run python tools/write_deepspeed_keys.py"


def test_keys_that_deepspeed_removed_are_refused() -> None:
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) <= refused(TOP_KEYS)
    assert set(_REMOVED_ZERO_CONFIG_KEYS) <= refused(ZERO_KEYS)
    assert set(DeepSpeedZeroConfig.model_fields) <= set(ZERO_KEYS), "deprecated fields have a remedy"


@pytest.mark.parametrize(
    "schema, legal, illegal, words",
    [
        ({"type": "integer", "minimum": 1}, [1, 5e8], [0, 1.5, True, "1", None], "a whole number from 1 on"),
        ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1.0], [-1, 2, float("nan")], "a number from 0 to 1"),
        ({"type": "integer", "enum": [0, 1]}, [0, 1.0], [2, True], "one of 0, 1"),
        (TOP_KEYS["steps_per_print"], [None, 3], [0, "3"], "a whole number from 1 on, or null"),
        (TOP_KEYS["checkpoint"]["properties"]["tag_validation"], ["WARN", "Fail"], ["off", 1], "Ignore, Warn or Fail"),
        (OPTIMIZERS["Adam"]["betas"], [[0, 0.9]], [[0.9], [0, 1], 0.9], "a list of two numbers from 0 to 1, 1 "),
    ],
)
def test_schema_accepts_and_describes_values(schema: Any, legal: list[Any], illegal: list[Any], words: str) -> None:
    assert [accepts(schema, value) for value in (*legal, *illegal)] == [True] * len(legal) + [False] * len(illegal)
    assert expected(schema).startswith(words)


def test_optimizers_are_ones_that_deepspeed_builds() -> None:
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    for name in OPTIMIZERS:
        assert name.lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, name)
