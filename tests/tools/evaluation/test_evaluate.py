"""tools/evaluate.py: its metrics are those that transformers gives, on every layout."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluating import evaluate_on_rank
from torch import Tensor

from megatron.tools.evaluation.tasks import detokenize_wikitext

LAYOUTS = {
    "DP1": (1, []),
    "DP2": (2, []),
    "PP2": (2, ["--pipe-parallel-size", "2"]),
    "TP2xPP2": (4, ["--model-parallel-size", "2", "--pipe-parallel-size", "2"]),
}
TASKS = {
    "LAMBADA": ["--task", "LAMBADA", "--valid-data", "{}/lambada.jsonl"],
    "LAMBADA strict": ["--task", "LAMBADA", "--valid-data", "{}/lambada.jsonl", "--strict-lambada"],
    "WIKITEXT": ["--task", "WIKITEXT103", "--valid-data", "{}/wiki.txt", "--overlapping-eval", "16"],
    "PPL": ["--task", "PPL", "--valid-data", "{}/plain.txt", "--seq-length=40"],
}


@pytest.fixture(scope="module")
def theirs(place: Path) -> dict[str, dict[str, Any]]:
    """The metrics that transformers gives, one sample at a time."""
    from transformers import GPT2LMHeadModel, GPT2Tokenizer

    model = GPT2LMHeadModel.from_pretrained(place / "hf").eval()
    tokenizer = GPT2Tokenizer.from_pretrained(place / "hf")

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    texts = [json.loads(line)["text"] for line in (place / "lambada.jsonl").read_text().splitlines()]
    last_tokens = [(ids(text)[:-1], ids(text)[-1:]) for text in texts]
    last_words = [(ids(text.rpartition(" ")[0]), ids(" " + text.rpartition(" ")[2])) for text in texts]
    assert any(len(target) > 1 for _, target in last_words)
    raw, plain = (place / "wiki.txt").read_text(), (place / "plain.txt").read_text()
    wiki = _text_loss(model, ids(detokenize_wikitext(raw)), size=48, stride=16)
    return {
        "LAMBADA": _lambada(model, last_tokens),
        "LAMBADA strict": _lambada(model, last_words),
        "WIKITEXT": wiki | {"word_perplexity": math.exp(wiki["nll"] / len(raw.strip().split(" ")))},
        "PPL": _text_loss(model, ids(plain), size=40, stride=32),
    }


def _log_probabilities(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """Log probabilities of the token after each position, [s, v]."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)


def _lambada(model: torch.nn.Module, cases: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    right, nll = 0, 0.0
    for context, target in cases:
        tokens = (context + target)[:-1][-48:]
        rows = _log_probabilities(model, tokens)[-len(target) :]
        nll -= sum(row[token].item() for row, token in zip(rows, target, strict=True))
        right += rows.argmax(-1).tolist() == target
    assert 0 < right < len(cases)
    return {"accuracy": right / len(cases), "perplexity": math.exp(nll / len(cases))}


def _text_loss(model: torch.nn.Module, tokens: list[int], *, size: int, stride: int) -> dict[str, float]:
    """Each token once, in the first window that reaches it."""
    nll, begin = {}, 0
    while len(nll) < len(tokens) - 1:
        rows = _log_probabilities(model, tokens[begin : begin + size])
        for place, row in enumerate(rows, begin + 1):
            if place < len(tokens) and place not in nll:
                nll[place] = -row[tokens[place]].item()
        begin += stride
    total = sum(nll.values())
    return {"nll": total, "loss": total / len(nll), "perplexity": math.exp(total / len(nll)), "tokens": len(nll)}


@pytest.mark.parametrize("layout", ["DP2", "TP2xPP2"])
def test_metrics_are_those_of_transformers(run_ranks, place: Path, theirs, layout: str):
    processes, flags = LAYOUTS[layout]
    for task, words in TASKS.items():
        words = [word.format(place) for word in words]
        ours, *others = run_ranks(processes, evaluate_on_rank, [*words, "--load", str(place / "hf"), *flags])
        assert others == [None] * (processes - 1)
        for figure in theirs[task].keys() & ours.keys():
            assert ours[figure] == pytest.approx(theirs[task][figure], rel=1e-5), (task, figure)
        if layout == "DP2":
            assert ours == run_ranks(1, evaluate_on_rank, [*words, "--load", str(place / "hf")])[0], "to the last bit"


def test_the_example_script_and_the_classic_flags(programs, place: Path, theirs, tmp_path: Path):
    """The file holds what the screen shows."""
    variables = {"VALID_DATA": f"{place}/lambada.jsonl", "LOAD": f"{place}/hf", "BATCH": "4", "GPUS": "1", "TP": "1"}
    shown = programs.run(
        "bash", "examples/evaluate_lambada.sh", "--json", tmp_path / "out.json", "--hidden_size", "32",
        "--activations-checkpoint-method", "uniform", **variables, DRY_RUN="1",
    ).ok()  # fmt: skip
    launcher, _, arguments = shown.output.partition("tools/evaluate.py ")
    assert launcher.startswith("deepspeed ") and "--num_gpus 1 " in launcher
    finished = programs.warm(1, "tools/evaluate.py", *shlex.split(arguments)).ok()
    shown = finished.output[finished.output.index("{\n") : finished.output.rindex("}") + 1]
    assert json.loads(shown) == json.loads((tmp_path / "out.json").read_text())
    assert json.loads(shown)["accuracy"] == pytest.approx(theirs["LAMBADA strict"]["accuracy"])


def test_a_data_set_reads_as_the_text_it_was_made_of(run_ranks, programs, place: Path, tmp_path: Path):
    programs.python(
        "tools/preprocess_data.py", "--input", place / "lambada.jsonl", "--append-eod", "--output-prefix",
        tmp_path / "own", "--vocab-file", place / "hf" / "vocab.json", "--merge-file", place / "hf" / "merges.txt",
    ).ok()  # fmt: skip
    of_text, of_tokens = (
        run_ranks(1, evaluate_on_rank, ["--task", "PPL", "--load", str(place / "hf"), "--valid-data", str(data)])[0]
        for data in (place / "lambada.jsonl", tmp_path / "own_text_document")
    )
    assert of_text["tokens"] > 500
    assert {name: of_text[name] for name in ("loss", "perplexity", "tokens", "windows")} == {
        name: of_tokens[name] for name in ("loss", "perplexity", "tokens", "windows")
    }


@pytest.mark.parametrize(
    "flags",
    ["--shape-order SBH --reset-attention-mask --pre-tokens 9", "--position-embedding-type rope"],
    ids=["documents apart", "rotary positions"],
)
def test_a_checkpoint_of_this_suite_with_documents(run_ranks, train_in_ranks, programs, tmp_path: Path, flags: str):
    """Attention and positions that restart in a document, and hidden states with the sequence first, on stages, too."""
    settings = "--train-iters 2 --batch-size 4 --eval-iters 0 --init-method-std 0.2 --reset-position-ids".split()
    train_in_ranks(1, *settings, *flags.split(), "--save", tmp_path / "ck")
    data = programs.data_arguments[1]
    words = ["--task", "PPL", "--valid-data", data, "--load", str(tmp_path / "ck"), "--overlapping-eval", "32"]
    alone, apart = (
        run_ranks(size, evaluate_on_rank, [*words, *more])[0] for size, more in (LAYOUTS["DP1"], LAYOUTS["PP2"])
    )
    assert alone["tokens"] > 5000
    assert apart["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    if "rope" in flags:
        return
    given, wider = (
        run_ranks(1, evaluate_on_rank, [*words, "--shape-order", "BSH", "--pre-tokens", window])[0]["loss"]
        for window in ("9", "31")
    )
    assert given == pytest.approx(alone["loss"], rel=1e-6), "the window is that of the checkpoint"
    assert abs(wider - given) > 1e-5 * given, "unless another is given"
