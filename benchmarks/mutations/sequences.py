"""Faults of context parallelism, Ulysses and mixtures of experts."""

import dataclasses

from benchmarks.mutations.patches import module, patch

# Context parallelism and Ulysses.


def chunks_in_order() -> None:
    def make(right):
        return lambda x, group, dim: x.chunk(group.size(), dim)[group.rank()]

    patch(module("parallel.sequence"), "zigzag", make)


def ring_without_steps() -> None:
    ring = module("parallel.sequence.ring_attention").RingAttention
    ring.steps = lambda self, length, segment_ids: [0]


def ring_without_gradients() -> None:
    def own(x, group, contribution, **options):
        return contribution(group.rank(), x)

    patch(module("parallel.sequence.ring_attention"), "gradient_of_each_rank", lambda right: own)


def first_positions_rotated() -> None:
    def make(right):
        return lambda x, layout, dim: x.narrow(dim, 0, x.size(dim) // layout.sequence_group.size())

    patch(module("model.rotary"), "sequence_shard", make)


def loss_of_a_shard() -> None:
    def make(right):
        def lm_loss(config, layout):
            loss = right(config, layout)
            size = layout.sequence_group.size()
            return lambda logits, targets: loss(logits, (targets[0], targets[1] / size, *targets[2:]))

        return lm_loss

    patch(module("model.loss"), "lm_loss", make)


def labels_in_order() -> None:
    def make(right):
        return lambda x, layout, dim: x.chunk(layout.sequence_group.size(), dim)[layout.sequence_group.rank()]

    patch(module("model.loss"), "sequence_shard", make)


def heads_come_back_swapped() -> None:
    def make(right):
        def exchange(x, group, *, split_dim, concat_dim):
            y = right(x, group, split_dim=split_dim, concat_dim=concat_dim)
            return y.roll(y.size(1) // 2, 1) if split_dim == 2 else y

        return exchange

    patch(module("model.attention"), "all_to_all", make)


def sequence_exchanged_in_reverse() -> None:
    def make(right):
        def exchange(x, group, *, split_dim, concat_dim):
            y = right(x, group, split_dim=split_dim, concat_dim=concat_dim)
            return y.roll(y.size(2) // 2, 2) if split_dim == 1 else y

        return exchange

    patch(module("model.attention"), "all_to_all", make)


# Mixtures of experts.


def router_not_summed() -> None:
    patch(module("model.moe"), "all_reduce_gradient", lambda right: lambda parameter, group: parameter)


def balance_counted_on_each_rank() -> None:
    cls = module("model.moe")._InjectLoss
    right = cls.forward
    cls.forward = staticmethod(lambda ctx, x, loss, scale: right(ctx, x, loss, 2 * scale))


def experts_not_summed() -> None:
    patch(module("model.moe"), "reduce_output", lambda right: lambda x, group, dim: x)


def gradient_of_experts_not_summed() -> None:
    patch(module("model.moe"), "copy_to_model_parallel_region", lambda right: lambda x, group: x)


def outputs_of_experts_reversed() -> None:
    def make(right):
        return lambda self, outputs: right(self, outputs.flip(0))

    patch(module("parallel.expert").AllToAllRoute, "send_back", make)


def rows_not_sorted() -> None:
    routes = module("parallel.expert")

    def send(self, x):
        return self._exchange(routes.rows_of_tokens(x, self.slots), self.sent, self.received)

    routes.AllToAllRoute.send = send


def wrong_norm_of_experts() -> None:
    from megatron.engines import gradient_norm, zero

    right = gradient_norm.sum_over_model
    for owner in (gradient_norm, zero):
        owner.sum_over_model = lambda values, layout: right(values, dataclasses.replace(layout, expert_group=None))


def doubled_gradient_of_experts() -> None:
    from megatron.model import moe

    right = moe.mark_expert

    def marked(parameter, layout):
        parameter.register_hook(lambda gradient: 2 * gradient)
        return right(parameter, layout)

    moe.mark_expert = marked


def wrong_weights_of_experts() -> None:
    from megatron.model.moe import Router

    right = Router.forward

    def forward(self, x):
        weights, chosen = right(self, x)
        return weights.flip(-1), chosen

    Router.forward = forward


def swapped_experts() -> None:
    from megatron.model import moe

    right = moe.local_experts
    moe.local_experts = lambda experts, layout: [(n + experts // 2) % experts for n in right(experts, layout)]
