"""Where a model may come from, and tokenizers that are not its own. No torch is needed for any of it."""

import json
import shutil
from pathlib import Path

import pytest

from megatron.common.errors import CheckpointError, ConfigError, DataError
from megatron.config import ModelConfig
from megatron.tokenizer.published import HuggingFaceTokenizer
from megatron.tools.convert.vocabulary import count_tokens, read_folder_tokenizer
from megatron.tools.inference.source import TokenizerFiles, config_on, open_source


@pytest.fixture(scope="module")
def kinds(programs, cut: Path, foreign: Path, tmp_path_factory) -> dict[str, Path]:
    """The same model in every form that this suite knows, and a foreign one."""
    folder = tmp_path_factory.mktemp("kinds")
    for command, output in (("merge", folder / "one.safetensors"), ("to-universal", None)):
        words = ["--output", output] if output else []
        programs.warm(1, "tools/convert_checkpoint.py", command, cut, *words).ok()
    tag = (cut / "latest").read_text()
    return {
        "folder": cut,
        "tag": cut / tag,
        "universal": cut / f"{tag}_universal",
        "safetensors": folder / "one.safetensors",
        "huggingface": foreign,
    }


def test_ranks_that_cannot_share_the_query_groups() -> None:
    model = ModelConfig(num_attention_heads=12, num_query_groups=3, ffn_hidden_size=64, vocab_size=50)
    with pytest.raises(ConfigError, match="2 tensor-parallel ranks cannot share a model of 3 query groups"):
        config_on(model, 2, "fp32")


def test_no_token_is_dropped_in_inference() -> None:
    model = ModelConfig(ffn_hidden_size=64, vocab_size=50, num_experts=4, moe_expert_capacity_factor=0.5)
    assert config_on(model, 1, "fp32").moe_expert_capacity_factor == 0


def test_the_default_window_limits_no_prompt() -> None:
    for given, used in ((65536, 131072), (8, 8), (200000, 200000)):
        model = ModelConfig(max_position_embeddings=131072, pre_tokens=given)
        assert config_on(model, 1, "fp32").pre_tokens == used


def weights_agree(paths: dict[str, Path]) -> list[str]:
    """The kinds whose model computes what that of the folder does; on one rank."""
    import torch

    from megatron.config import ParallelConfig
    from megatron.parallel.layout import ParallelLayout
    from megatron.tools.inference.model import load_model

    layout = ParallelLayout.create(ParallelConfig())
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        logits = {kind: load_model(open_source(path), layout)(tokens) for kind, path in paths.items()}
        half = load_model(open_source(paths["folder"]), layout, "bf16")(tokens)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), logits["folder"], atol=0.1, rtol=0.1)
    return [kind for kind, found in logits.items() if found.equal(logits["folder"])]


def test_every_kind_of_path_is_opened(kinds, run_ranks):
    for kind, path in kinds.items():
        source = open_source(path)
        assert source.found.kind == kind
        assert source.tokenizer.vocab_size == source.config.vocab_size == (300 if kind == "huggingface" else 92)
    ours = {kind: path for kind, path in kinds.items() if kind != "huggingface"}
    assert run_ranks(1, weights_agree, ours) == [list(ours)]


def test_falls_back_from_a_damaged_checkpoint(cut: Path, tmp_path: Path):
    folder = tmp_path / "ck"
    shutil.copytree(cut, folder)
    shutil.copytree(folder / "global_step2", folder / "global_step9")
    (folder / "latest").write_text("global_step9")
    (folder / "global_step9" / "run.json").write_text("{}")
    source = open_source(folder)
    assert source.name == str(folder / "global_step2")
    assert len(source.warnings) == 1 and source.warnings[0].endswith("taking global_step2")


def _vocabulary_of_words(path: Path, words: list[str]) -> TokenizerFiles:
    path.write_text(json.dumps({word: n for n, word in enumerate([*words, "<unk>", "<|endoftext|>"])}))
    return TokenizerFiles(str(path))


@pytest.mark.parametrize("kind", ["folder", "safetensors"])
def test_another_vocabulary_is_refused(kinds, kind, tmp_path: Path):
    right, moved = [f"w{n}" for n in range(90)], tmp_path / "moved.json"
    assert open_source(kinds[kind], _vocabulary_of_words(moved, right)).tokenizer.vocab_size == 92
    with pytest.raises(ConfigError, match=r"other.json: another tokenizer .* \(their hashes differ\)"):
        open_source(kinds[kind], _vocabulary_of_words(tmp_path / "other.json", right[::-1]))
    with pytest.raises(ConfigError, match=r"none.json: no such file; name the one"):
        open_source(kinds[kind], TokenizerFiles("none.json"))


def test_another_tokenizer_than_that_of_a_hugging_face_folder(foreign: Path, tmp_path: Path):
    files = {name: shutil.copy(foreign / name, tmp_path) for name in ("vocab.json", "merges.txt")}
    assert open_source(foreign, TokenizerFiles(*files.values())).tokenizer.vocab_size == 300
    vocabulary = json.loads(Path(files["vocab.json"]).read_text())
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    Path(files["vocab.json"]).write_text(json.dumps(vocabulary))
    with pytest.raises(ConfigError, match="another tokenizer than that in"):
        open_source(foreign, TokenizerFiles(*files.values()))
    with pytest.raises(ConfigError, match="another tokenizer than that in"):
        open_source(foreign, TokenizerFiles(files["vocab.json"]))  # the merges are found beside it
    with pytest.raises(ConfigError, match="takes two files or none"):
        open_source(foreign, TokenizerFiles(merge_file=files["merges.txt"]))


PREFIX = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, PREFIX]}


@pytest.mark.parametrize(
    ("words", "settings", "refusal"),
    [
        (PREFIX, {"tokenizer_class": "TokenizersBackend"}, ""),
        (DIGITS, {"tokenizer_class": "PreTrainedTokenizerFast"}, ""),
        (PREFIX, {"add_prefix_space": True}, ""),
        (PREFIX, {"add_prefix_space": False}, "tokenizer.json divides text in another way than GPT2Tokenizer"),
        (DIGITS, {"add_prefix_space": True}, "tokenizer.json divides text in another way than GPT2Tokenizer"),
        (None, {"add_prefix_space": True}, "tokenizer_config.json: add_prefix_space needs the tokenizer.json"),
    ],
)
def test_a_gpt2_whose_tokenizer_divides_text_in_another_way(foreign: Path, tmp_path: Path, words, settings, refusal):
    """It is read as transformers does, or refused: its GPT2Tokenizer divides text in GPT-2's way."""
    folder = shutil.copytree(foreign, tmp_path / "hf")
    own = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(own | settings))
    if words:
        write_tokenizer(folder, [*json.loads((foreign / "vocab.json").read_text())], words)
    if refusal:
        with pytest.raises(CheckpointError, match=refusal):
            open_source(folder)
        return
    from transformers import AutoTokenizer

    source = open_source(folder, TokenizerFiles(folder=str(shutil.copytree(folder, tmp_path / "same"))))
    assert isinstance(source.tokenizer, HuggingFaceTokenizer) and source.config.vocab_size == 300
    text = "the 12 ends"
    assert source.tokenizer.tokenize(text) == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    with pytest.raises(ConfigError, match="--vocab-file .* has no effect: the tokenizer of .* is one file"):
        open_source(folder, TokenizerFiles(str(folder / "vocab.json")))


def write_tokenizer(folder: Path, tokens: list[str], words: dict) -> None:
    """Write a BPE as a tokenizer.json."""
    merges = (folder / "merges.txt").read_text().splitlines()[1:]
    model = {"type": "BPE", "vocab": {token: n for n, token in enumerate(tokens)}, "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": words, "added_tokens": []}))


@pytest.mark.parametrize(
    ("absent", "problem"), [("~", ""), ("<|endoftext|>", "bos_token"), ("th", "not a tokenizer.json")]
)
def test_a_gpt2_whose_tokenizer_lacks_tokens(foreign: Path, tmp_path: Path, absent: str, problem: str):
    folder = shutil.copytree(foreign, tmp_path / "hf")
    tokens = [token for token in json.loads((folder / "vocab.json").read_text()) if token != absent]
    write_tokenizer(folder, tokens, PREFIX | {"add_prefix_space": False})
    if problem:
        with pytest.raises(DataError, match=problem) as caught:
            open_source(folder)
        assert str(caught.value).startswith(str(folder))
    else:
        assert isinstance(open_source(folder).tokenizer, HuggingFaceTokenizer)


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def test_a_llama_with_the_tokenizer_of_gpt2(foreign: Path, tmp_path: Path) -> None:
    """As to-hf writes the folder of a model that was trained here."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(foreign / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 300}))
    for files in (TokenizerFiles(), TokenizerFiles(folder=str(tmp_path))):
        source = open_source(tmp_path, files)
        assert source.tokenizer.vocab_size == 300 and source.tokenizer.detokenize(source.tokenizer.tokenize("a")) == "a"
    kept = read_folder_tokenizer(tmp_path, source.config)
    assert kept is not None and kept.kind == "GPT2BPETokenizer" and len(kept.tokens) == 300 == count_tokens(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')  # as of a Qwen2, whose special tokens are in other files
    assert read_folder_tokenizer(tmp_path, source.config) is None
    (tmp_path / "tokenizer.json").touch()
    assert read_folder_tokenizer(tmp_path, source.config) is None  # is copied


def test_another_tokenizer_than_that_of_a_llama(tmp_path: Path) -> None:
    """A folder with the same file is accepted, whatever else is beside it."""
    for name, words in (("own", "abcdef"), ("same", "abcdef"), ("other", "fedcba")):
        (tmp_path / name).mkdir()
        vocabulary = {word: n for n, word in enumerate([*words, "<unk>", "</s>"])}
        content = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 7}))
    for given in (tmp_path / "same", tmp_path / "same" / "tokenizer.json"):
        assert open_source(tmp_path / "own", TokenizerFiles(folder=str(given))).tokenizer.tokenize("b") == [1]
    with pytest.raises(ConfigError, match="--tokenizer-model .*other: another tokenizer than that in .*own"):
        open_source(tmp_path / "own", TokenizerFiles(folder=str(tmp_path / "other")))
    (tmp_path / "own" / "tokenizer.json").unlink()
    assert open_source(tmp_path / "own", TokenizerFiles(folder=str(tmp_path / "other"))).tokenizer.tokenize("b") == [4]


@pytest.mark.parametrize(
    "files", [TokenizerFiles("vocab.json"), TokenizerFiles(merge_file="m"), TokenizerFiles("vocab.json", folder="a")]
)
def test_files_that_a_published_model_does_not_read(tmp_path: Path, files: TokenizerFiles) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    flag = "--vocab-file vocab.json" if files.vocab_file else "--merge-file m"
    with pytest.raises(ConfigError, match=f"{flag} has no effect: .* give it by --tokenizer-model"):
        open_source(tmp_path, files)


def test_a_folder_without_a_tokenizer(exported: Path, foreign: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        open_source(exported)
    with pytest.raises(ConfigError, match="vocab.json has 300 tokens, and .* has 92"):
        open_source(exported, TokenizerFiles(str(foreign / "vocab.json"), str(foreign / "merges.txt")))
