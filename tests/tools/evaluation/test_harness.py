"""tools/lm_eval_adapter.py: tasks of lm-eval from local files, against transformers."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluating import evaluate_on_rank

from megatron.common.errors import ConfigError

LAST_WORD = """\
task: own_last_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/lambada.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' ' + text.split(' ')[-1]}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity}}, {{metric: acc, aggregation: mean}}]
"""
WHOLE_TEXT = """\
task: own_whole_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/lambada.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
CONTINUED = """\
task: own_continued
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/continued.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{max_gen_toks: 6, until: ["{stop}"]}}
metric_list: [{{metric: exact_match, aggregation: mean}}]
"""
STOP = "sea sea"


@pytest.fixture(scope="module")
def tasks(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A folder of tasks, and what transformers says to them."""
    from transformers import GPT2LMHeadModel, GPT2Tokenizer

    folder = tmp_path_factory.mktemp("tasks")
    model = GPT2LMHeadModel.from_pretrained(place / "hf").eval()
    tokenizer = GPT2Tokenizer.from_pretrained(place / "hf")
    texts = [json.loads(line)["text"] for line in (place / "lambada.jsonl").read_text().splitlines()]

    whole = sum(
        _nll(model, part, predicted)[0] for text in texts for part, predicted in _parts(tokenizer(text)["input_ids"])
    )
    with open(folder / "continued.jsonl", "w") as file:
        for text in texts:
            tokens = torch.tensor([tokenizer(text)["input_ids"][-42:]])
            more = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=300)[0, tokens.size(1) :]
            answer = tokenizer.decode([token for token in more if token != 300]).partition(STOP)[0]
            file.write(json.dumps({"text": text, "answer": answer}) + "\n")
    for name, task in {"last": LAST_WORD, "whole": WHOLE_TEXT}.items():
        (folder / f"{name}.yaml").write_text(task.format(folder=place))
    (folder / "continued.yaml").write_text(CONTINUED.format(folder=folder, stop=STOP))
    return folder, {
        **_last_words(model, tokenizer, texts),
        "own_whole_text word_perplexity": math.exp(whole / sum(len(text.split()) for text in texts)),
        "own_continued exact_match": 1.0,
    }


def _last_words(model: Any, tokenizer: Any, texts: list[str]) -> dict[str, float]:
    """The perplexity and the accuracy of the last words."""
    last = []
    for text in texts:
        context, target = (tokenizer(part)["input_ids"] for part in (text.rpartition(" ")[0], " " + text.split()[-1]))
        last.append(_nll(model, [*context, *target][-49:], len(target)))
    return {
        "own_last_word perplexity": math.exp(sum(loss for loss, _ in last) / len(last)),
        "own_last_word acc": sum(right for _, right in last) / len(last),
    }


@torch.no_grad()
def _nll(model: Any, tokens: list[int], predicted: int) -> tuple[float, bool]:
    """Minus the log probability of the last tokens, and whether each is the most likely one."""
    rows = model(torch.tensor([tokens[:-1]])).logits[0, -predicted:].double().log_softmax(-1)
    target = torch.tensor(tokens[-predicted:])
    return -rows.gather(1, target[:, None]).sum().item(), rows.argmax(-1).equal(target)


def _parts(ids: list[int]) -> list[tuple[list[int], int]]:
    """A text after an end of document, in windows of the model's context, and the number of new tokens of each."""
    tokens = [300, *ids]
    parts = [(tokens[:49], len(tokens[:49]) - 1)]
    for begin in range(48, len(ids), 48):
        new = min(48, len(ids) - begin)
        parts.append((tokens[begin + new - 48 : begin + new + 1], new))
    return parts


def ask_on_rank(words: list[str], cache: str) -> dict[str, Any] | None:
    """The results on the first rank, without a network."""
    os.environ.update(HF_HOME=cache, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    return evaluate_on_rank(words, "lm_eval_adapter")


def refused_on_rank(words: list[str], cache: str) -> str:
    """Why the tasks cannot be used."""
    with pytest.raises(ConfigError) as refused:
        ask_on_rank(words, cache)
    return str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lambada.jsonl", "nowhere.jsonl", "nowhere.jsonl"),
        ("{{text.split", "{{txt.split", "'txt' is undefined"),
        ("output_type: loglikelihood", "output_type: guess", "invalid output_type 'guess'"),
        (None, "- task", "got list"),
    ],
)
def test_a_mistake_in_a_task_is_one_line(run_ranks, place: Path, tmp_path: Path, old, new, message):
    text = LAST_WORD.format(folder=place)
    (tmp_path / "task.yaml").write_text(text.replace(old, new) if old else new)
    words = ["--load", str(place / "hf"), "--tasks", str(tmp_path / "task.yaml")]
    [refused] = run_ranks(1, refused_on_rank, words, str(tmp_path))
    assert message in refused and "\n" not in refused


def test_results_are_those_of_transformers(run_ranks, place: Path, tasks, tmp_path: Path):
    folder, expected = tasks
    files = [str(folder / f"{name}.yaml") for name in ("last", "whole")]
    words = ["--load", str(place / "hf"), "--batch-size", "4", "--model-parallel-size", "2", "--tasks", *files]
    words += ["own_continued", "--include_path", str(folder)]
    report, *others = run_ranks(2, ask_on_rank, words, str(tmp_path))
    assert others == [None]
    for name, value in expected.items():
        task, metric = name.split()
        assert report["results"][task][f"{metric},none"] == pytest.approx(value, rel=1e-5), name
