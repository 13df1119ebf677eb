"""Reading a file that DeepSpeed wrote, without letting it run code."""

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megatron.errors import CheckpointError


def read_file(path: Path) -> dict[str, Any]:
    """What ``path`` holds, on the CPU. Raises CheckpointError where it is missing or not whole."""
    try:
        with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has many names for a file that is not whole
        raise CheckpointError(f"{path} cannot be read ({str(error).splitlines()[0]})") from error
