"""What a run is: frozen values, made once from the command line and never changed. No torch here.

Each field is a command-line flag: ``flag(...)`` holds its help, its aliases and its choices, and
``arguments.py`` builds the parser from them. Fields made with ``derived(...)`` have no flag: they
follow from others or from the environment. Every field holds its *resolved* value, that is, after
the JSON file and the flags were brought together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    switches: Mapping[str, Any] = MappingProxyType({}),
    choices: tuple[str, ...] | None = None,
    within: str | None = None,
    required: bool = False,
    metavar: str | None = None,
) -> Any:
    """A field with a command-line flag named after it (or ``name``), and the other names it answers to.

    ``switches`` are further names that take no value, each with the value it stands for; ``within``
    is the interval of legal numbers, written as in mathematics: ``"[0, 1)"``, ``"[1, inf)"``.
    """
    metadata = {
        "help": help,
        "name": name,
        "aliases": aliases,
        "switches": switches,
        "choices": choices,
        "within": within,
        "required": required,
        "metavar": metavar,
    }
    return field(default=default, metadata={"flag": metadata})


def derived(default: Any) -> Any:
    """A field without a flag."""
    return field(default=default, metadata={})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Network size and regularization: what GPT-2 is made of."""

    num_layers: int = flag(0, "Number of transformer layers.", within="[1, inf)", required=True)
    hidden_size: int = flag(0, "Size of the hidden states.", within="[1, inf)", required=True)
    num_attention_heads: int = flag(0, "Number of attention heads.", within="[1, inf)", required=True)
    ffn_hidden_size: int = flag(0, "Size inside the MLP (default: 4 x hidden size).", within="[1, inf)")
    max_position_embeddings: int = flag(
        0, "Number of learned positions (default: the sequence length).", within="[1, inf)"
    )
    make_vocab_size_divisible_by: int = flag(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size.", within="[1, inf)"
    )
    layernorm_epsilon: float = flag(1e-5, "Epsilon of the layer norms.", within="(0, inf)")
    apply_residual_connection_post_layernorm: bool = flag(
        False, "Take the residual from behind the layer norm instead of before it."
    )
    openai_gelu: bool = flag(False, "Use GELU's tanh approximation, as OpenAI's GPT-2 does.")
    bias_gelu_fusion: bool = flag(False, "Compile bias and GELU of the MLP into one kernel (torch.compile).")
    bias_dropout_fusion: bool = flag(False, "Compile bias, dropout and residual into one kernel (torch.compile).")
    scaled_upper_triang_masked_softmax_fusion: bool = flag(
        False, "Insist on the fused causal attention kernel: an error if another flag rules it out."
    )
    fused_kernels: str = flag(
        "auto",
        "Layer norm and Adam from apex, from torch, or from apex where CUDA and apex are found.",
        choices=("auto", "apex", "torch"),
    )
    attention_dropout: float = flag(0.1, "Dropout probability of the attention weights.", within="[0, 1)")
    hidden_dropout: float = flag(0.1, "Dropout probability of the hidden states.", within="[0, 1)")
    init_method_std: float = flag(0.02, "Standard deviation of the initial weights.", within="(0, inf)")
    apply_query_key_layer_scaling: bool = flag(
        False, "Divide attention scores by the layer number and multiply them back in fp32, against fp16 overflow."
    )
    attention_softmax_in_fp32: bool = flag(False, "Compute attention scores and their softmax in fp32.")
    fp16_lm_cross_entropy: bool = flag(False, "Compute the loss in the model's half precision instead of fp32.")
    use_cpu_initialization: bool = flag(
        False, "Draw initial weights on the CPU, so that they are the same on any device."
    )
    shape_order: str = flag(
        "BSH",
        "Layout of hidden states between layers: batch, sequence, hidden, or sequence first.",
        choices=("BSH", "SBH"),
    )
    pre_tokens: int = flag(65536, "Tokens before itself that each token sees.", within="[0, inf)")
    next_tokens: int = flag(
        65536,
        "Tokens behind itself that each token may see, within causality: a decoder sees none, whatever is said.",
        within="[0, inf)",
    )
    fp32_residual_connection: bool = flag(
        False, "Keep the residual stream in fp32 where weights are in half precision."
    )
    vocab_size: int = derived(0)
    """Tokens the tokenizer knows."""
    padded_vocab_size: int = derived(0)
    """Rows of the embedding; those from ``vocab_size`` on take no part in the loss."""
    eod_token: int = derived(-1)
    """Token that ends a document."""
    reset_position_ids: bool = derived(False)
    reset_attention_mask: bool = derived(False)
    dtype: str = derived("fp32")
    """Type of weights and activations: fp32, bf16 or fp16."""
    recomputes_attention: bool = derived(False)
    """Whether the backward pass recomputes the attention core alone."""
    seed: int = derived(1234)

    @property
    def sequence_dim(self) -> int:
        """Dimension of the sequence in hidden states: [b, s, h], or [s, b, h] with ``--shape-order SBH``."""
        return 0 if self.shape_order == "SBH" else 1

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Distributed: how the ranks share the work."""

    model_parallel_size: int = flag(
        1,
        "Tensor-parallel size: ranks that share each layer.",
        aliases=("tensor-model-parallel-size",),
        within="[1, inf)",
    )
    pipe_parallel_size: int = flag(
        0,
        "Pipeline stages. 0 is the plain engine (any ZeRO stage); 1 and more the pipeline engine (ZeRO 0 or 1).",
        aliases=("pipeline-model-parallel-size",),
        switches={"no-pipeline-parallel": 0},
        within="[0, inf)",
    )
    pipeline_partition: str = flag(
        "type:ParallelTransformerLayer",
        "What the stages get equal shares of: layers, the embeddings and the head counted as one each (uniform); "
        "parameters; operations of the forward pass, with the head's 2 x hidden x vocabulary a token (flops); layers "
        "whose class matches REGEX (type:REGEX). Or the transformer layers of each stage, such as 5,6,6,4. The "
        "embeddings are always with the first, the head with the last.",
        metavar="METHOD",
    )
    pipeline_schedule: str = flag(
        "1f1b",
        "Order of forward and backward passes. dualpipev cuts the model into twice as many pieces, gives each stage "
        "one on the way out and one on the way back, and so waits less; the first stage has both ends. It needs twice "
        "as many micro-batches as stages, and an explicit partition has a number for each piece.",
        choices=("1f1b", "dualpipev"),
    )
    sequence_parallel: bool = flag(
        False,
        "Between the parts of a layer that are cut by tensor parallelism, cut norms, dropout and residuals along the "
        "sequence over the same ranks.",
    )
    ds_sequence_parallel_size: int = flag(
        1,
        "Ranks that share each sample, a part of its sequence on each, and exchange sequence for heads around "
        "attention (DeepSpeed-Ulysses).",
        within="[1, inf)",
    )
    distributed_backend: str | None = flag(
        None, "Backend of torch.distributed (default: nccl on CUDA, gloo on CPU).", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(30, "Minutes a collective may wait for a rank.", within="[1, inf)")
    local_rank: int | None = flag(
        None, "Set by the launcher: this process's place on its host.", name="local_rank", within="[0, inf)"
    )
    world_size: int = flag(
        1, "With --explain: processes to explain the run for. Otherwise the launcher says.", within="[1, inf)"
    )
    device: str = derived("cpu")
    """What the ranks compute on: cuda, cpu, or another accelerator by DeepSpeed's name for it."""

    @property
    def uses_pipeline(self) -> bool:
        """Whether DeepSpeed's pipeline engine runs the model."""
        return self.pipe_parallel_size > 0

    @property
    def pipe_stages(self) -> int:
        """Stages the model is cut into; 1 on the plain engine."""
        return max(self.pipe_parallel_size, 1)

    @property
    def folds_pipeline(self) -> bool:
        """Whether the model turns around behind the last stage and ends on the first."""
        return self.pipeline_schedule == "dualpipev"

    @property
    def pipe_pieces(self) -> int:
        """Pieces the model is cut into: one for each stage, or two."""
        return self.pipe_stages * (2 if self.folds_pipeline else 1)

    @property
    def replica_size(self) -> int:
        """Ranks that share a sample: tensor-parallel size x stages x sequence-parallel size of DeepSpeed-Ulysses."""
        return self.model_parallel_size * self.pipe_stages * self.ds_sequence_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return self.world_size // self.replica_size


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
    zero_contigious_gradients: bool = flag(
        True,
        "Copy gradients into one buffer as they are made, as DeepSpeed does by itself, or do not.",
        aliases=("zero-contiguous-gradients",),
        switches={"no-zero-contigious-gradients": False, "no-zero-contiguous-gradients": False},
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
    contigious_checkpointing: bool = flag(
        False,
        "Keep inputs in one buffer; needs --partition-activations.",
        aliases=("contiguous-checkpointing",),
    )
    checkpoint_in_cpu: bool = flag(False, "Keep inputs in CPU memory; needs --partition-activations.")
    synchronize_each_layer: bool = flag(False, "Synchronize the device around each recomputed layer.")
    profile_backward: bool = flag(False, "Time forward and backward of the recomputed layers.")

    @property
    def layers_together(self) -> int:
        """Transformer layers that keep one input between them; 0 where whole layers are not recomputed."""
        whole = self.checkpoint_activations and self.recompute_granularity != "selective"
        return self.checkpoint_num_layers if whole else 0


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate."""

    lr: float = flag(0.0, "Peak learning rate.", within="(0, inf)", required=True)
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.", within="[0, inf)")
    lr_decay_style: str = flag(
        "linear",
        "Curve from --lr to --min-lr.",
        choices=("constant", "linear", "cosine", "exponential", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "Iterations to decay over (default: all).", within="[1, inf)")
    lr_decay_samples: int | None = flag(None, "Samples to decay over, instead of iterations.", within="[1, inf)")
    lr_warmup_fraction: float = flag(
        0.01,
        "Fraction of the decay iterations that warm up linearly.",
        name="warmup",
        aliases=("lr-warmup-fraction",),
        within="[0, 1]",
    )
    lr_warmup_iters: int | None = flag(None, "Iterations that warm up, instead of a fraction.", within="[0, inf)")
    lr_warmup_samples: int | None = flag(None, "Samples that warm up, instead of iterations.", within="[0, inf)")
    lr_wsd_decay_style: str = flag(
        "exponential",
        "Last part of WSD (warmup, stable, decay).",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "Iterations of WSD's last part.", within="[1, inf)")
    weight_decay: float = flag(0.01, "Weight decay of matrices; biases and norms have none.", within="[0, inf)")
    clip_grad: float = flag(1.0, "Clip gradients to this global norm; 0 is off.", within="[0, inf)")
    adam_beta1: float = flag(0.9, "Decay of Adam's first moment.", within="[0, 1)")
    adam_beta2: float = flag(0.999, "Decay of Adam's second moment.", within="[0, 1)")
    adam_eps: float = flag(1e-8, "Epsilon of Adam.", within="(0, inf)")
    override_lr_scheduler: bool = flag(
        False,
        "On resume take the schedule from the command line, whatever the checkpoint says.",
        aliases=("override-opt_param-scheduler",),
    )
    use_checkpoint_lr_scheduler: bool = flag(
        False,
        "On resume take the schedule from the checkpoint, whatever the command line says.",
        aliases=("use-checkpoint-opt_param-scheduler",),
    )

    def decay_iters(self, train: "TrainConfig") -> int:
        """Iterations over which the learning rate falls to ``min_lr``."""
        if self.lr_decay_samples is not None:
            return max(self.lr_decay_samples // train.global_batch_size, 1)
        return self.lr_decay_iters or train.train_iters

    def warmup_iters(self, train: "TrainConfig") -> int:
        """Iterations over which the learning rate rises to ``lr``."""
        if self.lr_warmup_iters is not None:
            return self.lr_warmup_iters
        if self.lr_warmup_samples is not None:
            return self.lr_warmup_samples // train.global_batch_size
        return int(self.lr_warmup_fraction * self.decay_iters(train))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training, validation and the batch."""

    micro_batch_size: int = flag(
        0,
        "Samples a data-parallel rank takes at a time; this or --global-batch-size is required.",
        name="batch-size",
        aliases=("micro-batch-size",),
        within="[1, inf)",
    )
    gradient_accumulation_steps: int = flag(
        1,
        "Micro-batches a rank accumulates in one iteration.",
        name="gas",
        aliases=("gradient-accumulation-steps",),
        within="[1, inf)",
    )
    global_batch_size: int = flag(
        0, "Samples of one iteration: micro-batch size x gas x data-parallel size.", within="[1, inf)"
    )
    train_iters: int = flag(0, "Iterations to train; this or --train-samples is required.", within="[1, inf)")
    loss_normalization: str = flag(
        "global-batch",
        "With --eod-mask-loss, the loss is the mean over the global batch's tokens that count, which does not depend "
        "on how the batch is split; or the mean of each micro-batch's own mean, as it was in the beginning.",
        choices=("global-batch", "micro-batch"),
    )
    train_samples: int | None = flag(None, "Samples to train on, instead of iterations.", within="[1, inf)")
    exit_interval: int | None = flag(None, "Save and leave after an iteration divisible by this.", within="[1, inf)")
    exit_duration_in_mins: float | None = flag(
        None, "Save and leave after the first iteration that ends so many minutes behind the start.", within="(0, inf)"
    )
    max_consecutive_bad_steps: int = flag(
        10,
        "Stop, or go back, at so many iterations in a row whose loss or gradient norm is not finite. None of them "
        "changes a weight; fp16's are not counted while its loss scale can fall.",
        within="[1, inf)",
    )
    rewind_on_spike: bool = flag(
        False,
        "At a spike of the loss, or at that many bad iterations, go back to the newest checkpoint in --save and leave "
        "out the samples that did it.",
    )
    spike_factor: float = flag(
        2.0, "With --rewind-on-spike: a loss so many times the mean of the last 20 is a spike.", within="(1, inf)"
    )
    eval_iters: int = flag(100, "Global batches of one evaluation; 0 evaluates never.", within="[0, inf)")
    eval_interval: int = flag(1000, "Iterations between evaluations.", within="[1, inf)")
    seed: int = flag(1234, "Seed of weights, dropout and the order of samples.", within="[0, 4294967295]")
    samples_ahead: int = derived(0)
    """Samples consumed beyond iterations x batch, where the run began with another batch."""

    def consumed_samples(self, iteration: int) -> int:
        """Samples behind which iteration ``iteration`` + 1 begins."""
        return iteration * self.global_batch_size + self.samples_ahead


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data and tokenizer."""

    data_path: str | None = flag(
        None, "Prefix of the data set: PREFIX.bin and PREFIX.idx.", required=True, metavar="PREFIX"
    )
    split: str = flag("969, 30, 1", "Documents for training, validation and test, in proportion.")
    data_cache_path: str | None = flag(None, "Folder for index maps (default: beside the data).", metavar="DIR")
    data_impl: str = flag("infer", "Format of the data set.", choices=("mmap", "infer"))
    mmap_warmup: bool = flag(False, "Read the data set once at the start, to warm the page cache.")
    num_workers: int = flag(2, "Processes that read samples, on each rank that reads.", within="[0, inf)")
    seq_length: int = flag(0, "Tokens of a sample.", within="[1, inf)", required=True)
    tokenizer_type: str = flag(
        "GPT2BPETokenizer", "Kind of tokenizer.", choices=("GPT2BPETokenizer", "WhitespaceTokenizer")
    )
    vocab_file: str | None = flag(
        None, "Vocabulary of the tokenizer (vocab.json).", aliases=("vocab",), required=True, metavar="FILE"
    )
    merge_file: str | None = flag(
        None, "Merges of the BPE tokenizer (merges.txt), which requires them.", metavar="FILE"
    )
    reset_position_ids: bool = flag(False, "Count positions anew after each end of document.")
    reset_attention_mask: bool = flag(False, "Attend only within a document.")
    eod_mask_loss: bool = flag(False, "Leave end-of-document tokens out of the loss.")
    data_hash: str = derived("")
    """What the data set holds, told by its content alone; empty where no checkpoint is written or read."""
    tokenizer_hash: str = derived("")
    """The same of the tokenizer's files."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = flag(None, "Folder to save checkpoints in.", metavar="DIR")
    save_interval: int | None = flag(None, "Iterations between saves (default: only at the end).", within="[1, inf)")
    no_save_optim: bool = flag(False, "Save no optimizer state.")
    no_save_rng: bool = flag(False, "Save no random states.")
    async_save: bool = flag(False, "Copy the state to host memory, and write it while training goes on.")
    keep_last: int | None = flag(None, "Newest checkpoints to keep (default: all).", within="[1, inf)")
    keep_every: int | None = flag(
        None, "With --keep-last: keep those of iterations divisible by this as well.", within="[1, inf)"
    )
    on_save_error: str = flag(
        "stop", "What a checkpoint that cannot be written does to training.", choices=("stop", "continue")
    )
    load: str | None = flag(None, "Folder to load from. The same as --save, and empty: a fresh start.", metavar="DIR")
    load_strict: bool = flag(False, "Refuse a broken checkpoint instead of falling back to the newest whole one.")
    auto_resume: bool = flag(
        False, "Go on from what is in --save; where that is nothing, begin with --load, or fresh without it."
    )
    no_load_optim: bool = flag(False, "Load no optimizer state.")
    no_load_rng: bool = flag(False, "Load no random states.")
    finetune: bool = flag(False, "Load weights only, and begin at iteration 0.")
    override: bool = flag(
        False, "Resume although data, tokenizer, batch, learning rate or other settings differ from the checkpoint's."
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What one sees."""

    log_interval: int = flag(100, "Iterations between progress lines.", within="[1, inf)")
    tensorboard_dir: str | None = flag(None, "Folder for TensorBoard.", metavar="DIR")
    metrics_file: str | None = flag(None, "File for one JSON object per logged iteration.", metavar="FILE")
    verbose: bool = flag(False, "Let DeepSpeed talk.")
    explain: bool = flag(
        False, "Print layout, groups of ranks, DeepSpeed config and every rule with what it finds, and start nothing."
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of a run. Equal values are equal runs."""

    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    zero: ZeroConfig
    activation: ActivationConfig
    optim: OptimConfig
    train: TrainConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    ds_config: Mapping[str, Any]
    """The finished DeepSpeed config."""
