"""An entry script like pretrain_gpt2.py, with a fault of FAULT in the environment where there are several ranks.

all-reduce     the backward pass of a column-parallel layer does not sum the gradient of its input over its ranks
tied           the gradient of the embedding is not summed over the first and the last pipeline stage
gradient       gradients are twice what they should be
norm           the gradient norm counts weights that tensor-parallel ranks hold alike once for each of them
shards         tensor-parallel ranks swap their shards of a weight when it is drawn
accumulation   the loss does not take into account how many micro-batches are accumulated
learning rate  rank 1 steps with half the learning rate
expert norm    the gradient norm leaves out the experts of the other ranks
expert twice   the gradients of experts are twice what they should be
weights        the outputs of a token's experts are weighted in the wrong order
experts        ranks hold one another's experts
none           nothing is wrong

FAULT is JSON: the fault of each layout, by the layout's name without its expert-parallel size.
"""

import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt2
from megatron.launch.rank import run_rank
from megatron.model.architectures import GPT2

ARCHITECTURE = GPT2


def missing_all_reduce():
    from megatron.parallel.tensor import linear

    linear._SumOverlap._start_sum = linear._Overlap._start_sum  # of row-parallel layers' outputs
    linear._Overlap._start_sum = lambda self, gradient: lambda: gradient


def untied_embedding():
    from deepspeed.pipe import PipelineModule

    PipelineModule.get_tied_weights_and_groups = lambda self: []


def doubled_gradient():
    from deepspeed.runtime.engine import DeepSpeedEngine

    backward = DeepSpeedEngine.backward
    DeepSpeedEngine.backward = lambda self, loss, **options: backward(self, 2 * loss, **options)


def wrong_norm():
    from megatron.engines import gradients

    gradients.is_model_parallel_parameter = lambda parameter: True


def swapped_shards():
    from megatron.parallel.tensor import layers

    right = layers.sharded_parameter

    def swapped(whole, *, dim, group):
        return right(whole.roll(whole.size(dim) // 2, dim), dim=dim, group=group)

    layers.sharded_parameter = swapped


def ignored_accumulation():
    from megatron.training import data_iterators

    right = data_iterators.weighted

    def unscaled(micro_batches, accumulated, group, **options):
        numbers, accumulated = itertools.tee(accumulated)
        number = next(numbers)  # the same in every iteration
        for tokens, (labels, weights, *others) in right(micro_batches, accumulated, group, **options):
            yield data_iterators.Batch(tokens, (labels, weights / number, *others))

    data_iterators.weighted = unscaled


def wrong_learning_rate():
    if os.environ["RANK"] != "1":
        return
    from megatron.training import learning_rates

    right = learning_rates.Schedule.learning_rate
    learning_rates.Schedule.learning_rate = lambda self, *positions: right(self, *positions) / 2


def wrong_norm_of_experts():
    from megatron.engines import gradients, zero

    right = gradients.sum_over_model
    for module in (gradients, zero):
        module.sum_over_model = lambda values, layout: right(values, dataclasses.replace(layout, expert_group=None))


def doubled_gradient_of_experts():
    from megatron.model import moe

    right = moe.mark_expert

    def marked(parameter, layout):
        parameter.register_hook(lambda gradient: 2 * gradient)
        return right(parameter, layout)

    moe.mark_expert = marked


def wrong_weights_of_experts():
    from megatron.model.moe import Router

    right = Router.forward

    def forward(self, x):
        weights, chosen, kept = right(self, x)
        return weights.flip(-1), chosen, kept

    Router.forward = forward


def swapped_experts():
    from megatron.model import moe

    right = moe.local_experts
    moe.local_experts = lambda experts, layout: [(n + experts // 2) % experts for n in right(experts, layout)]


FAULTS = {
    "all-reduce": missing_all_reduce,
    "tied": untied_embedding,
    "gradient": doubled_gradient,
    "norm": wrong_norm,
    "shards": swapped_shards,
    "accumulation": ignored_accumulation,
    "learning rate": wrong_learning_rate,
    "expert norm": wrong_norm_of_experts,
    "expert twice": doubled_gradient_of_experts,
    "weights": wrong_weights_of_experts,
    "experts": swapped_experts,
    "none": lambda: None,
}


def name_of_layout() -> str:
    """The name of the layout that this run has, as ``tools/verify_layout.py`` writes it."""
    flags = ("--model-parallel-size", "--pipe-parallel-size", "--zero-stage")
    tensor, pipe, zero = (int(sys.argv[sys.argv.index(flag) + 1]) for flag in flags)
    data = int(os.environ["WORLD_SIZE"]) // (tensor * max(pipe, 1))
    return f"tp{tensor}-pp{pipe}-dp{data}" + (f"-zero{zero}" if zero else "")


if __name__ == "__main__":
    if int(os.environ["WORLD_SIZE"]) > 1:
        FAULTS[json.loads(os.environ["FAULT"])[name_of_layout()]]()
    run_rank(pretrain_gpt2.main)
