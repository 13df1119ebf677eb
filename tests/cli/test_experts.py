"""Which layers have experts: the numbers and lists of --moe-layer-freq."""

import json
import tracemalloc
from pathlib import Path

import pytest
from support.command_lines import parse

from megatron.cli.flags import read_flags
from megatron.config import ModelConfig
from megatron.config.experts import as_runs, layer_list


@pytest.mark.parametrize(
    "words, expected",
    [
        ("1", "[1]*4"),
        ("3", "[1]*1+[0]*2+[1]*1"),
        ("[0]*1+[1]*3", "[0]*1+[1]*3"),
        ("([0]+[1])*2", "[0]*1+[1]*1+[0]*1+[1]*1"),
        ("'2*([0,1])'", "[0]*1+[1]*1+[0]*1+[1]*1"),
        ("[0,1,1,1]", "[0]*1+[1]*3"),
    ],
)
def test_layers_with_experts(words: str, expected: str) -> None:
    model = parse(f"--num-layers 4 --num-experts 4 --moe-layer-freq {words}").model
    assert model.expert_layers == expected
    assert [model.layer_has_experts(n) for n in range(1, 5)] == [value == 1 for value in layer_list(expected)]
    assert ModelConfig(num_layers=4, moe_layer_freq=model.moe_layer_freq).expert_layers == ""


@pytest.mark.parametrize(
    "text",
    ["[]", "[2]", "[0", "[1]*0", "[1]*-1", "[1]*99999999999", "[1]*[1]", "[1]-[1]", "[x]", "[__import__('os')]",
     "[1]*0x2", "[1]*1_0", "[0b1]", "[True]", "[1.0]", "[1]*20000+[1]", "[1 for _ in '1']", "[[1]]", "[1]+1",
     "(" * 5000 + "[1]", "+".join(["[1]"] * 30000)],
)  # fmt: skip
def test_a_list_of_layers_is_read_without_being_run(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number from 1 on, or a list"):
        layer_list(text)


def test_a_list_that_is_too_long_is_not_made() -> None:
    """[1]*20000*20000 would take 3 GB."""
    tracemalloc.start()
    with pytest.raises(ValueError, match="must be a number from 1 on, or a list"):
        layer_list("([1]*20000)*20000")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**20


@pytest.mark.parametrize("layers", [100, 1_000, 20_000])
def test_alternating_layers_are_written_as_they_are_read(layers: int) -> None:
    listed = layer_list(f"[0,1]*{layers // 2}")
    assert len(listed) == layers and layer_list(as_runs(listed)) == listed


@pytest.mark.parametrize(("words", "agree"), [("[1]*4", True), ("1", True), ("[0]*1+[1]*3", False), ("2", False)])
def test_layers_with_experts_of_a_folder(tmp_path: Path, words: str, agree: bool) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
             "intermediate_size": 48, "max_position_embeddings": 32, "vocab_size": 40, "model_type": "mixtral",
             "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    problems = read_flags(["--load-hf", str(tmp_path), "--moe-layer-freq", words]).problems
    assert [f"--moe-layer-freq {words} contradicts" in problem for problem in problems] == ([] if agree else [True])
