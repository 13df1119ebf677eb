"""What is kept, in which type and where: precision, ZeRO, activations."""

from dataclasses import dataclass

from megatron.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Mixed precision."""

    fp16: bool = flag(False, "Train in fp16 with a dynamic loss scale (GPU only).")
    bf16: bool = flag(False, "Train in bf16.")
    loss_scale: float | None = flag(None, "Static loss scale of fp16 (default: dynamic).", within="(0, inf)")
    initial_loss_scale: float = flag(
        2.0**16, "First value of fp16's dynamic loss scale, a power of two.", within="[1, inf)"
    )
    loss_scale_window: int = flag(1000, "Iterations without overflow before the loss scale doubles.", within="[1, inf)")
    hysteresis: int = flag(2, "Overflows before the loss scale halves.", within="[1, inf)")
    min_scale: float = flag(1, "Smallest dynamic loss scale, a whole number.", within="[1, inf)")
    fp32_allreduce: bool = flag(False, "Reduce gradients in fp32.")
    grad_accum_dtype: str | None = flag(
        None,
        "Type that half-precision gradients are accumulated in over micro-batches (default: that of the weights).",
        choices=("fp32", "bf16"),
    )

    @property
    def dtype(self) -> str:
        """Type of weights and activations."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """ZeRO: what is sharded over the data-parallel ranks (arXiv 1910.02054)."""

    zero_stage: int = flag(
        0,
        "0 nothing, 1 optimizer state, 2 and gradients, 3 and weights. 2 and 3 need the plain engine. Half precision "
        "takes 1 where nothing is said.",
        within="[0, 3]",
    )
    zero_reduce_scatter: bool = flag(
        True,
        "Reduce-scatter gradients instead of all-reducing them, as DeepSpeed does by itself, or do not.",
        switches={"no-zero-reduce-scatter": False},
    )
    zero_contiguous_gradients: bool = flag(
        True,
        "Copy gradients into one buffer as they are made, as DeepSpeed does by itself, or do not.",
        aliases=("zero-contigious-gradients",),
        switches={"no-zero-contiguous-gradients": False, "no-zero-contigious-gradients": False},
    )
    zero_reduce_bucket_size: float = flag(
        0.0, "Elements reduced at a time; 0 leaves it to DeepSpeed.", within="[0, inf)"
    )
    zero_allgather_bucket_size: float = flag(
        0.0, "Elements gathered at a time; 0 leaves it to DeepSpeed.", within="[0, inf)"
    )
    zero_overlap_comm: bool | None = flag(
        None,
        "Reduce gradients while the backward pass goes on, or do not (default: at stage 3 only).",
        switches={"no-zero-overlap-comm": False},
    )
    zero_round_robin_gradients: bool = flag(
        False, "Deal gradients out to the ranks in turn, so that all copy at once (stages 1 and 2)."
    )
    offload_optimizer: str = flag(
        "none",
        "Where optimizer state lives; off the device the CPU steps. nvme needs ZeRO 3.",
        choices=("none", "cpu", "nvme"),
        switches={"cpu-optimizer": "cpu"},
    )
    offload_param: str = flag(
        "none", "Where ZeRO 3 keeps weights that are not in use.", choices=("none", "cpu", "nvme")
    )
    nvme_path: str | None = flag(None, "Folder on the NVMe device, for what is offloaded there.", metavar="DIR")
    offload_pin_memory: bool = flag(
        True,
        "Page-lock what is offloaded, as DeepSpeed does by itself, or do not.",
        switches={"no-offload-pin-memory": False},
    )
    cpu_torch_adam: bool = flag(
        False, "With --offload-optimizer: torch's Adam instead of DeepSpeedCPUAdam.", name="cpu_torch_adam"
    )

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the CPU takes the optimizer's step."""
        return self.offload_optimizer != "none"

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is offloaded to files."""
        return "nvme" in (self.offload_optimizer, self.offload_param)


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Activation checkpointing: what is recomputed in the backward pass instead of kept."""

    checkpoint_activations: bool = flag(
        False,
        "Keep only the layers' inputs and recompute the rest.",
        aliases=("deepspeed-activation-checkpointing",),
    )
    recompute_granularity: str | None = flag(
        None,
        "Recompute whole layers (full), or scores, softmax, dropout and context of attention alone (selective). "
        "Turns recomputation on; --checkpoint-activations alone is full.",
        choices=("full", "selective"),
        switches={"recompute-activations": "selective"},
    )
    checkpoint_num_layers: int = flag(1, "Layers recomputed together.", within="[1, inf)")
    partition_activations: bool = flag(
        False, "Cut kept inputs over the tensor-parallel ranks.", aliases=("distribute-checkpointed-activations",)
    )
    contiguous_checkpointing: bool = flag(
        False,
        "Keep inputs in one buffer; needs --partition-activations.",
        aliases=("contigious-checkpointing",),
    )
    checkpoint_in_cpu: bool = flag(False, "Keep inputs in CPU memory; needs --partition-activations.")
    synchronize_each_layer: bool = flag(False, "Synchronize the device around each recomputed layer.")
    profile_backward: bool = flag(False, "Time forward and backward of the recomputed layers.")

    @property
    def layers_together(self) -> int:
        """Transformer layers that keep one input between them; 0 where whole layers are not recomputed."""
        whole = self.checkpoint_activations and self.recompute_granularity != "selective"
        return self.checkpoint_num_layers if whole else 0
