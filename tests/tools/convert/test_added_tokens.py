"""Added tokens in Hugging Face folders whose tokenizer is a vocabulary file, without a tokenizer.json."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.programs import Programs
from tokenizers.pre_tokenizers import ByteLevel

TOOL = "tools/convert_checkpoint.py"
END = "<|endoftext|>"
ADDED = {"<user>": 258, "<pad>": 259}
BYTES = sorted(ByteLevel.alphabet())
FILES = {
    "vocab.json": json.dumps({token: id for id, token in enumerate([*BYTES, "he", END])}),
    "merges.txt": "#version: 0.2\nh e\n",
    "special_tokens_map.json": json.dumps({**dict.fromkeys(("bos_token", "eos_token"), END), "pad_token": "<pad>"}),
}
OLDER = {
    "added_tokens.json": json.dumps(ADDED),
    "tokenizer_config.json": json.dumps({"tokenizer_class": "GPT2Tokenizer"}),
}
NEWER = {
    "tokenizer_config.json": json.dumps(
        {
            "tokenizer_class": "GPT2Tokenizer",
            "added_tokens_decoder": {
                str(id): {"content": text, "special": text != "<user>"} for text, id in {END: 257, **ADDED}.items()
            },
        }
    )
}


@pytest.mark.parametrize("files", [FILES | OLDER, FILES | NEWER], ids=["added_tokens.json", "tokenizer_config.json"])
def test_rows_of_added_tokens_are_kept(programs: Programs, tmp_path: Path, files: dict[str, str]) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    source, ours, again = (tmp_path / name for name in ("source", "ours", "again"))
    source.mkdir()
    for name, text in files.items():
        (source / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(source)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=258, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    model.resize_token_embeddings(len(theirs))
    model.save_pretrained(source)
    programs.warm(1, TOOL, "from-hf", source, "--output", ours).ok()
    programs.warm(1, TOOL, "to-hf", ours, "--output", again).ok()
    tables = [load_file(folder / "model.safetensors")["transformer.wte.weight"] for folder in (source, again)]
    assert tables[0].shape == (260, 8) and tables[1].equal(tables[0])
    text = f"he<user>hi<pad>{END}"
    kept = AutoTokenizer.from_pretrained(again)
    assert kept(text)["input_ids"] == theirs(text)["input_ids"]
    assert (kept.special_tokens_map, len(kept)) == (theirs.special_tokens_map, 260)


def test_added_tokens_that_do_not_fit_are_refused(programs: Programs, tmp_path: Path) -> None:
    tree = {"model_type": "gpt2", "vocab_size": 260, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    for name, text in (FILES | OLDER | {"config.json": json.dumps(tree)}).items():
        (tmp_path / name).write_text(text)
    for name, text, code in (
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', 4),
        ("added_tokens.json", '{"<user>": 300}', 3),
    ):
        (tmp_path / name).write_text(text)
        finished = programs.warm(1, TOOL, "from-hf", tmp_path, "--output", tmp_path / "out")
        assert finished.returncode == code and len(finished.output.splitlines()) == 1, finished.output
        assert str(tmp_path) in finished.output and not (tmp_path / "out").exists()
        (tmp_path / name).write_text("{}")
