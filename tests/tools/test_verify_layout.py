"""tools/verify_layout.py: layouts that agree, and faults that it finds."""

import json
from pathlib import Path

import pytest
from support.programs import TINY_MODEL, Finished, Programs

SETTINGS = "--batch-size 2 --global-batch-size 8 --clip-grad 0.4 --iterations 3".split()
FAULTS = {
    "tied": ("tp1-pp2-dp1", "gradient of tied_modules.embed.word_embeddings.weight"),
    "gradient": ("tp1-pp0-dp2", "gradient of 7.bias (2 times the reference)"),
    "norm": ("tp2-pp0-dp1-zero1", "gradient norm of iteration 1"),
    "shards": ("tp2-pp0-dp1-zero2", "initial tied_modules.embed.word_embeddings.weight"),
    "accumulation": ("tp1-pp0-dp2-zero1", "loss of iteration 1"),
    "learning rate": ("tp2-pp1-dp1", "1.position_embeddings.weight after the first step"),
}
FAULTS_OF_EXPERTS = {
    # Each rank then clips its experts by another norm.
    "expert norm": ("tp1-pp0-dp2-ep2", "gradient of 5.mlp.experts.dense_4h_to_h.weight"),
    "expert twice": (
        "tp1-pp0-dp2-ep2-zero1",
        "gradient of 5.mlp.experts.dense_4h_to_h.weight (2 times the reference)",
    ),
}


QUICK = "tests/support/verify_layout.py"
"""The tool, without a process of its own that imports torch."""


def verify(programs: Programs, *words: str | Path, tool: str = QUICK, **environ: str) -> Finished:
    command = (tool, *SETTINGS, *TINY_MODEL, *programs.data_arguments, *words)
    return programs.warm(1, *command, **environ)


FP32_BOUNDS = ["1.0e-04", "1.0e-04", "1.0e-04", "2.0e-02", "2.0e+00"]
FP16_BOUNDS = ["2.0e-04", "2.0e-03", "2.0e-02", "5.0e-01", "2.0e+00"]
BF16_BOUNDS = ["1.0e-03", "1.0e-02", "1.0e-01", "5.0e-01", "2.0e+00"]


def printed_bounds(output: str) -> list[str]:
    """Those of loss, gradient norm, gradient and weights."""
    (line,) = [line for line in output.splitlines() if line.startswith("bound")]
    return line.split()[1:]


def read_layouts(path: Path) -> list[dict]:
    return json.loads(path.read_text())["layouts"]


@pytest.mark.parametrize(
    ("layouts", "words", "bounds"),
    [
        (
            "tp1-pp0-dp1-zero1 tp2-pp0-dp1-zero1-sp tp1-pp0-dp2-zero3",
            "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-min-size 16",
            BF16_BOUNDS,
        ),
        # On the CPU, where an entry script of the tests allows it; ZeRO 0 runs as ZeRO 1.
        ("tp1-pp0-dp1 tp2-pp0-dp1", "--program tests/support/fp16_pretrain.py --fp16", FP16_BOUNDS),
    ],
    ids=["fp8", "fp16"],
)
def test_layouts_agree_in(programs: Programs, layouts: str, words: str, bounds: list[str]) -> None:
    finished = verify(programs, "--layouts", *layouts.split(), *words.split()).ok()
    number = len(layouts.split())
    assert f"{number} of {number} layouts agree within these bounds" in finished.output
    assert printed_bounds(finished.output) == bounds


def test_layouts_agree(programs: Programs, tmp_path: Path) -> None:
    names = ["tp1-pp0-dp1", "tp1-pp2-dp1-zero1", "tp2-pp0-dp1-zero3"]
    words = ("--layouts", *names, "--json", tmp_path / "found.json")
    finished = verify(programs, *words, tool="tools/verify_layout.py").ok()
    assert "3 of 3 layouts agree within these bounds" in finished.output
    assert printed_bounds(finished.output) == FP32_BOUNDS
    layouts = read_layouts(tmp_path / "found.json")
    assert [layout["layout"] for layout in layouts] == names
    for layout in layouts:
        assert layout["agrees"] and layout["first"] is layout["failure"] is None
        assert max(layout["loss"], layout["grad_norm"], layout["gradient"]) < 1e-5 and layout["weights"] < 1e-2
    assert layouts[2]["gradient"] > 0, "bit for bit the same: were they compared with themselves?"


def found_faults(programs: Programs, faults: dict[str, tuple[str, str]], *words: str) -> str:
    """What the tool prints of layouts that each have a fault: its first difference is named."""
    by_layout = {layout.replace("-ep2", ""): fault for fault, (layout, _) in faults.items()}
    layouts = [layout for layout, _ in faults.values()]
    program = ("--program", "tests/support/faulty_layouts.py", "--no-bisect", "--layouts", "tp1-pp0-dp1", *layouts)
    finished = verify(programs, *program, *words, FAULT=json.dumps(by_layout))
    assert finished.returncode == 1
    for layout, first in faults.values():
        assert f"] {layout}: differs, first in {first} (" in finished.output, finished.output
    assert f"1 of {1 + len(faults)} layouts agree" in finished.output
    return finished.output


def test_planted_faults_are_found_and_named(programs: Programs) -> None:
    assert printed_bounds(found_faults(programs, FAULTS)) == FP32_BOUNDS


EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.1".split()


def test_planted_faults_of_experts_are_found_and_named(programs: Programs) -> None:
    found_faults(programs, FAULTS_OF_EXPERTS, *EXPERTS)


def test_a_layout_that_differs_is_bisected(programs: Programs, tmp_path: Path) -> None:
    """To the smallest layout that differs, and the pass that lacks an all-reduce."""
    words = ["--program", "benchmarks/mutations/pretrain.py", "--layouts", "tp1-pp0-dp1", "tp2-pp2-dp1"]
    finished = verify(programs, *words, "--json", tmp_path / "found.json", MUTATION="row not summed")
    assert finished.returncode == 1
    (text,) = json.loads((tmp_path / "found.json").read_text())["bisections"]
    assert text in finished.output
    assert "tp2-pp2-dp1 differs. The smallest layout that does is tp2-pp0-dp1 (2 processes), in iteration 1:" in text
    assert "computed by   the forward pass of 2.attention.dense (RowParallelLinear)\n" in text
    assert "their sum over the tensor-parallel ranks is right: a reduction is absent" in text


def test_bert_is_verified_by_its_program(programs: Programs) -> None:
    words = [*SETTINGS, *TINY_MODEL, *programs.sentence_arguments, "--program", "pretrain_bert.py"]
    finished = programs.warm(1, QUICK, *words, "--layouts", "tp1-pp0-dp1", "tp2-pp0-dp1-zero2").ok()
    assert "2 of 2 layouts agree" in finished.output


def test_a_run_that_fails_is_reported_with_its_last_lines(programs: Programs) -> None:
    finished = verify(programs, "--layouts", "tp1-pp0-dp1", "--data-path", "nowhere")
    assert finished.returncode == 1
    assert "[1/1] tp1-pp0-dp1: failed" in finished.output and "nowhere" in finished.output
    assert "0 of 1 layouts agree" in finished.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --layouts with names, or --all with a number of processes"),
        (["--all", "0"], "--all 0 must be from 1 to 256"),
        (["--all", "257"], "--all 257 must be from 1 to 256"),
        (["--all", "2", "--sample", "9" * 20], "--sample of 20 digits must be 1,000,000 at most"),
        (["--layouts", "tp１-pp0-dp1"], "'tp１' is not part of a layout's name"),  # noqa: RUF001
        (["--all", "2", "--program", "nowhere.py"], "--program nowhere.py cannot be loaded (FileNotFoundError"),
        (["--all", "2", "--program", "tests/support/pages.py"], "--program tests/support/pages.py defines no ARCHITEC"),
    ],
)
def test_wrong_usage(programs: Programs, words: list[str], message: str) -> None:
    finished = verify(programs, *words)
    assert finished.returncode == 2 and message in finished.output
