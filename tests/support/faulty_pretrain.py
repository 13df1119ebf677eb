"""pretrain_gpt2.py with one fault injected, which FAULT in the environment describes.

gradient RANK ITERATION       the loss of that iteration on that rank is NaN; each rank prints for each iteration how
                              many of its weights are unchanged
weights RANK LAYER ITERATION  a weight of that layer on that rank is NaN, from that iteration on
samples FIRST LAST FACTOR     the loss of a batch with one of these samples is multiplied by the factor
signal RANK ITERATION NAMES   that rank receives these signals at the start of that iteration
evaluation RANK ITERATION NAMES  that rank receives them during the evaluation after that iteration
start RANK NAMES              that rank receives them while it builds the engine, inside of a library for a minute
launcher RANK ITERATION NAMES the process that started that rank receives them
terminal RANK ITERATION NAMES all processes of its group receive them, as Ctrl-C in a terminal has it
sleep RANK ITERATION          that rank hangs
hold RANK ITERATION           that rank hangs and holds Python's lock
raise RANK ITERATION          that rank fails
command RANK ITERATION WORDS  that rank runs the words in a shell, and waits for it
memory RANK ITERATION MB      that rank can allocate so much more memory, and no more than that
files BYTES                   no file can be larger
write RANK FILE               that rank waits before each file of a checkpoint but the first one until FILE is there
"""

import ctypes
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the program does before it imports torch
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
import torch.distributed as dist

from megatron.checkpoint import tensor_files
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.model import loss as losses
from megatron.model.transformer import ParallelTransformerLayer
from megatron.training import setup
from megatron.training import trainer as training

MARK = 7
"""The one token of a sample that is at fault."""

iteration = 0
kind, *words = os.environ["FAULT"].split()
count = {"command": 2, "write": 1}.get(kind, len(words))
text = words[count:]
numbers = [float(word) for word in words[:count] if not word.startswith("SIG")]
real_train_batch, real_eval_batch = training.train_batch, training.eval_batch
real_build_engine, real_write_file = setup.build_engine, tensor_files.write_file
real_loss, real_take = losses.lm_loss, GPT2Dataset.take


def fail():
    raise ValueError("an error of this rank alone")


RECEIVERS = {"signal": os.getpid, "launcher": os.getppid, "terminal": lambda: 0}
FAULTS = {
    "sleep": lambda: time.sleep(1000),
    "hold": lambda: ctypes.PyDLL(None).sleep(1000),
    "raise": fail,
    "command": lambda: subprocess.run(" ".join(text), shell=True, check=True),
}


def train_batch(engine, batches, hooks):
    global iteration
    iteration += 1
    engine.settle()
    if kind == "weights" and [dist.get_rank(), iteration] == [numbers[0], numbers[2]]:
        layers = {
            name: part for name, part in engine.module.named_modules() if isinstance(part, ParallelTransformerLayer)
        }
        layers[f"{numbers[1] + 1:.0f}"].input_layernorm.weight.data[0] = torch.nan
    if kind in ("raise", "signal") and iteration == numbers[1]:
        dist.barrier()  # by now the others have printed the iteration before, and count this one
    if kind in RECEIVERS and [dist.get_rank(), iteration] == numbers:
        for name in words[2:]:
            os.kill(RECEIVERS[kind](), getattr(signal, name))
    if kind == "memory" and [dist.get_rank(), iteration] == numbers[:2]:
        size = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (size + int(numbers[2] * 1e6),) * 2)
    if [dist.get_rank(), iteration] == numbers and kind in FAULTS:
        FAULTS[kind]()
    before = weights(engine)
    loss = real_train_batch(engine, batches, hooks)
    if kind == "gradient":
        kept = sum(map(torch.equal, before, weights(engine)))
        print(f"rank {dist.get_rank()} iteration {iteration} kept {kept} of {len(before)} weights", flush=True)
    return loss


def build_engine(run, layout, lr_scheduler):
    if kind == "start" and dist.get_rank() == numbers[0]:
        for name in words[1:]:
            os.kill(os.getpid(), getattr(signal, name))
        ctypes.CDLL(None).sleep(60)
    return real_build_engine(run, layout, lr_scheduler)


def eval_batch(engine, batches, hooks):
    if kind == "evaluation" and [dist.get_rank(), iteration] == numbers:
        for name in words[2:]:
            os.kill(os.getpid(), getattr(signal, name))
    return real_eval_batch(engine, batches, hooks)


def weights(engine):
    engine.settle()
    return [getattr(weight, "ds_tensor", weight).detach().clone() for weight in engine.module.parameters()]


def lm_loss(config, layout):
    loss_fn = real_loss(config, layout)

    def faulty_loss(logits, targets):
        loss = loss_fn(logits, targets)
        if kind == "gradient" and [dist.get_rank(), iteration] == numbers and loss.requires_grad:
            return loss * torch.nan
        if kind == "samples" and (targets[0] == MARK).all(dim=1).any():
            return loss * numbers[2]
        return loss

    return faulty_loss


def take(dataset, indices):
    rows = real_take(dataset, indices)
    for row, index in zip(rows, indices, strict=True):
        if kind == "samples" and numbers[0] <= index <= numbers[1]:
            row[:] = MARK
    return rows


def write_file(path, content):
    if kind == "write" and dist.get_rank() == numbers[0] and path.parent.name != "global_step1.partial":
        while not Path(text[0]).exists():
            time.sleep(0.05)
    return real_write_file(path, content)


if kind == "files":
    sys.dont_write_bytecode = True  # Python would cut the files of modules, and leave them
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(numbers[0]),) * 2)
setup.build_engine, tensor_files.write_file = build_engine, write_file
training.train_batch, training.eval_batch = train_batch, eval_batch
losses.lm_loss, GPT2Dataset.take = lm_loss, take
sys.argv[0] = "pretrain_gpt2.py"
runpy.run_path("pretrain_gpt2.py", run_name="__main__")
