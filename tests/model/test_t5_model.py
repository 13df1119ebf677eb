"""T5 against the same network of transformers, and what its attention sees."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.whole_models import whole_model
from torch import Tensor
from torch.testing import assert_close

from megatron.config import ModelConfig
from megatron.engines.containers import SequentialModel
from megatron.model.architectures import T5
from megatron.tools.convert.full_model import FullModel, without_padding
from megatron.tools.convert.load_and_save import read_huggingface, write_huggingface
from megatron.tools.convert.their_weights import their_weights
from megatron.tools.inference.batches import TextToTextBatch
from megatron.tools.inference.model import LanguageModel

CONFIG = ModelConfig(
    architecture=T5.name, num_layers=5, encoder_num_layers=2, decoder_num_layers=3, hidden_size=16, ffn_hidden_size=24,
    num_attention_heads=4, kv_channels=6, encoder_seq_length=12, decoder_seq_length=7, max_position_embeddings=12,
    vocab_size=21, padded_vocab_size=24, decoder_start_token=0, eod_token=1, attention_dropout=0.0, hidden_dropout=0.0,
    init_method_std=0.2, normalization="RMSNorm", layernorm_epsilon=1e-6, position_embedding_type="relative",
    relative_attention_num_buckets=8, relative_attention_max_distance=10, geglu=True, openai_gelu=True,
    disable_bias_linear=True, untie_embeddings_and_output_weights=True,
)  # fmt: skip
CLASSIC = replace(
    CONFIG, normalization="LayerNorm", position_embedding_type="learned_absolute", geglu=False, openai_gelu=False,
    disable_bias_linear=False, untie_embeddings_and_output_weights=False,
)  # fmt: skip
TEXTS = torch.randint(1, 21, (2, 12), generator=torch.Generator().manual_seed(2))
TEXTS[1, 8:] = -1
TARGETS = torch.randint(1, 21, (2, 7), generator=torch.Generator().manual_seed(3))
INPUTS = torch.cat([TEXTS, torch.cat([torch.zeros(2, 1), TARGETS[:, :-1]], 1)], 1).long()
WEIGHTS = torch.full((2, 7), 1 / 14)


@pytest.mark.ranks(1)
def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """T5 1.1, whose encoder and decoder differ in depth, with an inner size that is not hidden / heads."""
    ours, whole = whole_model(CONFIG), replace(CONFIG, padded_vocab_size=CONFIG.vocab_size)
    theirs = exported(ours, whole, tmp_path / "hf")
    output = theirs(TEXTS.clamp(min=0), attention_mask=(TEXTS >= 0).long(), labels=TARGETS)
    assert_close(ours(INPUTS)[..., :21], output.logits, rtol=1e-5, atol=1e-5)
    loss = ours(INPUTS, (TARGETS, WEIGHTS))
    assert_close(loss, output.loss)
    loss.backward()
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    renamed = their_weights(without_padding(gradients, whole), whole)
    assert renamed.keys() == dict(theirs.named_parameters()).keys()
    for name, gradient in renamed.items():
        expected = theirs.get_parameter(name).grad
        assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name

    generates_as_transformers(ours.eval(), theirs)


def generates_as_transformers(ours: SequentialModel, theirs: torch.nn.Module):
    """50 tokens of texts of different lengths, with keys and values cached, and computed again for each token."""
    texts = [[*TEXTS[0].tolist(), 1], [*TEXTS[1, :5].tolist(), 1]]
    given = torch.tensor([texts[0], [*texts[1], *[0] * (len(texts[0]) - len(texts[1]))]])
    expected = theirs.generate(
        given, attention_mask=torch.arange(given.size(1)) < torch.tensor([[len(text)] for text in texts]),
        max_new_tokens=50, do_sample=False, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    model = LanguageModel(ours, CONFIG, torch.distributed.group.WORLD)
    for use_cache in (True, False):
        batch = TextToTextBatch(model, texts, use_cache=use_cache)
        for _ in range(50):
            batch.append(batch.logits.argmax(-1).tolist())
        assert batch.sequences == expected.tolist()
    batch.select([1, 1, 0])
    assert batch.sequences == expected[[1, 1, 0]].tolist()


def exported(ours: SequentialModel, whole: ModelConfig, folder: Path) -> torch.nn.Module:
    """transformers' model of the folder that to-hf would write, in evaluation mode; from-hf reads the same again."""
    import transformers

    weights = without_padding({name: one.detach() for name, one in ours.named_parameters()}, whole)
    write_huggingface(folder, FullModel(whole, weights), None, max_shard_size=20_000, carried={})
    theirs, report = transformers.T5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    again = read_huggingface(folder)
    lengths = {"encoder_seq_length": 512, "decoder_seq_length": 512, "max_position_embeddings": 512}
    assert again.config == replace(whole, init_method_std=0.02, **lengths)
    assert again.weights.keys() == weights.keys() and all(again.weights[name].equal(weights[name]) for name in weights)
    return theirs.eval()


@pytest.mark.ranks(1)
def test_initial_weights_are_scaled_by_the_depth_of_the_encoder() -> None:
    """As in Megatron-LM: 0.02 / sqrt(2 x 2) with 2 layers of the encoder and 3 of the decoder."""
    model = whole_model(replace(CONFIG, hidden_size=64, ffn_hidden_size=256, init_method_std=0.02))
    found = {n: p.std().item() for n, p in model.named_parameters() if n.endswith(("4h_to_h.weight", ".dense.weight"))}
    assert len(found) == 2 * 2 + 3 * 3
    assert list(found.values()) == pytest.approx([0.01] * len(found), rel=0.1)


@pytest.mark.ranks(1)
def test_tokens_of_a_classic_t5_see_the_text_and_earlier_tokens() -> None:
    model = whole_model(CLASSIC)
    logits = model(INPUTS)

    def changed(row: int, column: int) -> Tensor:
        others = INPUTS.clone()
        others[row, column] = others[row, column] % 20 + 1
        return (model(others) - logits).abs().amax(-1) > 1e-5

    assert changed(0, 11)[0].all(), "the first token sees the end of the text"
    assert not changed(0, 11)[1].any()
    assert changed(0, 15).tolist() == [[False] * 3 + [True] * 4, [False] * 7], "tokens see earlier ones only"
    shorter = INPUTS[1:, [*range(8), *range(12, 19)]]
    assert_close(model(shorter), logits[1:], msg="padding is not seen")
