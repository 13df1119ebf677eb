"""Hugging Face's accelerate: its settings next to ours, and an exported model that an ``Accelerator`` trains."""

import json
import os
from pathlib import Path

import pytest
import torch
from support.command_lines import CPU, complaints
from support.programs import BIN, TINY_MODEL, Programs, read_metrics
from support.training import RankTraining

from megatron.common.environment import check_place, expected_device
from megatron.common.errors import ConfigError
from megatron.launch.environment import free_port
from megatron.tools.cluster.launch_flags import read_launch

TOOL = "tools/convert_checkpoint.py"
SETTINGS = (
    "--train-iters 3 --batch-size 2 --gas 2 --eval-iters 0 --finetune --lr-decay-style constant --warmup 0 --min-lr 0"
    " --clip-grad 0.5 --weight-decay 0 --attention-dropout 0 --hidden-dropout 0"
).split()
SAVES_WEIGHTS = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}


@pytest.mark.parametrize(
    ("variables", "words", "message"),
    [
        ("USE_MEGATRON_LM=true", "", "accelerate launch --use_megatron_lm has no effect"),
        (
            "MIXED_PRECISION=bf16",
            "",
            "mixed_precision bf16 of accelerate and --bf16 and --fp16 of this run, fp32, ",
        ),
        ("MIXED_PRECISION=bf16", "--bf16", None),
        ("DEEPSPEED_ZERO_STAGE=2", "", "zero_stage 2 of accelerate and --zero-stage of this run, 0, contradict"),
        ("GRADIENT_ACCUMULATION_STEPS=4", "--gas 4", None),
        ("GRADIENT_ACCUMULATION_STEPS=1.2.3", "", "gradient_accumulation_steps 1.2.3 of accelerate and --gas of this"),
        ("GRADIENT_ACCUMULATION_STEPS=4", "--gas 2", "gradient_accumulation_steps 4 of accelerate and --gas of this"),
        ("DEEPSPEED_CONFIG_FILE=a.json", "", "deepspeed_config_file a.json of accelerate is not read here: add"),
    ],
)
def test_settings_of_the_launcher_agree_with_the_flags(variables: str, words: str, message: str | None):
    name, _, value = variables.partition("=")
    found = complaints(words, environ={**CPU, f"ACCELERATE_{name}": value})
    assert len(found) == (message is not None)
    assert all(line.startswith(message) for line in found), found


def test_one_process_in_place_of_several_is_refused():
    """``accelerate launch --cpu --num_processes 2`` starts one, with an address to meet others that never come."""
    by_accelerate = {"ACCELERATE_USE_CPU": "True"}
    assert expected_device({**by_accelerate, "CUDA_VISIBLE_DEVICES": "0"}) == "cpu"
    check_place(by_accelerate)
    with pytest.raises(ConfigError, match="--cpu starts several processes only with --mpirun_hostfile: use --use_deep"):
        check_place({**by_accelerate, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})


def test_with_a_hostfile_it_starts_deepspeed_over_pdsh(programs: Programs, tmp_path: Path):
    """With its own environment in the file that deepspeed sends, as in ``tests/launch/test_multihost.py``."""
    deepspeed, sent = tmp_path / "deepspeed", tmp_path / "environment"
    deepspeed.write_text('#!/bin/sh\necho "started $*"\n')
    deepspeed.chmod(0o755)
    ended = programs.warm(
        1, BIN / "accelerate", "launch", "--use_deepspeed", "--num_machines", "2", "--num_processes", "2",
        "--machine_rank", "0", "--deepspeed_hostfile", "hostfile", "--main_process_ip", "host-1",
        "--main_process_port", str(free_port()),
        "pretrain_gpt2.py", "--lr", "0.1",
        PATH=f"{tmp_path}:{os.environ['PATH']}", DS_ENV_FILE=str(sent),
    ).ok()  # fmt: skip
    (started,) = [line for line in ended.output.splitlines() if line.startswith("started ")]
    launch = read_launch(started.split()[1:])
    assert (str(launch.hostfile), launch.num_gpus, launch.master_addr) == ("hostfile", 1, "host-1")
    assert "--launcher pdsh" in started
    assert (launch.script, list(launch.arguments)) == ("pretrain_gpt2.py", ["--lr", "0.1"])
    assert "ACCELERATE_USE_DEEPSPEED=true" in sent.read_text().splitlines()


def test_an_accelerator_trains_an_exported_model_alike(
    programs: Programs, train_in_ranks: RankTraining, run_ranks_once, run_ranks, trained, exported, tmp_path
):
    """With the JSON of our run on two ranks: its losses; and converted back, its weights."""
    ours, tuned, back = tmp_path / "ours", tmp_path / "tuned", tmp_path / "back"
    (tmp_path / "given.json").write_text(json.dumps(SAVES_WEIGHTS))
    flags = ["--zero-stage", "3", "--deepspeed_config", str(tmp_path / "given.json")]
    words = [*SETTINGS, *flags, "--load", trained, "--metrics-file", tmp_path / "metrics"]
    train_in_ranks(2, *words, "--save", ours)
    expected = [line["lm_loss"] for line in read_metrics(tmp_path / "metrics")]

    words = [str(word) for word in (*TINY_MODEL, *programs.data_arguments, *words)]
    losses, _ = run_ranks_once(2, train_with_accelerator, words, exported, ours / "ds_config.json", tuned)
    assert losses == pytest.approx(expected, rel=1e-5)
    programs.warm(1, TOOL, "from-hf", tuned, "--output", back).ok()
    ((largest, moved),) = run_ranks(1, distances, ours, back, trained)
    assert largest < 2e-5 < moved / 20, "one and a half orders of magnitude below the distance trained"


def train_with_accelerator(words: list[str], model_folder: Path, config: Path, output: Path) -> list[float]:
    """The losses of a training loop as users of accelerate write it, on the samples of the run of ``words``."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, InitProcessGroupKwargs
    from torch.nn import functional as F
    from transformers import GPT2LMHeadModel

    from megatron.cli import parse_run
    from megatron.parallel.layout import ParallelLayout
    from megatron.training.data_iterators import DataIterators
    from megatron.training.preflight import check

    gloo = InitProcessGroupKwargs(backend="gloo")  # without it, on a CPU, accelerate takes each rank for the only one
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=str(config)), kwargs_handlers=[gloo])
    run, _ = check(parse_run(words, os.environ))
    batches = DataIterators(run, ParallelLayout.create(run.parallel)).training(0)
    model = GPT2LMHeadModel.from_pretrained(model_folder, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters()))
    losses = []
    for _ in range(run.train.train_iters * run.train.gradient_accumulation_steps):
        tokens, (labels, _) = next(batches)
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    assert model.global_steps == run.train.train_iters, "a step for each global batch"
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(output, state_dict=weights)
    accelerator.wait_for_everyone()
    steps = torch.tensor(losses).view(-1, run.train.gradient_accumulation_steps)
    return steps.mean(1).tolist()


def distances(ours: Path, back: Path, before: Path) -> tuple[float, float]:
    """The largest differences of a weight: between both results, and between ours and what it began with."""
    from support.whole_models import logits_and_weights

    first, second, start = (logits_and_weights(folder)[1] for folder in (ours, back, before))
    largest = max((first[name] - second[name]).abs().max().item() for name in first)
    return largest, max((first[name] - start[name]).abs().max().item() for name in first)
