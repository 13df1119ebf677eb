"""Faults of what divides a layer: tensor and sequence parallelism, the vocabulary."""

from collections.abc import Callable
from typing import Any

from benchmarks.mutations.patches import layouts, module, patch

# Tensor parallelism.


def set_output_sum(make: Callable[[Any], Any]) -> None:
    """Change how row-parallel layers start the sum of their outputs, and nothing else."""
    linear = module("parallel.tensor.linear")
    linear._SumOverlap._start_sum = make(linear._Overlap._start_sum)


def set_gradient_sum(make: Callable[[Any], Any]) -> None:
    """Change how column-parallel layers start the sum of the gradients of their inputs, and nothing else."""
    linear = module("parallel.tensor.linear")
    linear._SumOverlap._start_sum = linear._Overlap._start_sum
    linear._Overlap._start_sum = make(linear._Overlap._start_sum)


def row_not_summed() -> None:
    set_output_sum(lambda right: lambda self, y: lambda: y)


def row_over_data_group() -> None:
    found, mappings = layouts(), module("parallel.tensor.mappings")
    set_output_sum(lambda right: lambda self, y: mappings.async_all_reduce(y, found[0].data_group))


def row_averaged() -> None:
    set_output_sum(lambda right: lambda self, y: lambda: right(self, y)() / self.group.size())


def row_bias_on_each_rank() -> None:
    def make(right):
        return lambda self, x: right(self, x) + (self.group.size() - 1) * self.bias

    patch(module("parallel.tensor.layers").RowParallelLinear, "forward", make)


def column_not_summed() -> None:
    set_gradient_sum(lambda right: lambda self, gradient: lambda: gradient)


def column_summed_twice() -> None:
    set_gradient_sum(lambda right: lambda self, gradient: lambda: right(self, right(self, gradient)())())


def embedding_not_summed() -> None:
    patch(module("parallel.tensor.layers"), "reduce_output", lambda right: lambda x, group, dim: x)


def embedding_of_the_next_token() -> None:
    def make(right):
        return lambda self, tokens: right(self, tokens + self.group.rank())

    patch(module("parallel.tensor.layers").VocabParallelEmbedding, "forward", make)


def heads_reversed() -> None:
    def make(right):
        return lambda self, columns: tuple(part.flip(2) for part in right(self, columns))

    patch(module("model.attention").Heads, "split", make)


def heads_of_shared_keys() -> None:
    mappings = module("parallel.tensor.mappings")

    def gather(x, group, dim):
        return mappings.gather_from_model_parallel_region(x, group)

    patch(module("model.attention"), "gather_from_sequence_parallel_region", lambda right: gather)


def cross_entropy_over_data_group() -> None:
    found = layouts()
    patch(
        module("parallel.tensor.cross_entropy"),
        "_over_ranks",
        lambda right: lambda *tensors: right(*tensors[:-1], found[0].data_group),
    )


def cross_entropy_gradient() -> None:
    cls = module("parallel.tensor.cross_entropy")._CrossEntropy
    right = cls.backward

    def backward(ctx, grad):
        *saved, elsewhere = ctx.saved_tensors
        gradient, *others = right(ctx, grad.masked_fill(elsewhere, 0.0))
        return (gradient, *others)

    cls.backward = staticmethod(backward)


# Sequence parallelism of Megatron.


def replicated_not_summed() -> None:
    patch(module("parallel.tensor.layers"), "all_reduce_gradient", lambda right: lambda parameter, group: parameter)


def replicated_summed_twice() -> None:
    def make(right):
        return lambda tensors, group: (right(tensors, group), right(tensors, group))

    patch(module("engines.engine"), "sum_together", make)


def shards_gathered_in_reverse() -> None:
    def make(right):
        return lambda x, group, dim: right(x, group, dim).roll(x.size(dim), dim)

    patch(module("parallel.tensor.linear"), "all_gather", make)


def shard_of_the_next_rank() -> None:
    def make(right):
        return lambda x, group, dim: right(x.roll(x.size(dim) // group.size(), dim), group, dim)

    set_output_sum(lambda right: right)
    linear = module("parallel.tensor.linear")
    scatter = make(linear.async_reduce_scatter)
    set_output_sum(lambda right: lambda self, y: scatter(y, self.group, self.sequence_dim))


def shards_of_gradients_not_summed() -> None:
    def make(right):
        def start(self, gradient):
            if self.group is None:
                return right(self, gradient)
            return lambda: gradient.chunk(self.group.size(), self.sequence_dim)[self.group.rank()].contiguous()

        return start

    set_gradient_sum(make)


def table_not_summed() -> None:
    patch(module("model.embedding"), "all_reduce_gradient", lambda right: lambda parameter, group: parameter)


def positions_of_the_first_shard() -> None:
    def make(right):
        def shard(x, layout, dim, *, of_tensor_group=False):
            x = right(x, layout, dim)
            return x.chunk(layout.tensor_group.size(), dim)[0] if of_tensor_group else x

        return shard

    patch(module("model.embedding"), "sequence_shard", make)


def first_token_of_each_shard() -> None:
    patch(module("model.heads"), "first_token", lambda right: lambda hidden, layout, dim: hidden.select(dim, 0))


def swapped_shards() -> None:
    from megatron.parallel.tensor import layers

    right = layers.sharded_parameter

    def swapped(whole, *, dim, group):
        return right(whole.roll(whole.size(dim) // 2, dim), dim=dim, group=group)

    layers.sharded_parameter = swapped


def biases_of_other_heads() -> None:
    def make(right):
        return lambda full, *, dim, group: right(full.roll(full.size(dim) // 2, dim), dim=dim, group=group)

    patch(module("model.t5"), "sharded_parameter", make)


def dropout_differs() -> None:
    def make(right):
        return lambda *, per_rank: right(per_rank=True)

    patch(module("model.transformer"), "random_stream", make)
