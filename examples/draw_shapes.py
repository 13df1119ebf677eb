"""Draw pictures of colored shapes, with questions about them: the data of examples/train_vlm.sh.

Each picture has two things, side by side or one above the other. FOLDER/captions.jsonl and FOLDER/questions.jsonl are
conversations as OpenAI's messages, to train on. FOLDER/test.jsonl has a question, its picture and the answer on each
line, about pictures that show what no other picture does; FOLDER/shuffled.jsonl the same questions about the same
pictures, the pixels of each in random order. FOLDER/corpus.jsonl has the texts, for a tokenizer. The same seed gives
the same files.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageDraw

COLORS = {"red": "#d62728", "green": "#2ca02c", "blue": "#1f77b4", "yellow": "#ffdd33"}
SHAPES = ("circle", "square", "triangle")
QUARTERS = ("top left", "top right", "bottom left", "bottom right")
PAIRS = {(0, 1): ("left of", "right of"), (2, 3): ("left of", "right of"), (0, 2): ("above", "below"),
         (1, 3): ("above", "below")}  # fmt: skip
"""The quarters of two things: where the first is, as seen from the second, and the second as seen from the first."""
Thing = tuple[str, str]
"""Color and shape."""
Things = tuple[tuple[int, Thing], tuple[int, Thing]]
"""The quarter of each of two things, in reading order."""


def main() -> None:
    """Read the flags, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=8000, help="pictures to train on")
    parser.add_argument("--questions", type=int, default=4, help="questions about each of them")
    parser.add_argument("--test-pictures", type=int, default=200)
    parser.add_argument("--size", type=int, default=32, help="height and width in pixels")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    for name in ("images", "shuffled"):
        (args.folder / name).mkdir(parents=True, exist_ok=True)
    things = [one for one in all_things() if one[0][1][0] != one[1][1][0]]
    chance.shuffle(things)
    _write_training(args, chance, things[len(things) // 10 :])
    _write_tests(args, chance, things[: len(things) // 10])


def all_things() -> Iterator[Things]:
    """Everything that a picture can show."""
    every = [(color, shape) for color in COLORS for shape in SHAPES]
    for first, second in PAIRS:
        yield from (((first, one), (second, other)) for one in every for other in every)


def _write_training(args: argparse.Namespace, chance: random.Random, arrangements: Sequence[Things]) -> None:
    """The pictures to train on, with their conversations."""
    with _lines(args, "corpus") as corpus, _lines(args, "captions") as captions, _lines(args, "questions") as asking:
        for number in range(args.pictures):
            things = chance.choice(arrangements)
            image = f"images/{number}.png"
            draw(things, args.size, chance).save(args.folder / image)
            asked = chance.sample(questions(things), args.questions)
            for file, pairs in ((captions, [("Describe it.", caption(things))]), (asking, asked)):
                file.write(json.dumps({"messages": conversation(image, pairs)}) + "\n")
                text = "".join(f"User: \n{question}\n\nAssistant: {answer}" for question, answer in pairs)
                corpus.write(json.dumps({"text": text}) + "\n")


def _write_tests(args: argparse.Namespace, chance: random.Random, arrangements: Sequence[Things]) -> None:
    """Questions about pictures that are not trained on, and about the same pixels in random order."""
    with _lines(args, "test") as test, _lines(args, "shuffled") as shuffled:
        for number in range(args.test_pictures):
            things = chance.choice(arrangements)
            picture, name = draw(things, args.size, chance), f"test{number}.png"
            picture.save(args.folder / "images" / name)
            with_shuffled_pixels(picture, chance).save(args.folder / "shuffled" / name)
            for question, answer in chance.sample(questions(things), args.questions):
                for out, folder in ((test, "images"), (shuffled, "shuffled")):
                    record = {"image": f"{folder}/{name}", "question": question, "answer": answer}
                    out.write(json.dumps(record) + "\n")


def _lines(args: argparse.Namespace, name: str) -> IO[str]:
    return open(args.folder / f"{name}.jsonl", "w", encoding="utf-8")


def draw(things: Things, size: int, chance: random.Random) -> Image.Image:
    """A picture of ``size`` by ``size`` pixels, each thing near the middle of its quarter."""
    picture = Image.new("RGB", (size, size), "white")
    pen, half = ImageDraw.Draw(picture), size // 2
    for quarter, (color, shape) in things:
        radius = half * chance.uniform(0.32, 0.42)
        x, y = (
            (place + 0.5) * half + chance.uniform(-1, 1) * (half / 2 - radius) for place in (quarter % 2, quarter // 2)
        )
        box = (x - radius, y - radius, x + radius, y + radius)
        if shape == "circle":
            pen.ellipse(box, COLORS[color])
        elif shape == "square":
            pen.rectangle(box, COLORS[color])
        else:
            pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], COLORS[color])
    return picture


def with_shuffled_pixels(picture: Image.Image, chance: random.Random) -> Image.Image:
    """The same pixels in random places."""
    pixels = np.asarray(picture).reshape(-1, 3)
    order = np.random.default_rng(chance.getrandbits(32)).permutation(len(pixels))
    return Image.fromarray(pixels[order].reshape(picture.height, picture.width, 3))


def caption(things: Things) -> str:
    """The things in reading order, each after its place."""
    return ", ".join(f"{QUARTERS[quarter]} {color} {shape}" for quarter, (color, shape) in things)


def questions(things: Things) -> list[tuple[str, str]]:
    """All questions about a picture, with their answers: what is in a quarter, and next to the other thing."""
    (first, _), (second, _) = things
    one, other = ("{} {}".format(*thing) for _, thing in things)
    of_first, of_second = PAIRS[first, second]
    return [
        (f"What is {QUARTERS[first]}?", one),
        (f"What is {QUARTERS[second]}?", other),
        (f"What is {of_first} the {other}?", one),
        (f"What is {of_second} the {one}?", other),
    ]


def conversation(image: str, asked: list[tuple[str, str]]) -> list[dict]:
    """OpenAI's messages: the picture before the first question."""
    messages: list[dict] = []
    for question, answer in asked:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    picture = {"type": "image_url", "image_url": {"url": image}}
    messages[0]["content"] = [picture, {"type": "text", "text": messages[0]["content"]}]
    return messages


if __name__ == "__main__":
    main()
