"""Draw pictures of colored shapes, with questions about them: the data of examples/train_vlm.sh.

Each picture has four things, one in each quarter. FOLDER/captions.jsonl and FOLDER/questions.jsonl are conversations as
OpenAI's messages, to train on. FOLDER/test.jsonl has a question, its picture and the answer on each line;
FOLDER/shuffled.jsonl the same questions about the same pictures, the pixels of each in random order. No arrangement of
things in them is trained on. FOLDER/corpus.jsonl has the texts, for a tokenizer. The same seed gives the same files.
"""

import argparse
import json
import random
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageDraw

COLORS = {"red": "#d62728", "green": "#2ca02c", "blue": "#1f77b4", "yellow": "#ffdd33"}
SHAPES = ("circle", "square", "triangle")
QUARTERS = ("top left", "top right", "bottom left", "bottom right")
NEIGHBORS = {(1, 0): "left of", (0, 1): "right of", (3, 2): "left of", (2, 3): "right of",
             (2, 0): "above", (0, 2): "below", (3, 1): "above", (1, 3): "below"}  # fmt: skip
"""Where the second quarter is, as seen from the first."""
Thing = tuple[str, str]
"""Color and shape."""


def main() -> None:
    """Read the flags, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=8000, help="pictures to train on")
    parser.add_argument("--questions", type=int, default=6, help="questions about each of them")
    parser.add_argument("--test-pictures", type=int, default=200)
    parser.add_argument("--size", type=int, default=32, help="height and width in pixels")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    for name in ("images", "shuffled"):
        (args.folder / name).mkdir(parents=True, exist_ok=True)
    drawn = _write_training(args, chance)
    _write_tests(args, chance, drawn)


def _write_training(args: argparse.Namespace, chance: random.Random) -> set[tuple[Thing, ...]]:
    """The pictures to train on, with their conversations. Returns what they show."""
    drawn: set[tuple[Thing, ...]] = set()
    with _lines(args, "corpus") as corpus, _lines(args, "captions") as captions, _lines(args, "questions") as asking:
        for number in range(args.pictures):
            things = _things(chance)
            drawn.add(things)
            image = f"images/{number}.png"
            draw(things, args.size, chance).save(args.folder / image)
            asked = chance.sample(list(questions(things)), args.questions)
            for file, pairs in ((captions, [("Describe it.", caption(things))]), (asking, asked)):
                file.write(json.dumps({"messages": conversation(image, pairs)}) + "\n")
                text = "".join(f"User: \n{question}\n\nAssistant: {answer}" for question, answer in pairs)
                corpus.write(json.dumps({"text": text}) + "\n")
    return drawn


def _write_tests(args: argparse.Namespace, chance: random.Random, drawn: Collection[tuple[Thing, ...]]) -> None:
    """Questions about things in arrangements that are not ``drawn``, and about the same pixels in random order."""
    with _lines(args, "test") as test, _lines(args, "shuffled") as shuffled:
        for number in range(args.test_pictures):
            while (things := _things(chance)) in drawn:
                pass
            picture, name = draw(things, args.size, chance), f"test{number}.png"
            picture.save(args.folder / "images" / name)
            with_shuffled_pixels(picture, chance).save(args.folder / "shuffled" / name)
            for question, answer in chance.sample(list(questions(things)), args.questions):
                for out, folder in ((test, "images"), (shuffled, "shuffled")):
                    record = {"image": f"{folder}/{name}", "question": question, "answer": answer}
                    out.write(json.dumps(record) + "\n")


def _lines(args: argparse.Namespace, name: str) -> IO[str]:
    return open(args.folder / f"{name}.jsonl", "w", encoding="utf-8")


def _things(chance: random.Random) -> tuple[Thing, ...]:
    """Four things, each of another color."""
    return tuple((color, chance.choice(SHAPES)) for color in chance.sample(list(COLORS), len(QUARTERS)))


def draw(things: tuple[Thing, ...], size: int, chance: random.Random) -> Image.Image:
    """A picture of ``size`` by ``size`` pixels, each thing near the middle of its quarter."""
    picture = Image.new("RGB", (size, size), "white")
    pen, half = ImageDraw.Draw(picture), size // 2
    for quarter, (color, shape) in enumerate(things):
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


def caption(things: tuple[Thing, ...]) -> str:
    """The things, quarter by quarter."""
    return " ".join("{} {}".format(*thing) for thing in things)


def questions(things: tuple[Thing, ...]) -> Iterator[tuple[str, str]]:
    """All questions about a picture, with their answers: what is in a quarter, and next to another thing."""
    names = ["{} {}".format(*thing) for thing in things]
    for quarter, name in zip(QUARTERS, names, strict=True):
        yield f"What is {quarter}?", name
    for (known, asked), where in NEIGHBORS.items():
        yield f"What is {where} the {names[known]}?", names[asked]


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
