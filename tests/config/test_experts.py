"""Which layers have experts: the numbers and lists of --moe-layer-freq."""

import pytest
from support.command_lines import complaints, parse

from megatron.config import ModelConfig
from megatron.config.experts import layer_list


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
     "[1]*20000+[1]", "[1 for _ in '1']", "[[1]]", "[1]+1", "(" * 5000 + "[1]", "+".join(["[1]"] * 30000)],
)  # fmt: skip
def test_a_list_of_layers_is_read_without_being_run(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number from 1 on, or a list|is too long"):
        layer_list(text)


def test_a_wrong_number_of_layers_is_refused() -> None:
    assert complaints("--num-experts 4 --moe-layer-freq 0") == ["--moe-layer-freq 0: must be 1 or more"]
    assert complaints("--num-experts 4 --moe-layer-freq two") == ["--moe-layer-freq two: must be a number"]
