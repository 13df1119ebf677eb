"""Parallelism settings: how a model and its data are distributed over ranks."""

from dataclasses import dataclass

from megatron.config.fields import count, derived, flag, size

SCHEDULES = ("1f1b", "interleaved", "zbh1", "zbv", "dualpipev")
"""Choices of --pipeline-schedule."""
_ONE_SEQUENCE = {"decoder_seq_length": "it divides one sequence, and an encoder and a decoder have two"}
_SPLIT_SAMPLES_EXCLUDE = _ONE_SEQUENCE | {
    "expert_model_parallel_size": "gradients of experts would not be summed over the ranks that share a sample",
    "moe_expert_capacity_factor": "a capacity is divided among all tokens of a sample, which no rank has",
}
"""What cannot be combined with Ulysses and context parallelism, where a rank has only a part of each sample."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism and distributed setup."""

    model_parallel_size: int = size(
        1,
        "Tensor-parallel size: number of ranks over which each layer is split.",
        aliases=("tensor-model-parallel-size",),
    )
    pipe_parallel_size: int = flag(
        0,
        "Number of pipeline stages; 0 uses DeepSpeedEngine, with any ZeRO stage.",
        aliases=("pipeline-model-parallel-size",),
        switches={"no-pipeline-parallel": 0},
        within="[0, 1048576]",
    )
    pipeline_partition: str = flag(
        "type:ParallelTransformerLayer",
        "How layers are divided into stages: uniform, by parameters, by flops, type:REGEX of class names, or the "
        "number of transformer layers of each stage, such as 5,6,6,4.",
        metavar="METHOD",
        needs="pipe_parallel_size",
        instead_of=("repartition_from",),
    )
    repartition_from: str | None = flag(
        None,
        "Folder of --trace: balance the measured time of the layers over the stages.",
        metavar="TRACE",
        models="gpt bert other",
        needs="pipe_parallel_size",
    )
    pipeline_model_parallel_split_rank: int | None = count(
        None,
        "First stage of the decoder; the stages before it hold the encoder (default: a stage may hold both).",
        models="t5",
        needs="pipe_parallel_size",
        excludes={"pipeline_schedule=interleaved|zbv|dualpipev": "it is for stages with a single model chunk"},
    )
    pipeline_schedule: str = flag(
        "1f1b",
        "Order of forward and backward passes: 1F1B, with virtual stages (interleaved), ZB-H1, ZB-V or DualPipeV "
        "(docs/parallelism.md compares them).",
        switches={"enable-zbh1-pipeline": "zbh1"},
        choices=SCHEDULES,
        needs="pipe_parallel_size",
        excludes={
            "zbh1|zbv: compile": "the compiler does not look into layers that defer the gradients of weights",
            "zbh1|zbv: tiled_mlp": "the gradients of weights are deferred, which would keep all tiles until then",
        },
    )
    num_layers_per_virtual_pipeline_stage: int | None = count(
        None,
        "Transformer layers of each model chunk of the interleaved schedule.",
        models="gpt bert other",
        needs="pipe_parallel_size",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None,
        "Model chunks of each stage of the interleaved schedule.",
        within="[2, inf)",
        needs="pipe_parallel_size",
        instead_of=("num_layers_per_virtual_pipeline_stage",),
    )
    sequence_parallel: bool = flag(
        False,
        "Megatron's sequence parallelism: split norms, dropout and residuals along the sequence as well.",
        needs="model_parallel_size",
        excludes=_ONE_SEQUENCE,
    )
    tp_comm_overlap: bool = flag(
        False,
        "Overlap tensor-parallel communication of the forward pass with its matmuls, in chunks.",
        needs="model_parallel_size",
    )
    ds_sequence_parallel_size: int = size(
        1,
        "DeepSpeed-Ulysses: ranks that split each sample, and exchange parts of it for heads in attention.",
        excludes=_SPLIT_SAMPLES_EXCLUDE,
    )
    context_parallel_size: int = size(
        1,
        "Context parallelism: ranks that split each sample, attention included, by --cp-comm-type.",
        excludes=_SPLIT_SAMPLES_EXCLUDE,
    )
    cp_comm_type: str = flag(
        "p2p",
        "How ranks exchange keys and values: ring attention (p2p), all-gather, heads (a2a), or rings of a2a groups.",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
        needs="context_parallel_size",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag(
        (), "Ranks of an a2a group, and of a ring of such groups.", metavar="A2A P2P", needs="cp_comm_type=a2a+p2p"
    )
    expert_model_parallel_size: int = size(
        1,
        "Expert-parallel size: data-parallel ranks that divide the experts of each layer.",
        aliases=("moe-expert-parallel-size",),
        models="gpt",
        needs="num_experts",
        excludes={
            "zero_stage=3": "DeepSpeed divides weights among all data-parallel ranks, which have different experts",
            "offload_optimizer": "DeepSpeed's gradient norm of experts is not tested with offloading",
            "optimizer=adafactor": "its state depends on the ranks",
            "zero_reduce_scatter or zero_contiguous_gradients": "DeepSpeed's other code for experts is not tested",
        },
    )
    distributed_backend: str | None = flag(
        None, "Backend of torch.distributed (default: nccl on CUDA, gloo on CPU).", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(
        30.0, "Timeout in minutes of collectives, in every process group, and of the start.", within="[0.01, 525600]"
    )
    local_rank: int | None = flag(
        None, "Set by the launcher: the local rank of this process on its host.", within="[0, inf)"
    )
    world_size: int = size(1, "With --explain or --dry-run: number of processes; otherwise set by the launcher.")
    elastic_layout: bool = flag(
        False, "Choose the fastest layout for the ranks that were started if the given one does not fit them."
    )
    device: str = derived("cpu")
    """Device of the ranks: cuda, cpu, or the name of another DeepSpeed accelerator."""

    @property
    def uses_pipeline(self) -> bool:
        """Whether DeepSpeed's pipeline engine runs the model."""
        return self.pipe_parallel_size > 0

    @property
    def pipe_stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return max(self.pipe_parallel_size, 1)

    @property
    def is_v_shaped(self) -> bool:
        """Whether model chunks run from the first stage to the last and back, so that the first holds both ends."""
        return self.pipeline_schedule in ("zbv", "dualpipev")

    @property
    def chunks_per_stage(self) -> int:
        """Model chunks that each stage holds."""
        if self.pipeline_schedule == "interleaved":
            return self.num_virtual_stages_per_pipeline_rank or 1
        return 2 if self.is_v_shaped else 1

    @property
    def model_chunks(self) -> int:
        """Number of model chunks of all stages."""
        return self.pipe_stages * self.chunks_per_stage

    @property
    def replica_size(self) -> int:
        """Ranks of one model replica: tensor-parallel size x stages x ranks that share each sample."""
        return self.model_parallel_size * self.pipe_stages * self.sequence_ranks

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share each sample: context-parallel size x size of DeepSpeed-Ulysses."""
        return self.context_parallel_size * self.ds_sequence_parallel_size

    @property
    def ulysses_size(self) -> int:
        """Ranks of an all-to-all group, which exchange parts of the sequence for heads. Rings connect such groups."""
        inner = {"a2a": self.context_parallel_size, "a2a+p2p": next(iter(self.hierarchical_context_parallel_sizes), 1)}
        return self.ds_sequence_parallel_size * inner.get(self.cp_comm_type, 1)

    @property
    def ring_size(self) -> int:
        """Ranks R of a ring-attention group, of which rank r has the chunks r and 2R - 1 - r of 2R."""
        return max(self.sequence_ranks // max(self.ulysses_size, 1), 1)

    @property
    def samples_counted(self) -> int:
        """How often DeepSpeed counts a sample: its pipeline engine treats ranks that share one as data-parallel."""
        return self.sequence_ranks if self.uses_pipeline else 1

    @property
    def data_parallel_size(self) -> int:
        """Number of model replicas."""
        return self.world_size // self.replica_size
