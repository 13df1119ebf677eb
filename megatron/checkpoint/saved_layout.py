"""How the state of a saved run is distributed over ranks, which determines the content of each file of its checkpoints.

No torch here.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.common.checkpoint_folders import existing_rank_file
from megatron.config import RunConfig
from megatron.model.partition import layers_per_chunk

_SIZE = "[1, 1048576]"


def _saved_as(key: str, within: str | None = None, *, choices: tuple[str, ...] = (), **options: Any) -> Any:
    return field(metadata={"key": key, "within": within, "choices": choices}, **options)


@dataclass(frozen=True)
class SavedLayout:
    """How the state of a run is distributed over ranks, and so over the files of its checkpoints.

    A field that is missing in an older checkpoint is None.
    """

    model_parallel_size: int = _saved_as("--model-parallel-size", _SIZE)
    pipe_parallel_size: int = _saved_as("--pipe-parallel-size", "[0, 1048576]")
    """0: without the pipeline engine."""
    ds_sequence_parallel_size: int = _saved_as("--ds-sequence-parallel-size", _SIZE)
    data_parallel_size: int = _saved_as("data-parallel size", _SIZE)
    zero_stage: int = _saved_as("--zero-stage", "[0, 3]")
    offload_optimizer: str = _saved_as("--offload-optimizer", choices=("none", "cpu", "nvme"))
    cpu_torch_adam: bool = _saved_as("--cpu-torch-adam")
    precision: str = _saved_as("precision", choices=("fp32", "bf16", "fp16"))
    zero_round_robin_gradients: bool = _saved_as("--zero-round-robin-gradients")
    """Like the next two fields, it determines the order of parameters in ZeRO's files."""
    parameter_alignment: bool | None = _saved_as("parameter_alignment")
    sub_group_size: int | None = _saved_as("sub_group_size")
    pipeline_schedule: str | None = _saved_as("--pipeline-schedule", default=None)
    """None without a pipeline, like ``partition``."""
    partition: str | None = _saved_as("the partition into stages", default=None)
    """Transformer layers of each model chunk: the optimizer's files of a stage hold the parameters of that stage."""
    context_parallel_size: int | None = _saved_as("--context-parallel-size", _SIZE, default=None)
    """None without it."""
    gradient_bucket: int | None = _saved_as("elements of a bucket of gradients", default=None)
    """None for one bucket; ZeRO's files have a tensor for each bucket."""
    expert_parallel_size: int = _saved_as("--expert-model-parallel-size", _SIZE, default=1)
    """Only saved if it is more than 1."""
    unknown: tuple[str, ...] = ()
    """Keys in ``run.json`` that this version does not know."""

    @property
    def parameter_elements(self) -> int:
        """In the files of ZeRO 1 and 2 a parameter begins at a multiple of it: at 16 bytes if aligned."""
        return (4 if self.precision == "fp32" else 8) if self.parameter_alignment else 1

    @classmethod
    def from_run(cls, run: RunConfig) -> "SavedLayout":
        """The layout of checkpoints that ``run`` saves."""
        zero, parallel = run.zero, run.parallel
        zero_settings = run.ds_config.get("zero_optimization", {})
        return cls(
            model_parallel_size=parallel.model_parallel_size,
            pipe_parallel_size=parallel.pipe_parallel_size,
            ds_sequence_parallel_size=parallel.ds_sequence_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            zero_stage=zero.zero_stage,
            offload_optimizer=zero.offload_optimizer,
            cpu_torch_adam=zero.cpu_torch_adam,
            precision=run.precision.dtype,
            zero_round_robin_gradients=zero.zero_round_robin_gradients,
            parameter_alignment=zero_settings.get("parameter_alignment"),
            sub_group_size=zero_settings.get("sub_group_size"),
            pipeline_schedule=parallel.pipeline_schedule if parallel.uses_pipeline else None,
            partition=", ".join(map(str, layers_per_chunk(run))) if parallel.uses_pipeline else None,
            context_parallel_size=parallel.context_parallel_size if parallel.context_parallel_size > 1 else None,
            gradient_bucket=run.gradient_bucket,
            expert_parallel_size=parallel.expert_model_parallel_size,
        )

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "SavedLayout":
        """The layout in a ``run.json``."""
        values: dict[str, Any] = {name: saved.get(key) for name, key in layout_keys().items()}
        values["expert_parallel_size"] = values["expert_parallel_size"] or 1
        return cls(**values, unknown=tuple(sorted(saved.keys() - set(layout_keys().values()))))

    def to_json(self) -> dict[str, Any]:
        """The layout for ``run.json``, without fields that have their default."""
        values = {entry.metadata["key"]: (getattr(self, entry.name), entry.default) for entry in _saved_fields()}
        return {key: value for key, (value, default) in values.items() if value != default}

    def __str__(self) -> str:
        three = {"TP": self.model_parallel_size, "PP": self.pipe_parallel_size or 1, "DP": self.data_parallel_size}
        context, sequence = self.context_parallel_size or 1, self.ds_sequence_parallel_size
        others = {"CP": context, "SP": sequence, "EP": self.expert_parallel_size}
        sizes = three | {name: size for name, size in others.items() if size > 1} | {"ZeRO": self.zero_stage}
        return ", ".join([*(f"{name} {size}" for name, size in sizes.items()), self.precision])

    @property
    def has_optimizer_partitions(self) -> bool:
        """Whether the optimizer's state is in separate files, one for each data-parallel rank."""
        # In earlier versions bf16 at ZeRO 0 also partitioned it, in the pipeline engine.
        return self.zero_stage > 0 or (self.precision == "bf16" and self.pipe_parallel_size > 0)

    @property
    def zero_ranks(self) -> int:
        """Number of ranks that ZeRO partitions over."""
        return self.data_parallel_size * (self.context_parallel_size or 1) * self.ds_sequence_parallel_size

    def has_same_ranks(self, other: "SavedLayout") -> bool:
        """Whether each rank has the same layers, shards and samples in both layouts."""
        names = """model_parallel_size pipe_parallel_size data_parallel_size ds_sequence_parallel_size
            context_parallel_size pipeline_schedule partition expert_parallel_size""".split()
        return all(getattr(self, name) == getattr(other, name) for name in names)


def layout_keys() -> dict[str, str]:
    """The key in ``run.json`` of each field of SavedLayout."""
    return {entry.name: entry.metadata["key"] for entry in _saved_fields()}


def _saved_fields() -> list[Field]:
    return [entry for entry in fields(SavedLayout) if entry.metadata]


def model_file(folder: Path, layout: SavedLayout, mp_rank: int, zero_rank: int = 0) -> Path:
    """DeepSpeed's file of model-parallel rank ``mp_rank`` = stage x tensor-parallel size + tensor rank.

    At ZeRO 3 each data-parallel rank has one.
    """
    prefix = f"zero_pp_rank_{zero_rank}_" if layout.zero_stage == 3 else ""
    return existing_rank_file(folder / f"{prefix}mp_rank_{mp_rank:02d}_model_states.pt")


def optimizer_file(folder: Path, layout: SavedLayout, zero_rank: int, mp_rank: int) -> Path:
    """DeepSpeed's file of the optimizer's partition ``zero_rank`` of model-parallel rank ``mp_rank``."""
    prefix = "bf16_" if layout.precision == "bf16" else ""
    return existing_rank_file(folder / f"{prefix}zero_pp_rank_{zero_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def expert_file(folder: Path, expert_rank: int, mp_rank: int) -> Path:
    """Our file {name: state} with the experts of a rank of an expert group; DeepSpeed's have those of its first rank.

    With ZeRO a state is the weight only: DeepSpeed's files have the state of the optimizer.
    """
    return existing_rank_file(folder / f"expert_rank_{expert_rank:02d}_mp_rank_{mp_rank:02d}_states.pt")
