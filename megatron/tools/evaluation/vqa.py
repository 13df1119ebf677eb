"""Questions about images: answers by greedy decoding, or the most likely of given choices."""

import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.common.errors import ConfigError, DataError
from megatron.common.reading import parse_json, read_bytes
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.template import ChatPrompts
from megatron.tools.evaluation.tasks import Sample
from megatron.tools.inference.images import ImagePrompt, ImageReader, check_placeholders
from megatron.tools.inference.prompts import StoppingCriteria, checked_length, numbered

if TYPE_CHECKING:
    from megatron.tools.evaluation.scoring import ForwardModel

VQA = "VQA"
"""Name of the task."""
_FORM = '{"image": "a.png", "question": "...", "answer": "..."}'


@dataclass(frozen=True)
class Question:
    """A line of the file."""

    record: Mapping[str, Any]
    prompt: ImagePrompt
    answers: tuple[str, ...]
    """Each of them is right."""
    choices: tuple[tuple[int, ...], ...]
    """Tokens of the answers to choose from; empty if any text can be the answer."""


def read_questions(path: Path, chat: ChatPrompts, images: ImageReader, limits: StoppingCriteria) -> list[Question]:
    """The questions of a file of JSONL: ``image``, ``question``, ``answer``, and ``choices`` if there are any.

    Images are files in the folder of the file. Raises DataError for a line that is wrong, or too long for ``limits``.
    """
    try:
        lines = numbered(str(path), read_bytes(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--valid-data {path}: cannot be read ({getattr(error, 'strerror', 'not UTF-8')})") from None
    questions = []
    for where, line in lines:
        try:
            questions.append(_question(parse_json(line), chat, replace(images, folder=path.parent), limits))
        except (DataError, ConfigError, ValueError) as error:
            raise DataError(f"{where}: {error}") from None
    if not questions:
        raise DataError(f"--valid-data {path} is empty: write {_FORM} on each line")
    return questions


def _question(record: Any, chat: ChatPrompts, images: ImageReader, limits: StoppingCriteria) -> Question:
    if not isinstance(record, dict) or not isinstance(record.get("question"), str):
        raise DataError(f"no question: write {_FORM}")
    answers, choices = (_texts(record, name) for name in ("answer", "choices"))
    if not answers or (choices and not set(answers) <= set(choices)):
        raise DataError('no "answer", or one that is none of the "choices"')
    messages = [{"role": "user", "content": images.marked(record["question"], record)}]
    prompt = images.tokens(chat.text(messages), record, chat.tokenize)
    of_choices = tuple(tuple(chat.tokenize(chat.answer(messages, choice))) for choice in choices)
    for choice in of_choices:
        check_placeholders(choice, 0, images.model)
    longest = max(map(len, of_choices), default=0)
    checked_length(prompt, replace(limits, new_tokens=longest) if longest else limits)
    return Question(record, prompt, answers, of_choices)


def _texts(record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = record.get(name, [])
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else (None,)
    if not all(isinstance(text, str) and text for text in texts):
        raise DataError(f'"{name}" must be a text or a list of texts')
    return texts


def predict(
    model: "ForwardModel",
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    limits: StoppingCriteria,
    *,
    batch_size: int,
    report: Callable[[int], object] = lambda count: None,
) -> list[str]:
    """The model's answer to each question, on every rank; replicas of the model share the questions."""
    chosen = iter(_most_likely(model, [one for one in questions if one.choices], batch_size, report))
    written = iter(
        _generated(model, tokenizer, [one for one in questions if not one.choices], limits, batch_size, report)
    )
    return [next(chosen) if one.choices else next(written) for one in questions]


def _most_likely(
    model: "ForwardModel", questions: Sequence[Question], batch_size: int, report: Callable[[int], object]
) -> Iterator[str]:
    if not questions:
        return
    from megatron.tools.evaluation.scoring import score

    size = model.config.vision_image_size
    none = np.zeros((0, size, size, 3), np.uint8)
    samples = [
        Sample(
            np.array([*one.prompt, *tokens]), len(tokens), (), none if one.prompt.images is None else one.prompt.images
        )
        for one in questions
        for tokens in one.choices
    ]
    nll = iter(score(model, samples, batch_size=batch_size).nll)
    for one in questions:
        report(1)
        yield _texts(one.record, "choices")[int(np.argmin([next(nll) for _ in one.choices]))]


def _generated(
    model: "ForwardModel",
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    limits: StoppingCriteria,
    batch_size: int,
    report: Callable[[int], object],
) -> list[str]:
    from megatron.tools.inference.decoding import Sampling

    generator = model.generator(tokenizer)

    def texts_of(batch: Sequence[int]) -> list[str]:
        prompts = [questions[number].prompt for number in batch]
        texts = generator.complete(prompts, Sampling(greedy=True), limits)
        return [completion.text.strip() for (completion,) in texts]

    numbers = range(len(questions))
    batches = [numbers[begin : begin + batch_size] for begin in numbers[::batch_size]]
    return model.texts(batches, texts_of, report)


def normalized(answer: str) -> str:
    """An answer in lower case, without articles, punctuation and repeated blanks, as VQA compares answers."""
    words = answer.lower().translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def is_right(question: Question, answer: str) -> bool:
    """Whether a predicted answer is one of the right ones."""
    return normalized(answer) in map(normalized, question.answers)


def metrics(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, int | float]:
    """Exact matches, and of comparison the accuracy of the answer that is right most often."""
    right = sum(map(is_right, questions, answers))
    common = Counter(normalized(answer) for one in questions for answer in set(one.answers)).most_common(1)[0][1]
    return {
        "accuracy": right / len(questions),
        "right": right,
        "questions": len(questions),
        "most_frequent_answer": common / len(questions),
    }
