"""tools/plan.py: its output and files describe the runs exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.refusals import ROOT

from megatron.cli import parse_run
from megatron.cli.presets import PRESETS
from megatron.common.formats import with_prefix
from megatron.model.architectures import BERT, GPT2, LLAVA
from megatron.tools.planning.machine import DEVICES, Machine
from megatron.tools.planning.request import make_request
from megatron.tools.planning.search import search

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--global-batch-size 8 --device a100 --devices 4"
).split()


@pytest.fixture(scope="module")
def planned(programs, tmp_path_factory):
    """A plan for the tiny data set, with all that it writes."""
    folder = tmp_path_factory.mktemp("plan")
    outputs = [*("--emit", folder / "files"), *("--json", folder / "plan.json")]
    words = ["--model-parallel-size", "2", "--pipe-parallel-size", "2"]
    finished = programs.python("tools/plan.py", *SMALL, *words, *programs.data_arguments, *outputs).ok()
    return folder, finished.output


def test_the_table_and_the_file_agree(planned):
    folder, output = planned
    plan = json.loads((folder / "plan.json").read_text())
    best = plan["fitting"][0]
    row = next(line.split() for line in output.splitlines() if line.split()[:1] == ["1"])
    assert row[1:5] == ["2", "2", "1", str(best["zero_stage"])]
    head = next(line for line in output.splitlines() if line.split()[:1] == ["TP"])
    assert "sent kB" in head and "step ms" in head, "units that fit a small model"
    assert f"as in the log of the run: step {row[-4]} ms | " in output
    assert f"FLOP/s | memory {with_prefix(best['memory_bytes']['total'], 'B')}" in output
    assert f"{len(plan['fitting']):,} fit" in output
    assert plan["looked_at"] == sum(len(plan[kind]) for kind in ("fitting", "superseded", "too_large")) + sum(
        rejection["layouts"] for rejection in plan["rejections"]
    )
    assert best["memory_bytes"]["total"] == sum(
        amount for name, amount in best["memory_bytes"].items() if name != "total"
    )
    assert best["memory_bytes"]["total"] == max(stage["total"] for stage in best["stages"])


def test_files_are_written_even_if_nobody_reads_the_screen(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, ROOT / "tools" / "plan.py", *SMALL, "--emit", tmp_path, "--json", tmp_path / "plan.json"]
    assert subprocess.run(command, stdout=write).returncode == 141
    assert {"run.sh", "plan.json"} <= set(os.listdir(tmp_path))


@pytest.mark.parametrize("missing", [None, "--data-path", "--vocab-file"])
def test_the_command_is_legal_and_its_json_is_the_runs(planned, programs, tmp_path, missing):
    """--explain prints the DeepSpeed config that the run would start with, and ends with 0; also without the data."""
    files = planned[0] / "files"
    script = (files / "run.sh").read_text()
    for name in ("run.sh", "ds_config.json"):
        (tmp_path / name).write_text((files / name).read_text())
    if missing:
        path = programs.data_arguments[programs.data_arguments.index(missing) + 1]
        (tmp_path / "run.sh").write_text(script.replace(str(path), "data/missing"))
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", tmp_path / "run.sh", "--explain"]
    ended = subprocess.run(command, cwd=programs.root, env=environ, capture_output=True, text=True, check=True)
    assert "rules, all kept" in ended.stdout and ("--mock-data" in ended.stderr) == bool(missing)
    config = json.loads(ended.stdout.partition("> deepspeed ")[2])
    assert config == json.loads((files / "ds_config.json").read_text())


@pytest.mark.parametrize("launcher", ["deepspeed", "accelerate"])
def test_the_script_starts_as_many_processes_as_were_planned(planned, tmp_path, launcher):
    files = planned[0] / "files"
    (tmp_path / launcher).write_text('#!/bin/sh\necho "$0 $@"\n')
    (tmp_path / launcher).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LAUNCHER": launcher}
    command = ["bash", files / "run.sh", "--bf16"]
    words = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.split()
    place = words.index("pretrain_gpt2.py")
    config, json_file = files / "accelerate.yaml", files / "ds_config.json"
    assert (
        words[1:place]
        == {
            "deepspeed": "--log_level critical --num_gpus 4".split(),
            "accelerate": f"launch --config_file {config} --deepspeed_config_file {json_file}".split(),
        }[launcher]
    )
    assert words[-3:] == ["--deepspeed_config", str(json_file), "--bf16"]
    assert (files / "hostfile").read_text() == "host1 slots=4\n"
    of_accelerate = yaml.safe_load(config.read_text())
    assert (of_accelerate["num_processes"], of_accelerate["num_machines"]) == (4, 1)
    environ["LAUNCHER"] = "torchrun"
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)


def test_an_emitted_run_saves_warms_up_and_decays():
    """Unless the request says otherwise, and never against what it says."""

    def emitted(line):
        request = make_request(f"{' '.join(SMALL[:-4])} {line}".split(), Machine(DEVICES["a100"], 4), 4)
        return parse_run(search(request).fitting[0].command, request.environ)

    run = emitted("--train-iters 1000")
    assert (run.checkpoint.save, run.checkpoint.auto_resume) == ("checkpoints/my", True)
    assert run.checkpoint.save_interval == 1000
    assert (run.optim.lr_decay_style, run.optim.min_lr) == ("cosine", pytest.approx(run.optim.lr / 10))
    assert run.optim.warmup_steps(run.train) == 10
    run = emitted("--train-iters 1000 --lr 1e-5 --lr-warmup-iters 7 --lr-decay-style linear --save own --load own")
    assert (run.checkpoint.save, run.checkpoint.load, run.checkpoint.auto_resume) == ("own", "own", False)
    assert (run.optim.lr_decay_style, run.optim.min_lr, run.optim.warmup_steps(run.train)) == ("linear", 1e-6, 7)


@pytest.mark.parametrize(
    ("model", "architecture", "data"),
    [
        ("345m", GPT2, ["data/my_text_document", "vocab/vocab.json"]),
        ("bert-large", BERT, ["data/my_text_sentence", "vocab/vocab.txt"]),
        ("siglip-smollm2-222m", LLAVA, ["data/my_images_document"]),
    ],
)
def test_placeholders_of_data_fit_the_model_and_are_not_read(tmp_path, monkeypatch, model, architecture, data):
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab" / "vocab.json").write_text('{"a": 0}')
    monkeypatch.chdir(tmp_path)
    words, machine = ["--global-batch-size", "8"], Machine(DEVICES["a100"], 4)
    request = make_request(words, machine, 4, model=model, architecture=architecture)
    assert request.vocab_size == PRESETS[model].vocab_size
    assert [
        *request.given["data_path"].value,
        *(request.given[n].value for n in ["vocab_file"] if n in request.given),
    ] == data


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device a1000", "'a1000': did you mean a100?"),
        ("--emit new/x --json new/./x/run.sh", "--json new/x/run.sh is what --emit new/x writes"),
        ("--emit new/x --json new", "--json new is what --emit new/x writes"),
        ("--emit /dev/null/files", "--emit: /dev/null/files: /dev/null is not a folder"),
        ("--peak-tflops 1e300", "--peak-tflops 1e+300 must be "),
        ("--inter-bandwidth 1e-300 --devices-per-node 1", "--inter-bandwidth 1e-300 must be "),
        ("--tokens 1e300", "--tokens 1e+300 must be "),
    ],
)
def test_bad_arguments_are_one_line_errors(tool, words, message):
    ended = tool("plan", *SMALL, *words.split())
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("plan.py: error: "))
    assert ended.returncode == 2 and message in line


def test_a_model_names_its_program(tool):
    words = "--model siglip-smollm2-222m --device h100 --devices 1 --global-batch-size 8 --zero-stage 1".split()
    ended = tool("plan", *words)
    assert ended.returncode == 0 and "images: 224 pixels" in ended.stdout


@pytest.mark.parametrize("words", ["--precision fp16 --bf16", "--precision fp32 --fp16"])
def test_two_precisions_exclude_each_other(tool, words):
    ended = tool("plan", *SMALL, *words.split())
    assert ended.returncode == 2 and f"{words.replace(' --', ' and --')} exclude each other" in ended.stderr
