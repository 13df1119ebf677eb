"""Visual question answering, by greedy decoding or by the most likely of given choices. No torch here."""

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
"""Name of the evaluation task."""
_FORM = '{"image": "a.png", "question": "...", "answer": "..."}'


@dataclass(frozen=True)
class Question:
    """A question of the file."""

    record: Mapping[str, Any]
    prompt: ImagePrompt
    answers: tuple[str, ...]
    """All correct answers."""
    choices: tuple[tuple[int, ...], ...]
    """Tokens of each choice; empty for an open question."""


def read_questions(path: Path, chat: ChatPrompts, images: ImageReader, limits: StoppingCriteria) -> list[Question]:
    """Read questions from a JSONL file with ``image``, ``question``, ``answer``, and optional ``choices``.

    Image paths are relative to the file's folder. Raises DataError for an invalid line, or one too long for ``limits``.
    """
    try:
        lines = numbered(str(path), read_bytes(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not UTF-8")
        raise DataError(f"--valid-data {path}: cannot be read ({reason}); name a JSONL file of questions") from None
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
    choice_tokens = tuple(tuple(chat.tokenize_answer(chat.answer(messages, choice))) for choice in choices)
    for tokens in choice_tokens:
        check_placeholders(tokens, 0, images.model)
    longest = max(map(len, choice_tokens), default=0)
    checked_length(prompt, replace(limits, new_tokens=longest) if longest else limits)
    return Question(record, prompt, answers, choice_tokens)


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
    multiple_choice = [question for question in questions if question.choices]
    open_questions = [question for question in questions if not question.choices]
    chosen = iter(_choose(model, multiple_choice, batch_size, report))
    generated = iter(_generate(model, tokenizer, open_questions, limits, batch_size, report))
    return [next(chosen) if question.choices else next(generated) for question in questions]


def _choose(
    model: "ForwardModel", questions: Sequence[Question], batch_size: int, report: Callable[[int], object]
) -> Iterator[str]:
    if not questions:
        return
    from megatron.tools.evaluation.scoring import score

    size = model.config.vision_image_size
    none = np.zeros((0, size, size, 3), np.uint8)
    samples = [
        Sample(np.array([*prompt, *tokens]), len(tokens), (), none if prompt.images is None else prompt.images)
        for prompt, choices in ((question.prompt, question.choices) for question in questions)
        for tokens in choices
    ]
    nll = iter(score(model, samples, batch_size=batch_size).nll)
    for question in questions:
        report(1)
        yield _texts(question.record, "choices")[int(np.argmin([next(nll) for _ in question.choices]))]


def _generate(
    model: "ForwardModel",
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    limits: StoppingCriteria,
    batch_size: int,
    report: Callable[[int], object],
) -> list[str]:
    from megatron.tools.inference.decoding import Sampling

    generator = model.generator(tokenizer)

    def generate(batch: Sequence[int]) -> list[str]:
        prompts = [questions[number].prompt for number in batch]
        texts = generator.complete(prompts, Sampling(greedy=True), limits)
        return [completion.text.strip() for (completion,) in texts]

    numbers = range(len(questions))
    batches = [numbers[begin : begin + batch_size] for begin in numbers[::batch_size]]
    return model.texts(batches, generate, report)


def normalized(answer: str) -> str:
    """An answer in lower case, without articles, punctuation and repeated blanks, as in VQA's metric."""
    words = answer.lower().translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def is_right(question: Question, answer: str) -> bool:
    """Whether a predicted answer matches one of the correct answers."""
    return normalized(answer) in map(normalized, question.answers)


def metrics(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, int | float]:
    """Accuracy by exact match, and as a baseline the accuracy of always giving the most frequent answer."""
    right = sum(map(is_right, questions, answers))
    frequencies = Counter(normalized(answer) for question in questions for answer in set(question.answers))
    common = frequencies.most_common(1)[0][1]
    return {
        "accuracy": right / len(questions),
        "right": right,
        "questions": len(questions),
        "most_frequent_answer": common / len(questions),
    }
