"""A step has one collective outside of DeepSpeed and the model: all ranks agree on anomalies and on exiting."""

import pytest
import torch
import torch.distributed as dist
from support.programs import TINY_MODEL


def events_of_a_run(words: list[str]) -> list[list[tuple[str, int, bool]]]:
    """Name and elements of each collective from an iteration to the next, and whether it was inside the engine."""
    from support.training import pretrain

    from megatron.engines.overrides import COLLECTIVES
    from megatron.training import trainer

    iterations: list[list[tuple[str, int, bool]]] = [[]]
    is_inside, train_batch = [False], trainer.train_batch

    def recorded(name: str):
        function = getattr(dist, name)

        def call(*arguments, **options):
            elements = arguments[0].numel() if arguments and isinstance(arguments[0], torch.Tensor) else 0
            iterations[-1].append((name, elements, is_inside[0]))
            return function(*arguments, **options)

        return call

    def observed_train_batch(*arguments):
        iterations.append([])
        is_inside[0] = True
        loss = train_batch(*arguments)
        is_inside[0] = False
        return loss

    for name in {*COLLECTIVES, "barrier", "broadcast", "reduce", "all_gather_object", "broadcast_object_list"}:
        setattr(dist, name, recorded(name))
    trainer.train_batch = observed_train_batch
    code, output = pretrain(words)
    assert code == 0, output
    return iterations[1:]


@pytest.mark.parametrize("layout", ["--zero-stage 0", "--zero-stage 2", "--pipe-parallel-size 2"])
def test_one_collective_per_step(run_ranks_once, programs, layout: str) -> None:
    settings = f"--train-iters 4 --batch-size 1 --gas 2 --eval-iters 0 {layout}".split()
    words = [str(word) for word in (*TINY_MODEL, *programs.data_arguments, *settings)]
    for iterations in run_ranks_once(2, events_of_a_run, words):
        for events in iterations[:-1]:
            assert [name for name, _, is_inside in events if not is_inside] == ["all_reduce"]


LAYERS, HIDDEN = 8, 32
REPLICATED = (6 * LAYERS + 2 + 32) * HIDDEN
"""Elements of norms, of the biases of row-parallel layers and of the embeddings of positions."""


@pytest.mark.parametrize("layout", ["--zero-stage 2", "--zero-stage 1 --bf16 --grad-accum-dtype fp32"])
def test_tensor_parallel_ranks_sum_gradients_once_per_step(run_ranks_once, programs, layout: str) -> None:
    """Of all norms and biases together, not of each of them in each micro-batch."""
    settings = f"--num-layers {LAYERS} --train-iters 2 --batch-size 2 --gas 2 --eval-iters 0 {layout}"
    words = [str(word) for word in (*TINY_MODEL, *programs.data_arguments, *settings.split())]
    flags = "--model-parallel-size 2 --sequence-parallel".split()
    for *_, last in run_ranks_once(2, events_of_a_run, [*words, *flags]):
        sizes = [elements for name, elements, is_inside in last if name == "all_reduce" and is_inside]
        assert sizes.count(REPLICATED) == 1
        assert HIDDEN not in sizes
