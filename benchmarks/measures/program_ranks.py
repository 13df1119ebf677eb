"""Run by ``whole_program.py``: a training program that waits before it iterates, and reports how long it took."""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from benchmarks.measures.ranks import report
from benchmarks.measures.shapes import CLIP, LEARNING_RATE, WEIGHT_DECAY
from benchmarks.measures.whole_program import ITERATIONS, LOG_INTERVAL, WARM_UP, A
from megatron.training.callbacks import Callback


class Clock(Callback):
    """After the warm-up, waits for a line of stdin before every ``ITERATIONS`` iterations, and reports their time."""

    def __init__(self) -> None:
        self._begin: tuple[float, float] | None = None

    def tick(self, iteration: int) -> None:
        """Called before ``iteration``, of which the first is 1."""
        if iteration <= WARM_UP or (iteration - WARM_UP - 1) % ITERATIONS:
            return
        now = time.perf_counter(), time.process_time()
        wall, cpu = (end - begin for begin, end in zip(self._begin or now, now, strict=True))
        report({"wall": wall, "cpu": cpu})
        if not sys.stdin.readline():
            sys.exit()
        self._begin = time.perf_counter(), time.process_time()

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[tuple[()]]:
        """Of this project's training loop."""
        self.tick(iteration)
        yield ()


def suite(dtype: str, prefix: str, iterations: int) -> None:
    """This project's program, with the callbacks that its script registers."""
    from megatron.cli import parse_run
    from megatron.launch.environment import prepare_environment
    from megatron.tools.reporting.callbacks import default_callbacks

    prepare_environment(os.environ)
    from megatron.training.preflight import check
    from pretrain_gpt2 import train

    words = [
        *A.words,
        *f"--train-iters {iterations} --log-interval {LOG_INTERVAL} --eval-iters 0".split(),
        *f"--data-path {prefix} --vocab-file {prefix}.json --tokenizer-type WhitespaceTokenizer".split(),
        *"--split 1,0,0 --lr-decay-style cosine --min-lr 1e-5".split(),
        *(("--bf16", "--zero-stage", "1") if dtype == "bf16" else ()),
    ]
    run, _ = check(parse_run(words, os.environ))
    train(run, [*default_callbacks(), Clock()])


def one_file(dtype: str, prefix: str, iterations: int) -> None:
    """A loop without an engine: random places of a memory map, autocast, a learning rate for each iteration."""
    import numpy as np
    import torch

    from benchmarks.measures.peers import BareGPT2

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
        places = torch.randint(len(tokens) - A.sequence, (A.batch,)).tolist()
        inputs, labels = (
            torch.stack([torch.from_numpy(tokens[p + shift : p + shift + A.sequence].astype(np.int64)) for p in places])
            for shift in (0, 1)
        )
        return inputs, labels

    model = BareGPT2(A)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    autocast = torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()
    clock, inputs, labels = Clock(), *batch()
    for iteration in range(1, iterations + 1):
        clock.tick(iteration)
        progress = iteration / iterations
        for group in optimizer.param_groups:
            group["lr"] = 1e-5 + (LEARNING_RATE - 1e-5) * (1 + math.cos(math.pi * progress)) / 2
        with autocast:
            loss = model(inputs, labels)
        inputs, labels = batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if iteration % LOG_INTERVAL == 0:
            print(f"iteration {iteration}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    program, dtype, prefix, iterations = sys.argv[1:]
    {"suite": suite, "one file": one_file}[program](dtype, prefix, int(iterations))
