"""BERT against the same network of transformers, and what its attention and its loss see."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.whole_models import whole_model
from torch.testing import assert_close

from megatron.config import ModelConfig
from megatron.engines.containers import SequentialModel
from megatron.model.architectures import BERT, CLASSIFIER
from megatron.tools.convert.full_model import FullModel, without_padding
from megatron.tools.convert.load_and_save import read_huggingface, write_huggingface
from megatron.tools.convert.their_weights import their_weights

CONFIG = ModelConfig(
    architecture=BERT.name, num_layers=3, hidden_size=16, ffn_hidden_size=48, num_attention_heads=4,
    max_position_embeddings=12, vocab_size=21, padded_vocab_size=24, attention_dropout=0.0, hidden_dropout=0.0,
    init_method_std=0.3,
)  # fmt: skip
TOKENS = torch.randint(1, 21, (2, 12), generator=torch.Generator().manual_seed(2))
SEGMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 4 + [1] * 3 + [-1] * 5])
INPUTS = torch.stack([TOKENS, SEGMENTS], 1)
REAL = SEGMENTS >= 0
TARGETS = (TOKENS.roll(3, 1), REAL / REAL.sum(), torch.tensor([1, 0]))


def _bert(config: ModelConfig = CONFIG) -> SequentialModel:
    model = whole_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # none shall be mistaken for another
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 5)
    return model


@pytest.mark.ranks(1)
def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """MegatronBertForPreTraining is the network with its norms in front, as Megatron trained it."""
    for tanh in (False, True):
        compare_pretraining(replace(CONFIG, openai_gelu=tanh), tmp_path / str(tanh))


def compare_pretraining(config: ModelConfig, folder: Path):
    ours = _bert(config)
    theirs = exported(ours, config, folder)
    mask, types = REAL.long(), SEGMENTS.clamp(min=0)
    logits, order = ours(INPUTS)
    expected = theirs(TOKENS, attention_mask=mask, token_type_ids=types)
    assert_close(logits[REAL][:, :21], expected.prediction_logits[REAL], atol=1e-5, rtol=0)
    assert_close(order, expected.seq_relationship_logits, atol=1e-5, rtol=0)

    loss = ours(INPUTS, TARGETS)
    loss.backward()
    labels = TARGETS[0].masked_fill(~REAL, -100)
    their_loss = theirs(
        TOKENS, attention_mask=mask, token_type_ids=types, labels=labels, next_sentence_label=TARGETS[2]
    ).loss
    assert_close(loss, their_loss)
    their_loss.backward()
    compare_gradients(ours, theirs, config)


@pytest.mark.ranks(1)
def test_a_classifier_is_that_of_transformers(tmp_path: Path) -> None:
    config = replace(CONFIG, architecture=CLASSIFIER.name, classes=("a", "b", "c"))
    ours = _bert(config)
    theirs = exported(ours, config, tmp_path / "hf")
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c"}
    mask, types, labels = REAL.long(), SEGMENTS.clamp(min=0), torch.tensor([2, 0])
    expected = theirs(TOKENS, attention_mask=mask, token_type_ids=types, labels=labels)
    assert_close(ours(INPUTS), expected.logits)
    loss = ours(INPUTS, (labels, torch.tensor([0.5, 0.5])))
    assert_close(loss, expected.loss)
    loss.backward()
    expected.loss.backward()
    compare_gradients(ours, theirs, config)


def exported(ours: SequentialModel, config: ModelConfig, folder: Path) -> torch.nn.Module:
    """transformers' model of the folder that to-hf would write, in evaluation mode."""
    import transformers

    whole = replace(config, padded_vocab_size=config.vocab_size)
    weights = without_padding({name: one.detach() for name, one in ours.named_parameters()}, whole)
    write_huggingface(folder, FullModel(whole, weights), None, max_shard_size=20_000, carried={})
    (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    theirs, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    if config.architecture == BERT.name:
        again = read_huggingface(folder)
        assert again.config == replace(whole, attention_dropout=0, hidden_dropout=0)
        assert all(again.weights[name].equal(weights[name]) for name in weights)
    return theirs.eval()


def compare_gradients(ours: SequentialModel, theirs: torch.nn.Module, config: ModelConfig):
    """Every parameter has the gradient that transformers computes."""
    whole = replace(config, padded_vocab_size=config.vocab_size)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    renamed = their_weights(without_padding(gradients, whole), whole)
    assert len(renamed) == len(list(theirs.named_parameters()))
    for name, gradient in renamed.items():
        assert_close(gradient, theirs.get_parameter(name).grad)
