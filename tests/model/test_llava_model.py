"""LLaVA against the same network of transformers, and conversion in both directions."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.command_lines import parse
from support.llava_models import IMAGE, transformers_model
from support.saved_tensors import saved_bytes
from support.whole_models import whole_model
from torch import Tensor
from torch.testing import assert_close

from megatron.common.errors import CheckpointError, ConfigError
from megatron.engines.build import freeze
from megatron.engines.containers import run_in_order
from megatron.engines.optimizers import weight_decay_groups
from megatron.model.huggingface.formats import TOWER
from megatron.model.llava import PIXELS
from megatron.tools.convert.full_model import without_padding
from megatron.tools.convert.join_llava import joined_llava
from megatron.tools.convert.load_and_save import read_huggingface, write_huggingface
from megatron.tools.convert.their_weights import their_weights

TOKENS = torch.randint(0, 60, (2, 14), generator=torch.Generator().manual_seed(1))
PICTURES = torch.randint(0, 256, (4, 28, 28, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
LABELS = TOKENS.roll(-1, 1)
WEIGHTS = torch.full((2, 14), 1 / 28)


@pytest.mark.parametrize("kind", ["clip", "siglip", "mistral"])
@pytest.mark.ranks(1)
def test_logits_gradients_and_weights_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Two images in the first text, one in the second, and an empty slot."""
    theirs = transformers_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    model = read_huggingface(tmp_path / "theirs")
    ours = whole_model(model.config)
    parameters = dict(ours.named_parameters())
    assert list(parameters) == list(model.weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(model.weights[name])

    tokens = TOKENS.clone()
    tokens[0, 1:5], tokens[0, 7:11], tokens[1, 3:7] = IMAGE, IMAGE, IMAGE
    mean, deviation = map(torch.tensor, PIXELS[model.config.vision_encoder])
    pixels = ((PICTURES / 255 - mean) / deviation).permute(0, 3, 1, 2)
    output = theirs(input_ids=tokens, pixel_values=pixels[:3], attention_mask=torch.ones_like(tokens)).logits
    assert_close(ours((PICTURES, tokens)), output, rtol=1e-5, atol=1e-5)
    loss = ours((PICTURES, tokens), (LABELS, WEIGHTS))
    expected = torch.nn.functional.cross_entropy(output.flatten(0, 1), LABELS.flatten())
    assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients: dict[str, Tensor] = {
        name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in parameters.items()
    }
    renamed = their_weights(without_padding(gradients, model.config), model.config)
    for name, parameter in theirs.named_parameters():
        of_file = name.removeprefix("model.").replace("lm_head", "language_model.lm_head")
        of_file = of_file.replace("vision_tower.", "vision_tower.vision_model.")
        if "lm_head" not in name:
            of_file = of_file.replace("language_model.", "language_model.model.")
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (renamed[of_file] - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp(min=1e-3), name

    write_huggingface(tmp_path / "again", model, None, max_shard_size=1 << 20, carried={})
    again, report = type(theirs).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert all(one.equal(theirs.state_dict()[name]) for name, one in again.state_dict().items())


def test_an_encoder_and_a_language_model_are_joined(tmp_path: Path):
    """With a new projector, and rows for a placeholder that the vocabulary does not have."""
    import transformers

    theirs = transformers_model("clip")
    theirs.model.vision_tower.save_pretrained(tmp_path / "encoder")
    language = transformers.LlamaForCausalLM(theirs.config.text_config)
    language.save_pretrained(tmp_path / "language")
    model = joined_llava(tmp_path / "encoder", tmp_path / "language", 70, -2, seed=1)
    weights = their_weights(model.weights, model.config)
    tower = {f"{TOWER}{name}": one for name, one in theirs.model.vision_tower.state_dict().items()}
    expected = tower | {f"language_model.{name}": one for name, one in language.state_dict().items()}
    assert all(weights[name][: len(one)].equal(one) for name, one in expected.items())
    assert len(weights) == len(expected) + 4 and model.config.vocab_size == 128
    with pytest.raises(ConfigError, match="--image-token-id 128 is far beyond the 64 tokens"):
        joined_llava(tmp_path / "encoder", tmp_path / "language", 128, -2, seed=1)
    with pytest.raises(ConfigError, match="--vision-feature-layer -9 is not one of the 3 layers"):
        joined_llava(tmp_path / "encoder", tmp_path / "language", 70, -9, seed=1)
    assert weights["multi_modal_projector.linear_1.weight"].std() == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": None}, "vision_config is None, and should be an object"),
        ({"vision_config": [1]}, r"vision_config is \[1\], and should be an object"),
        ({"hidden_size": 16.0}, "hidden_size is 16.0, and should be a whole number above 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: must be 20,000 at most"),
        ({"num_hidden_layers": 19000}, "tensors, which cannot be the model that it describes, of 19001 layers"),
        ({"hidden_size": 1 << 20}, r"class_embedding is \[32\], and the model's \[1048576\]"),
        ({"layer_norm_eps": math.inf}, "layer_norm_eps is inf, and should be a number above 0"),
    ],
)
def test_a_wrong_configuration_of_an_encoder_is_refused(tmp_path: Path, change: dict, message: str):
    import transformers

    theirs = transformers_model("clip")
    theirs.model.vision_tower.save_pretrained(tmp_path / "encoder")
    transformers.LlamaForCausalLM(theirs.config.text_config).save_pretrained(tmp_path / "language")
    file = tmp_path / "encoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message) as caught:
        joined_llava(tmp_path / "encoder", tmp_path / "language", 0, -2, seed=1)
    assert str(file.parent) in str(caught.value)


@pytest.mark.ranks(1)
def test_a_frozen_encoder_keeps_nothing_for_the_backward_pass() -> None:
    """No gradients, no states of the optimizer, and no activations; the projector has a learning rate of its own."""
    kept = {}
    for flags in ("", "--freeze-vision"):
        model = replace(
            parse(f"llava --projector-lr-mult 10 --attention-dropout 0 --hidden-dropout 0 {flags}").model,
            vocab_size=64,
            padded_vocab_size=64,
        )
        layers = whole_model(model).train()
        freeze(layers, model)
        groups = weight_decay_groups(layers, model)
        assert [group.get("lr_mult", 1) for group in groups] == [1, 1, 10, 10]
        encoder = list(layers.children())[1 : 2 + model.vision_layers]  # after the tied modules
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        batch = PICTURES[:3].repeat(2, 1, 1, 1), torch.full((2, 14), 60)
        kept[flags] = saved_bytes(
            lambda part=encoder, batch=batch: run_in_order(part, batch), torch.nn.Sequential(*encoder)
        )
        layers(batch, (LABELS, WEIGHTS)).backward()
        for part in encoder:
            for parameter in part.parameters():
                assert (parameter.grad is None) == (id(parameter) not in trained) == ("freeze" in flags)
    assert min(kept.values()) == 0 < max(kept.values())
