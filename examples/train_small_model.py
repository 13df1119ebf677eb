"""Train a small GPT on tensor-parallel size 2, save it, and load it on sizes 4 and 1: the outputs are the same.

    torchrun --nproc_per_node 4 examples/train_small_model.py     (or deepspeed --num_gpus 4, or mpirun -np 4 python)
    python examples/train_small_model.py                          starts the four ranks itself

Needs neither data nor a GPU.
"""

import os
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli import parse_run
from megatron.common.environment import rank, world_size
from megatron.common.errors import ConfigError
from megatron.launch.environment import prepare_environment
from megatron.launch.rank import run_rank

FLAGS = """
    --model-parallel-size 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --mock-data --vocab-size 500 --num-workers 0 --batch-size 8 --train-iters 5 --lr 1e-2 --lr-decay-style constant
"""


def main() -> None:
    """What each of the four ranks does."""
    if world_size(os.environ) != 4:
        raise ConfigError(f"this example needs 4 ranks: torchrun --nproc_per_node 4 {sys.argv[0]}")
    prepare_environment(os.environ)  # before torch is imported

    from megatron.checkpoint.save import Checkpointer
    from megatron.engines.build import build_engine
    from megatron.engines.engine import train_batch
    from megatron.parallel.layout import ParallelLayout
    from megatron.tools.inference.model import load_model
    from megatron.tools.inference.source import open_source
    from megatron.training.data_iterators import DataIterators
    from megatron.training.learning_rates import annealing_lr
    from megatron.training.preflight import check
    from megatron.training.setup import initialized_ranks

    # 1. From flags of pretrain_gpt2.py to a checked and frozen configuration.
    folder = Path(tempfile.gettempdir()) / f"small_model_{os.environ.get('MASTER_PORT', 'mpi')}"
    run, _ = check(parse_run([*FLAGS.split(), "--save", str(folder)], os.environ))

    # 2. Join the process groups. The layout has this rank's coordinates; everything takes it as an argument.
    with initialized_ranks(run, callbacks=()) as (layout, _):
        # 3. DeepSpeed's engine around model and Adam, this data-parallel rank's samples, and five steps.
        engine = build_engine(run, layout, annealing_lr(run))
        batches = DataIterators(run, layout).training(finished=0)
        for iteration in range(1, run.train.train_iters + 1):
            loss = train_batch(engine, batches).item()  # the same on every rank
            log(f"iteration {iteration}: loss {loss:.4f}")

        # 4. Each rank saves its shard of the weights and of Adam's state.
        Checkpointer(engine, run, log).save(run.train.train_iters)
        trained = logits_of(engine.module.eval(), layout, run.model.vocab_size)

        # 5. The same ranks in other layouts: the weights are merged, and divided again.
        for size in (4, 1):
            other = ParallelLayout.create(replace(run.parallel, model_parallel_size=size))
            logits = logits_of(load_model(open_source(folder), other), other, run.model.vocab_size)
            log(f"loaded at TP {size}: largest difference of {(logits - trained).abs().max().item():.1e}")


def logits_of(model, layout, vocab_size):
    """The logits of one sample, [1, s, v], on every rank. Prints a few."""
    import torch

    from megatron.parallel.tensor.mappings import gather_from_model_parallel_region

    tokens = torch.arange(32, device=next(model.parameters()).device).unsqueeze(0)  # [1, s]
    with torch.no_grad():
        shard = model(tokens)  # [1, s, v/t]: the columns of this rank's part of the vocabulary
    logits = gather_from_model_parallel_region(shard, layout.tensor_group)[..., :vocab_size]
    log(f"TP {layout.tensor_group.size()}: logits {[round(value, 5) for value in logits[0, -1, :5].tolist()]} ...")
    return logits


def log(text: str) -> None:
    """Print on rank 0 only."""
    if not rank(os.environ):
        print(text, flush=True)


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_known_args()
    if rank(os.environ) is None:  # no launcher has started this process: start one
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
        os.execv(sys.executable, [*launcher, __file__])
    run_rank(main)
