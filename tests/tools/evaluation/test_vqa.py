"""Questions about images: likelihoods and answers of transformers' model, the file, and exact matches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.command_lines import parse
from support.llava_models import IMAGE, transformers_model

from megatron.common.errors import DataError
from megatron.config import ParallelConfig
from megatron.model.llava import PIXELS
from megatron.parallel.layout import ParallelLayout
from megatron.tokenizer import build_tokenizer
from megatron.tools.convert.inspection import find, read_config
from megatron.tools.evaluation.scoring import open_forward
from megatron.tools.evaluation.vqa import Question, metrics, predict, read_questions
from megatron.tools.inference.images import ImagePrompt, ImageReader
from megatron.tools.inference.prompts import StoppingCriteria
from megatron.tools.inference.source import Source
from megatron.tools.reporting.page import read_answers

PICTURES = np.random.default_rng(3).integers(0, 256, (2, 28, 28, 3), dtype=np.uint8)
PROMPTS = [ImagePrompt([5, *[IMAGE] * 4, 7], PICTURES[:1]), ImagePrompt([*[IMAGE] * 4, 11], PICTURES[1:])]
CHOICES = ((3, 4), (9,), (50, 51, 52))


class Letters:
    """A chat whose template writes only what is said; a token is a byte."""

    def text(self, messages: list[dict[str, str]]) -> str:
        """What the user says."""
        return messages[-1]["content"]

    def answer(self, messages: list[dict[str, str]], answer: str) -> str:
        """The answer."""
        return answer

    def tokenize(self, text: str) -> list[int]:
        """Bytes."""
        return list(text.encode())

    tokenize_answer = tokenize


def test_likelihoods_and_answers_are_those_of_transformers(run_ranks, tmp_path: Path):
    """Two replicas of the model share the questions."""
    theirs = transformers_model("siglip")
    theirs.save_pretrained(tmp_path)
    most_likely = [_most_likely(theirs, prompt) for prompt in PROMPTS]
    written = [_written(theirs, prompt) for prompt in PROMPTS]
    for answers in run_ranks(2, _answers, tmp_path):
        assert answers == [*(f"choice {number}" for number in most_likely), *written]


def _pixels(prompt: ImagePrompt) -> torch.Tensor:
    mean, deviation = map(torch.tensor, PIXELS["siglip"])
    return ((torch.from_numpy(prompt.images) / 255 - mean) / deviation).permute(0, 3, 1, 2)


def _most_likely(model: Any, prompt: ImagePrompt) -> int:
    sums = []
    for choice in CHOICES:
        logits = model(input_ids=torch.tensor([[*prompt, *choice]]), pixel_values=_pixels(prompt)).logits[0]
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        sums.append(logprobs[torch.arange(len(choice)), list(choice)].sum())
    return int(torch.stack(sums).argmax())


def _written(model: Any, prompt: ImagePrompt) -> str:
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=_pixels(prompt), max_new_tokens=4,
        do_sample=False, eos_token_id=62,
    )  # fmt: skip
    return " ".join(map(str, output[0, len(prompt) :].tolist()))


def _answers(path: Path) -> list[str]:
    found, tokenizer = find(path), build_tokenizer("NullTokenizer", None, None, 64)
    tokenizer.eod, tokenizer._decode = 62, lambda ids: "".join(f" {id}" for id in ids)  # type: ignore[method-assign]
    config = read_config(found)
    assert config is not None
    model = open_forward(
        Source(found, config, tokenizer), ParallelLayout.create(ParallelConfig(world_size=2)), "fp32", pipeline=False
    )
    names = [f"choice {number}" for number in range(3)]
    questions = [Question({"choices": names}, prompt, ("choice 0",), CHOICES) for prompt in PROMPTS]
    questions += [Question({}, prompt, ("1",), ()) for prompt in PROMPTS]
    return predict(model, tokenizer, questions, StoppingCriteria(32, new_tokens=4), batch_size=1)


def read(folder: Path, *records: Any) -> list[Question]:
    """The questions of a file with these lines."""
    (folder / "q.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    Image.new("RGB", (5, 3), "red").save(folder / "a.png")
    chat: Any = Letters()
    return read_questions(
        folder / "q.jsonl", chat, ImageReader(parse("llava").model), StoppingCriteria(32, new_tokens=4)
    )


def test_a_question_is_a_prompt_with_its_images(tmp_path: Path):
    one, other, listed = read(
        tmp_path,
        {"image": "a.png", "question": "hm?", "answer": "Yes"},
        {"question": "so?", "answer": ["a", "b"], "choices": ["a", "b", "cd"]},
        {"images": ["a.png"], "question": "hm?", "answer": "Yes"},
    )
    model = parse("llava").model
    assert list(one.prompt) == [*[model.image_token_id] * model.image_tokens, *b"\nhm?"] and one.answers == ("Yes",)
    assert one.prompt.images is not None and one.prompt.images.shape == (1, 28, 28, 3)
    assert listed.prompt.images is not None and [*listed.prompt] == [*one.prompt]
    assert other.prompt.images is None and other.choices == ((97,), (98,), (99, 100))
    assert metrics([one, one, other], ["yes.", "no", "the B"]) == {
        "accuracy": 2 / 3, "right": 2, "questions": 3, "most_frequent_answer": 2 / 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        [],
        {"question": "a"},
        {"question": "a", "answer": "a", "choices": ["b"]},
        {"question": "a", "answer": "a", "image": "../a.png"},
        {"question": "a", "answer": "a", "image": "a.png", "images": ["a.png"]},
        {"question": "a" * 40, "answer": "a"},
        {"question": "<image><image>", "answer": "a", "image": "a.png"},
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, record: Any):
    with pytest.raises(DataError, match=r"q.jsonl:1: ") as error:
        read(tmp_path, record)
    assert len(error.value.messages) == 1 and "\n" not in str(error.value)


def test_answers_are_shown_with_their_pictures(tmp_path: Path):
    Image.new("RGB", (5, 3), "red").save(tmp_path / "a.png")
    record = {"image": "a.png", "question": "q", "answer": ["x", "y"], "predicted": "x", "right": True}
    (tmp_path / "p.jsonl").write_text(json.dumps({**record, "folder": str(tmp_path)}) + "\n")
    [answer] = read_answers(tmp_path / "p.jsonl")
    assert answer.image.startswith("data:image/png;base64,") and answer[1:] == ("q", "x or y", "x", True)
