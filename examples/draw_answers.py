"""Draw the first pictures of a file that tools/evaluate.py --predictions wrote, each with its question and answer."""

import argparse
import json
from itertools import islice
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from PIL import Image


def main() -> None:
    """Read the flags and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with open(args.answers, encoding="utf-8") as file:
        records = [json.loads(line) for line in islice(file, 0, 24, 3)]
    figure, axes = pyplot.subplots(2, 4, figsize=(13, 7.2))
    for axis, record in zip(axes.flat, records, strict=False):
        axis.imshow(Image.open(Path(record["folder"]) / record["image"]))
        axis.set_title(f"{record['question']}\n{record['predicted']}", color="black" if record["right"] else "red")
    for axis in axes.flat:
        axis.axis("off")
    figure.savefig(args.output, dpi=100, bbox_inches="tight")
    print(args.output)


if __name__ == "__main__":
    main()
