"""The examples of vision-language models: what they start, and the pictures and questions that they draw."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.command_lines import CPU
from support.llava_models import transformers_model
from test_shipped_files import ROOT, dry_run_of

from megatron.cli import parse_run
from megatron.config import RunConfig
from megatron.model.architectures import LLAVA


def runs_of(script: str, **variables: str) -> list[RunConfig]:
    """The runs that an example would start."""
    lines = dry_run_of(script, **variables).splitlines()
    words = [shlex.split(line) for line in lines if "pretrain_vlm.py" in line]
    begins = [next(n for n, word in enumerate(line) if word.endswith("pretrain_vlm.py")) + 1 for line in words]
    size = [line[line.index("--num_gpus") + 1] for line in words]
    return [
        parse_run(line[begin:], {**CPU, "WORLD_SIZE": processes}, LLAVA)
        for line, begin, processes in zip(words, begins, size, strict=True)
    ]


@pytest.mark.parametrize(("tensor", "stages"), [("2", "0"), ("1", "2")])
def test_two_stages_of_training_on_shapes(tmp_path: Path, tensor: str, stages: str) -> None:
    first, second = runs_of("train_vlm.sh", OUT=str(tmp_path / "out"), VIRTUAL_ENV=sys.prefix, TP=tensor, PP=stages)
    assert first.parallel.world_size == second.parallel.world_size == 2
    assert first.model.image_tokens == 4 and not first.model.frozen_parts
    assert second.checkpoint.load == first.checkpoint.save and second.checkpoint.finetune


def test_the_projector_is_trained_before_the_language_model(tmp_path: Path) -> None:
    import tokenizers

    transformers_model("clip").config.save_pretrained(tmp_path)
    words = tokenizers.models.WordLevel({f"w{n}": n for n in range(60)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    settings = {"HF_MODEL": str(tmp_path), "VOCAB_SIZE": "64", "IMAGE_TOKEN": "63", "SEQ_LENGTH": "32", **CPU}
    (tmp_path / "c.json").write_text("[]")
    shown = dry_run_of("finetune_llava.sh", **settings, CAPTIONS=f"{tmp_path}/c.json", EXPORT="out")
    first, second = (shlex.split(line) for line in shown.splitlines() if "pretrain_vlm.py" in line)
    assert first[first.index("--save") + 1] + "-hf" == second[second.index("--load-hf") + 1]
    begin = next(n for n, word in enumerate(first) if word.endswith("pretrain_vlm.py")) + 1
    run = parse_run(first[begin:], {**CPU, "WORLD_SIZE": "8"}, LLAVA)
    assert run.model.frozen_parts == ("vision", "language") and run.zero.zero_stage == 3
    [run] = runs_of("finetune_llava.sh", **settings, CAPTIONS="", LORA_RANK="4", ZERO_STAGE="2")
    assert run.model.frozen_parts == ("vision",) and run.model.lora_rank == 4


def test_questions_are_about_what_is_drawn(tmp_path: Path) -> None:
    """The answer to where a thing is follows from the caption; pixels in random order are the same pixels."""
    words = (sys.executable, "examples/draw_shapes.py", str(tmp_path), "--pictures", "20", "--test-pictures", "5")
    subprocess.run(words, cwd=ROOT, check=True)
    captions, questions, test = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("captions", "questions", "test")
    )
    for caption, asked in zip(captions, questions, strict=True):
        first, second = (text.split(maxsplit=2)[2] for text in caption["messages"][1]["content"].split(", "))
        for question, answer in zip(asked["messages"][::2], asked["messages"][1::2], strict=True):
            text = question["content"] if isinstance(question["content"], str) else question["content"][1]["text"]
            if first in text or second in text:
                assert answer["content"] == (second if first in text else first)
                assert ("left of" in text or "above" in text) == (answer["content"] == first)
            else:
                assert answer["content"] in (first, second)
    for record in test:
        picture, shuffled = (
            np.asarray(Image.open(tmp_path / folder / Path(record["image"]).name)).reshape(-1, 3)
            for folder in ("images", "shuffled")
        )
        assert not np.array_equal(picture, shuffled)
        assert np.array_equal(np.sort(picture, axis=0), np.sort(shuffled, axis=0))
