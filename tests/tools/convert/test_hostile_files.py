"""Files of weights that are broken, or made to do harm: refused by a line, before anything is made of them."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from support.fuzzing import Attack

from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import ModelConfig
from megatron.model.huggingface import config_of as from_huggingface
from megatron.model.huggingface import shape_problems, source_shapes
from megatron.tools.convert.full_model import read_tensors
from megatron.tools.convert.huggingface_files import carried_files
from megatron.tools.convert.inspection import FoundCheckpoint, find
from megatron.tools.convert.load_and_save import read_huggingface, read_weights
from megatron.tools.convert.written_config import write_config as to_huggingface

WHOLE = save({"a": torch.zeros(2), "b": torch.zeros(2)})


def with_each_tensor_twice(content: bytes) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    entries = content[8:end].strip()[1:-1]
    header = b"{" + entries + b"," + entries + b"}"
    return len(header).to_bytes(8, "little") + header + content[end:]


def with_a_million_tensors(content: bytes) -> bytes:
    """Each is empty; reading their names would take minutes."""
    end = 8 + int.from_bytes(content[:8], "little")
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[16,16]}'
    header = content[8:end].strip()[:-1] + b"".join(b"," + (entry % number).encode() for number in range(10**6)) + b"}"
    return len(header).to_bytes(8, "little") + header + content[end:]


@pytest.mark.parametrize(
    "content",
    [WHOLE[:-6], with_each_tensor_twice(WHOLE), with_a_million_tensors(WHOLE)],
    ids=["half a file", "tensors twice", "a million tensors"],
)
def test_a_hostile_header_is_refused(tmp_path: Path, content: bytes):
    """tests/fuzz/test_files.py has others."""
    (file := tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file} is not a complete safetensors file"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../model-1.safetensors"}, "names the file '../model-1.safetensors', which is not in the same folder"),
        ({"a": 7}, "names the file '7', which is not in the same folder"),
        ([], "has no weight_map"),
        ({"a": "model-1.safetensors", "c": "model-1.safetensors"}, "model-1.safetensors holds no c, which the index"),
        ({"a": "model.safetensors.index.json"}, "index.json names 'model.safetensors.index.json' as a file with tens"),
        ({"a": "model-1.safetensors", "b": "model-2.safetensors"}, "model-2.safetensors holds a, and so does another"),
    ],
)
def test_index_names_only_files_in_its_folder(tmp_path: Path, weight_map: object, message: str):
    for place in (tmp_path, tmp_path / "folder", tmp_path / "folder" / "part"):
        place.mkdir(exist_ok=True)
        for number in (1, 2):
            (place / f"model-{number}.safetensors").write_bytes(WHOLE)
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/folder/model.*\.safetensors") as caught:
        read_tensors(tmp_path / "folder")
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [[1], {"step": 3}, {"param": [1.0]}, None, torch.ones(2).int()])
def test_a_universal_weight_that_is_no_tensor(tmp_path: Path, content: object):
    (file := tmp_path / "zero" / "2.weight" / "fp32.pt").parent.mkdir(parents=True)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=f"{file}: param is .*, and should be a tensor"):
        read_weights(FoundCheckpoint(tmp_path, "universal"))


def test_a_universal_checkpoint_without_weights(tmp_path: Path):
    (tmp_path / "zero").mkdir()
    with pytest.raises(CheckpointError, match="zero holds no NAME/fp32.pt"):
        read_weights(FoundCheckpoint(tmp_path, "universal"))


def test_a_pickle_runs_no_code(tmp_path: Path):
    torch.save({"wte.weight": Attack(tmp_path / "marker")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        read_tensors(tmp_path)
    assert not (tmp_path / "marker").exists()


GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 4, "vocab_size": 10}


def weights(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    h = 8
    found = {"wte.weight": torch.rand(10, h), "wpe.weight": torch.rand(4, h)}
    for name, (rows, columns) in {
        "h.0.attn.c_attn": (h, 3 * h),
        "h.0.attn.c_proj": (h, h),
        "h.0.mlp.c_fc": (h, 4 * h),
        "h.0.mlp.c_proj": (4 * h, h),
    }.items():
        found |= {f"{name}.weight": torch.rand(rows, columns), f"{name}.bias": torch.rand(columns)}
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        found |= {f"{name}.weight": torch.rand(h), f"{name}.bias": torch.rand(h)}
    changed = found | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in changed.items() if tensor is not None}


def test_older_files_hold_masks_and_a_head_too(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    held = weights(h__0__attn__bias=torch.ones(1, 1, 4, 4), h__0__attn__masked_bias=torch.tensor(-1e4))
    torch.save(held | {"lm_head.weight": held["wte.weight"]}, tmp_path / "pytorch_model.bin")
    model = read_huggingface(tmp_path)
    assert len(model.weights) == 16 and model.weights["2.attention.dense.weight"].equal(
        held["h.0.attn.c_proj.weight"].t()
    )


def test_weights_that_are_not_finite_are_not_taken_over(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    save_file(weights(ln_f__weight=torch.full((8,), torch.nan)), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is from nan to nan, and should be finite"):
        list(read_huggingface(tmp_path).weights.values())


@pytest.mark.parametrize(("file", "save"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)])
def test_a_weight_that_is_not_finite_is_named_as_in_its_file(tmp_path: Path, file: str, save: Callable):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    save(weights(h__0__attn__c_attn__bias=torch.full((24,), torch.inf)), tmp_path / file)
    with pytest.raises(CheckpointError, match=rf"/{file}: h\.0\.attn\.c_attn\.bias is from inf"):
        list(read_huggingface(tmp_path).weights.values())


def test_a_shard_that_is_a_fifo_is_named(tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    os.mkfifo(tmp_path / "model-1.safetensors")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/model-1.safetensors .*a FIFO, not a file"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("target", ["config.json", "nowhere"])
def test_a_broken_link_is_named(tmp_path: Path, target: str):
    save_file(weights(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(target)
    assert find(tmp_path).kind == "huggingface"
    with pytest.raises(CheckpointError, match="config.json: cannot be read"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le"])
def test_a_configuration_is_utf_8(tmp_path: Path, encoding: str):
    (tmp_path / "config.json").write_text(json.dumps(GPT2), encoding=encoding)
    save_file(weights(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="config.json is not JSON"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "key"),
    [
        ("config.json", json.dumps(GPT2)[:-1] + ', "n_head": 4}', "n_head"),
        ("config.json", json.dumps(GPT2)[:-1] + ', "x": {"y": 1, "y": 1}}', "y"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', "a"),
    ],
)
def test_a_repeated_key_is_refused(tmp_path: Path, file: str, text: str, key: str):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=f'{file} is not JSON .the key "{key}" occurs twice in an object'):
        read_huggingface(tmp_path)


def of_gigabytes(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(4 << 30)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "additional_chat_templates/a.jinja"])
@pytest.mark.parametrize("make", [of_gigabytes, os.mkfifo, os.mkdir, lambda path: path.symlink_to("../blobs/1")])
def test_what_cannot_be_copied_is_named_not_left_out(tmp_path: Path, make: Callable, name: str):
    (tmp_path / "additional_chat_templates").mkdir()
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/{name}"):
        carried_files(tmp_path)


@pytest.mark.parametrize("size", ["n_layer", "vocab_size"])
def test_huge_size_allocates_nothing(tmp_path: Path, size: str):
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {size: 1 << 60}))
    save_file(weights(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds 16 tensors, which cannot be the model of|must be .* at most"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ln_f__bias": None}, "holds no weight ln_f.bias"),
        (
            {"h__0__attn__c_attn__weight": torch.rand(24, 8)},
            "/model.safetensors: h.0.attn.c_attn.weight is [24, 8], and the model's [8, 24]",
        ),
        *(
            ({"ln_f__bias": torch.zeros(8, dtype=dtype)}, f"/model.safetensors: ln_f.bias is of type {name}")
            for name, dtype in {"int8": torch.int8, "bool": torch.bool, "float8_e4m3fn": torch.float8_e4m3fn}.items()
        ),
        ({"h__1__ln_1__bias": torch.rand(8)}, "/model.safetensors holds h.1.ln_1.bias, which the model does not have"),
        ({"lm_head__weight": torch.rand(10, 8)}, "lm_head.weight is another table than wte.weight"),
        ({"transformer__ln_f__bias": torch.rand(8)}, "holds transformer.ln_f.bias and ln_f.bias, which are one weight"),
        ({"transformer__x": torch.rand(8)}, "holds transformer.x, which the model does not have"),
    ],
)
def test_weights_that_are_not_those_of_the_model(tmp_path: Path, changes: dict, message: str):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    save_file(weights(**changes), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_huggingface(tmp_path)
    assert message in str(caught.value)


MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
QWEN = MIXTRAL | {"model_type": "qwen2"}
VISION = {"model_type": "clip_vision_model", "num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 2}
LLAVA = {
    "model_type": "llava",
    "text_config": QWEN | {"model_type": "llama"},
    "vision_config": VISION,
    "image_token_index": 7,
}
T5 = {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "vocab_size": 64}
WRONG: list[tuple[dict, dict, str]] = [
    (GPT2, {"eos_token_id": 10}, "eos_token_id is 10, and the model has 10 tokens"),
    (QWEN, {"eos_token_id": [2, 1 << 40]}, "eos_token_id is 1099511627776, and the model has 8 tokens"),
    (T5, {"eos_token_id": -2}, "eos_token_id is -2, and the model has 64 tokens"),
    (QWEN, {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0: must be more than 0"),
    (GPT2, {"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0: must be more than 0"),
    (QWEN, {"rope_theta": 1e400}, "rope_theta is inf: "),
    (
        LLAVA,
        {"text_config": LLAVA["text_config"] | {"rms_norm_eps": 0.0}},
        "text_config: rms_norm_eps is 0.0: must be more than 0",
    ),
    (
        GPT2,
        {"model_type": "bert"},
        "model_type is 'bert', which is not supported; supported are gpt2",
    ),
    (GPT2, {"tie_word_embeddings": False}, "tie_word_embeddings is False, and only True"),
    (GPT2, {"activation_function": ["gelu"]}, "activation_function is ['gelu'], and can be gelu or gelu_new"),
    (GPT2, {"n_head": 3}, "n_embd 8 is not a multiple of n_head 3"),
    (T5, {"dense_act_fn": "relu"}, "dense_act_fn is 'relu', and only 'gelu_new'"),
    (T5, {"is_gated_act": False}, "is_gated_act is False, and only True"),
    (T5, {"decoder_start_token_id": 64}, "decoder_start_token_id is 64, and the model has 64 tokens"),
    (T5, {"decoder_start_token_id": -2}, "decoder_start_token_id is -2, and the model has 64 tokens"),
    (T5, {"decoder_start_token_id": "0"}, "decoder_start_token_id is '0', and the model has 64 tokens"),
    (MIXTRAL, {"hidden_act": None}, "hidden_act is None, and only 'silu'"),
    (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, of 4 experts"),
    (MIXTRAL, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': "),
    (MIXTRAL, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and only 1"),
    (MIXTRAL, {"rope_parameters": {"partial_rotary_factor": "1"}}, "partial_rotary_factor is '1', and only 1"),
    (QWEN, {"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window is true, and only Mi"),
    (QWEN, {"layer_types": ["sliding_attention"]}, "layer_types is ['sliding_attention'], and only full_attention"),
    (QWEN, {"layer_types": "full_attention"}, "layer_types is 'full_attention', and only full_attention"),
    (QWEN, {"rope_theta": 10**400}, "rope_theta is 1000"),
    (GPT2, {"num_attention_heads": 4}, "num_attention_heads is 4, and n_head, the same setting, is 2"),
    (T5, {"num_heads": 8, "num_attention_heads": 4}, "num_attention_heads is 4, and num_heads, the same setting, is 8"),
    (MIXTRAL, {"num_experts": 2}, "num_experts is 2, and num_local_experts, the same setting, is 4"),
    (LLAVA, {"image_token_id": 6}, "image_token_id is 6, and image_token_index, the same setting, is 7"),
    (LLAVA, {"vision_config": 3}, "vision_config is 3, and should be an object"),
    (LLAVA, {"image_token_index": 8}, "image_token_index is 8, and the model has 8 tokens"),
    (LLAVA, {"image_token_index": "7"}, "image_token_index is '7', and the model has 8 tokens"),
]


@pytest.mark.parametrize(("tree", "changes", "message"), WRONG)
def test_a_setting_that_cannot_be_meant_is_refused(tree: dict, changes: dict, message: str):
    assert from_huggingface(tree, Path("config.json"))
    with pytest.raises(CheckpointError) as caught:
        from_huggingface(tree | changes, Path("config.json"))
    assert caught.value.messages[0].startswith(f"config.json: {message}")


@pytest.mark.parametrize(
    ("tree", "name", "alias", "value"),
    [
        (GPT2, "n_head", "num_attention_heads", 4),
        (T5, "d_kv", "head_dim", 16),
        (MIXTRAL, "num_local_experts", "num_experts", 2),
        (LLAVA, "image_token_index", "image_token_id", 6),
    ],
)
def test_second_names_of_settings(tree: dict, name: str, alias: str, value: int):
    others = {key: each for key, each in tree.items() if key != name}
    one, other = (from_huggingface(others | {key: value}, Path("config.json")) for key in (name, alias))
    assert one == other != from_huggingface(tree, Path("config.json"))


def test_a_bias_that_no_t5_uses_is_ignored():
    """Of older files."""
    config = from_huggingface(T5, Path("config.json"))
    shapes = {name: shape for weight in source_shapes(config).values() for name, shape in weight.items()}
    for block, unknown in ((0, 0), (1, 1)):
        name = f"decoder.block.{block}.layer.1.EncDecAttention.relative_attention_bias.weight"
        assert len(shape_problems(config, shapes | {name: (32, 8)}, "folder")) == unknown


@pytest.mark.parametrize("tree", [GPT2, T5, QWEN], ids=["gpt2", "t5", "qwen2"])
def test_the_first_of_several_ends_is_the_end_of_a_document(tree: dict):
    for given in (5, [5, 6]):
        assert from_huggingface(tree | {"eos_token_id": given}, Path("config.json")).eod_token == 5


@pytest.mark.parametrize(
    ("tree", "changes"),
    [
        (GPT2, {"recompute_mlp_activation": True}),
        (MIXTRAL, {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}),
        (MIXTRAL, {"moe_ffn_hidden_size": 16, "ffn_hidden_size": 64}),
    ],
)
def test_settings_of_training_do_not_prevent_an_export(tree: dict, changes: dict):
    config = from_huggingface(tree, Path("config.json"))
    written = to_huggingface(replace(config, **changes), "float32")
    assert from_huggingface(written, Path("config.json")) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm"),
        ({"pre_tokens": 2}, "without attention to all 4 positions (--pre-tokens 2), which"),
    ],
)
def test_unsupported_settings_of_hugging_face_are_refused(changes: dict, message: str):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 32}
    config = ModelConfig(**sizes, max_position_embeddings=4, vocab_size=10, padded_vocab_size=10)
    assert from_huggingface(to_huggingface(config, "float32"), Path("config.json")) == ModelConfig(
        **sizes, max_position_embeddings=4, vocab_size=10, padded_vocab_size=10, eod_token=-1
    )
    with pytest.raises(ConfigError) as caught:
        to_huggingface(ModelConfig(**sizes, max_position_embeddings=4, **changes), "float32")
    assert message in str(caught.value)
