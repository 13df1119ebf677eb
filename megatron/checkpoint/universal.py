"""A checkpoint without a layout, in DeepSpeed's universal format: every parameter whole, in files of its own.

    FOLDER/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": whole tensor in fp32, "cat_dim": where TP cuts it}
    FOLDER/zero/NAME/step.pt                               updates so far
    FOLDER/zero/optimizer_state.pt                         the optimizer's groups and loss scale
    FOLDER/mp_rank_00_model_states.pt                      schedule, iteration and other things that ranks share
    FOLDER/source.txt                                      a hash of the files it was made from; written last

The word embedding (``vocab_tensor``) is without the rows that pad it. At ZeRO 1 and 2 DeepSpeed itself reads
such a folder ("checkpoint": {"load_universal": true}); at 3 it does not pad the vocabulary again.
"""

import re
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpoint.files import read_file
from megatron.checkpoint.masters import parameter_shapes
from megatron.checkpoint.optimizer_state import WEIGHT, State
from megatron.config import RunConfig

CUT_BY_ROWS = (
    r".*word_embeddings\.weight",
    r".*word_bias",
    r".*query_key_value\.(weight|bias)",
    r".*dense_h_to_4h\.(weight|bias)",
)
CUT_BY_COLUMNS = (r".*attention\.dense\.weight", r".*dense_4h_to_h\.weight")
WHOLE = (
    r".*(position|tokentype)_embeddings\.weight",
    r".*layernorm\.(weight|bias)",
    r".*attention\.dense\.bias",
    r".*dense_4h_to_h\.bias",
    r"\d+\.((dense|pooler|order)\.)?(weight|bias)",
)
"""Names of the parameters that tensor parallelism cuts, by dimension, and of those that it leaves whole."""
VOCABULARY = r".*(word_embeddings\.weight|word_bias)"
TIED = r"tied_modules\..*"
SOURCE = "source.txt"


def partition_dim(name: str) -> int | None:
    """Dimension along which tensor parallelism cuts the parameter ``name``; None where every rank has it whole."""
    for dim, patterns in enumerate((CUT_BY_ROWS, CUT_BY_COLUMNS)):
        if any(re.fullmatch(pattern, name) for pattern in patterns):
            return dim
    return None


def conversion_info(engine: DeepSpeedEngine, run: RunConfig) -> dict[str, Any]:
    """What a conversion has to find in DeepSpeed's files, and would not, to be saved among the client's state."""
    patterns = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": run.model.vocab_size,
        "padded_vocab_size": run.model.padded_vocab_size,
        "vocabulary_parameter_patterns": [VOCABULARY],
        "tp_replicated_parameter_patterns": list(WHOLE),
        "parameter_with_row_parallelism_patterns": list(CUT_BY_COLUMNS),
        "pipeline_replicated_parameter_patterns": [TIED],
    }
    # DeepSpeed itself says with ZeRO alone which parameters the optimizer's tensors are.
    shapes = {} if run.zero.zero_stage else {"param_shapes": parameter_shapes(engine)}
    return {"universal_checkpoint_info": patterns, **shapes}


def point_to(folder: Path) -> None:
    """Let DeepSpeed find the universal checkpoint ``folder`` where it is told no tag."""
    (folder.parent / "latest_universal").write_text(folder.name)


def read_state(folder: Path, name: str, *, optimizer: bool = True) -> State:
    """The whole state of the parameter ``name`` in the universal checkpoint ``folder``, or its weight alone."""
    place = folder / "zero" / name
    files = sorted(place.glob("*.pt")) if optimizer else [place / f"{WEIGHT}.pt"]
    contents = {file.stem: read_file(file) for file in files}
    return {key: value["param"] if isinstance(value, dict) else value for key, value in contents.items()}


def read_shared(folder: Path) -> dict[str, Any]:
    """What all ranks share in the universal checkpoint ``folder``."""
    return read_file(folder / "mp_rank_00_model_states.pt")


def read_optimizer(folder: Path) -> dict[str, Any]:
    """The optimizer's groups and loss scale in the universal checkpoint ``folder``."""
    return read_file(folder / "zero" / "optimizer_state.pt")
