"""3D-parallel GPT training on DeepSpeed: tensor, pipeline and data parallelism from one command line."""

from pkgutil import resolve_name
from typing import Any

_CLASSIC = ("get_args", "get_tensorboard_writer", "get_timers", "get_tokenizer", "print_rank_0", "print_rank_last")


def __getattr__(name: str) -> Any:
    """Megatron-LM's global functions, for programs that ``megatron.training.pretrain`` runs."""
    if name in _CLASSIC:
        return resolve_name(f"megatron.classic_program:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
