"""--dry-run: the real layers of any rank of any number of processes, without memory and without the others."""

from dataclasses import replace

import pytest
from support.programs import TINY_MODEL

from megatron.cli import parse_run
from megatron.config import RunConfig
from megatron.model.architectures import BERT
from megatron.tools.planning.memory import stage_memory
from megatron.training.preflight import check

LLAMA = (
    "--num-query-groups 2 --normalization RMSNorm --swiglu --ffn-hidden-size 48 --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
LAYOUTS = [
    "",
    "--zero-stage 3",
    "--model-parallel-size 2 --sequence-parallel --bf16",
    "--context-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1",
    "--pipe-parallel-size 3 --pipeline-partition 1,3,0 --zero-stage 1",
    "--pipe-parallel-size 2 --pipeline-schedule interleaved --pipeline-partition 0,2,1,1 --gas 4",
    "--pipe-parallel-size 2 --pipeline-schedule zbv --gas 4 --zero-stage 1",
    "--lora-rank 4 --bf16 --model-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1",
    f"{LLAMA} --model-parallel-size 2 --pipe-parallel-size 2 --bf16 --zero-stage 1",
]


def settled(words: str, programs, world_size: int) -> RunConfig:
    words = [*TINY_MODEL, *programs.data_arguments, *"--batch-size 2 --train-iters 4".split(), *words.split()]
    return check(parse_run(words, {"DS_ACCELERATOR": "cuda", "WORLD_SIZE": str(world_size)}))[0]


def settled_bert(words: str) -> RunConfig:
    words = [*TINY_MODEL, *"--data-path d --vocab-file v --batch-size 2 --train-iters 4".split(), *words.split()]
    words += ["--tokenizer-type", "BertWordPieceLowerCase"]
    run = parse_run(words, {"DS_ACCELERATOR": "cuda", "WORLD_SIZE": "48"}, BERT)
    return replace(run, model=replace(run.model, vocab_size=100, padded_vocab_size=128))


@pytest.mark.parametrize("words", LAYOUTS)
def test_built_layers_have_the_planned_parameters(words, programs):
    check_ranks(settled(words, programs, 48))


@pytest.mark.parametrize("words", ["--model-parallel-size 2", "--pipe-parallel-size 2 --bf16"])
def test_built_layers_of_bert_have_the_planned_parameters(words):
    check_ranks(settled_bert(words))


def check_ranks(run: RunConfig) -> None:
    """Tensor by tensor, on the first rank of each stage and on the very last rank."""
    from support.built_stages import built_stage, fake_layout, first_rank_of_each_stage

    from megatron.engines.optimizers import weight_decay_groups
    from megatron.model.partition import plan
    from megatron.tools.planning.states import stage_weights

    stages = plan(run)
    for rank in (*first_rank_of_each_stage(run.parallel), 47):
        with fake_layout(run.parallel, rank) as layout:
            built, number = built_stage(run, layout), layout.pipe_group.rank()
        groups = [group for group in weight_decay_groups(built, run.model) if "weight_decay" not in group]
        decaying = {id(parameter) for group in groups for parameter in group["params"]}
        counted = [weight for layer in stage_weights(run, stages[number]).layers for weight in layer]
        assert sorted((one.numel(), id(one) in decaying, one.requires_grad) for one in built.parameters()) == sorted(
            (one.numel, one.decays, one.is_trained) for one in counted
        )
        assert stage_memory(run)[number].parameters == sum(weight.numel for weight in counted)
