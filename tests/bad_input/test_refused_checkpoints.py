"""Checkpoints that are missing, broken or of another run: one line each before torch is imported; no fresh start."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refusal

from megatron.checkpoint.commit import write_description

SAME = "--load ck --save ck"
STRICT = f"{SAME} --load-strict"
TWO = "; the newest complete checkpoint is global_step2: to use it, remove --load-strict"
ONE = "; the newest complete checkpoint is global_step1: to use it, remove --load-strict"
NONE = "; no complete checkpoint is left in ck"
WEIGHTS = "mp_rank_00_model_states.pt"


def latest(content: bytes) -> Callable[[Path], Any]:
    return lambda ck: (ck / "latest").write_bytes(content)


def changed(name: str, old: str, new: str) -> Callable[[Path], Any]:
    """Change a value in a file of the newest tag."""

    def change(ck: Path) -> None:
        file = ck / "global_step2" / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))

    return change


def of_other_types(ck: Path) -> None:
    """Two values of the newest tag's description have other types."""
    tag = ck / "global_step2"
    description = json.loads((tag / "run.json").read_text()) | {"has_optimizer": 2, "has_rng": 3}
    (tag / "run.json").unlink()
    (tag / "manifest.json").unlink()
    write_description(tag, description)


# Problem: the change to the checkpoint folder, how the line begins, and how it ends.
BROKEN: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "latest missing": (lambda ck: (ck / "latest").unlink(), "ck/latest is missing", TWO),
    "latest dangling": (latest(b"global_step9"), "ck/latest names global_step9, which is not in ck", TWO),
    "latest garbage": (latest(b"\0\1 what?"), r"ck/latest contains '\x00\x01 what?', which is not the name", TWO),
    "latest leads elsewhere": (latest(b"../../x"), "ck/latest contains '../../x', which is not the name of", TWO),
    "latest may not be read": (
        lambda ck: (ck / "latest").chmod(0), "ck/latest cannot be read (Permission denied)", TWO
    ),
    "latest is a pipe": (
        lambda ck: ((ck / "latest").unlink(), os.mkfifo(ck / "latest")), "ck/latest cannot be read (a FIFO, not", TWO
    ),
    "all tags gone": (
        lambda ck: [shutil.rmtree(tag) for tag in ck.glob("global_step*")], "ck/latest names global_step2", NONE
    ),
    "manifest of a later version": (
        changed("manifest.json", '"format": 1', '"format": 2'), "ck/global_step2/manifest.json has format 2, but", ONE
    ),
    "a file too many": (
        lambda ck: (ck / "global_step2" / "mp_rank_01_model_states.pt").touch(),
        "ck/global_step2/mp_rank_01_model_states.pt is not in the manifest", ONE,
    ),
    "two problems": (of_other_types, "ck/global_step2/run.json: has_optimizer: Input should be", ONE),
    "a tag copied under another name": (
        lambda ck: (shutil.rmtree(ck / "global_step2"), shutil.copytree(ck / "global_step1", ck / "global_step2")),
        "ck/global_step2 holds iteration 1: its folder was copied or renamed", ONE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused(place: Path, case: str) -> None:
    damage, begin, end = BROKEN[case]
    damage(place / "ck")
    code, (line,) = refusal(place, STRICT)
    assert code == 4 and line.startswith(begin) and line.endswith(end) and "\\n" not in line


def test_a_folder_without_a_checkpoint_and_one_of_another_model(place: Path) -> None:
    none = "--load none: no checkpoint there; name a folder that contains one"
    assert refusal(place, "--load none --save other") == (4, [none])
    one = "--load ck/global_step2: this is one checkpoint; name its folder: --load ck; to go back to it, write "
    one += "global_step2 into ck/latest"
    assert refusal(place, "--load ck/global_step2 --save other") == (4, [one])
    (place / "hf").mkdir()
    (place / "hf" / "config.json").write_text("{}")
    hugging = "--load hf: no checkpoint there, but a Hugging Face folder: train on from it with --load-hf"
    assert refusal(place, "--load hf --save other") == (4, [hugging])
    ours = "--load-hf ck has training checkpoints, and is not a Hugging Face folder: use --load for it"
    assert refusal(place, "--load-hf ck") == (2, [ours])
    (place / "old/iter_0000010/mp_rank_00").mkdir(parents=True)
    (place / "old/latest_checkpointed_iteration.txt").write_text("10")
    theirs = "--load old: a checkpoint of Megatron-LM: tools/convert_checkpoint.py from-megatron converts it"
    assert refusal(place, "--load old") == (4, [theirs])
    changed = {"--num-layers": (2, 4), "--hidden-size": (64, 32), "--ffn-hidden-size": (256, 128)}
    assert refusal(place, f"{SAME} --num-layers 2 --hidden-size 64") == (
        4,
        [
            f"{name} is {ours}, but {theirs} in ck/global_step2: load a model of the same shape"
            for name, (ours, theirs) in changed.items()
        ],
    )


def test_another_vocabulary(place: Path) -> None:
    vocabulary = json.loads((place / "vocab.json").read_text())
    (place / "vocab.json").write_text(json.dumps({**vocabulary, "new": len(vocabulary)}))
    code, (size, content) = refusal(place, SAME)
    assert (code, size) == (4, "the vocabulary's size is 93, but 92 in ck/global_step2: load a model of the same shape")
    assert content.startswith("the tokenizer's content is ")


@pytest.mark.parametrize("words", [SAME, "--auto-resume --save ck"])
def test_run_does_not_start_over_without_a_valid_checkpoint(place: Path, words: str) -> None:
    for weights in place.glob(f"ck/*/{WEIGHTS}"):
        weights.write_bytes(weights.read_bytes()[:-1])
    size = len(weights.read_bytes())
    line = f"ck/global_step2/{WEIGHTS} has {size:,} bytes, but {size + 1:,} were saved{NONE}"
    assert refusal(place, words) == (4, [line])
