"""tools/verify_layout.py: layouts that agree, and faults that it finds."""

import json
import shutil
from pathlib import Path

import pytest
from support.programs import TINY_MODEL, Finished, Programs

SETTINGS = "--batch-size 2 --global-batch-size 8 --clip-grad 0.4 --iterations 3".split()
FAULTS = {
    "a missing all-reduce of gradients": (
        "megatron/parallel/tensor/layers.py",
        "under_way = ctx.group is not None and grad_x is not None",
        "under_way = False",
        "tp2-pp0-dp1",
    ),
    "swapped shards": (
        "megatron/parallel/tensor/layers.py",
        "whole.chunk(group.size(), dim)[group.rank()]",
        "whole.chunk(group.size(), dim)[-1 - group.rank()]",
        "tp2-pp0-dp1",
    ),
    "a loss that accumulation does not scale": (
        "megatron/training/data_iterators.py",
        "scale = accumulated * group.size() / counted",
        "scale = group.size() / counted",
        "tp1-pp0-dp2",
    ),
}


def verify(programs: Programs, *words: str | Path) -> Finished:
    return programs.warm(1, "tools/verify_layout.py", *arguments(programs, *words))


def arguments(programs: Programs, *words: str | Path) -> list[str | Path]:
    return [*SETTINGS, *TINY_MODEL, *programs.data_arguments, *words]


def test_layouts_agree(programs: Programs, tmp_path: Path) -> None:
    names = ["tp1-pp0-dp1", "tp1-pp2-dp1-zero1", "tp2-pp0-dp1-zero3"]
    finished = verify(programs, "--layouts", *names, "--json", tmp_path / "found.json").ok()
    assert "3 of 3 layouts agree within loss 0.0001, grad norm 0.0001, weights 0.0001" in finished.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [layout["layout"] for layout in found["layouts"]] == names
    for layout in found["layouts"]:
        assert layout["agrees"] and layout["first_tensor"] is None and layout["failure"] is None
        assert max(layout["loss"], layout["grad_norm"], layout["weights"]) < 1e-4
    assert found["layouts"][1]["weights"] > 0, "bit for bit the same: were they compared with themselves?"


def test_layouts_agree_in_bf16_within_the_stated_bound(programs: Programs) -> None:
    finished = verify(programs, "--bf16", "--layouts", "tp1-pp0-dp1-zero1", "tp2-pp0-dp1-zero3-sp").ok()
    assert "2 of 2 layouts agree within loss 0.001, grad norm 0.01, weights inf" in finished.output


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(programs: Programs, tmp_path: Path, fault: str) -> None:
    """In a copy of the program, and the layout that it is planted for is named with a tensor."""
    file, right, wrong, layout = FAULTS[fault]
    for part in ("megatron", "tools"):
        shutil.copytree(programs.root / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(programs.root / "pretrain_gpt2.py", tmp_path)
    source = (tmp_path / file).read_text()
    before, _, after = source.partition(right)
    assert after, f"{file} does not say {right} any more"
    (tmp_path / file).write_text(before + wrong + after)
    words = arguments(programs, "--layouts", "tp1-pp0-dp1", layout)
    finished = programs.python(tmp_path / "tools" / "verify_layout.py", *words)
    assert finished.returncode == 1, finished.output
    assert f"{layout}: differs, first in tied_modules.embed.word_embeddings.weight" in finished.output
    assert "1 of 2 layouts agree" in finished.output


def test_a_run_that_fails_is_told_with_its_last_words(programs: Programs) -> None:
    finished = verify(programs, "--layouts", "tp1-pp0-dp1", "tp1-pp0-dp2", "--data-path", "nowhere")
    assert finished.returncode == 1
    assert "[1/2] tp1-pp0-dp1: failed" in finished.output and "nowhere" in finished.output
    assert "0 of 2 layouts agree" in finished.output


def test_the_list_is_printed_without_running(programs: Programs) -> None:
    finished = verify(programs, "--all", "2", "--list").ok()
    assert {"tp1-pp0-dp1", "tp2-pp0-dp1-zero3-sp", "tp1-pp2-dp1-zero1"} <= set(finished.output.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --layouts with names, or --all with a number of processes"),
        (["--layouts", "tp1-pp1-dp1", "--all", "2"], "give --layouts with names, or --all"),
        (["--layouts", "tp1"], "layout tp1: sizes of TP, PP and DP are needed"),
        (
            ["--layouts", "tp1-pp1-dp1", "tp1-pp1-dp1-zero3"],
            "layout tp1-pp1-dp1-zero3: --zero-stage 3 cannot be combined with",
        ),
        (["--all", "0"], "--iterations and --all take whole numbers from 1 on"),
    ],
)
def test_wrong_usage(programs: Programs, words: list[str], message: str) -> None:
    finished = verify(programs, *words)
    assert finished.returncode == 2 and message in finished.output
