"""Memory of weights, gradients and optimizer states of a rank, in bytes, as DeepSpeed stores them.

At ZeRO 0, which is fp32, the optimizer updates the weights themselves. At ZeRO 1 and 2, weights with and without weight
decay are one flat tensor each, padded so that all data-parallel ranks (owners) have partitions of equal size. At ZeRO 3
every weight is padded separately. Frozen weights of a model with adapters are partitioned only at ZeRO 3.
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
"""The partitions of ZeRO 1 and 2 are multiples of this number of elements."""
_COUNTER = 4
"""Bytes of the step counter of torch's Adam for each tensor."""
_PERSISTENT = 100_000
"""Maximum elements of weights that ZeRO 3 keeps gathered."""
_LIVE = _SUB_GROUP = 1_000_000_000


class Weight(NamedTuple):
    """One parameter on a tensor-parallel rank."""

    numel: int
    decays: bool
    """Whether it has weight decay: matrices do, biases and norms do not."""
    shape: tuple[int, ...] = ()
    """Shape of the full parameter."""
    is_block_matrix: bool = False
    """Whether it is a matrix of a transformer layer, which Muon updates."""
    is_trained: bool = True
    """Whether it has a gradient and optimizer state."""
    is_in_fp8: bool = False
    """Whether it has two FP8 copies: for the output and, transposed, for the input gradient."""
    is_divided: bool = False
    """Whether it belongs to experts that are sharded by expert parallelism."""


@dataclass(frozen=True)
class Weights:
    """The weights of a rank."""

    layers: Sequence[Sequence[Weight]]
    """The weights of each layer in order. Equal layers are the same object."""

    @cached_property
    def counts(self) -> list[tuple[Weight, int]]:
        """Distinct weights with their counts."""
        return [(weight, count) for layer, count in counts(self.layers) for weight in layer]

    @cached_property
    def numel(self) -> int:
        """Number of elements of all weights."""
        return sum(count * weight.numel for weight, count in self.counts)

    @cached_property
    def trained(self) -> "Weights":
        """The trained weights."""
        if all(weight.is_trained for weight, _ in self.counts):
            return self
        return self._select(lambda weight: weight.is_trained)

    @cached_property
    def groups(self) -> list["Weights"]:
        """Parameter groups: weights with decay, weights without and, with expert parallelism, experts."""
        experts = self._select(lambda weight: weight.is_divided)
        return [
            self._select(lambda weight: weight.decays and not weight.is_divided),
            self._select(lambda weight: not (weight.decays or weight.is_divided)),
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
    """Device memory that a rank keeps between micro-batches, in bytes."""

    weights: int
    gradients: int
    new_gradients: int
    """Gradients that a step frees, so that the first backward pass of the next iteration starts without them."""
    optimizer: int
    buffers: int
    """Buckets for reducing gradients, and parameters gathered by ZeRO 3."""
    step: int
    """Temporary memory of the optimizer step, after activations have been freed."""


def bytes_of(run: RunConfig) -> int:
    """Bytes per element of weights and activations."""
    return FP32 if run.precision.dtype == "fp32" else 2


def states(run: RunConfig, weights: Weights) -> States:
    """The states of a rank with ``weights``, without states offloaded to CPU memory or NVMe."""
    trained = weights.trained
    return States(
        weights=_weights(run, weights),
        gradients=_gradients(run, trained),
        new_gradients=_new_gradients(run, trained),
        optimizer=_optimizer(run, trained),
        buffers=_buffers(run, weights),
        step=_step(run, trained),
    )


def owners(run: RunConfig) -> int:
    """Number of ranks with the same weights, over which ZeRO partitions."""
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
    """Bytes of gradients that do not live in a permanent tensor of the optimizer."""
    if _has_buckets(run):
        return 0 if _keeps_gradients(run) else _gradients(run, weights)
    if run.zero.zero_stage < 2 or run.coalesces_grad_reduction:
        return weights.numel * bytes_of(run)
    return 0  # ZeRO 3 always has memory for its shards


def _part(run: RunConfig, weights: Weights) -> int:
    """Bytes of reduced gradients that ZeRO 3 keeps."""
    return _shards(run, weights) * bytes_of(run) if run.zero.zero_stage == 3 else 0


def _optimizer(run: RunConfig, weights: Weights) -> int:
    """Bytes of optimizer moments, and of fp32 master weights except at ZeRO 0, which updates the model's weights."""
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
    """Elements of optimizer moments of ``weight``.

    Adam has two per element; Lion, SGD with momentum, and Muon's matrices have one. Adafactor has a row and a column
    for a matrix.
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
    """Elements of a reduce bucket."""
    bucket = int(run.zero.zero_reduce_bucket_size) or _setting(run, "reduce_bucket_size", DEFAULT_REDUCE_BUCKET)
    return min(bucket, weights.trained.numel)


def _step(run: RunConfig, weights: Weights) -> int:
    """Temporary bytes of the optimizer step, or of the reduction after the last backward pass if that needs more.

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
    """Temporary bytes of bucket reduction: this rank's parts, also in fp32; at ZeRO 2 a bucket as well."""
    summed, parts = bytes_of_sums(run), _parts(run, weights)
    in_fp32 = 0 if summed == FP32 else FP32
    if _keeps_gradients(run):
        return parts * ((summed if owners(run) > 1 else 0) + in_fp32)
    bucket = min(run.gradient_bucket or weights.numel, weights.numel)
    return max((bucket + bucket // owners(run)) * summed, parts * in_fp32)


def _optimizer_step(run: RunConfig, weights: Weights) -> int:
    """Temporary bytes of the optimizer step: flat gradients, and an fp32 copy for half precision.

    Adam updates in place, and gradient norms are computed in blocks.
    """
    if run.zero.offloads_optimizer:
        return 0
    is_sharded = run.zero.zero_stage == 3
    parts = (
        min(_shards(run, weights), _setting(run, "sub_group_size", _SUB_GROUP)) if is_sharded else _parts(run, weights)
    )
    return parts * (bytes_of(run) + (FP32 if bytes_of(run) != FP32 else 0))


def _has_buckets(run: RunConfig) -> bool:
    """Whether gradients are in the buckets of ``megatron.engines.gradients`` (ZeRO 1 and 2)."""
    return run.zero.zero_stage in (1, 2) and not run.zero.offloads_optimizer


def bytes_of_sums(run: RunConfig) -> int:
    """Bytes per element of accumulated gradients."""
    return FP32 if run.precision.grad_accum_dtype == "fp32" else bytes_of(run)


def _keeps_gradients(run: RunConfig) -> bool:
    """Whether gradient buckets are permanent, as at ZeRO 1."""
    return run.zero.zero_stage == 1 or run.coalesces_grad_reduction


def _flat(run: RunConfig, weights: Weights) -> int:
    """Elements of the flat gradients of all parameter groups."""
    return sum(group.part * group.owners for group in _groups(run, weights))


def _parts(run: RunConfig, weights: Weights) -> int:
    """Elements of the flat gradients that belong to this rank."""
    return sum(group.part for group in _groups(run, weights))


class _Group(NamedTuple):
    """A parameter group, and the number of ranks that partition it."""

    weights: Weights
    owners: int

    @property
    def part(self) -> int:
        """Elements that one owner updates."""
        return ceil(self.weights.numel / (_ALIGNMENT * self.owners)) * _ALIGNMENT


def _groups(run: RunConfig, weights: Weights) -> list[_Group]:
    """The parameter groups with their owners: with decay, without and, with expert parallelism, experts."""
    expert_owners = owners(run) // run.parallel.expert_model_parallel_size
    return [_Group(*group) for group in zip(weights.groups, (owners(run), owners(run), expert_owners), strict=False)]


def _shards(run: RunConfig, weights: Weights) -> int:
    """Elements of one owner's parts of all weights at ZeRO 3."""
    return sum(count * ceil(weight.numel / owners(run)) for weight, count in weights.counts)


def _setting(run: RunConfig, key: str, default: int) -> int:
    return int(run.ds_config.get("zero_optimization", {}).get(key, default))
