"""An entry script like pretrain_gpt2.py, with a fault of FAULT in the environment where there are several ranks.

all-reduce     the backward pass of a column-parallel layer does not sum the gradient of its input over its ranks
tied           the gradient of the embedding is not summed over the first and the last pipeline stage
gradient       gradients are twice what they should be
norm           the gradient norm counts weights that tensor-parallel ranks hold alike once for each of them
shards         tensor-parallel ranks swap their shards of a weight when it is drawn
accumulation   the loss does not take into account how many micro-batches are accumulated
learning rate  rank 1 steps with half the learning rate
expert norm    the gradient norm leaves out the experts of the other ranks
expert twice   the gradients of experts are twice what they should be
weights        the outputs of a token's experts are weighted in the wrong order
experts        ranks hold one another's experts
none           nothing is wrong

FAULT is JSON: the fault of each layout, by the layout's name without its expert-parallel size.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt2
from benchmarks.mutations import replicas, sequences, shards
from megatron.launch.rank import run_rank
from megatron.model.architectures import GPT2

ARCHITECTURE = GPT2


FAULTS = {
    "all-reduce": shards.column_not_summed,
    "tied": replicas.untied_embedding,
    "gradient": replicas.doubled_gradient,
    "norm": replicas.wrong_norm,
    "shards": shards.swapped_shards,
    "accumulation": replicas.ignored_accumulation,
    "learning rate": replicas.wrong_learning_rate,
    "expert norm": sequences.wrong_norm_of_experts,
    "expert twice": sequences.doubled_gradient_of_experts,
    "weights": sequences.wrong_weights_of_experts,
    "experts": sequences.swapped_experts,
    "none": lambda: None,
}


def name_of_layout() -> str:
    """The name of the layout that this run has, as ``tools/verify_layout.py`` writes it."""
    flags = ("--model-parallel-size", "--pipe-parallel-size", "--zero-stage")
    tensor, pipe, zero = (int(sys.argv[sys.argv.index(flag) + 1]) for flag in flags)
    data = int(os.environ["WORLD_SIZE"]) // (tensor * max(pipe, 1))
    return f"tp{tensor}-pp{pipe}-dp{data}" + (f"-zero{zero}" if zero else "")


if __name__ == "__main__":
    if int(os.environ["WORLD_SIZE"]) > 1:
        FAULTS[json.loads(os.environ["FAULT"])[name_of_layout()]]()
    run_rank(pretrain_gpt2.main)
