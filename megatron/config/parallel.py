"""Parallelism: how the work is distributed over ranks."""

from dataclasses import dataclass

from megatron.config.fields import derived, flag

SCHEDULES = ("1f1b", "interleaved", "zbh1", "zbv", "dualpipev")
"""Choices of --pipeline-schedule."""
_NO_COMPLETE_SAMPLE = {
    "expert_model_parallel_size": "gradients of experts would not be summed over the ranks that share a sample",
    "moe_expert_capacity_factor": "a capacity is divided among all tokens of a sample, which no rank has",
}
"""What excludes ranks that have a part of each sample."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism and distributed setup."""

    model_parallel_size: int = flag(
        1,
        "Tensor-parallel size: number of ranks over which each layer is split.",
        aliases=("tensor-model-parallel-size",),
        within="[1, 1048576]",
    )
    pipe_parallel_size: int = flag(
        0,
        "Number of pipeline stages. 0 uses DeepSpeedEngine, without a pipeline (any ZeRO stage); 1 or more "
        "DeepSpeed's pipeline engine (ZeRO 0 or 1).",
        aliases=("pipeline-model-parallel-size",),
        switches={"no-pipeline-parallel": 0},
        within="[0, 1048576]",
    )
    pipeline_partition: str = flag(
        "type:ParallelTransformerLayer",
        "How the model is partitioned into stages. Balance the number of layers, embeddings and head included "
        "(uniform), the number of parameters (parameters), the FLOPs of the forward pass (flops), or the number of "
        "layers whose class name matches REGEX (type:REGEX); or give the number of transformer layers of each stage, "
        "such as 5,6,6,4. The embeddings belong to the first stage, the head to the last.",
        metavar="METHOD",
        needs="pipe_parallel_size",
        instead_of=("repartition_from",),
    )
    repartition_from: str | None = flag(
        None,
        "Folder of --trace, or its trace.json. Instead of using --pipeline-partition, balance the measured time of "
        "the layers over the stages.",
        metavar="TRACE",
        encoder_decoder="not",
        needs="pipe_parallel_size",
    )
    pipeline_model_parallel_split_rank: int | None = flag(
        None,
        "First stage of the decoder, from 1 on: the stages before it share only the encoder (default: any stage may "
        "hold layers of both).",
        within="[1, inf)",
        encoder_decoder="only",
    )
    pipeline_schedule: str = flag(
        "1f1b",
        "Order of forward and backward passes. interleaved (1F1B with virtual stages) splits the model into more model "
        "chunks than stages, which divides the pipeline bubble by their number per stage. zbh1 (ZB-H1) computes weight "
        "gradients later than input gradients, in the bubble; zbv (ZB-V) does so with two model chunks per stage, "
        "the first and the last of the model on the first stage. dualpipev (DualPipeV) has the same two chunks, and "
        "needs at least two micro-batches per stage. An explicit partition gives a number for each chunk.",
        switches={"enable-zbh1-pipeline": "zbh1"},
        choices=SCHEDULES,
        needs="pipe_parallel_size",
        excludes={
            "zbh1|zbv: compile": "the compiler does not look into layers that defer the gradients of weights",
            "zbh1|zbv: tiled_mlp": "the gradients of weights are deferred, which would keep all tiles until then",
        },
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "Transformer layers of each model chunk of --pipeline-schedule interleaved, which it selects.",
        within="[1, inf)",
        encoder_decoder="not",
        needs="pipe_parallel_size",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None,
        "Model chunks of each stage of --pipeline-schedule interleaved, which it selects: in place of "
        "--num-layers-per-virtual-pipeline-stage if the layers cannot be divided evenly.",
        within="[2, inf)",
        needs="pipe_parallel_size",
        instead_of=("num_layers_per_virtual_pipeline_stage",),
    )
    sequence_parallel: bool = flag(
        False,
        "Megatron's sequence parallelism: split layer norms, dropout and residual connections along the sequence over "
        "the tensor-parallel ranks.",
        needs="model_parallel_size",
    )
    tp_comm_overlap: bool = flag(
        False,
        "Overlap the tensor-parallel communication of the forward pass with its matmuls, in chunks of the sequence. In "
        "the backward pass sums overlap with the matmuls in any case.",
        needs="model_parallel_size",
    )
    ds_sequence_parallel_size: int = flag(
        1,
        "DeepSpeed-Ulysses: number of ranks over which the sequence of each sample is split; around attention they "
        "exchange parts of the sequence for attention heads. With --context-parallel-size they split its parts.",
        within="[1, 1048576]",
        excludes=_NO_COMPLETE_SAMPLE,
    )
    context_parallel_size: int = flag(
        1,
        "Context parallelism: number of ranks over which the sequence of each sample is split, attention included. "
        "--cp-comm-type selects how the ranks communicate.",
        within="[1, 1048576]",
        excludes=_NO_COMPLETE_SAMPLE,
    )
    cp_comm_type: str = flag(
        "p2p",
        "How the ranks of --context-parallel-size see the keys and values of the others: passed around a ring while "
        "attention to the previous ones is computed (p2p, ring attention), all gathered at once (all_gather), or for a "
        "part of the heads each (a2a, as --ds-sequence-parallel-size); a2a+p2p combines groups of a2a with rings over "
        "them.",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
        needs="context_parallel_size",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag(
        (), "Ranks of an a2a group, and of a ring of such groups.", metavar="A2A P2P", needs="cp_comm_type=a2a+p2p"
    )
    expert_model_parallel_size: int = flag(
        1,
        "Expert-parallel size: number of data-parallel ranks over which the experts of each layer are divided.",
        aliases=("moe-expert-parallel-size",),
        within="[1, 1048576]",
        masked_lm=False,
        needs="num_experts",
        excludes={
            "zero_stage=3": "DeepSpeed divides weights among all data-parallel ranks, which have different experts",
            "offload_optimizer": "DeepSpeed computes the gradient norm of experts by code that is not tested here",
            "optimizer=adafactor": "its state depends on the ranks",
            "zero_reduce_scatter or zero_contiguous_gradients": "DeepSpeed's other code for experts is not tested",
        },
    )
    expert_tensor_parallel_size: int = flag(
        0,
        "Ranks that split an expert: as many as --model-parallel-size (default).",
        within="[1, 1048576]",
        ignored_without="num_experts",
        masked_lm=False,
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
    world_size: int = flag(
        1, "With --explain or --dry-run: number of processes, which else the launcher sets.", within="[1, 1048576]"
    )
    elastic_layout: bool = flag(
        False,
        "Choose the fastest layout for the ranks that were started, as tools/plan.py does, if the given one is not "
        "supported on that many or does not fit: for torchrun --nnodes 2:4.",
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
        """Those of them that exchange parts of the sequence for heads; the ranks of a ring are at equal places."""
        inner = {"a2a": self.context_parallel_size, "a2a+p2p": next(iter(self.hierarchical_context_parallel_sizes), 1)}
        return self.ds_sequence_parallel_size * inner.get(self.cp_comm_type, 1)

    @property
    def ring_size(self) -> int:
        """Those of them that see one another's keys and values: rank r has chunks r and 2R - 1 - r of 2R."""
        return max(self.sequence_ranks // max(self.ulysses_size, 1), 1)

    @property
    def samples_counted(self) -> int:
        """How often DeepSpeed counts a sample: its pipeline engine takes ranks that share one for data-parallel."""
        return self.sequence_ranks if self.uses_pipeline else 1

    @property
    def data_parallel_size(self) -> int:
        """Number of model replicas."""
        return self.world_size // self.replica_size
