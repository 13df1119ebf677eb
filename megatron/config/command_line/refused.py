"""Arguments of Megatron-LM v1.1.5-3D_parallelism that are not supported, each with the reason."""

from megatron.config import flag_fields
from megatron.config.fields import flag_name
from megatron.model.architectures import BERT, GPT2
from megatron.model.spec import ArchitectureSpec

_RETRIEVAL = "not supported by this program (retrieval models)"
_SHARING = "weight sharing between layers is not supported"
_AUTORESUME = "not supported (a service of NVIDIA's own cluster): use --auto-resume"
_GENERATION = "not supported by this program (text generation)"
_TASKS = "not supported by this program (evaluation tasks)"

REFUSED: dict[str, str] = {
    "num-unique-layers": _SHARING,
    "param-sharing-style": _SHARING,
    "onnx-safe": "export to ONNX is not supported",
    "scaled-masked-softmax-fusion": "attention is fused unless another flag excludes it: remove it",
    "DDP-impl": "DeepSpeed reduces the gradients: remove it",
    "lazy-mpu-init": "not supported: the process groups are created once, at the start",
    "adlr-autoresume": _AUTORESUME,
    "adlr-autoresume-interval": _AUTORESUME,
    "ict-head-size": _RETRIEVAL,
    "ict-load": _RETRIEVAL,
    "bert-load": _RETRIEVAL,
    "titles-data-path": _RETRIEVAL,
    "query-in-block-prob": _RETRIEVAL,
    "use-one-sent-docs": _RETRIEVAL,
    "report-topk-accuracies": _RETRIEVAL,
    "faiss-use-gpu": _RETRIEVAL,
    "block-data-path": _RETRIEVAL,
    "indexer-batch-size": _RETRIEVAL,
    "indexer-log-interval": _RETRIEVAL,
    "temperature": _GENERATION,
    "greedy": _GENERATION,
    "top-p": _GENERATION,
    "top-k": _GENERATION,
    "out-seq-length": _GENERATION,
    "sample-input-file": _GENERATION,
    "sample-output-file": _GENERATION,
    "num-samples": _GENERATION,
    "genfile": _GENERATION,
    "recompute": _GENERATION,
    "task": _TASKS,
    "epochs": _TASKS,
    "pretrained-checkpoint": _TASKS,
    "train-data": _TASKS,
    "valid-data": _TASKS,
    "overlapping-eval": _TASKS,
    "strict-lambada": _TASKS,
}
"""Flag without leading dashes to the reason why it is refused."""

REFUSED_VALUES: dict[tuple[str, str], str] = {
    ("data_impl", "lazy"): "convert the data with tools/preprocess_data.py",
    ("data_impl", "cached"): "convert the data with tools/preprocess_data.py",
}
"""Field and value to the reason why that value of an accepted flag is refused."""


def refusals(architecture: ArchitectureSpec) -> dict[str, str]:
    """The flags that the program of ``architecture`` refuses: unsupported ones, and those of other models."""
    owner = GPT2 if architecture.masked_lm else BERT
    of_other_models = {
        flag_name(field).removeprefix("--"): f"{architecture.program} has no such flag: it is {owner.name}'s, "
        f"for {owner.program}"
        for field in flag_fields().values()
        if field.metadata["flag"]["masked_lm"] not in (None, architecture.masked_lm)
    }
    return REFUSED | of_other_models
