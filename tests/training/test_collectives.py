"""A step has one collective outside of DeepSpeed and the model: all ranks agree on anomalies and on exiting."""

from collections import Counter

import pytest
import torch.distributed as dist
from support.programs import TINY_MODEL

ITERATIONS = 4


def collectives_of_a_run(words: list[str]) -> dict[str, int]:
    """How often the training loop called each collective between the first iteration and the last."""
    from support.training import pretrain

    from megatron.engines.overrides import COLLECTIVES
    from megatron.training import trainer

    calls: Counter[str] = Counter()
    between: dict[str, int] = {}
    is_inside_engine = True
    train_batch = trainer.train_batch

    def counted(name: str):
        function = getattr(dist, name)

        def call(*arguments, **options):
            calls[name] += not is_inside_engine
            return function(*arguments, **options)

        return call

    def observed_train_batch(*arguments):
        nonlocal between, is_inside_engine
        is_inside_engine, between = True, {name: count for name, count in calls.items() if count}
        loss = train_batch(*arguments)
        is_inside_engine = False
        return loss

    names = {*COLLECTIVES, "barrier", "broadcast", "reduce", "all_gather_object", "broadcast_object_list"}
    for name in names:
        setattr(dist, name, counted(name))
    trainer.train_batch = observed_train_batch
    code, output = pretrain(words)
    assert code == 0, output
    return between


@pytest.mark.parametrize("layout", ["--zero-stage 0", "--zero-stage 2", "--pipe-parallel-size 2"])
def test_one_collective_per_step(run_ranks_once, programs, layout: str) -> None:
    settings = f"--train-iters {ITERATIONS} --batch-size 1 --gas 2 --eval-iters 0 {layout}".split()
    words = [str(word) for word in (*TINY_MODEL, *programs.data_arguments, *settings)]
    assert run_ranks_once(2, collectives_of_a_run, words) == [{"all_reduce": ITERATIONS - 1}] * 2


def all_reduces_of_a_step(words: list[str]) -> list[int]:
    """Elements of each all-reduce inside the engine in the last iteration of a run."""
    from support.training import pretrain

    from megatron.training import trainer

    sizes: list[int] = []
    all_reduce, train_batch = dist.all_reduce, trainer.train_batch

    def recorded(tensor, *arguments, **options):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    found: list[int] = []

    def observed_train_batch(*arguments):
        sizes.clear()
        loss = train_batch(*arguments)
        found[:] = sizes
        return loss

    dist.all_reduce, trainer.train_batch = recorded, observed_train_batch
    code, output = pretrain(words)
    assert code == 0, output
    return found


LAYERS, HIDDEN = 8, 32
REPLICATED = (6 * LAYERS + 2 + 32) * HIDDEN
"""Elements of norms, of the biases of row-parallel layers and of the embeddings of positions."""


@pytest.mark.parametrize(
    "layout", ["--zero-stage 0", "--zero-stage 1", "--zero-stage 2", "--zero-stage 1 --bf16 --grad-accum-dtype fp32"]
)
def test_tensor_parallel_ranks_sum_gradients_once_per_step(run_ranks_once, programs, layout: str) -> None:
    """Of all norms and biases together, not of each of them in each micro-batch."""
    settings = f"--num-layers {LAYERS} --train-iters 2 --batch-size 2 --gas 2 --eval-iters 0 {layout}"
    words = [str(word) for word in (*TINY_MODEL, *programs.data_arguments, *settings.split())]
    flags = "--model-parallel-size 2 --sequence-parallel".split()
    for sizes in run_ranks_once(2, all_reduces_of_a_step, [*words, *flags]):
        assert sizes.count(REPLICATED) == 1
        assert HIDDEN not in sizes
