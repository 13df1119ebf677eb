"""Command lines that several tests start from."""

from collections.abc import Mapping

from megatron.arguments import parse_run
from megatron.config import RunConfig
from megatron.errors import ConfigError

CPU = {"DS_ACCELERATOR": "cpu"}
CUDA = {"DS_ACCELERATOR": "cuda"}

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 0.001 --train-iters 100 "
    "--batch-size 2 --data-path corpus --vocab-file vocab.json --merge-file merges.txt"
)
"""The shortest legal command line."""


def parse(words: str = "", *, ranks: int = 1, environ: Mapping[str, str] = CPU) -> RunConfig:
    """The run of SMALL and ``words`` on so many ranks."""
    return parse_run([*SMALL.split(), *words.split()], {**environ, "WORLD_SIZE": str(ranks)})


def complaints(words: str = "", *, ranks: int = 1, environ: Mapping[str, str] = CPU) -> list[str]:
    """The messages that SMALL and ``words`` are refused with; none where the run is legal."""
    try:
        parse(words, ranks=ranks, environ=environ)
    except ConfigError as error:
        return error.messages
    return []
