"""Errors during a run, on one process and on two: the run exits at once with a message."""

import json
from pathlib import Path

import pytest
from support.programs import TINY_MODEL, Programs

BRIEF = "--batch-size 2 --train-iters 20 --eval-iters 0".split()
LAYOUTS = {
    "one process, read ahead": (1, "--num-workers 2"),
    "two stages": (2, "--pipe-parallel-size 2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_outside_the_vocabulary(programs: Programs, tmp_path: Path, layout: str) -> None:
    """The vocabulary lacks the data's last words, and so their tokens."""
    processes, flags = LAYOUTS[layout]
    words = [*(f"w{n}" for n in range(50)), "<unk>", "<|endoftext|>"]
    (tmp_path / "small.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    flags = [*flags.split(), "--override", "--vocab-file", str(tmp_path / "small.json"), "--save", str(tmp_path / "ck")]
    ended = programs.pretrain(processes, *BRIEF, *flags)
    lines = [line for line in ended.output.splitlines() if line.startswith("pretrain_gpt2.py: error: ")]
    causes = [line for line in lines if "another rank failed first" not in line]
    assert causes and len(lines) <= processes
    for line in causes:
        assert "tiny_text_document.bin holds token " in line and " in document " in line and " at offset " in line
        assert "but the vocabulary ends at 51: name the vocabulary that the data set was made with" in line
    assert ended.returncode == 3 and "Traceback" not in ended.output
    assert "> optimizer" not in ended.output, "it shows in the first samples, which are read before the model is built"
    assert not list(tmp_path.glob("ck/global_step*"))


def test_missing_device_is_refused(programs: Programs) -> None:
    words = ("pretrain_gpt2.py", *TINY_MODEL, *programs.data_arguments, *BRIEF)
    ended = programs.python(*words, DS_ACCELERATOR="cuda", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 7
    assert ended.output.splitlines() == [
        "pretrain_gpt2.py: error: process 0 of this host has no device: torch finds 0 of cuda; start fewer processes, "
        "let each see all devices (Slurm: --gpus-per-node), install a torch that knows the device, or set "
        "DS_ACCELERATOR=cpu to train on the CPU"
    ]
