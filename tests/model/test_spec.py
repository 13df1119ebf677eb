"""The spec of each architecture against the layers that are built from its list, on any layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.command_lines import parse

from megatron.checkpoint.run_file import describe
from megatron.checkpoint.saved_layout import SavedLayout
from megatron.common.errors import ConfigError
from megatron.config import ModelConfig, RunConfig
from megatron.model.architectures import architecture_of
from megatron.model.huggingface import config_of, model_arguments, model_title
from megatron.tools.convert.written_config import write_config
from megatron.tools.inference.source import config_on
from megatron.training.summary import describe_config

LAYOUTS = [
    "",
    "--model-parallel-size 2",
    "--model-parallel-size 2 --sequence-parallel",
    "--pipe-parallel-size 3",
    "--pipe-parallel-size 2 --model-parallel-size 2 --pipeline-partition parameters",
    "--pipe-parallel-size 2 --pipeline-schedule dualpipev --gas 4",
]
EXPERTS = (
    "--pipe-parallel-size 2 --model-parallel-size 2 --num-experts 6 --moe-layer-freq 2 --moe-ffn-hidden-size 24"
    " --moe-shared-expert-intermediate-size 32"
)


def settled(words: str) -> RunConfig:
    run = parse(f"{words} --ffn-hidden-size 96 --max-position-embeddings 40", ranks=12)
    return replace(run, model=replace(run.model, vocab_size=100, padded_vocab_size=128, classes=("a", "b", "c")))


CLASSIC_T5 = (
    "--normalization LayerNorm --no-geglu --no-disable-bias-linear --position-embedding-type learned_absolute "
    "--no-untie-embeddings-and-output-weights"
)
LAYOUTS_OF_T5 = [
    "",
    "--model-parallel-size 2",
    "--pipe-parallel-size 3 --pipeline-model-parallel-split-rank 1",
    f"--pipe-parallel-size 2 --model-parallel-size 2 --pipeline-partition 5,2 {CLASSIC_T5}",
    f"--pipe-parallel-size 4 {CLASSIC_T5}",
]

LAYOUTS_OF_LLAVA = [
    "",
    "--model-parallel-size 2 --sequence-parallel --vision-encoder siglip --untie-embeddings-and-output-weights",
    "--pipe-parallel-size 3 --pipeline-partition 1,3,2",
]


@pytest.mark.parametrize(
    "program, words",
    [
        *((program, words) for program in ("", "bert", "classifier") for words in LAYOUTS),
        *(("t5", words) for words in LAYOUTS_OF_T5),
        *(("llava", words) for words in LAYOUTS_OF_LLAVA),
        *(("", f"{EXPERTS}{kind}") for kind in ("", " --swiglu --disable-bias-linear")),
    ],
)
def test_built_parameters_are_those_of_the_spec(program: str, words: str) -> None:
    """Names, shapes, sharded dimension and weight decay, on the first rank of each stage."""
    from support.built_stages import built_stage, fake_layout, first_rank_of_each_stage

    from megatron.engines.optimizers import weight_decay_groups

    run = settled(f"{program} {words}")
    t, seen = run.parallel.model_parallel_size, {}
    for rank in first_rank_of_each_stage(run.parallel):
        with fake_layout(run.parallel, rank) as layout:
            stage = built_stage(run, layout)
            decaying = {id(parameter) for parameter in weight_decay_groups(stage, run.model)[0]["params"]}
        for name, parameter in stage.named_parameters():
            dim, shape = getattr(parameter, "partition_dim", None), list(parameter.shape)
            if dim is not None:
                shape[dim] *= t
            assert not parameter.requires_grad or (id(parameter) in decaying) == (parameter.dim() > 1), name
            seen[name] = (tuple(shape), dim, parameter.dim() > 1)
    specs = architecture_of(run.model).named_parameters(run.model)
    assert seen == {name: (spec.shape, spec.shard_dim, spec.weight_decay) for name, spec in specs.items()}


@pytest.mark.parametrize("program", ["", "bert", "classifier", "t5", f"t5 {CLASSIC_T5}"])
@pytest.mark.ranks(1)
def test_parameters_are_in_the_order_of_the_layers(program: str) -> None:
    from support.whole_models import whole_model

    config = settled(program).model
    assert [name for name, _ in whole_model(config).named_parameters()] == list(
        architecture_of(config).named_parameters(config)
    )


def test_the_vocabulary_is_the_padded_dimension() -> None:
    for program in ("", "bert", "classifier", "t5"):
        run = settled(program)
        grown = replace(run.model, padded_vocab_size=256)
        specs, others = (architecture_of(model).named_parameters(model) for model in (run.model, grown))
        for name, spec in specs.items():
            assert spec.is_vocabulary == (spec.shape != others[name].shape)
            assert others[name].shape[0] == (256 if spec.is_vocabulary else spec.shape[0])


KEPT = [
    "--model-parallel-size 2",
    "--model-parallel-size 2 --sequence-parallel",
    "--model-parallel-size 2 --sequence-parallel --shape-order SBH --hidden-dropout 0.1",
]


@pytest.mark.parametrize("words", KEPT)
@pytest.mark.ranks(2)
def test_a_layer_keeps_the_activations_of_its_spec(words: str) -> None:
    """To the byte: what autograd keeps of a transformer layer is what the planner counts."""
    from support.saved_tensors import saved_bytes

    from megatron.model.transformer import ParallelTransformerLayer
    from megatron.parallel.layout import ParallelLayout
    from megatron.parallel.tensor.random import model_parallel_manual_seed
    from megatron.tools.planning.activations import activations

    run = settled(f"--batch-size 3 --hidden-dropout 0 --attention-dropout 0 {words}")
    layout = ParallelLayout.create(replace(run.parallel, world_size=2))
    model_parallel_manual_seed(1, layout)
    layer = ParallelTransformerLayer(run.model, layout, layer_number=1).train()
    shape = [run.train.micro_batch_size, run.data.seq_length // (2 if run.parallel.sequence_parallel else 1)]
    hidden = torch.randn(*shape[:: 1 if run.model.sequence_dim else -1], run.model.hidden_size, requires_grad=True)
    assert saved_bytes(lambda: layer(hidden), layer) == activations(run).layer


@pytest.mark.parametrize(("tokens", "shards"), [(64, 5), (9, 6), (1, 4), (100, None), (31, None), (32, None)])
def test_tiles_of_an_mlp_are_as_many_as_torch_makes(tokens: int, shards: int | None) -> None:
    """Of fewer DeepSpeed would wait for the last one, and never reduce the gradients; 9 tokens make no 6 parts."""
    config = ModelConfig(hidden_size=32, tiled_mlp=True, tiled_mlp_num_shards=shards or 0)
    tiles = config.mlp_tiles(tokens)
    assert len(torch.arange(tokens).chunk(tiles)) == tiles <= (shards or -(-tokens // 32))
    assert config.mlp_tiles(tokens) > 1 or tokens <= 32 and shards is None or tokens == 1


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model T6 is unknown \(known: GPT-2, BERT"):
        architecture_of(replace(settled("").model, architecture="T6"))


LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    " --untie-embeddings-and-output-weights"
)


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("", "GPT-2"),
        ("bert", "BERT"),
        ("t5", "T5"),
        (LLAMA, "Llama"),
        (f"{LLAMA} --pre-tokens 8", "Mistral"),
        (f"{LLAMA} --num-experts 4", "Mixtral"),
        ("--position-embedding-type rope", "GPT"),
    ],
)
def test_a_model_is_called_what_people_call_it(words: str, title: str) -> None:
    run = settled(words)
    assert describe_config(run)["model"].startswith(f"{title}, ")
    assert describe(run, 0)["model"] == title
    assert ", PP 1, " in str(SavedLayout.from_run(run))


@pytest.mark.parametrize(("length", "window"), [(8192, 65536), (65537, 65536), (65538, 131071), (131072, 131071)])
def test_the_default_window_limits_no_sequence(length: int, window: int) -> None:
    words = f"{LLAMA} --seq-length {length} --max-position-embeddings 131072"
    model = parse(words).model
    assert (model.pre_tokens, model_title(model)) == (window, "Llama")
    assert parse(f"{words} --pre-tokens 65536").model.pre_tokens == 65536


@pytest.mark.parametrize("length", [8192, 131072])
def test_the_number_of_the_default_is_a_window_if_it_is_given(length: int) -> None:
    words = f"{LLAMA} --seq-length {length} --max-position-embeddings 131072 --pre-tokens 65536"
    model = parse(words).model
    assert (model_title(model), config_on(model, 1, "fp32").pre_tokens) == ("Mistral", 65536)
    tree = write_config(replace(model, vocab_size=100), "float32")
    assert tree["sliding_window"] == 65537
    read = config_of(tree, Path("config.json"))
    assert read.has_window and "--pre-tokens" in model_arguments(read)
