"""Checkpoints that are missing, broken or of another run: a line each before torch is there, never a fresh start."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.programs import Programs
from support.refusals import COMMAND, refusal

SAME = "--load ck --save ck"
TWO = "; the newest whole checkpoint is global_step2: to use it, write that name into ck/latest"
ONE = "; the newest whole checkpoint is global_step1: to use it, write that name into ck/latest"


def latest(content: bytes) -> Callable[[Path], Any]:
    return lambda ck: (ck / "latest").write_bytes(content)


def described(**changes: object) -> Callable[[Path], Any]:
    """Something in the newest tag's run.json is another."""

    def change(ck: Path) -> None:
        file = ck / "global_step2" / "run.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


# What is wrong: what is done to the folder of checkpoints, and the line.
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "latest missing": (lambda ck: (ck / "latest").unlink(), f"ck/latest is missing{TWO}"),
    "latest empty": (latest(b""), f"ck/latest holds '', which is no name of a checkpoint{TWO}"),
    "latest dangling": (latest(b"global_step9"), f"ck/latest names global_step9, which is not in ck{TWO}"),
    "latest garbage": (
        latest(b"\0\1 what?"),
        rf"ck/latest holds '\x00\x01 what?', which is no name of a checkpoint{TWO}",
    ),
    "latest not UTF-8": (latest(b"\xff\xfe"), f"ck/latest holds bytes that are no text{TWO}"),
    "latest leads elsewhere": (
        latest(b"../../x"),
        f"ck/latest holds '../../x', which is no name of a checkpoint{TWO}",
    ),
    "latest is absolute": (latest(b"/etc"), f"ck/latest holds '/etc', which is no name of a checkpoint{TWO}"),
    "latest is a folder": (
        lambda ck: ((ck / "latest").unlink(), (ck / "latest").mkdir()),
        f"ck/latest cannot be read (Is a directory){TWO}",
    ),
    "latest may not be read": (
        lambda ck: (ck / "latest").chmod(0),
        f"ck/latest cannot be read (Permission denied){TWO}",
    ),
    "the newest tag gone": (
        lambda ck: shutil.rmtree(ck / "global_step2"),
        f"ck/latest names global_step2, which is not in ck{ONE}",
    ),
    "all tags gone": (
        lambda ck: [shutil.rmtree(tag) for tag in ck.glob("global_step*")],
        "ck/latest names global_step2, which is not in ck; no whole checkpoint is left in ck",
    ),
    "broken tags only": (
        lambda ck: [file.unlink() for file in (*ck.glob("latest*"), *ck.glob("*/run.json"))],
        "ck/latest is missing; no whole checkpoint is left in ck",
    ),
    "run.json missing": (
        lambda ck: (ck / "global_step2" / "run.json").unlink(),
        f"ck/global_step2 is not whole: its run.json, written last, is missing or broken{ONE}",
    ),
    "run.json empty": (
        lambda ck: (ck / "global_step2" / "run.json").write_text(""),
        f"ck/global_step2 is not whole: its run.json, written last, is missing or broken{ONE}",
    ),
    "run.json of other types": (
        described(layout=[1], iteration="two"),
        f"ck/global_step2 is not whole: its run.json, written last, is missing or broken{ONE}",
    ),
    "run.json without a model": (
        described(config={"model": None}),
        f"ck/global_step2 is not whole: its run.json, written last, is missing or broken{ONE}",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused(place: Path, case: str) -> None:
    damage, line = BROKEN[case]
    damage(place / "ck")
    assert refusal(place, SAME) == (4, [line])


# What is wrong: flags and the lines.
OTHER_RUNS: dict[str, tuple[str, list[str]]] = {
    "no checkpoint": (
        "--load none",
        ["--load none: no checkpoint there; name a folder that holds one"],
    ),
    "no checkpoint, and saved elsewhere": (
        "--load none --save other",
        ["--load none: no checkpoint there; name a folder that holds one"],
    ),
    "another model": (
        f"{SAME} --num-layers 2 --hidden-size 64",
        [
            "--num-layers is 2, but 4 in ck/global_step2: load a model of the same shape",
            "--hidden-size is 64, but 32 in ck/global_step2: load a model of the same shape",
            "--ffn-hidden-size is 256, but 128 in ck/global_step2: load a model of the same shape",
        ],
    ),
}


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused(place: Path, case: str) -> None:
    words, lines = OTHER_RUNS[case]
    assert refusal(place, words) == (4, lines)


def test_another_vocabulary(place: Path) -> None:
    vocabulary = json.loads((place / "vocab.json").read_text())
    (place / "vocab.json").write_text(json.dumps({**vocabulary, "new": len(vocabulary)}))
    code, (size, content) = refusal(place, SAME)
    assert (code, size) == (4, "the vocabulary's size is 93, but 92 in ck/global_step2: load a model of the same shape")
    assert content.startswith("the tokenizer's content is ")


def test_what_a_message_advises_helps(programs: Programs, place: Path) -> None:
    """Also against tests that would pass because nothing is accepted."""
    (place / "ck" / "global_step2" / "run.json").unlink()
    (line,) = refusal(place, SAME)[1]
    assert line.endswith("the newest whole checkpoint is global_step1: to use it, write that name into ck/latest")
    (place / "ck" / "latest").write_text("global_step1")
    command = [programs.root / "pretrain_gpt2.py", *COMMAND, *SAME.split()]
    finished = programs.run("env", "-C", place, "python", *command).ok()
    assert "loaded ck/global_step1; training goes on behind iteration 1" in finished.output
    assert (place / "ck" / "latest").read_text() == "global_step4"
