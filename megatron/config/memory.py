"""Settings that determine memory: precision, ZeRO and activation checkpointing."""

from dataclasses import dataclass
from functools import partial

from megatron.config.fields import count, flag, folder, positive

_recomputation_flag = partial(flag, ignored_without="checkpoint_activations")
_zero_flag = partial(flag, ignored_without="zero_stage=1|2|3")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Mixed precision."""

    fp16: bool = flag(
        False, "Train in fp16 with a dynamic loss scale (GPU only).", excludes={"bf16": "weights have one type"}
    )
    bf16: bool = flag(False, "Train in bf16.")
    loss_scale: float | None = positive(None, "Static loss scale for fp16 (default: dynamic).", ignored_without="fp16")
    initial_loss_scale: float = flag(2.0**16, "Initial dynamic loss scale for fp16, a power of two.", within="[1, inf)")
    loss_scale_window: int = count(1000, "Iterations without overflow after which the loss scale doubles.")
    hysteresis: int = count(2, "Overflows after which the loss scale halves.")
    min_scale: float = flag(
        1, "Minimum dynamic loss scale, an integer.", aliases=("min-loss-scale",), within="[1, inf)"
    )
    fp32_allreduce: bool = flag(False, "All-reduce gradients in fp32.")
    grad_accum_dtype: str | None = flag(
        None,
        "Type in which half-precision gradients are accumulated (default: the type of the weights).",
        choices=("fp32", "bf16"),
        switches={"accumulate-allreduce-grads-in-fp32": "fp32"},
        needs="bf16: bf16",
        ignored_without="fp32: bf16 or fp16",
    )

    @property
    def dtype(self) -> str:
        """Type of weights and activations."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"


DEFAULT_REDUCE_BUCKET = 500_000_000
"""DeepSpeed's default number of elements reduced at a time."""


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """ZeRO: sharding over the data-parallel ranks (arXiv 1910.02054), and offload."""

    zero_stage: int = flag(
        0,
        "ZeRO stage: 0 disables ZeRO, 1 shards optimizer state, 2 also gradients, 3 also weights (default: 0, or 1 in "
        "half precision).",
        switches={"use-distributed-optimizer": 1},
        within="[0, 3]",
    )
    zero_reduce_scatter: bool = _zero_flag(True, "Reduce-scatter gradients, not all-reduce; on by default.")
    zero_contiguous_gradients: bool = _zero_flag(
        True,
        "Copy gradients into a contiguous buffer as they are computed; enabled by default.",
        aliases=("zero-contigious-gradients",),
    )
    zero_reduce_bucket_size: float = _zero_flag(
        0.0,
        "Number of elements reduced at a time; 0: 40 million or more at ZeRO 1 and 2, else DeepSpeed's default.",
        aliases=("ddp-bucket-size",),
        within="[0, 9007199254740992]",
    )
    zero_allgather_bucket_size: float = _zero_flag(
        0.0,
        "Number of elements all-gathered at a time, with offload; 0 uses DeepSpeed's default.",
        within="[0, 9007199254740992]",
    )
    zero_overlap_comm: bool | None = flag(
        None,
        "Overlap the reduction of gradients with the backward pass; enabled by default.",
        aliases=("overlap-grad-reduce",),
        needs="zero_stage=1|2|3",
    )
    overlap_param_gather: bool | None = flag(
        None, "Overlap the gathering of weights with the next forward pass; enabled by default.", needs="zero_stage=1|2"
    )
    zero_round_robin_gradients: bool = flag(
        False, "Assign gradients to ranks round-robin, so that all ranks copy in parallel.", needs="zero_stage=1|2"
    )
    zero_coalesce_grad_reduction: bool = flag(
        False,
        "Reduce gradients once per step, not per micro-batch (stages 2 and 3), which takes more memory.",
        needs={"zero_stage=2|3": "the other stages reduce gradients once per step in any case"},
        excludes={"grad_accum_dtype=fp32": "gradients are added up in the type of the weights"},
    )
    offload_optimizer: str = flag(
        "none",
        "Offload optimizer state to the CPU or NVMe, and run the optimizer on the CPU. nvme needs ZeRO 3.",
        choices=("none", "cpu", "nvme"),
        switches={"cpu-optimizer": "cpu", "optimizer-cpu-offload": "cpu"},
        needs=("cpu: zero_stage=1|2|3", "nvme: zero_stage=3", "nvme: nvme_path"),
    )
    offload_param: str = flag(
        "none",
        "Offload weights that are not in use to the CPU or NVMe (ZeRO 3).",
        aliases=("remote-device",),
        choices=("none", "cpu", "nvme"),
        needs=("zero_stage=3", "nvme: nvme_path"),
    )
    nvme_path: str | None = folder(
        None, "NVMe folder for offloaded state.", needs="offload_optimizer=nvme or offload_param=nvme"
    )
    offload_pin_memory: bool = flag(
        True, "Offload to page-locked memory; enabled by default.", needs="offload_optimizer or offload_param"
    )
    cpu_torch_adam: bool = flag(
        False,
        "Use torch's Adam instead of DeepSpeedCPUAdam.",
        aliases=("use-torch-optimizer-for-cpu-offload",),
        needs="offload_optimizer",
    )

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer runs on the CPU."""
        return self.offload_optimizer != "none"

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is offloaded to files."""
        return "nvme" in (self.offload_optimizer, self.offload_param)


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Activation checkpointing: recomputing activations in the backward pass."""

    checkpoint_activations: bool = flag(
        False,
        "Keep only the inputs of layers, and recompute the rest in the backward pass.",
        aliases=("deepspeed-activation-checkpointing",),
    )
    recompute_granularity: str | None = flag(
        None,
        "Recompute complete layers (full, the default), or only the core of attention (selective).",
        choices=("full", "selective"),
        switches={"recompute-activations": "selective"},
        excludes=("selective: partition_activations", "selective: checkpoint_num_layers"),
    )
    checkpoint_num_layers: int = _recomputation_flag(
        1,
        "Number of layers per activation checkpoint.",
        aliases=("recompute-num-layers", "activations-checkpoint-num-layers"),
        within="[1, inf)",
    )
    partition_activations: bool = _recomputation_flag(
        False,
        "Partition checkpointed activations over the tensor-parallel ranks.",
        aliases=("distribute-checkpointed-activations", "distribute-saved-activations"),
        models="gpt bert other",
        excludes={"sequence_parallel": "each rank keeps a part of the sequence already"},
    )
    contiguous_checkpointing: bool = _recomputation_flag(
        False,
        "Keep checkpointed activations in a contiguous buffer.",
        aliases=("contigious_checkpointing",),
        models="gpt bert other",
        needs="partition_activations",
    )
    checkpoint_in_cpu: bool = _recomputation_flag(
        False, "Keep checkpointed activations in CPU memory.", models="gpt bert other", needs="partition_activations"
    )
    synchronize_each_layer: bool = _recomputation_flag(
        False, "Synchronize the device before and after each recomputed layer."
    )
    profile_backward: bool = _recomputation_flag(False, "Measure the forward and backward time of recomputed layers.")

    @property
    def layers_together(self) -> int:
        """Transformer layers per activation checkpoint; 0 without full recomputation."""
        is_full = self.checkpoint_activations and self.recompute_granularity != "selective"
        return self.checkpoint_num_layers if is_full else 0
