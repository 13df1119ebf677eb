"""Folders of Hugging Face's models to checkpoints and back: equal bits, bounded memory, mistakes in one line."""

import ctypes
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.llava_models import transformers_model
from support.programs import Programs
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.checkpoint.huggingface import _Shards, our_weights
from megatron.checkpoint.tensor_files import SafetensorsFiles
from megatron.checkpoint.tracker import newest
from megatron.common.errors import CheckpointError
from megatron.config import ModelConfig
from megatron.data.fingerprint import tokenizer_hash
from megatron.model.architectures import architecture_of
from megatron.model.huggingface import config_of, read_config, source_shapes
from megatron.model.huggingface.llama import LLAMA_FORMATS
from megatron.tools.convert.full_model import FullModel, write_tensors
from megatron.tools.convert.huggingface_files import files_for_huggingface
from megatron.tools.convert.load_and_save import lazy_weights, read_huggingface, write_checkpoint, write_huggingface
from megatron.tools.convert.vocabulary import Vocabulary, read_folder_tokenizer
from megatron.tools.convert.written_config import write_config

os.environ["HF_HUB_OFFLINE"] = "1"
M_MMAP_THRESHOLD = -3
TOOL = "tools/convert_checkpoint.py"
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90,
    "max_position_embeddings": 64, "num_key_value_heads": 2, "eos_token_id": [4, 5], "pad_token_id": 3,
}  # fmt: skip
OTHER_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "tokenizer.model",
        "generation_config.json",
    ),
    *("chat_template.jinja", "preprocessor_config.json", "processor_config.json"),
)


def make_folder(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **settings: object) -> Path:
    """A folder that transformers has written, in several files, with files beside the weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **settings})).to(dtype)
    model.save_pretrained(folder, max_shard_size="10KB")
    tree = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 89}, "unk_token": "a"}}
    for number, name in enumerate(OTHER_FILES):
        (folder / name).write_text(json.dumps(tree, indent=number))  # each is another
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2 and (folder / "model.safetensors.index.json").exists()
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert {name for name, place in index.items() if place == file.name} == set(opened.keys())
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [("llama", torch.bfloat16, {}), ("qwen3", torch.float32, {"head_dim": 12, "tie_word_embeddings": True})],
)
def test_a_folder_returns_equal(programs: Programs, tmp_path: Path, kind: str, dtype: torch.dtype, settings: dict):
    source, ours, again = make_folder(tmp_path / "source", kind, dtype, **settings), tmp_path / "ours", tmp_path / "hf"
    programs.warm(1, TOOL, "from-hf", source, "--output", ours).ok()
    data = newest(ours).config["data"]
    assert (data["tokenizer_type"], data["vocab_size"]) == ("HuggingFaceTokenizer", 90)
    assert data["vocab_file"] == str(ours / "tokenizer.json")
    programs.warm(1, TOOL, "to-hf", ours, "--output", again, "--max-shard-size", "10KB").ok()
    first, second = tensors_of(source), tensors_of(again)
    assert first.keys() == second.keys() and len(first) > 10
    assert all(tensor.dtype == dtype and tensor.equal(second[name]) for name, tensor in first.items())
    for name in ("config.json", *OTHER_FILES):
        assert (again / name).read_bytes() == (source / name).read_bytes(), name


PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "sea", "ship", "##s", "the", "The", "é", "e")


def test_a_bert_returns_equal_with_its_tokenizer(programs: Programs, tmp_path: Path):
    from transformers import AutoModelForPreTraining, AutoTokenizer, BertTokenizer, MegatronBertConfig

    source, ours, again = tmp_path / "source", tmp_path / "ours", tmp_path / "hf"
    config = MegatronBertConfig(
        vocab_size=len(PIECES) + 3, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=12, hidden_act="gelu_new",
    )  # fmt: skip
    torch.manual_seed(5)
    AutoModelForPreTraining.from_config(config).save_pretrained(source)
    theirs = BertTokenizer({piece: n for n, piece in enumerate(PIECES)}, do_lower_case=False)
    theirs.save_pretrained(source)
    programs.warm(1, TOOL, "from-hf", source, "--output", ours).ok()
    assert newest(ours).config["data"]["tokenizer_type"] == "BertWordPieceCase"
    assert (ours / "vocab.txt").read_text().split() == list(PIECES)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (ours / name).unlink()  # what is left is what training would leave
    moved = source.rename(tmp_path / "moved")
    programs.warm(1, TOOL, "to-hf", ours, "--output", again).ok()
    first, second = (load_file(folder / "model.safetensors") for folder in (moved, again))
    cut = {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}
    assert first.keys() == second.keys() and len(first) > 20
    assert all(one[: len(PIECES)].equal(second[name]) if name in cut else one.equal(second[name])
               for name, one in first.items())  # fmt: skip
    model, tokenizer = AutoModelForPreTraining.from_pretrained(again), AutoTokenizer.from_pretrained(again)
    assert model.config.hidden_act == "gelu_new" and model.config.vocab_size == len(PIECES)
    text = "The ships, thé sea."
    assert tokenizer(text, text)["input_ids"] == theirs(text, text)["input_ids"]
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0


@pytest.mark.parametrize("lower_case", [True, False])
def test_word_pieces_are_read_from_either_file(tmp_path: Path, lower_case: bool):
    from transformers import BertTokenizer

    kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    config, pieces = ModelConfig(architecture="BERT"), Vocabulary(kind, {piece: n for n, piece in enumerate(PIECES)})
    pieces.write(tmp_path, positions=12)
    assert read_folder_tokenizer(tmp_path, config) == pieces
    theirs = BertTokenizer.from_pretrained(tmp_path)
    assert theirs("The é", add_special_tokens=False)["input_ids"] == ([9, 12] if lower_case else [10, 11])
    theirs.add_tokens(["<user>"])  # which needs a row of the embedding, and is in this file only
    theirs.save_pretrained(tmp_path)
    assert read_folder_tokenizer(tmp_path, config) == replace(pieces, tokens={**pieces.tokens, "<user>": len(PIECES)})
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**tree, "model": {**tree["model"], "type": "BPE"}}))
    with pytest.raises(CheckpointError, match="tokenizer.json is not a WordPiece, which BERT uses"):
        read_folder_tokenizer(tmp_path, config)


class PeakMemory(TorchDispatchMode):
    """The largest memory of this process after any operation on tensors, without mapped files, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.first = anonymous_memory()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.peak = max(self.peak, anonymous_memory())
        return result


def anonymous_memory() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def convert(source: Path, folder: Path, shard: int) -> None:
    """from-hf and to-hf in this process."""
    folder.mkdir()
    write_checkpoint(folder, read_huggingface(source), vocab_file=None, merge_file=None, source=source)
    saved = newest(folder)
    model = FullModel(saved.full_model_config(), lazy_weights(saved))
    write_huggingface(folder / "hf", model, None, max_shard_size=shard, carried={})


@pytest.mark.parametrize(
    ("part", "dtype", "wider"),
    [
        ("self_attn.q_proj", torch.bfloat16, torch.float32),
        ("self_attn.v_proj", torch.float16, torch.float32),
        ("mlp.gate_proj", torch.float64, torch.float64),
    ],
)
def test_parts_of_a_weight_may_differ_in_type(tmp_path: Path, part: str, dtype: torch.dtype, wider: torch.dtype):
    """Together they have the type that holds the numbers of all."""
    source, name = make_folder(tmp_path / "source", "llama"), f"model.layers.1.{part}.weight"
    first = tensors_of(source)
    first[name] = first[name].to(dtype)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    save_file(first, source / "model.safetensors")
    convert(source, tmp_path / "ours", 1 << 30)
    second = load_file(tmp_path / "ours" / "hf" / "model.safetensors")
    assert all(tensor.to(second[key].dtype).equal(second[key]) for key, tensor in first.items())
    assert second[name].dtype == wider


def test_memory_is_less_than_two_shards(tmp_path: Path):
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # memory that is freed goes back to the system at once
    tree = {"model_type": "llama", **SIZES}
    large = tree | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 10, "vocab_size": 4000}
    shard = 6 << 20
    for name, settings in {"small": tree, "large": large}.items():  # the first imports all that is needed
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings))
        shapes = source_shapes(config_of(settings, folder)).values()
        weights = {key: torch.zeros(shape, dtype=torch.bfloat16) for one in shapes for key, shape in one.items()}
        write_tensors(weights, folder, max_shard_size=shard, metadata={})
        del weights
        with PeakMemory() as memory:
            convert(folder, tmp_path / f"{name}-ours", shard)
    assert len(list((tmp_path / "large-ours" / "hf").glob("*.safetensors"))) >= 8
    assert memory.peak - memory.first < 2 * shard, f"{(memory.peak - memory.first) / shard:.1f} shards"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("whole") / "hf", "mistral", sliding_window=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "phimoe"}, "model_type is 'phimoe', which is not supported; supported are gpt2, llama"),
        ({"vocab_size": 80}, "vocab_size is 80, and its tokenizer has 90 tokens"),
        ("the end of a shard", "is not a complete safetensors file"),
    ],
)
def test_mistakes(programs: Programs, whole: Path, tmp_path: Path, change: dict | str, message: str):
    source = shutil.copytree(whole, tmp_path / "source")
    (shard,), (index,) = source.glob("model-00002-*"), source.glob("*.index.json")
    if change == "the end of a shard":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif isinstance(change, str):
        index.unlink()
    else:
        tree = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(tree | change))
    finished = programs.warm(1, TOOL, "from-hf", source, "--output", tmp_path / "out")
    assert finished.returncode == 4 and message in finished.output, finished.output
    assert all(line.count(str(source)) == 1 for line in finished.output.splitlines())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_both_spellings_of_the_rotation():
    tree = {"model_type": "llama", **SIZES}
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
    older = tree | {"rope_theta": 5e5, "rope_scaling": scaling}
    newer = tree | {"rope_parameters": {**scaling, "rope_theta": 5e5}}
    config = config_of(older, Path("config.json"))
    assert config == config_of(newer, Path("config.json"))
    assert (config.rotary_base, config.use_rope_scaling, config.rope_scaling_factor) == (5e5, True, 32.0)
    both = config_of(older | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, Path("config.json"))
    assert both == config  # as in transformers
    plain = config_of(tree | {"rope_theta": 1e6, "rope_scaling": None}, Path("config.json"))
    assert (plain.rotary_base, plain.use_rope_scaling) == (1e6, False)


@pytest.mark.parametrize("kind", [*LLAMA_FORMATS, "gpt2"])
@pytest.mark.parametrize("settings", [{}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}])
def test_what_a_config_leaves_out_is_the_default_of_transformers(kind: str, settings: dict) -> None:
    """As in the text_config of a published LLaVA, which has only what differs."""
    from transformers import AutoConfig

    complete = AutoConfig.for_model(kind, **settings).to_dict()
    assert config_of({"model_type": kind, **settings}, Path("config.json")) == config_of(complete, Path("config.json"))


@pytest.mark.parametrize(
    ("kinds", "has_window"),
    [
        (["full_attention"] * 2, False),
        (["sliding_attention"] * 2, True),
        (["sliding_attention", "full_attention"], None),
        ("full_attention", None),
        ([["full_attention"]], None),
        (5, None),
    ],
)
def test_windows_of_a_mistral_by_layer(kinds: Any, has_window: bool | None) -> None:
    tree = {"model_type": "mistral", **SIZES, "sliding_window": 5, "layer_types": kinds}
    if has_window is not None:
        assert config_of(tree, Path("config.json")).has_window == has_window
        return
    with pytest.raises(CheckpointError, match="layer_types is .*, and only sliding_attention in all layers"):
        config_of(tree, Path("config.json"))


@pytest.mark.parametrize("attention_factor", [1.0, 1.1, 1.7, 2.3])
def test_an_attention_factor_of_yarn_is_written_again(attention_factor: float) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    tree = {"model_type": "llama", **SIZES, "rope_parameters": {**rope, "attention_factor": attention_factor}}
    written = write_config(config_of(tree, Path("config.json")), "float32")
    assert written["rope_parameters"].get("attention_factor", 1.0) == pytest.approx(attention_factor, rel=1e-12)


def test_shards_of_a_llava_with_the_names_of_newer_transformers(tmp_path: Path) -> None:
    """Of the encoder, whose names lack a part there."""
    transformers_model("clip").save_pretrained(tmp_path)
    config, tensors = read_config(tmp_path), SafetensorsFiles(tmp_path)
    weights = our_weights(tensors, config, str(tmp_path))
    for rank in range(2):
        layout: Any = SimpleNamespace(tensor_group=SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2))
        shards = _Shards(tensors, weights, config, layout, config.vocab_size)
        for name, spec in architecture_of(config).named_parameters(config).items():
            whole, dim = weights[name], spec.shard_dim
            expected = whole if dim is None else whole.chunk(2, dim)[rank]
            assert shards.read(name, expected.size(0)).equal(expected), name
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    row = next(name for name in stored if name.endswith("self_attn.o_proj.weight"))
    save_file(stored | {row: stored[row] * torch.inf}, file)
    shards = replace(shards, tensors=SafetensorsFiles(tmp_path))
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {row} is from"):
        for name in architecture_of(config).named_parameters(config):
            shards.read(name, weights[name].size(0) // 2)


@pytest.mark.parametrize(
    ("file", "kind", "name"),
    [
        ("sp.model", "GPTSentencePieceTokenizer", "tokenizer.model"),
        ("tokenizer.model", "GPTSentencePieceTokenizer", "tokenizer.model"),
        ("bpe.json", "HuggingFaceTokenizer", "tokenizer.json"),
    ],
)
def test_the_tokenizer_of_a_run_may_be_a_file(tmp_path: Path, file: str, kind: str, name: str) -> None:
    path = tmp_path / file
    path.write_text("{}")
    data = {"tokenizer_type": kind, "tokenizer_model": str(path)}
    assert files_for_huggingface(None, {"config": {"data": data}}, ModelConfig(), None) == {name: path}


def test_the_tokenizer_of_the_run_is_copied_and_no_other(tmp_path: Path) -> None:
    """Not that of the folder which the run loaded its model from, whose config.json has the ids of its tokens."""
    for name, content in {"model/config.json": "{}", "model/tokenizer.json": "1", "own/tokenizer.json": "2"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    model, own, llama = tmp_path / "model", tmp_path / "own", ModelConfig(position_embedding_type="rope", swiglu=True)
    hash_of_own = tokenizer_hash("HuggingFaceTokenizer", str(own / "tokenizer.json"), None, eod=llama.eod_token)

    def copied(hash_in_run: str, tokenizer: Vocabulary | None = None) -> set[str]:
        data = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(own), "tokenizer_hash": hash_in_run}
        run = {"config": {"data": data, "checkpoint": {"load_hf": str(model)}}}
        files = files_for_huggingface(None, run, llama, tokenizer).values()
        return {str(file.relative_to(tmp_path)) for file in files}

    for hash_in_run in ("", hash_of_own):
        assert copied(hash_in_run) == {"own/tokenizer.json"}
    assert copied(hash_of_own, Vocabulary("GPT2BPETokenizer", {"a": 0})) == set()
    (own / "tokenizer.json").rename(tmp_path / "moved")
    assert copied(hash_of_own) == set()
    assert copied("") == {"model/config.json", "model/tokenizer.json"}
    (tmp_path / "moved").rename(model / "tokenizer.json")
    assert copied(hash_of_own) == {"model/config.json", "model/tokenizer.json"}
