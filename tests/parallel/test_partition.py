"""How the model is cut into stages: the arithmetic by itself, and against the model that is built."""

import os
from dataclasses import replace
from itertools import combinations

import pytest
from support.command_lines import parse

from megatron.config import RunConfig
from megatron.model.partition import (
    balanced,
    inputs_in_flight,
    layers_per_chunk,
    plan,
)
from megatron.model.spec import model_flops


def best_by_trial(weights: list[int], parts: int) -> tuple[int, int]:
    """The lightest heaviest run of all ways to cut, and with it the least sum of squares."""
    found = []
    for cuts in combinations(range(1, len(weights)), parts - 1):
        ends = [0, *cuts, len(weights)]
        runs = [sum(weights[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)]
        found.append((max(runs), sum(run * run for run in runs)))
    return min(found)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("weights", [[1] * 7, [0, 1, 1, 1, 1, 1, 0], [9, 2, 2, 2, 2, 2, 14], [0, 5, 5, 5, 5, 5, 31]])
def test_partition_is_optimal(weights: list[int], parts: int) -> None:
    lengths = balanced(weights, parts)
    assert len(lengths) == parts and sum(lengths) == len(weights) and min(lengths) > 0
    ends = [sum(lengths[:n]) for n in range(parts + 1)]
    runs = [sum(weights[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)]
    assert (max(runs), sum(run * run for run in runs)) == best_by_trial(weights, parts)


@pytest.mark.parametrize(
    "words, stages, layers",
    [
        ("", 2, (2, 2)),
        ("", 3, (2, 1, 1)),
        ("", 4, (1, 1, 1, 1)),
        ("--pipeline-partition 1,3", 2, (1, 3)),
        ("--pipeline-partition 0,4,0", 3, (0, 4, 0)),
        ("--pipeline-partition type:transformer", 2, (2, 2)),
        ("--pipeline-partition uniform", 3, (1, 2, 1)),
        ("--pipeline-partition uniform", 5, (1, 1, 1, 1, 0)),
        ("--pipeline-partition parameters --num-layers 12", 2, (6, 6)),
        ("--pipeline-schedule dualpipev --gas 4", 2, (1, 1, 1, 1)),
        ("--pipeline-schedule dualpipev --gas 4 --pipeline-partition 2,1,1,0", 2, (2, 1, 1, 0)),
    ],
)
def test_layers_of_stages(words: str, stages: int, layers: tuple[int, ...]) -> None:
    assert layers_per_chunk(parse(f"--pipe-parallel-size {stages} {words}", ranks=stages)) == layers


def test_large_vocabulary_changes_the_partition() -> None:
    """Parameters are at both ends, since each has the table; operations are the head's."""
    run = parse("--pipe-parallel-size 4 --num-layers 12", ranks=4)
    model = replace(run.model, vocab_size=3000, padded_vocab_size=3000)
    cut = {
        method: layers_per_chunk(replace(run, model=model, parallel=replace(run.parallel, pipeline_partition=method)))
        for method in ("parameters", "flops")
    }
    assert cut["parameters"][0] == cut["parameters"][-1] < cut["parameters"][1]
    assert cut["flops"][0] == cut["flops"][1] > cut["flops"][-1]


def test_kept_inputs_have_enough_buffers() -> None:
    """DeepSpeed's one buffer has a slot for each transformer layer that was run forward before the first backward."""
    for words, slots in [("", 4), ("--pipeline-partition 3,1", 6), ("--pipeline-partition 1,3", 3)]:
        assert inputs_in_flight(parse(f"--pipe-parallel-size 2 {words}", ranks=2)) == slots
    assert inputs_in_flight(parse("--pipe-parallel-size 2 --pipeline-schedule dualpipev --gas 4", ranks=2)) == 5
    words = "--checkpoint-activations --partition-activations --contigious-checkpointing --pipeline-partition 3,1"
    run = parse(f"--pipe-parallel-size 2 {words}", ranks=2)
    assert run.ds_config["activation_checkpointing"]["number_checkpoints"] == 6


def tiny(schedule: str, partition: str, program: str = "") -> RunConfig:
    """A run on two stages with the vocabulary at hand."""
    run = parse(
        f"{program} --pipe-parallel-size 2 --gas 4 --hidden-size 16 --ffn-hidden-size 48 "
        f"--pipeline-schedule {schedule} --pipeline-partition {partition}",
        ranks=2,
    )
    return replace(run, model=replace(run.model, vocab_size=21, padded_vocab_size=24))


@pytest.mark.parametrize(
    "schedule, partition",
    [("1f1b", "flops"), ("1f1b", "3,1"), ("dualpipev", "parameters"), ("dualpipev", "0,1,1,2")],
)
@pytest.mark.parametrize("program", ["", "bert"])
@pytest.mark.ranks(2)
def test_built_stages_equal_the_plan(schedule: str, partition: str, program: str) -> None:
    """The pieces of a rank's stage, by what is in it, and its parameters."""
    from megatron.engines.build import build_module
    from megatron.model.embedding import WordEmbedding
    from megatron.model.transformer import ParallelTransformerLayer
    from megatron.parallel.layout import ParallelLayout

    run = tiny(schedule, partition, program)
    module = build_module(run, ParallelLayout.create(run.parallel))
    pieces = []
    for functions in getattr(module, "_layers_of_chunks", [module.forward_funcs]):
        units = [layer.layer_number for layer in functions if isinstance(layer, ParallelTransformerLayer)]
        if isinstance(functions[0], WordEmbedding):
            units = [0, *units]
        if any(getattr(function, "func", None) is not None for function in functions):
            units.append(run.model.num_layers + 1)
        pieces.append(range(units[0], units[-1] + 1))
        assert units == list(pieces[-1])
    planned = plan(run)[int(os.environ["RANK"])]
    assert tuple(pieces) == planned.chunks
    assert sum(parameter.numel() for parameter in module.parameters()) == planned.parameters


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.ranks(1)
def test_flops_equal_those_of_the_flop_counter(lora_rank: int) -> None:
    """By torch's own counter, which knows matrix products and attention: of a forward pass, and of an iteration."""
    import torch
    from support.whole_models import whole_model
    from torch.utils.flop_counter import FlopCounterMode

    from megatron.engines.build import freeze

    run = tiny("1f1b", "uniform")
    run = replace(run, model=replace(run.model, lora_rank=lora_rank, attention_dropout=0.0, hidden_dropout=0.0))
    softmax_by_steps = replace(run.model, attention_softmax_in_fp32=True)  # products that the counter sees
    model = whole_model(softmax_by_steps)
    tokens = torch.zeros(1, run.data.seq_length).long()
    with FlopCounterMode(display=False) as forward:
        model.eval()(tokens)
    if run.model.lora_rank:
        freeze(model, run.model)
    with FlopCounterMode(display=False) as iteration:
        model.train()(tokens, (tokens, torch.ones_like(tokens).float())).backward()
    planned = sum(stage.flops(run.data.seq_length) for stage in plan(run)) * run.data.seq_length
    assert planned == forward.get_total_flops()
    assert model_flops(run) / run.train.global_batch_size == iteration.get_total_flops()
