"""The weights of one rank, and their gradients and optimizer, in bytes, as DeepSpeed lays them out.

At ZeRO 0, which is fp32, the optimizer updates the weights themselves. At ZeRO 1 and 2, the weights with decay and the
weights without are one flat tensor each, padded so that all data-parallel ranks (owners) have partitions of equal size.
At ZeRO 3 every weight is padded separately. Frozen weights of a model with adapters stay as they are, and are divided
at ZeRO 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.config.memory import DEFAULT_REDUCE_BUCKET
from megatron.model.partition import Stage, counts
from megatron.model.spec import LayerSpec, fp8_weights, is_trained_in

FP32 = 4
_ONE_MOMENT = ("lion", "sgd", "adafactor", "adagrad")
_ALIGNMENT = 2
"""Each owner's partition is a multiple of this many elements at ZeRO 1 and 2."""
_COUNTER = 4
"""Bytes in which torch's Adam counts the steps of each of its tensors."""
_PERSISTENT = 100_000
"""Elements up to which ZeRO 3 also keeps a full weight."""
_LIVE = _SUB_GROUP = 1_000_000_000


class Weight(NamedTuple):
    """One parameter on a tensor-parallel rank."""

    numel: int
    decays: bool
    """Whether the optimizer's weight decay applies to it: to matrices, not to biases and norms."""
    shape: tuple[int, ...] = ()
    """Of the full parameter."""
    is_block_matrix: bool = False
    """Whether it is a matrix of a transformer layer, which Muon updates."""
    is_trained: bool = True
    """Whether it has a gradient and optimizer state."""
    is_in_fp8: bool = False
    """Whether it is quantized, once for the output and once, transposed, for the gradient of the input."""
    is_divided: bool = False
    """Whether it belongs to experts that expert parallelism divides."""


@dataclass(frozen=True)
class Weights:
    """The weights of a rank."""

    layers: Sequence[Sequence[Weight]]
    """The weights of each layer in order. Equal layers are one object."""

    @cached_property
    def counts(self) -> list[tuple[Weight, int]]:
        """Distinct weights, each with the number of times it occurs."""
        return [(weight, count) for layer, count in counts(self.layers) for weight in layer]

    @cached_property
    def numel(self) -> int:
        """Elements of all weights."""
        return sum(count * weight.numel for weight, count in self.counts)

    @cached_property
    def trained(self) -> "Weights":
        """The weights that training changes."""
        return self if all(weight.is_trained for weight, _ in self.counts) else self._select(lambda one: one.is_trained)

    @cached_property
    def groups(self) -> list["Weights"]:
        """The weights with decay, the weights without, and with expert parallelism the experts."""
        experts = self._select(lambda one: one.is_divided)
        return [
            self._select(lambda one: one.decays and not one.is_divided),
            self._select(lambda one: not (one.decays or one.is_divided)),
            *([experts] if experts.numel else []),
        ]

    def _select(self, condition: Callable[[Weight], bool]) -> "Weights":
        kinds = {id(layer): list(filter(condition, layer)) for layer, _ in counts(self.layers)}
        return Weights([kinds[id(layer)] for layer in self.layers])


def stage_weights(run: RunConfig, stage: Stage) -> Weights:
    """The weights of a tensor-parallel rank of ``stage``; tied layers count once."""
    t, experts = run.parallel.model_parallel_size, run.parallel.expert_model_parallel_size

    def of_layer(layer: LayerSpec) -> list[Weight]:
        in_fp8 = fp8_weights(run.model, layer, t)
        return [
            Weight(
                spec.local_numel(t, experts),
                decays=spec.weight_decay and is_trained_in(run.model, layer.part, spec.name),
                shape=spec.shape,
                is_block_matrix=layer.is_block and len(spec.shape) > 1,
                is_trained=is_trained_in(run.model, layer.part, spec.name),
                is_in_fp8=spec in in_fp8,
                is_divided=spec.is_expert and experts > 1,
            )
            for spec in layer.parameters
        ]

    of_layers = {id(layer): of_layer(layer) for layer, _ in stage.counts}
    return Weights([of_layers[id(layer)] for layer in stage.distinct_layers()])


@dataclass(frozen=True)
class States:
    """What a rank keeps between micro-batches on its device."""

    weights: int
    gradients: int
    new_gradients: int
    """Gradients that a step frees: the first backward pass of the next iteration begins without them."""
    optimizer: int
    buffers: int
    """Buckets for reducing gradients, and parameters that ZeRO 3 has gathered."""
    step: int
    """Temporary memory of the optimizer step, when the activations have been freed."""


def bytes_of(run: RunConfig) -> int:
    """Bytes of an element of weights and activations."""
    return FP32 if run.precision.dtype == "fp32" else 2


def states(run: RunConfig, weights: Weights) -> States:
    """What a rank with ``weights`` keeps.

    What is offloaded to CPU memory or NVMe is not counted.
    """
    changing = weights.trained
    return States(
        weights=_weights(run, weights),
        gradients=_gradients(run, changing),
        new_gradients=_new_gradients(run, changing),
        optimizer=_optimizer(run, changing),
        buffers=_buffers(run, weights),
        step=_step(run, changing),
    )


def owners(run: RunConfig) -> int:
    """Ranks with the same weights, over which ZeRO partitions."""
    return run.parallel.data_parallel_size * run.parallel.sequence_ranks


def _weights(run: RunConfig, weights: Weights) -> int:
    element = bytes_of(run)
    if run.zero.zero_stage == 3:
        most = _setting(run, "stage3_param_persistence_threshold", _PERSISTENT)
        gathered = sum(count * weight.numel for weight, count in weights.counts if weight.numel <= most)
        shards = 0 if run.zero.offload_param != "none" else _shards(run, weights)
        return (shards + gathered) * element
    if run.zero.zero_stage == 0:
        return weights.numel * element
    quantized = 2 * sum(count * weight.numel for weight, count in weights.counts if weight.is_in_fp8)
    flat = sum(group.part * group.owners for group in _groups(run, weights.trained))
    return (weights.numel - weights.trained.numel + flat) * element + quantized


def _gradients(run: RunConfig, weights: Weights) -> int:
    if _has_buckets(run):
        return (_flat(run, weights) if _keeps_gradients(run) else _parts(run, weights)) * bytes_of_sums(run)
    full = weights.numel * bytes_of(run) if run.zero.zero_stage < 2 or run.coalesces_grad_reduction else 0
    return full + (0 if run.zero.offloads_optimizer else _part(run, weights))


def _new_gradients(run: RunConfig, weights: Weights) -> int:
    """Bytes of the gradients that are in no tensor of the optimizer, which would stay."""
    if _has_buckets(run):
        return 0 if _keeps_gradients(run) else _gradients(run, weights)
    if run.zero.zero_stage < 2 or run.coalesces_grad_reduction:
        return weights.numel * bytes_of(run)
    return 0  # ZeRO 3 always has memory for its shards


def _part(run: RunConfig, weights: Weights) -> int:
    """Bytes that ZeRO 3 keeps of reduced gradients."""
    return _shards(run, weights) * bytes_of(run) if run.zero.zero_stage == 3 else 0


def _optimizer(run: RunConfig, weights: Weights) -> int:
    """The optimizer's moments, and fp32 master weights unless it updates the model's weights, as at ZeRO 0."""
    if run.zero.offloads_optimizer:
        return 0
    counter = _COUNTER if run.optim.optimizer in ("adam", "adafactor") else 0
    moments = sum(count * _moments(run, weight) for weight, count in weights.counts)
    if run.zero.zero_stage == 0:
        return moments * FP32 + sum(count for _, count in weights.counts) * counter
    groups = [group for group in _groups(run, weights) if group.weights.numel]
    part = _shards(run, weights) if run.zero.zero_stage == 3 else sum(group.part for group in groups)
    return part * FP32 + round(moments / max(weights.numel, 1) * part) * FP32 + len(groups) * counter


def _moments(run: RunConfig, weight: Weight) -> int:
    """Elements of the optimizer's state of ``weight``, without master weights.

    Two for each element with Adam, and one with Lion, SGD with momentum, and the matrices of Muon. Adafactor has a row
    and a column of a matrix.
    """
    optim = run.optim
    if optim.optimizer == "adafactor" and len(weight.shape) > 1:
        return weight.numel // weight.shape[-1] + weight.numel // weight.shape[-2]
    if optim.optimizer == "sgd" and not optim.sgd_momentum:
        return 0
    has_one = weight.is_block_matrix if optim.optimizer == "muon" else optim.optimizer in _ONE_MOMENT
    return weight.numel if has_one else 2 * weight.numel


def _buffers(run: RunConfig, weights: Weights) -> int:
    zero = run.zero
    if zero.zero_stage == 0 or _has_buckets(run):
        return 0
    if zero.zero_stage == 3:
        most = _setting(run, "stage3_param_persistence_threshold", _PERSISTENT)
        passing = sum(count * weight.numel for weight, count in weights.counts if weight.numel > most)
        gathered = min(passing, _setting(run, "stage3_max_live_parameters", _LIVE))
        return (_bucket(run, weights) + gathered) * bytes_of(run)
    copies = 2 if zero.zero_overlap_comm else 1
    has_bucket = zero.zero_contiguous_gradients and not run.coalesces_grad_reduction
    return copies * _bucket(run, weights) * bytes_of(run) if has_bucket else 0


def _bucket(run: RunConfig, weights: Weights) -> int:
    """Elements that are reduced at a time."""
    bucket = int(run.zero.zero_reduce_bucket_size) or _setting(run, "reduce_bucket_size", DEFAULT_REDUCE_BUCKET)
    return min(bucket, weights.trained.numel)


def _step(run: RunConfig, weights: Weights) -> int:
    """Temporary memory of the optimizer step, or of the reduction after the last backward pass if that needs more.

    Reduced gradients replace the unsharded ones.
    """
    if run.zero.zero_stage == 0:
        copied = min(weights.numel, DEFAULT_REDUCE_BUCKET) if owners(run) > 1 else 0
        return copied * bytes_of(run)
    if _has_buckets(run):
        return _reduction(run, weights)
    step = _optimizer_step(run, weights)
    if not run.coalesces_grad_reduction:
        return step
    return max(_bucket(run, weights) * bytes_of(run), step - weights.numel * bytes_of(run))


def _reduction(run: RunConfig, weights: Weights) -> int:
    """Bytes that the reduction of buckets needs: this rank's parts, also in fp32; at ZeRO 2 a bucket as well."""
    summed, parts = bytes_of_sums(run), _parts(run, weights)
    in_fp32 = 0 if summed == FP32 else FP32
    if _keeps_gradients(run):
        return parts * ((summed if owners(run) > 1 else 0) + in_fp32)
    bucket = min(run.gradient_bucket or weights.numel, weights.numel)
    return max((bucket + bucket // owners(run)) * summed, parts * in_fp32)


def _optimizer_step(run: RunConfig, weights: Weights) -> int:
    """Flat gradients, and a copy in fp32 for half precision.

    Adam steps in place, and gradient norms are computed in blocks.
    """
    if run.zero.offloads_optimizer:
        return 0
    is_sharded = run.zero.zero_stage == 3
    parts = (
        min(_shards(run, weights), _setting(run, "sub_group_size", _SUB_GROUP)) if is_sharded else _parts(run, weights)
    )
    return parts * (bytes_of(run) + (FP32 if bytes_of(run) != FP32 else 0))


def _has_buckets(run: RunConfig) -> bool:
    """Whether the gradients of ZeRO 1 and 2 are in ``megatron.engines.gradients``."""
    return run.zero.zero_stage in (1, 2) and not run.zero.offloads_optimizer


def bytes_of_sums(run: RunConfig) -> int:
    """Bytes of an element of the sum over micro-batches."""
    return FP32 if run.precision.grad_accum_dtype == "fp32" else bytes_of(run)


def _keeps_gradients(run: RunConfig) -> bool:
    """Whether the buckets stay, as at ZeRO 1."""
    return run.zero.zero_stage == 1 or run.coalesces_grad_reduction


def _flat(run: RunConfig, weights: Weights) -> int:
    """Elements of the flat gradients."""
    return sum(group.part * group.owners for group in _groups(run, weights))


def _parts(run: RunConfig, weights: Weights) -> int:
    """Elements of them that a rank updates."""
    return sum(group.part for group in _groups(run, weights))


class _Group(NamedTuple):
    """A group of the optimizer, and how many ranks partition it."""

    weights: Weights
    owners: int

    @property
    def part(self) -> int:
        """Elements that one owner updates."""
        return ceil(self.weights.numel / (_ALIGNMENT * self.owners)) * _ALIGNMENT


def _groups(run: RunConfig, weights: Weights) -> list[_Group]:
    """The weights with decay, the weights without, and with expert parallelism the experts."""
    of_experts = owners(run) // run.parallel.expert_model_parallel_size
    return [_Group(*one) for one in zip(weights.groups, (owners(run), owners(run), of_experts), strict=False)]


def _shards(run: RunConfig, weights: Weights) -> int:
    """Elements of one owner's parts of every weight at ZeRO 3."""
    return sum(count * ceil(weight.numel / owners(run)) for weight, count in weights.counts)


def _setting(run: RunConfig, key: str, default: int) -> int:
    return int(run.ds_config.get("zero_optimization", {}).get(key, default))
