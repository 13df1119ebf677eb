"""Draw pictures of colored shapes, with questions about them: the data of examples/train_vlm.sh.

Each picture has four things, one in each quarter. Writes FOLDER/train.jsonl, conversations as OpenAI's messages, and
FOLDER/test.jsonl, one question with its picture and answer on each line; FOLDER/shuffled.jsonl has the same questions
about the same pictures, the pixels of each in random order. The same seed gives the same files.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

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
    parser.add_argument("--questions", type=int, default=4, help="questions about each of them")
    parser.add_argument("--test-pictures", type=int, default=200)
    parser.add_argument("--size", type=int, default=32, help="height and width in pixels")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    for name in ("images", "shuffled"):
        (args.folder / name).mkdir(parents=True, exist_ok=True)
    drawn: set[tuple[Thing, ...]] = set()
    with open(args.folder / "train.jsonl", "w", encoding="utf-8") as file:
        for number in range(args.pictures):
            things = _things(chance)
            drawn.add(things)
            image = f"images/{number}.png"
            draw(things, args.size, chance).save(args.folder / image)
            asked = chance.sample(list(questions(things)), args.questions)
            file.write(json.dumps({"messages": conversation(image, asked)}) + "\n")
    with open(args.folder / "test.jsonl", "w") as file, open(args.folder / "shuffled.jsonl", "w") as shuffled:
        for number in range(args.test_pictures):
            while (things := _things(chance)) in drawn:
                pass
            picture, name = draw(things, args.size, chance), f"test{number}.png"
            picture.save(args.folder / "images" / name)
            with_shuffled_pixels(picture, chance).save(args.folder / "shuffled" / name)
            for question, answer in chance.sample(list(questions(things)), args.questions):
                for out, folder in ((file, "images"), (shuffled, "shuffled")):
                    record = {"image": f"{folder}/{name}", "question": question, "answer": answer}
                    out.write(json.dumps(record) + "\n")


def _things(chance: random.Random) -> tuple[Thing, ...]:
    """Four different things."""
    return tuple(chance.sample([(color, shape) for color in COLORS for shape in SHAPES], len(QUARTERS)))


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


def questions(things: tuple[Thing, ...]) -> Iterator[tuple[str, str]]:
    """All questions about a picture, with their answers: what is in a quarter, and next to another thing."""
    names = ["the {} {}".format(*thing) for thing in things]
    for quarter, name in zip(QUARTERS, names, strict=True):
        yield f"What is {quarter}?", f"{name}"
    for (known, asked), where in NEIGHBORS.items():
        yield f"What is {where} {names[known]}?", names[asked]


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
