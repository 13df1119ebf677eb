"""A rank that runs out of memory reports how much there was, what was planned, and what would fit."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from support.command_lines import parse

from megatron.tools.planning.memory import stage_memory
from megatron.tools.reporting.callbacks import smallest_change
from megatron.training import memory


def test_out_of_memory_is_a_one_line_error(programs, tmp_path: Path) -> None:
    """Linux refuses the process what it requests, and torch's allocator raises."""
    words = "--train-iters 3 --batch-size 256 --eval-iters 0 --save-interval 1 --hidden-dropout 0".split()
    finished = programs.faulty(1, "memory 0 1 40", *words, "--save", tmp_path)
    assert finished.returncode == 7, finished.output[-3000:]
    assert "Traceback" not in finished.output
    (message,) = (line for line in finished.output.splitlines() if "error:" in line)
    pattern = (
        r"pretrain_gpt2.py: error: rank 0: out of memory in training, iteration 1: \S+ GB were requested, "
        r"\S+ GB are free; "
        r"this rank holds (\S+) GB, and was planned to hold (\S+) GB at its peak; (--\S.*) would take (\S+) GB; "
        r"see (\S+)"
    )
    held, planned, change, needed, file = re.fullmatch(pattern, message).groups()
    assert 0 < float(held) < 4 * float(planned) and float(needed) < float(planned)
    assert change.startswith("--batch-size ") and file == str(tmp_path / "memory-rank0.txt")
    snapshot = Path(file).read_text()
    assert "activations" in snapshot and re.search(r"\d\.\d+  \(256, 32, 32, 'torch.float32', 'cpu'\)", snapshot)
    assert not list(tmp_path.glob("global_step*"))


def test_the_smallest_change_comes_first() -> None:
    run = parse("--batch-size 8 --hidden-size 512 --num-layers 8 --seq-length 512 --max-position-embeddings 512")
    run = replace(run, model=replace(run.model, vocab_size=1000, padded_vocab_size=1024))
    (planned,) = stage_memory(run)
    assert smallest_change(run, 0, planned.total - 1).startswith("--batch-size 4 --gas 2 would take ")
    states = planned.states.weights + planned.states.gradients + planned.states.optimizer
    assert smallest_change(run, 0, 1.4 * states).startswith("--checkpoint-activations --batch-size 2 --gas 4 would ")
    assert smallest_change(run, 0, states / 2).startswith(
        "no smaller micro-batch, recomputation or ZeRO stage would fit"
    )


class Deprecated:
    """Warns when it is asked for its class, as torch.distributed.reduce_op does."""

    @property
    def __class__(self) -> type:
        raise FutureWarning


def test_live_tensors_are_listed_beside_objects_that_only_look_like_tensors() -> None:
    of_the_compiler = torch._to_functional_tensor(torch.ones(3, 42))
    held = torch.nn.Parameter(torch.ones(3, 41)), Deprecated(), of_the_compiler
    assert memory._live_tensors()[3, 41, "torch.float32", "cpu"] == held[0].nbytes


@pytest.mark.parametrize(
    "visible", ["GPU-8a1c0f3e-7c1d-4a5b-9d53-6f2f3a2b1c0d", "MIG-4f2e1d0c-1111-2222-3333-444455556666"]
)
def test_free_memory_is_known_whatever_names_the_device(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    """DeepSpeed's own function reads a UUID in CUDA_VISIBLE_DEVICES as a number, and fails."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(memory, "get_accelerator", CUDA_Accelerator)
    monkeypatch.setattr("deepspeed.accelerator.cuda_accelerator.pynvml", SimpleNamespace(), raising=False)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (3_000, 4_000))
    assert memory._free() == 3_000
