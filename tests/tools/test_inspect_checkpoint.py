"""tools/inspect_checkpoint.py on undamaged, damaged and different checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.programs import Finished, Programs

from megatron.tools.convert.inspection import find
from megatron.tools.convert.load_and_save import read_weights
from megatron.tools.convert.report import heading

TOOL = "tools/inspect_checkpoint.py"
TAG = "global_step3"


def inspect(programs: Programs, *words: str | Path) -> Finished:
    return programs.warm(1, TOOL, *words)


def test_facts_about_a_folder(programs: Programs, copy: Path):
    output = inspect(programs, copy).ok().output
    assert output.startswith(f"{copy}: a folder of checkpoints\n")
    for words in (
        f"newest      {TAG}",
        "iteration   3\n  samples     12\n  tokens      384\n",
        "model parallel size 2, pipe parallel size 2",
        "layers 4, hidden 32, heads 4, inside the MLP 128, positions 32, tokens 92",
        "weights; the optimizer; random streams",
        "DeepSpeed 0.19.8, checkpoint 3",
        "complete    yes: 2",
        "pretrain_gpt2.py --load to resume",
    ):
        assert words in output
    rows = [line.split("  ") for line in output.splitlines()]
    assert ["", "attention.query_key_value.weight", "96 x 32", "float32"] in [
        [part.strip() for part in row if part.strip() or part == row[0]][:4] for row in rows
    ]


def test_texts_of_a_file_are_not_shown_as_they_are():
    texts = "\x1b[2J", "x" * 100_000
    shown = heading({"path": "a", "kind": "b", "versions": dict(zip("cd", texts, strict=True)), "tags": texts})
    assert len(shown) < 1000 and shown.replace("\n", "").isprintable()


def test_every_parameter_is_measured(programs: Programs, trained: Path, merged: Path):
    weights = load_file(merged)
    report = json.loads(inspect(programs, trained / TAG, "--json").ok().output)
    assert report["iteration"] == 3 and report["layout"]["--pipe-parallel-size"] == 2
    assert [parameter["name"] for parameter in report["parameters"]][:2] == [
        "tied_modules.embed.word_embeddings.weight",
        "1.position_embeddings.weight",
    ]
    assert {parameter["name"]: parameter["shape"] for parameter in report["parameters"]} == {
        name: list(tensor.shape) for name, tensor in weights.items()
    }
    for parameter in report["parameters"]:
        assert parameter["norm"] == pytest.approx(weights[parameter["name"]].double().norm().item(), rel=1e-12)


def test_a_damaged_file_is_named(programs: Programs, copy: Path):
    file = copy / TAG / "layer_03-model_01-model_states.pt"
    file.write_bytes(file.read_bytes()[:-100])
    finished = inspect(programs, copy / TAG)
    assert finished.returncode == 4 and finished.output.count("\n") == 1, finished.output
    assert str(file) in finished.output


@pytest.mark.parametrize("tool", [[TOOL], ["tools/convert_checkpoint.py", "merge", "--output", "out.safetensors"]])
def test_an_older_checkpoint_is_not_taken_in_silence(programs: Programs, copy: Path, tool: list[str]):
    shutil.copytree(copy / TAG, newer := copy / "global_step9")
    (copy / "latest").write_text(newer.name)
    (newer / "run.json").write_text("{}")
    first, *words = [str(copy / word) if word.startswith("out") else word for word in tool]
    output = programs.warm(1, first, *words, copy).ok().output
    lines = [line for line in output.splitlines() if line.startswith(f"{Path(first).name}: warning: {newer}")]
    assert len(lines) == 1 and lines[0].endswith(f"; taking {TAG}")


def test_two_checkpoints_of_different_kinds_are_compared(
    programs: Programs, trained: Path, merged: Path, tmp_path: Path
):
    equal = inspect(programs, "--diff", trained, merged).ok()
    assert equal.output == "52 of 52 tensors are equal, largest relative difference 0\n"
    weights, name = load_file(merged), "4.mlp.dense_4h_to_h.bias"
    with safe_open(merged, "pt") as file:
        metadata = file.metadata()
    weights[name] = weights[name].clone()
    weights[name][5] += 0.5
    save_file(weights, tmp_path / "changed.safetensors", metadata)
    finished = inspect(programs, "--diff", trained, tmp_path / "changed.safetensors", "--json")
    assert finished.returncode == 1, finished.output
    report = json.loads(finished.output)
    differing = [tensor for tensor in report["tensors"] if tensor["absolute"]]
    assert [tensor["name"] for tensor in differing] == [name] and len(report["tensors"]) == 52
    largest = load_file(merged)[name].abs().max().item()
    assert differing[0]["absolute"] == pytest.approx(0.5, rel=1e-6)
    assert differing[0]["relative"] == pytest.approx(0.5 / largest, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ([], "give one PATH, or --diff with two", 2),
        (["docs"], "docs is not a checkpoint", 4),
        (["--diff", "{}"], "expected 2 arguments", 2),
    ],
)
def test_mistakes(programs: Programs, trained: Path, words: list[str], message: str, code: int):
    finished = inspect(programs, *(word.format(trained) for word in words))
    assert finished.returncode == code and message in finished.output and finished.output.count("\n") == 1


def test_a_universal_checkpoint(tmp_path: Path):
    """DeepSpeed's format without a description of the model: its tensors can be listed and compared."""
    zero = tmp_path / "universal" / "zero"
    for name, tensor in {"10.weight": torch.ones(3), "2.mlp.bias": torch.arange(4.0)}.items():
        (zero / name).mkdir(parents=True)
        torch.save({"param": tensor, "cat_dim": 0}, zero / name / "fp32.pt")
    found = find(tmp_path / "universal")
    assert found.what == "a universal checkpoint"
    assert [(name, tensor.tolist()) for name, tensor in read_weights(found).items()] == [
        ("2.mlp.bias", [0, 1, 2, 3]),
        ("10.weight", [1, 1, 1]),
    ]
