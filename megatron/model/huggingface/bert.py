"""BERT in Hugging Face's format ``megatron-bert``: config.json to and from a ModelConfig, and its weights. No torch.

Its layer norms are in front of attention and MLP, as ours; those of the network that is called ``bert`` are after both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import ModelConfig
from megatron.model.architectures import BERT, CLASSIFIER
from megatron.model.huggingface.values import (
    GELU_KINDS,
    Shapes,
    gelu_name,
    gelu_problems,
    our_parameters,
    read_values,
    vocabulary_problems,
)

MODEL_TYPE = "megatron-bert"
CLASS_NAMES = {BERT.name: "MegatronBertForPreTraining", CLASSIFIER.name: "MegatronBertForSequenceClassification"}
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Names that files may have besides, to the weights that they repeat."""

_SIZES = {
    "num_layers": ("num_hidden_layers", 24),
    "hidden_size": ("hidden_size", 1024),
    "ffn_hidden_size": ("intermediate_size", 4096),
    "num_attention_heads": ("num_attention_heads", 16),
    "max_position_embeddings": ("max_position_embeddings", 512),
    "vocab_size": ("vocab_size", 29056),
}
_NUMBERS = {
    "layernorm_epsilon": ("layer_norm_eps", 1e-12),
    "hidden_dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "init_method_std": ("initializer_range", 0.02),
}
_FIXED = {
    "model_type": MODEL_TYPE,
    "type_vocab_size": 2,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def read_config(tree: Mapping[str, Any], path: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The model that the config.json at ``path`` describes; with ``vocab_size``, that of its tokenizer.

    Raises CheckpointError with a line for each setting that is wrong or not supported.
    """
    fixed = _FIXED | {"architectures": [CLASS_NAMES[BERT.name]], "position_embedding_type": "absolute"}
    values, problems = read_values(tree, _SIZES, _NUMBERS, fixed)
    activation = tree.get("hidden_act", "gelu")
    problems += gelu_problems("hidden_act", activation)
    if not problems and values["hidden_size"] % values["num_attention_heads"]:
        problems.append(
            f"hidden_size {values['hidden_size']} is not a multiple of num_attention_heads "
            f"{values['num_attention_heads']}"
        )
    problems = problems or vocabulary_problems(values["vocab_size"], vocab_size)
    if problems:
        raise CheckpointError(f"{path}: {problem}" for problem in problems)
    values["vocab_size"] = vocab_size or values["vocab_size"]
    return ModelConfig(
        **values,
        architecture=BERT.name,
        padded_vocab_size=values["vocab_size"],
        openai_gelu=GELU_KINDS[activation],
    )


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of ``config`` with weights of ``dtype`` (such as float32).

    Raises ConfigError with a line for each setting that Hugging Face's Megatron-BERT does not have.
    """
    problems = {
        "heads of another size than hidden size / heads": config.head_size * config.num_attention_heads
        != config.hidden_size,
        "--apply-residual-connection-post-layernorm, so its residual is taken after the norm": (
            config.apply_residual_connection_post_layernorm
        ),
    }
    if any(problems.values()):
        raise ConfigError(
            f"the model was trained with {problem}; Hugging Face's Megatron-BERT does not support that; use merge"
            for problem, is_there in problems.items()
            if is_there
        )
    labels = dict(enumerate(config.classes))
    return {
        "architectures": [CLASS_NAMES[config.architecture]],
        **_FIXED,
        **{name: getattr(config, field) for field, (name, _) in {**_SIZES, **_NUMBERS}.items()},
        "hidden_act": gelu_name(config),
        **({"id2label": labels, "label2id": {label: n for n, label in labels.items()}} if labels else {}),
        "torch_dtype": dtype,
    }


_LAYER = {
    "input_layernorm": ("attention.ln",),
    "attention.query_key_value": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.dense": ("attention.output.dense",),
    "post_attention_layernorm": ("ln",),
    "mlp.dense_h_to_4h": ("intermediate.dense",),
    "mlp.dense_4h_to_h": ("output.dense",),
}
_OTHERS = {
    "word_embeddings": "bert.embeddings.word_embeddings",
    "tokentype_embeddings": "bert.embeddings.token_type_embeddings",
    "position_embeddings": "bert.embeddings.position_embeddings",
    "": "bert.encoder.ln",
    "pooler": "bert.pooler.dense",
    "dense": "cls.predictions.transform.dense",
    "layernorm": "cls.predictions.transform.LayerNorm",
    "order": "cls.seq_relationship",
    "classifier": "classifier",
}
"""Names of the modules outside the blocks, in their layers, to Hugging Face's."""


def source_shapes(config: ModelConfig) -> Shapes:
    """Our name of each weight, in the order of the layers, to name and shape of the tensors that it consists of.

    Queries, keys and values are one weight of ours.
    """
    sources: Shapes = {}
    for ours, block, layer, parameter in our_parameters(config):
        module, _, kind = parameter.name.rpartition(".")
        if layer.is_block:
            names = [f"bert.encoder.layer.{block}.{name}.{kind}" for name in _LAYER[module]]
        else:
            names = ["cls.predictions.bias" if kind == "word_bias" else f"{_OTHERS[module]}.{kind}"]
        sources[ours] = dict.fromkeys(names, (parameter.shape[0] // len(names), *parameter.shape[1:]))
    return sources
