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
    "--ds-sequence-parallel-size 2 --zero-stage 1",
    "--context-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1",
    "--pipe-parallel-size 2 --model-parallel-size 2 --pipeline-partition parameters",
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


def test_dry_run_of_some_ranks_of_a_thousand(programs):
    words = "--model-parallel-size 2 --pipe-parallel-size 4 --zero-stage 1 --batch-size 1 --gas 8 --train-iters 1"
    finished = programs.warm(
        1, "pretrain_gpt2.py", *TINY_MODEL, *programs.data_arguments, "--split", "1,0,0", "--eval-iters", "0",
        *words.split(), *"--dry-run --world-size 1024 --rank 0,513".split(),
    ).ok()  # fmt: skip
    for line in (
        "> layout    1,024 processes = TP 2 x PP 4 x DP 128, pipeline engine, 4 stages, ZeRO 1",
        "rank 0: stage 0 of 4, ",
        "rank 513: stage 2 of 4, ",
        "  tensor   1 of 2: [512 513]",
        "  data     0 of 128: [513 515 517 519 521 523 525 527 ... 767]",
        "  pipe     2 of 4: [1 257 513 769]",
    ):
        assert line in finished.output
    assert finished.output.count("  memory   ") == 2


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        ("--dry-run --world-size 6 --model-parallel-size 4", 2, "6 processes cannot be split"),
        ("--dry-run --load nowhere", 4, "nowhere"),
    ],
)
def test_dry_run_refuses_what_a_run_refuses(programs, words, exit_code, message):
    finished = programs.python(
        "pretrain_gpt2.py", *TINY_MODEL, *programs.data_arguments, *"--batch-size 2 --train-iters 4".split(),
        *words.split(),
    )  # fmt: skip
    assert finished.returncode == exit_code, finished.output
    assert any(message in line for line in finished.output.splitlines() if "error: " in line)
    assert "Traceback" not in finished.output
