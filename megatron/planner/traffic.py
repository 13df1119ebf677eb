"""What a rank sends in one iteration, in bytes, over which links.

Ranks are numbered as ``grid.AXES`` says, tensor-parallel ones innermost, so neighbours on a host are those first.
"""

from dataclasses import dataclass

from megatron.config import RunConfig
from megatron.partition import Stage
from megatron.planner.formulas import ring_all_reduce, ring_gather
from megatron.planner.memory import ends_of, layers_of
from megatron.planner.states import bytes_of, owners


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in one iteration, by what they are for."""

    tensor: float
    pipeline: float
    data: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.tensor + self.pipeline + self.data


def traffic(run: RunConfig, stage: Stage, parameters: int, hidden: int) -> Traffic:
    """What a rank of ``stage``, with so many parameters, sends in one iteration.

    ``hidden`` are the bytes of hidden states between two stages.
    """
    return Traffic(tensor(run, stage), pipeline(run, stage, hidden), data(run, parameters))


def tensor(run: RunConfig, stage: Stage) -> float:
    """All-reduces of hidden states: two a layer forward and two backward, two more where layers are recomputed.

    Where the sequence is cut, a gather and a reduce-scatter stand for each, and send as much. Around
    attention, Ulysses exchanges query, key, value and context, forward and backward.
    """
    parallel, layers = run.parallel, layers_of(run, stage)
    t, parts = parallel.model_parallel_size, parallel.ds_sequence_parallel_size
    tokens = run.train.micro_batch_size * run.data.seq_length // parts
    hidden = tokens * run.model.hidden_size * bytes_of(run)
    passes = 6 if run.activation.layers_together else 4
    reduced = (passes * layers + sum(ends_of(run, stage))) * ring_all_reduce(hidden, t)
    exchanged = 2 * passes * layers * ring_gather(hidden / t, parts)  # 4 hidden states in each of passes / 2
    return run.train.gradient_accumulation_steps * (reduced + exchanged)


def pipeline(run: RunConfig, stage: Stage, hidden: int) -> float:
    """Hidden states forward and their gradients backward, at each border; of equal ones a rank sends its part."""
    parallel = run.parallel
    if parallel.pipe_stages == 1:
        return 0.0
    last = run.model.num_layers + 1
    borders = sum((piece.start > 0) + (piece.stop <= last) for piece in stage.pieces)
    whole = parallel.sequence_parallel or parallel.folds_pipeline
    part = hidden / (1 if whole else parallel.model_parallel_size)
    return run.train.gradient_accumulation_steps * borders * part


def data(run: RunConfig, parameters: int) -> float:
    """Gradients reduced and weights gathered, by ZeRO stage (arXiv 1910.02054, section 7).

    ZeRO 2 reduces the gradients of every micro-batch, and ZeRO 3 gathers the weights twice for each, too.
    """
    ranks, accumulated = owners(run), run.train.gradient_accumulation_steps
    one_way = ring_gather(parameters * bytes_of(run), ranks)
    ways = {0: 2, 1: 2, 2: accumulated + 1, 3: 3 * accumulated}[run.zero.zero_stage]
    return ways * one_way
