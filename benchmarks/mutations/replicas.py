"""Faults of data parallelism, ZeRO, pipelines and the step."""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace

from benchmarks.mutations.patches import module, patch

# Data parallelism and ZeRO.


def rows_of_the_first_rank() -> None:
    def make(right):
        return lambda self, *arguments, **options: right(self, *arguments, **{**options, "data_rank": 0})

    patch(module("data.loader").MicroBatches, "__init__", make)


def tokens_counted_on_each_rank() -> None:
    def make(right):
        return lambda *arguments, masks: right(*arguments, masks=False)

    patch(module("training.data_iterators"), "weighted", make)


def gradients_not_averaged() -> None:
    patch(module("engines.engine").Engine, "buffered_allreduce_fallback", lambda right: lambda self, **options: None)


def gradients_summed() -> None:
    def make(right):
        def reduce(self, **options):
            right(self, **options)
            for parameter in self.module.parameters():
                parameter.grad.mul_(self._data_group.size())

        return reduce

    patch(module("engines.engine").Engine, "buffered_allreduce_fallback", make)


def bucket_not_divided() -> None:
    def make(right):
        return lambda self, *arguments, **options: right(self, *arguments, **{**options, "divisor": 1.0})

    patch(module("engines.gradients").GradientBucket, "__init__", make)


def bucket_not_reduced() -> None:
    gradients = module("engines.gradients")

    def make(right):
        def start(self):
            right(self)
            part = self._started.sent.chunk(self.group.size())[self.group.rank()]
            self._started = gradients.Reduction(self._started.work, self._started.sent, part)

        return start

    patch(gradients.GradientBucket, "start", make)


def weights_not_gathered() -> None:
    def make(right):
        def update(self, masters):
            self._in_order = []
            right(self, masters)

        return update

    patch(module("engines.sharded_weights").ShardedWeights, "update", make)


def norm_of_a_stage() -> None:
    def make(right):
        return lambda values, layout: right(values, replace(layout, model_group=layout.tensor_group))

    for name in ("gradient_norm", "zero"):
        patch(module(f"engines.{name}"), "sum_over_model", make)


def doubled_gradient() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    backward = DeepSpeedEngine.backward
    DeepSpeedEngine.backward = lambda self, loss, **options: backward(self, 2 * loss, **options)


def wrong_norm() -> None:
    from megatron.engines import gradient_norm

    gradient_norm.is_model_parallel_parameter = lambda parameter: True


def ignored_accumulation() -> None:
    from megatron.training import data_iterators

    right = data_iterators.weighted

    def unscaled(micro_batches, accumulated, group, **options):
        numbers, accumulated = itertools.tee(accumulated)
        number = next(numbers)  # the same in every iteration
        for tokens, (labels, weights, *others) in right(micro_batches, accumulated, group, **options):
            yield data_iterators.Batch(tokens, (labels, weights / number, *others))

    data_iterators.weighted = unscaled


def wrong_learning_rate() -> None:
    if os.environ["RANK"] != "1":
        return
    from megatron.training.lr_schedule import LRSchedule

    right = LRSchedule.learning_rate
    LRSchedule.learning_rate = lambda self, *positions: right(self, *positions) / 2


# Pipelines.


def set_layers(choose: Callable[[list], list]) -> None:
    """Change which layers a forward pass of the second stage runs."""

    def make(right):
        def forward(self, hidden):
            layers = self.forward_funcs
            self.forward_funcs = choose(layers) if self.stage_id else layers
            try:
                return right(self, hidden)
            finally:
                self.forward_funcs = layers

        return forward

    patch(module("engines.pipelined_model").PipelinedModel, "forward", make)


def layer_left_out() -> None:
    set_layers(lambda layers: layers[1:])


def layer_twice() -> None:
    set_layers(lambda layers: [layers[0], *layers])


def gradients_sent_twice_as_large() -> None:
    def make(right):
        return lambda self, one, value: right(self, one, value if one.is_forward else 2 * value)

    patch(module("engines.transfers").Transfers, "send", make)


def activations_sent_in_bf16() -> None:
    def make(right):
        return lambda self, one, value: right(self, one, value.bfloat16().float() if one.is_forward else value)

    patch(module("engines.transfers").Transfers, "send", make)


def weight_gradient_forgotten() -> None:
    def make(right):
        def compute(collected):
            del collected[0]
            right(collected)

        return compute

    patch(module("engines.pipelined_engine"), "compute_weight_gradients", make)


def untied_embedding() -> None:
    from deepspeed.pipe import PipelineModule

    PipelineModule.get_tied_weights_and_groups = lambda self: []
