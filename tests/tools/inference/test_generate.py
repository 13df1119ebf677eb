"""tools/generate.py as it is started: on one process and on two, with files, at a pipe, at a terminal."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.programs import Programs
from support.refusals import refusal

from megatron.tools.chat.template import ChatPrompts, ChatTemplate
from megatron.tools.chat.tokens import special_tokens
from megatron.tools.inference.decoding import Sampling
from megatron.tools.inference.generator import Completion, Session
from megatron.tools.inference.prompts import Prompt, StoppingCriteria, read_prompts
from megatron.tools.inference.source import open_source

TOOL = "tools/generate.py"
SAMPLING = "--temperature 0.8 --top_k 20 --seed 5 --new-tokens 20 --num-samples 2".split()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w5 w80", "id": 7, "half": "\\ud800"}\n{"text": "w1 w2 w3"}\n')
    return path


def test_a_file_on_one_process_and_on_two(programs: Programs, cut: Path, prompts: Path, tmp_path: Path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    words = [TOOL, "--load", cut, "--sample-input-file", prompts, *SAMPLING, "--sample_output_file"]
    assert programs.warm(1, *words, one).ok().output == ""
    programs.warm(2, *words, two).ok()
    first, second = map(json.loads, one.read_text().splitlines())
    assert (first["id"], first["half"], second["text"]) == (7, "\ud800", "w1 w2 w3")
    for record in (first, second):
        texts = [completion["text"] for completion in record["completions"]]
        assert len(set(texts)) == 2 and all(text.startswith(" w") for text in texts)
        assert {completion["finish_reason"] for completion in record["completions"]} <= {"stop", "length"}
    assert two.read_text() == one.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "one.jsonl", "two.jsonl"}


GREEDY = "--greedy --new-tokens 6".split()


@pytest.fixture(scope="module")
def piped(programs: Programs, foreign: Path) -> tuple[str, str]:
    """Two prompts that come through a pipe, with what follows them."""
    words = [sys.executable, TOOL, "--load", foreign, *GREEDY]
    process = subprocess.run(words, cwd=programs.root, input="naïve\nthe value\n", capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    first, second = process.stdout.split("the value")
    return first, f"the value{second}"


def test_prompts_at_a_pipe(piped: tuple[str, str]):
    first, second = piped
    assert first.startswith("naïve") and len(first) > len("naïve\n") and first.endswith("\n")
    assert len(second) > len("the value\n") and second.endswith("\n")


def test_texts_without_a_prompt(programs: Programs, foreign: Path, tmp_path: Path):
    file = tmp_path / "samples.jsonl"
    length = "--out-seq-length 10 --num-samples 3 --batch-size 2".split()
    programs.warm(1, TOOL, "--load", foreign, "--genfile", file, *length).ok()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({record["text"] for record in records}) == 3
    assert all(record["length"] <= 9 and record["finished"] == (record["length"] < 9) for record in records)


def test_a_conversation(programs: Programs, foreign: Path, piped: tuple[str, str]):
    """At a terminal: a line is continued, a mistake is reported, and the end of input ends the program."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, TOOL, "--load", foreign, *GREEDY],
        cwd=programs.root, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, "naïve\n\nthe value\n\x04".encode())
    output, errors = process.communicate(timeout=240)
    os.close(ours)
    assert process.returncode == 0, errors.decode()
    mistake = "input: the prompt is empty: give a text to continue\n"
    assert output.decode().replace("> ", "") == piped[0] + mistake + piped[1] + "\n"


CHAT = "{% for m in messages %}{{ m.role[0] + ' ' + m.content + '\n' }}{% endfor %}{{ 'a' if add_generation_prompt }}"


def test_a_chat_has_what_was_said_before(foreign: Path, monkeypatch, capsys):
    tokenizer = open_source(foreign).tokenizer
    chat = ChatPrompts(ChatTemplate(CHAT, {}, special_tokens(tokenizer)), tokenizer)
    prompts = []

    class Echo:
        model = SimpleNamespace(continues=True)

        def complete(self, tokens, *_, on_piece, **__):
            prompts.append(self.tokenizer.detokenize(tokens[0]))
            return [[Completion("yes")]]

    Echo.tokenizer = tokenizer
    session = Session(Echo(), Sampling(), StoppingCriteria(128), 1, None, batch_size=1, is_main_rank=True, chat=chat)
    lines = iter(["the", "<|endoftext|>", "value", None])
    monkeypatch.setattr("megatron.tools.inference.generator.broadcast", lambda _: next(lines))
    monkeypatch.setattr(Session, "_input", lambda _: None)
    session.converse()
    assert prompts == ["u the\na", "u the\na yes\nu value\na"]
    assert "input: message 3 contains '<|endoftext|>', which only the chat template" in capsys.readouterr().out


def test_at_most_a_batch_of_samples_is_computed_together(capsys):
    """However many there are; before, all of one prompt were, and a large number took all memory."""
    together = []

    class Count:
        model = SimpleNamespace(continues=False)

        def complete(self, prompts, *_, samples, first_sample, **__):
            together.append(len(prompts) * samples)
            return [[Completion(f"{first_sample + sample}") for sample in range(samples)] for _ in prompts]

    session = Session(Count(), Sampling(), StoppingCriteria(128), 5, None, batch_size=2, is_main_rank=True)
    prompt = Prompt("x", [1], {})
    assert session.show(prompt) == "0"
    session.write_completions([prompt], sys.stdout, as_json=False)
    printed = capsys.readouterr().out
    assert printed == "".join(f"--- {n + 1}\n{n}\n" for n in range(5)) + "".join(f"{n}\n\n" for n in range(5))
    assert together == [2, 2, 1] * 2


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path):
    for name, line in (("a.txt", "a b"), ("a.jsonl", '{"prompt": "a b"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n")
        assert [text for _, text, _ in read_prompts(tmp_path / name)] == ["a b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--load nowhere --prompt a", "nowhere: no such file or folder; name a checkpoint"),
        ("--load MODEL", "standard input is empty: give --prompt"),
        ("--load MODEL --prompt a --model-parallel-size 2", "deepspeed --num_gpus 2"),
        ("--load MODEL --prompt a --chat", "a chat with this model needs a chat template, and"),
        ("--load MODEL --prompt a --greedy --top-k 5", "--top-k has no effect with --greedy: leave one of them out"),
        ("--load MODEL --prompt a --num-beams 2 --temperature 2", "--temperature has no effect with --num-beams"),
        ("--load MODEL --prompt a --num-beams 1000000000", "must be 1,024 at most"),
        ("--load MODEL --prompt a --num-beams 2 --greedy", "--greedy has no effect with --num-beams"),
        ("--load MODEL --prompt a --temperature 0", "--greedy"),
        ("--load MODEL --sample-input-file bad.jsonl --sample-output-file bad.jsonl", "is the --sample-input-file"),
        ("--load MODEL --sample-input-file bad.jsonl", "bad.jsonl:2: not JSON"),
        ("--load MODEL --sample-input-file long.txt", "long.txt:1: a prompt of"),
    ],
)
def test_a_mistake_is_one_line_before_torch(words: str, message: str, foreign: Path, tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (tmp_path / "long.txt").write_text("a b " * 100 + "\n")
    code, (line,) = refusal(tmp_path, words.replace("MODEL", str(foreign)), program=TOOL, command=())
    assert code == 2 and message in line


@pytest.mark.parametrize(("flag", "begins"), [("", True), ("--no-prepend-bos", False)])
def test_a_text_begins_and_ends_as_in_transformers(programs: Programs, tmp_path: Path, flag: str, begins: bool):
    """With the token that a published Llama's tokenizer adds in front, and at each of several ends."""
    import tokenizers
    import torch
    import transformers

    vocabulary = {word: id for id, word in enumerate(["<s>", "</s>", *"abcdefgh"])}
    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    encoder.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=encoder, bos_token="<s>", eos_token="</s>")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(8)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=10, initializer_range=0.5))
    ids = tokenizer("a b c", add_special_tokens=begins, return_tensors="pt").input_ids
    later = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=1)[0, ids.size(1) + 4 :].tolist()
    model.generation_config.eos_token_id = [1, *later]
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "hf")
    (tmp_path / "text").write_text("a b c d e f g h")
    words = ["--load", tmp_path / "hf", *flag.split()]
    settings = ["--prompt", "a b c", "--greedy", "--new-tokens", 9]
    generated = programs.warm(1, "tools/generate.py", *words, *settings).ok().output
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)[0]
    assert 3 + begins < len(expected) < ids.size(1) + 9 and expected[-1] in later
    assert generated.split() == tokenizer.decode(expected[:-1], skip_special_tokens=True).split()
    measures = ["--task", "PPL", "--valid-data", tmp_path / "text", "--json", tmp_path / "result"]
    programs.warm(1, "tools/evaluate.py", *words, *measures).ok()
    ids = tokenizer("a b c d e f g h", add_special_tokens=begins, return_tensors="pt").input_ids
    assert json.loads((tmp_path / "result").read_text())["loss"] == pytest.approx(
        model(ids, labels=ids).loss.item(), rel=1e-5
    )
