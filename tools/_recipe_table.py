"""The table of the recipes: what each trains, and what the planner expects of it on H100."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron.model.spec import active_parameters
from megatron.tools.planning.machine import DEVICES, Machine
from megatron.tools.planning.request import make_request
from megatron.tools.planning.search import Candidate, Plan, search

ROOT = Path(__file__).resolve().parents[1]
RECIPES_COLUMNS = "script | GPUs | layout | batch, tokens | peak lr | iterations | memory | tokens/s | time | loss"
MACHINE = Machine(DEVICES["h100"], per_node=8)
VOCABULARIES = {"gpt": 50257, "llama": 128256, "lora": 128256, "moe": 50304}
_OF_THE_LAYOUT = {
    "model_parallel_size", "pipe_parallel_size", "sequence_parallel", "zero_stage", "batch_size",
    "context_parallel_size", "expert_model_parallel_size", "checkpoint_activations", "pipeline_schedule",
}  # fmt: skip


class Recipe(NamedTuple):
    """A script, and the plan of the run that it starts."""

    script: Path
    planned: Candidate
    others: Plan
    """The same model and batch on all layouts of as many GPUs."""


def recipes() -> Iterator[Recipe]:
    """Each script of recipes/, planned."""
    for script in sorted((ROOT / "recipes").glob("*.sh")):
        if script.name == "common.sh":
            continue
        words, devices = command_of(script)
        request = make_request(words, MACHINE, devices, vocab_size=VOCABULARIES[script.name.split("-")[0]])
        given = {name: value for name, value in request.given.items() if name not in _OF_THE_LAYOUT}
        yield Recipe(script, search(request).fitting[0], search(replace(request, given=given), any_schedule=True))


def command_of(script: Path) -> tuple[list[str], int]:
    """The arguments that ``script`` gives to the training program, and its number of GPUs. Nothing is started."""
    environ = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "DS_ACCELERATOR": "cuda"}
    shown = subprocess.run(["bash", script], env=environ, capture_output=True, text=True, check=True).stdout
    (words,) = [shlex.split(line) for line in shown.splitlines() if "pretrain_gpt2.py" in line]
    place = next(n for n, word in enumerate(words) if word.endswith("pretrain_gpt2.py"))
    devices = re.search(r"GPUS:-(\d+)", script.read_text())
    flags = words[place + 1 :]
    if "--load-hf" in flags:  # the sizes of a folder that is not here
        place = flags.index("--load-hf")
        flags[place : place + 2] = ["--model-preset", "llama3.1-8b"]
    if "--epochs" in flags:
        place = flags.index("--epochs")
        flags[place : place + 2] = ["--train-iters", "100"]
    return flags, int(devices[1]) if devices else 8


def recipe_row(recipe: Recipe) -> list[str]:
    """The cells of a recipe."""
    one, run = recipe.planned, recipe.planned.run
    tokens = run.train.global_batch_size * run.data.seq_length
    parallel = run.parallel
    sizes = {"TP": parallel.model_parallel_size, "PP": parallel.pipe_parallel_size, "DP": parallel.data_parallel_size}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    total = tokens * (run.train.train_iters or 0)
    is_tuned = run.model.lora_rank > 0
    return [
        f"`{recipe.script.name}`", str(one.request.devices), f"{layout}, ZeRO {run.zero.zero_stage}", f"{tokens:,}",
        f"{run.optim.lr:g}", "3 epochs" if is_tuned else f"{run.train.train_iters:,}",
        f"{one.memory.total / 1e9:.0f} GB", f"{tokens / one.timing.total:,.0f}",
        "" if is_tuned else _duration(total / tokens * one.timing.total / 3600),
        "" if is_tuned else f"{expected_loss(active_parameters(run.model), total):.2f}",
    ]  # fmt: skip


def _duration(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.0f} minutes"
    return f"{hours / 24:,.0f} days" if hours > 48 else f"{hours:.2g} hours"


def expected_loss(parameters: int, tokens: int) -> float:
    """Nats per token by the third fit of arXiv 2203.15556, for its own text and tokenizer."""
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28
