"""The unigram entropy of a data set: the loss of a model that knows how often each token occurs, and nothing else."""

import _project_root  # noqa: F401
import numpy as np

from megatron.common.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tools.command_line import ToolParser, run_tool


def main() -> None:
    """Print the entropy in nats a token, the unit of the loss."""
    parser = ToolParser(__doc__)
    parser.add_argument("--data-path", required=True, metavar="PREFIX", help="data set, PREFIX.bin and PREFIX.idx")
    print(f"{unigram_entropy(parser.parse_args().data_path):.4f}")


def unigram_entropy(prefix: str) -> float:
    """Entropy in nats of the tokens of a data set, drawn one by one."""
    data = IndexedDataset(prefix)
    if not data.num_tokens:
        raise DataError(f"{prefix} holds no token")
    counts = np.bincount(data.span(0, data.num_tokens).astype(np.int64))
    shares = counts[counts > 0] / data.num_tokens
    return float(-(shares * np.log(shares)).sum())


if __name__ == "__main__":
    run_tool(main)
