"""Command lines of pretrain_t5.py: what they stand for, and what is refused."""

from dataclasses import replace

import pytest
from support.command_lines import CPU, SMALL_BERT, parse

from megatron.cli import read_run
from megatron.model.architectures import T5, architecture_of
from megatron.model.partition import layers_per_chunk, partition_boundaries, plan
from megatron.model.spec import model_flops


def test_the_default_is_t5_1_1_and_flags_change_it():
    model = parse("t5").model
    assert (model.num_layers, model.encoder_num_layers, model.decoder_num_layers) == (7, 4, 3)
    assert (model.normalization, model.position_embedding_type, model.layernorm_epsilon) == (
        "RMSNorm",
        "relative",
        1e-6,
    )
    assert model.geglu and model.openai_gelu and not model.linear_bias and model.untie_embeddings_and_output_weights
    assert model.ffn_hidden_size == 128, "two thirds of 4 x 64, in multiples of 64"
    classic = parse("t5 --no-geglu --normalization LayerNorm --no-disable-bias-linear").model
    assert classic.linear_bias and not classic.geglu and classic.openai_gelu and classic.ffn_hidden_size == 256
    assert parse("t5 --encoder-num-layers 4 --encoder-seq-length 32").model == model, "Megatron-LM's names"


@pytest.mark.parametrize("stages, split", [(stages, split) for stages in (2, 4) for split in range(1, stages)])
def test_the_split_divides_the_stages(stages: int, split: int):
    """At every rank; what stands between encoder and decoder is with the first layer of the decoder."""
    words = f"t5 --pipe-parallel-size {stages} --pipeline-model-parallel-split-rank {split}"
    run = parse(words, ranks=stages)
    names = [{layer.class_name for layer in stage.layers} for stage in plan(run)]
    encoder, decoder = "EncoderParallelTransformerLayer", "DecoderParallelTransformerLayer"
    assert [encoder in held for held in names] == [True] * split + [False] * (stages - split)
    assert [decoder in held for held in names] == [False] * split + [True] * (stages - split)
    assert "EncoderNorm" in names[split] and sum(layers_per_chunk(run)) == 7
    ends = partition_boundaries(layers_per_chunk(run), run.model)
    layers = architecture_of(run.model).layers(run.model)
    assert ends[-1] == len(layers) and layers[ends[split]].class_name == "EncoderNorm"


def test_flops_count_both_sequences():
    """Of encoder and decoder by hand: 2 for each weight and token, 4 for each column, token and attended token."""
    run = parse("t5 --num-layers 1 --decoder-num-layers 1")
    h, f, s, r = 64, 128, 32, 16
    vocabulary = run.model.padded_vocab_size
    encoder = s * (2 * (4 * h * h + 3 * h * f) + 4 * s * h)
    decoder = r * (2 * (6 * h * h + 3 * h * f) + 4 * (r + s) * h) + s * 4 * h * h
    assert model_flops(run) == 3 * 2 * (encoder + decoder + r * 2 * h * vocabulary)


def test_a_decoder_needs_an_encoder():
    given = f"{SMALL_BERT} --decoder-num-layers 4".replace("--num-layers 4 ", "", 1)
    problems = read_run(given.split(), CPU, T5).problems
    assert {"--num-layers is required", "--decoder-seq-length is required"} <= set(problems)


@pytest.mark.parametrize(
    "layers, hidden, heads, ffn, parameters",
    [(8, 512, 6, 1024, 76_961_152), (12, 768, 12, 2048, 247_577_856), (24, 4096, 64, 10240, 11_135_332_352)],
)
def test_parameters_are_those_of_the_published_models(layers: int, hidden: int, heads: int, ffn: int, parameters: int):
    """google/t5-v1_1-small, -base and -xxl."""
    sizes = f"--hidden-size {hidden} --num-attention-heads {heads} --kv-channels 64 --ffn-hidden-size {ffn}"
    model = parse(f"t5 --num-layers {layers} --decoder-num-layers {layers} {sizes}").model
    model = replace(model, vocab_size=32128, padded_vocab_size=32128)
    names = architecture_of(model).named_parameters(model)
    assert sum(parameter.numel for parameter in names.values()) == parameters
