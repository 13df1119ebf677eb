"""BERT against the same network of transformers, and what its attention and its loss see."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.model.architectures import BERT, CLASSIFIER, architecture_of
from megatron.model.containers import SequentialModel
from megatron.mpu import ParallelLayout
from megatron.training.optimizers import weight_decay_groups

CONFIG = ModelConfig(
    architecture=BERT.name,
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=48,
    num_attention_heads=4,
    max_position_embeddings=12,
    vocab_size=21,
    padded_vocab_size=24,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.3,
)
TOKENS = torch.randint(1, 21, (2, 12), generator=torch.Generator().manual_seed(2))
SEGMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 4 + [1] * 3 + [-1] * 5])
INPUTS = torch.stack([TOKENS, SEGMENTS], 1)
REAL = SEGMENTS >= 0
TARGETS = (TOKENS.roll(3, 1), REAL / REAL.sum(), torch.tensor([1, 0]))


def _bert(config: ModelConfig = CONFIG) -> SequentialModel:
    layout, spec = ParallelLayout.create(ParallelConfig(world_size=1)), architecture_of(config)
    model = SequentialModel(spec.build_layers(config, layout), spec.build_loss(config, layout), ActivationConfig())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # none shall be mistaken for another
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 5)
    return model


def test_logits_and_gradients_are_those_of_transformers(run_ranks):
    run_ranks(1, equals_transformers)


def equals_transformers():
    """MegatronBertForPreTraining is the network with its norms in front, as Megatron trained it."""
    ours = _bert()
    theirs = their_model(ours, CONFIG)
    mask, types = REAL.long(), SEGMENTS.clamp(min=0)
    logits, order = ours(INPUTS)
    expected = theirs(TOKENS, attention_mask=mask, token_type_ids=types)
    assert_close(logits[REAL][:, :21], expected.prediction_logits[REAL])
    assert_close(order, expected.seq_relationship_logits)

    ours(INPUTS, TARGETS).backward()
    labels = TARGETS[0].masked_fill(~REAL, -100)
    loss = theirs(TOKENS, attention_mask=mask, token_type_ids=types, labels=labels, next_sentence_label=TARGETS[2]).loss
    assert_close(ours(INPUTS, TARGETS), loss)
    loss.backward()
    table = ours.get_parameter("tied_modules.embed.word_embeddings.weight")
    assert_close(table.grad[:21], theirs.bert.embeddings.word_embeddings.weight.grad)
    assert_close(ours.get_parameter("1.tokentype_embeddings.weight").grad,
                 theirs.bert.embeddings.token_type_embeddings.weight.grad)  # fmt: skip


def test_a_classifier_is_that_of_transformers(run_ranks):
    run_ranks(1, classifier_equals_transformers)


def classifier_equals_transformers():
    config = replace(CONFIG, architecture=CLASSIFIER.name, classes=("a", "b", "c"))
    ours = _bert(config)
    theirs = their_model(ours, config, "MegatronBertForSequenceClassification", num_labels=3)
    mask, types, labels = REAL.long(), SEGMENTS.clamp(min=0), torch.tensor([2, 0])
    expected = theirs(TOKENS, attention_mask=mask, token_type_ids=types, labels=labels)
    assert_close(ours(INPUTS), expected.logits)
    loss = ours(INPUTS, (labels, torch.tensor([0.5, 0.5])))
    assert_close(loss, expected.loss)
    loss.backward()
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    for name, gradient in renamed(gradients, config).items():
        assert_close(gradient, theirs.get_parameter(name).grad)


def their_model(
    ours: SequentialModel, config: ModelConfig, kind: str = "MegatronBertForPreTraining", **head: int
) -> torch.nn.Module:
    """transformers' model of a ``kind`` with our weights."""
    import transformers

    theirs = getattr(transformers, kind)(
        transformers.MegatronBertConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads, intermediate_size=config.ffn_hidden_size,
            max_position_embeddings=config.max_position_embeddings, layer_norm_eps=config.layernorm_epsilon,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **head,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(renamed(dict(ours.named_parameters()), config)[name])
    return theirs


def renamed(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our weights, or their gradients, under the names of transformers."""
    heads, last, v = config.num_attention_heads, config.num_layers + 3, config.vocab_size
    pairs = {
        "bert.embeddings.word_embeddings.weight": weights["tied_modules.embed.word_embeddings.weight"][:v],
        "bert.embeddings.token_type_embeddings.weight": weights["1.tokentype_embeddings.weight"],
        "bert.embeddings.position_embeddings.weight": weights["2.position_embeddings.weight"],
    }
    if f"{last + 4}.word_bias" in weights:
        pairs["cls.predictions.bias"] = weights[f"{last + 4}.word_bias"][:v]
    names = {f"{last + 1}": "bert.encoder.ln", f"{last + 2}.dense": "cls.predictions.transform.dense",
             f"{last + 2}.layernorm": "cls.predictions.transform.LayerNorm", f"{last + 2}.pooler": "bert.pooler.dense",
             f"{last + 2}.order": "cls.seq_relationship", f"{last + 2}.classifier": "classifier"}  # fmt: skip
    for n in range(config.num_layers):
        layer = f"bert.encoder.layer.{n}."
        names |= {f"{n + 3}.input_layernorm": f"{layer}attention.ln", f"{n + 3}.post_attention_layernorm": f"{layer}ln",
                  f"{n + 3}.attention.dense": f"{layer}attention.output.dense",
                  f"{n + 3}.mlp.dense_h_to_4h": f"{layer}intermediate.dense",
                  f"{n + 3}.mlp.dense_4h_to_h": f"{layer}output.dense"}  # fmt: skip
        for end in ("weight", "bias"):
            rows = weights[f"{n + 3}.attention.query_key_value.{end}"].unflatten(0, (heads, 3, -1)).unbind(1)
            for part, row in zip(("query", "key", "value"), rows, strict=True):
                pairs[f"{layer}attention.self.{part}.{end}"] = row.flatten(0, 1)
    return pairs | {
        f"{theirs}.{end}": weights[f"{ours}.{end}"]
        for ours, theirs in names.items()
        for end in ("weight", "bias")
        if f"{ours}.{end}" in weights
    }


def test_bert_attends_to_the_future_but_not_to_padding(run_ranks):
    run_ranks(1, padding_is_not_seen)


def padding_is_not_seen():
    for config in (CONFIG, replace(CONFIG, attention_softmax_in_fp32=True, shape_order="SBH")):
        model = _bert(config)
        logits, order = model(INPUTS)
        changed = INPUTS.clone()
        changed[1, 0, 7:] = 3  # what pads the second sample
        others, other_order = model(changed)
        assert_close(others[REAL], logits[REAL])
        assert_close(other_order, order)
        changed = INPUTS.clone()
        changed[0, 0, -1] = (changed[0, 0, -1] + 1) % 21
        others, other_order = model(changed)
        assert (others[0, 0] - logits[0, 0]).abs().max() > 1e-3, "the first token sees the last"
        assert_close(others[1], logits[1])


def test_biases_and_norms_have_no_weight_decay(run_ranks):
    run_ranks(1, weight_decay)


def weight_decay():
    decayed, spared = weight_decay_groups(_bert(), CONFIG)
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in spared["params"]} == {1}


def test_loss_is_the_sum_of_both_tasks(run_ranks):
    run_ranks(1, both_losses)


def both_losses():
    model = _bert()
    logits, order = model(INPUTS)
    labels, weights, swapped = TARGETS
    words = (
        F.cross_entropy(logits[..., :21].flatten(0, 1), labels.flatten(), reduction="none") * weights.flatten()
    ).sum()
    assert_close(model(INPUTS, TARGETS), words + F.cross_entropy(order, swapped))
    assert_close(model.loss_fn.parts, {"masked_lm_loss": words, "sop_loss": F.cross_entropy(order, swapped)})
    nothing_hidden = (labels, torch.zeros_like(weights), swapped)
    assert_close(model(INPUTS, nothing_hidden), F.cross_entropy(order, swapped))
