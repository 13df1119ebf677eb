"""Command lines that several tests start from."""

from collections.abc import Mapping, Sequence

from megatron.cli import ParsedRun, read_run
from megatron.common.errors import ConfigError
from megatron.config import RunConfig
from megatron.model.architectures import BERT, CLASSIFIER, GPT2, LLAVA, T5

CPU = {"DS_ACCELERATOR": "cpu"}
CUDA = {"DS_ACCELERATOR": "cuda"}

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 0.001 --train-iters 100 "
    "--batch-size 2 --data-path corpus --vocab-file vocab.json --merge-file merges.txt"
)
"""The shortest legal command line."""
SMALL_BERT = SMALL.replace(
    "--vocab-file vocab.json --merge-file merges.txt", "--vocab-file vocab.txt --tokenizer-type BertWordPieceLowerCase"
)
"""That of pretrain_bert.py."""
SMALL_T5 = f"{SMALL_BERT} --decoder-num-layers 3 --decoder-seq-length 16"
"""That of pretrain_t5.py."""
SMALL_LLAVA = (
    f"{SMALL} --vision-num-layers 3 --vision-hidden-size 16 --vision-ffn-hidden-size 48 --vision-num-attention-heads 4"
    " --vision-image-size 28 --image-token-id 60 --images-per-micro-batch 6"
)
"""That of pretrain_vlm.py: 5 tokens of the encoder for each image, and 4 of the language model."""
_BY_WORD = {
    "llava": (SMALL_LLAVA, LLAVA),
    "t5": (SMALL_T5, T5),
    "bert": (SMALL_BERT, BERT),
    "classifier": (SMALL_BERT.replace("--data-path corpus ", ""), CLASSIFIER),
}


def latest(words: Sequence[str], *, only: str = "") -> list[str]:
    """``words`` with each flag, or ``only`` that one, as it is given last: to replace values of a common line."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    first, *flags = groups
    last = {group[0]: number for number, group in enumerate(flags)}
    kept = (group for number, group in enumerate(flags) if number == last[group[0]] or only not in ("", group[0]))
    return [*first, *(word for group in kept for word in group)]


def parse(words: str = "", *, ranks: int = 1, environ: Mapping[str, str] = CPU) -> RunConfig:
    """The run of SMALL and ``words`` on that many ranks; where they begin with ``bert`` or ``t5``, of
    pretrain_bert.py or pretrain_t5.py.

    Where they begin with ``classifier``, it is the run of a task. A value of SMALL that
    ``words`` repeat is theirs.
    """
    return read(words, ranks=ranks, environ=environ).checked()


def read(words: str = "", *, ranks: int = 1, environ: Mapping[str, str] = CPU) -> ParsedRun:
    """The same, legal or not."""
    first, _, rest = words.partition(" ")
    small, architecture = _BY_WORD.get(first, (SMALL, GPT2))
    line = f"{small} {rest if first in _BY_WORD else words}"
    return read_run(latest(line.split()), {**environ, "WORLD_SIZE": str(ranks)}, architecture)


def complaints(words: str = "", *, ranks: int = 1, environ: Mapping[str, str] = CPU) -> list[str]:
    """The messages that SMALL and ``words`` are refused with; none where the run is legal."""
    try:
        parse(words, ranks=ranks, environ=environ)
    except ConfigError as error:
        return error.messages
    return []
