"""How ranks share the work."""

from dataclasses import dataclass

from megatron.config.fields import derived, flag


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
    repartition_from: str | None = flag(
        None,
        "Folder of --trace, or its trace.json: instead of --pipeline-partition, give the stages equal shares of the "
        "time that each layer took there.",
        metavar="TRACE",
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
    distributed_timeout_minutes: float = flag(
        30.0, "Minutes a collective, and the start, may wait for a rank.", within="(0, inf)"
    )
    local_rank: int | None = flag(
        None, "Set by the launcher: this process's place on its host.", name="local_rank", within="[0, inf)"
    )
    world_size: int = flag(
        1, "With --explain or --dry-run: processes of the run. Otherwise the launcher says.", within="[1, inf)"
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
    def uses_dualpipev(self) -> bool:
        """Whether the model turns around behind the last stage and ends on the first."""
        return self.pipeline_schedule == "dualpipev"

    @property
    def model_chunks(self) -> int:
        """Pieces the model is cut into: one for each stage, or two."""
        return self.pipe_stages * (2 if self.uses_dualpipev else 1)

    @property
    def replica_size(self) -> int:
        """Ranks that share a sample: tensor-parallel size x stages x sequence-parallel size of DeepSpeed-Ulysses."""
        return self.model_parallel_size * self.pipe_stages * self.ds_sequence_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return self.world_size // self.replica_size
