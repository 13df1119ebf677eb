"""What tools/evaluate.py and tools/lm_eval_adapter.py say to wrong usage and wrong data: one line, and no torch."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.evaluating import load_tool

from megatron.common.errors import ConfigError, UserError
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder


@pytest.fixture(scope="module")
def wrong(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are wrong, each in its way."""
    folder = tmp_path_factory.mktemp("wrong")
    good = '{"text": "the sea was of the ship"}\n'
    (folder / "broken.jsonl").write_text(good + "\n" + '{"text": "the sea\n')
    (folder / "one_word.jsonl").write_text(good + good + '{"text": " harbour "}\n')
    (folder / "no_word.jsonl").write_text('{"text": " "}\n')
    (folder / "long_word.jsonl").write_text(json.dumps({"text": "the " + "q" * 49}) + "\n")
    (folder / "empty.txt").write_text("")
    (folder / "latin1.txt").write_bytes(b"the sea, na\xefve")
    (folder / "cut.bin").write_bytes(b"12")
    (folder / "cut.idx").write_bytes(b"12")
    with IndexedDatasetBuilder(str(folder / "more"), np.uint16) as builder:
        builder.add_document(np.array([1, 2, 399]))
        builder.finish()
    vocabulary = json.loads((place / "hf" / "vocab.json").read_text())
    names = list(vocabulary)
    vocabulary |= {names[0]: 1, names[1]: 0}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("LAMBADA nowhere.jsonl", "nowhere.jsonl: No such file"),
        ("LAMBADA {wrong}/broken.jsonl", "broken.jsonl:3: not JSON"),
        ("LAMBADA {wrong}/empty.txt", "empty.txt: no text in it"),
        ("LAMBADA {wrong}/one_word.jsonl --strict-lambada", "one_word.jsonl:3: "),
        ("LAMBADA {wrong}/long_word.jsonl --strict-lambada", "the last of them of at most 48 tokens"),
        ("WIKITEXT {wrong}/latin1.txt", "byte 11 is not UTF-8"),
        ("PPL nowhere", "nowhere: no such file, nor nowhere.bin and nowhere.idx"),
        ("PPL {wrong}/cut", "cut.idx"),
        ("PPL {wrong}/more", "its tokens range from 1 to 399, and the model's vocabulary has 301"),
        ("PPL {wrong}/empty.txt", "0 tokens, from which nothing can be predicted"),
        ("PPL {place}/plain.txt --seq-length 49", "--seq-length 49 is more than the 48 positions"),
        ("PPL {place}/plain.txt --seq-length 8 --overlapping-eval 9", "--overlapping-eval 9: windows of 8 tokens"),
        ("PPL {place}/plain.txt --json {place}/hf/../plain.txt", "--json is the --valid-data: name another"),
        (
            "PPL {place}/plain.txt --json {place}/hf/config.json",
            "--json {place}/hf/config.json is an input",
        ),
        ("VQA {place}/plain.txt --predictions new --json new/x", "--json new/x is what --predictions new writes"),
        ("PPL {place}/plain.txt --predictions x", "--predictions is for VQA"),
        ("PPL {place}/plain.txt --chat-template x", "--chat-template is for VQA"),
        ("PPL {place}/plain.txt --new-tokens 0", "--new-tokens 0 must be"),
        ("PPL {place}/plain.txt --pipe-parallel-size 4", "--pipe-parallel-size 4 is more than the 3 layers"),
        (
            "PPL {place}/plain.txt --vocab-file {wrong}/vocab.json --merge-file {place}/hf/merges.txt",
            "another tokenizer",
        ),
    ],
)
def test_mistakes_are_one_line_errors(place: Path, wrong: Path, words: str, message: str):
    tool = load_tool("evaluate")
    task, data, *flags = words.format(place=place, wrong=wrong).split()
    with pytest.raises(UserError) as refused:
        tool.evaluate(
            tool.build_parser().parse_args(["--task", task, "--valid-data", data, "--load", str(place / "hf"), *flags])
        )
    is_usage = message.startswith("--") or "--vocab-file" in words
    assert refused.value.exit_code == (2 if is_usage else 3)
    assert message.format(place=place) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("any --num-fewshot -3", "--num-fewshot -3 must be 0 or more"),
        ("any --limit -1", "--limit -1 must be more than 0"),
        ("{wrong}/task.yaml", "task.yaml: no YAML file of a task (while parsing a flow sequence"),
    ],
)
def test_mistakes_of_the_harness_are_one_line_errors(place: Path, wrong: Path, words: str, message: str):
    (wrong / "task.yaml").write_text("task: [unclosed\n")
    tool = load_tool("lm_eval_adapter")
    with pytest.raises(ConfigError) as refused:
        flags = words.format(wrong=wrong).split()
        tool.evaluate(tool.build_parser().parse_args(["--load", str(place / "hf"), "--tasks", *flags]))
    assert message in str(refused.value) and "\n" not in str(refused.value)
