"""The first command a newcomer runs: from nothing to a trained model, on a CPU."""

import fcntl
import os
import re
import shlex
import struct
import sys
from dataclasses import replace

import pytest
from support.command_lines import CPU
from support.programs import Programs, read_metrics

from megatron.cli import parse_run
from megatron.launch.environment import free_port
from megatron.model.architectures import GPT2


def test_the_quickstart_learns(programs: Programs, warm_python: dict[str, str], tmp_path) -> None:
    """It trains under TP 2 x PP 2 to well below the unigram entropy it prints, and leaves all that it promises."""
    prompt = "Return the"
    finished = programs.run(
        "bash", "examples/quickstart.sh", "--fast",
        time_limit=540, OUT=str(tmp_path), VIRTUAL_ENV=sys.prefix, PROMPT=prompt, MASTER_PORT=str(free_port()),
        **warm_python,
    ).ok()  # fmt: skip
    assert "4 processes = TP 2 x PP 2 x DP 1, pipeline engine, 2 stages" in finished.output

    entropy = float(re.search(r"unigram entropy of the corpus ([\d.]+)", finished.output)[1])
    validation = [
        line["validation_loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if "validation_loss" in line
    ]
    assert f"validation loss {validation[-1]:.3f}" in finished.output
    assert len(validation) == 5 and validation[-1] < entropy - 0.5

    picture = (tmp_path / "loss.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width >= 1000 and height >= 600 and len(picture) > 20_000

    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step120"
    continued = finished.output.partition(f"text generated from the prompt: {prompt}\n")[2]
    assert continued.startswith(prompt) and len(continued.partition("\n== done")[0]) > len(prompt) + 20


@pytest.mark.parametrize("name", ["quickstart.sh", "mixture_of_experts.sh", "extend_context.sh"])
def test_files_that_are_not_of_an_earlier_run_are_kept(programs: Programs, tmp_path, name: str) -> None:
    (tmp_path / "mine.txt").touch()
    finished = programs.run("bash", f"examples/{name}", "--fast", OUT=str(tmp_path), VIRTUAL_ENV=sys.prefix)
    assert finished.returncode == 2 and (tmp_path / "mine.txt").exists()
    assert finished.output.startswith(f"{name}: error: the files in {tmp_path} are not of an earlier run")


def test_a_second_one_in_the_same_folder_is_refused(programs: Programs, tmp_path) -> None:
    """It would delete the files of the first, which then fails or trains on the other's data."""
    (tmp_path / "corpus.jsonl").touch()
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    finished = programs.run("bash", "examples/quickstart.sh", "--fast", OUT=str(tmp_path), VIRTUAL_ENV=sys.prefix)
    os.close(folder)
    assert finished.returncode == 2 and (tmp_path / "corpus.jsonl").exists()
    assert finished.output.endswith(f"quickstart.sh: error: another one runs in {tmp_path}: wait, or set OUT\n")


def test_a_dry_run_shows_the_commands(programs: Programs, tmp_path) -> None:
    folder = tmp_path / "quick start"
    shown = programs.run("bash", "examples/quickstart.sh", "--fast", OUT=str(folder), DRY_RUN="1", TP="4").ok().output
    (words,) = [shlex.split(line) for line in shown.splitlines() if line.startswith("deepspeed ")]
    run = parse_run(words[words.index("pretrain_gpt2.py") + 1 :], {**CPU, "WORLD_SIZE": "8"})
    assert (run.parallel.model_parallel_size, run.parallel.pipe_parallel_size, run.model.num_layers) == (4, 2, 2)
    assert run.data.prefixes == (f"{folder}/corpus_text_document",) and not folder.exists(), "a dry run makes nothing"


def test_the_llama_has_no_more_parameters(programs: Programs, tmp_path) -> None:
    """Both models in full size, as the script starts them."""
    counts = {}
    for model in ("gpt2", "llama"):
        words = ("bash", "examples/quickstart.sh", "--model", model)
        shown = programs.run(*words, OUT=str(tmp_path / model), DRY_RUN="1").ok().output
        (line,) = [line for line in shown.splitlines() if line.startswith("deepspeed ")]
        flags = shlex.split(line.partition("pretrain_gpt2.py")[2])
        config = replace(parse_run(flags, {**CPU, "WORLD_SIZE": "4"}).model, vocab_size=2048, padded_vocab_size=2048)
        assert config.swiglu == (model == "llama")
        counts[model] = sum(spec.numel for spec in GPT2.named_parameters(config).values())
    assert 0.97 < counts["llama"] / counts["gpt2"] <= 1
