"""Models of the Llama family against Hugging Face's: the same logits, and the same gradient of every weight."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.checkpoint.huggingface import joined
from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.config.model import padded_vocabulary
from megatron.engines.containers import sequential_model
from megatron.model.huggingface import config_of as read_config
from megatron.model.huggingface import source_shapes
from megatron.model.huggingface.llama import family_of
from megatron.model.rotary import frequencies, rotation_tables
from megatron.parallel.layout import ParallelLayout
from megatron.tools.convert.full_model import FullModel
from megatron.tools.convert.inspection import find
from megatron.tools.convert.inspection import read_config as read_checkpoint_config
from megatron.tools.convert.load_and_save import write_checkpoint
from megatron.tools.convert.their_weights import divided
from megatron.tools.convert.written_config import write_config
from megatron.tools.inference.batches import DecodingBatch
from megatron.tools.inference.model import LanguageModel, load_model
from megatron.tools.inference.source import Source

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 53,
    "max_position_embeddings": 64, "initializer_range": 0.2, "eos_token_id": 4,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": {"num_key_value_heads": 4, "rope_parameters": LLAMA3},
    "llama with biases": {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 2, "head_dim": 6, "sliding_window": 7},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
    },
    "llama linear": {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "llama yarn": {"num_key_value_heads": 4, "head_dim": 8, "rope_parameters": YARN},
}
TOKENS = torch.randint(0, 53, (2, 24), generator=torch.Generator().manual_seed(1))


def hugging_face(name: str) -> torch.nn.Module:
    """A small random model in fp32, its norms and biases random, too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = name.split()[0]
    settings = {**SIZES, "tie_word_embeddings": False, **MODELS[name]}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if parameter.mean() > 0.5 else 0.0, 0.3)
    return model.float().train()


class Reference(NamedTuple):
    """What Hugging Face's model computes of TOKENS, in our names: the logits, and the gradient of every weight."""

    config: ModelConfig
    weights: dict[str, Tensor]
    logits: Tensor
    gradients: dict[str, Tensor]


def _reference(name: str) -> Reference:
    model = hugging_face(name)
    config = replace(read_config(model.config.to_dict(), Path("config.json")), attention_dropout=0.0)
    logits = model(TOKENS).logits
    F.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten()).backward()
    state = _with_experts_apart({key: (one.detach(), one.grad) for key, one in model.named_parameters()}, config)
    weights, gradients = (
        {
            ours: joined(ours, [state[theirs][part] for theirs in sources], config)
            for ours, sources in source_shapes(config).items()
        }
        for part in range(2)
    )
    return Reference(config, weights, logits.detach(), gradients)


def _with_experts_apart(state: dict[str, tuple[Tensor, ...]], config: ModelConfig) -> dict[str, tuple[Tensor, ...]]:
    """``state`` with a tensor for each expert, and gate and up apart, as in files; transformers stacks them."""
    names = family_of(config).experts if config.has_experts else None
    files: dict[str, tuple[Tensor, ...]] = {}
    for key, tensors in state.items():
        layer, _, kind = key.partition(".mlp.")
        if names is None or not kind:
            files[key] = tensors
        elif "experts." not in kind:
            files[f"{layer}.{names.router}.weight"] = tensors
        for number, parts in enumerate(zip(*tensors, strict=True)) if names and "experts." in kind else ():
            is_pair = "gate_up" in kind
            halves = zip(*(part.chunk(2) for part in parts), strict=True) if is_pair else [parts]
            matrices = names.matrices[:2] if is_pair else names.matrices[2:]
            for matrix, half in zip(matrices, halves, strict=True):
                files[f"{layer}.{names.experts}.{number}.{matrix}.weight"] = half
    return files


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """One of each model."""
    return {name: _reference(name) for name in MODELS}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_and_gradients_are_those_of_transformers(run_ranks, references, size):
    run_ranks(
        size, compare, references if size != 2 else {name: references[name] for name in ("llama", "qwen3", "mixtral")}
    )


def compare(references: dict[str, Reference]):
    """Each model on this rank, with and without sequence parallelism, against its reference."""
    size = dist.get_world_size()
    for name, reference in references.items():
        for sequence_parallel in (False, True) if size > 1 else (False,):
            parallel = ParallelConfig(model_parallel_size=size, world_size=size, sequence_parallel=sequence_parallel)
            _compare(name, reference, ParallelLayout.create(parallel))


def _compare(name: str, reference: Reference, layout: ParallelLayout):
    rows = padded_vocabulary(reference.config.vocab_size, dist.get_world_size(), 1)
    config = replace(reference.config, padded_vocab_size=rows)
    model = sequential_model(config, ActivationConfig(), layout)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == reference.weights.keys(), name
    for key, parameter in parameters.items():
        parameter.data.copy_(_shard(key, reference.weights[key], parameter, rows))
    whole = torch.cat(_gathered(model(TOKENS), layout), -1)[..., : config.vocab_size]
    assert_close(whole, reference.logits, rtol=1e-5, atol=1e-5)
    labels = TOKENS.roll(-1, 1)
    loss = model(TOKENS, (labels, torch.full(labels.shape, 1 / labels.numel())))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The .grad attribute")  # every rank of a run would print it
        loss.backward()
    for key, parameter in parameters.items():
        expected = _shard(key, reference.gradients[key], parameter, rows)
        assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{name} {key}: {text}")


def _shard(key: str, whole: Tensor, parameter: torch.nn.Parameter, rows: int) -> Tensor:
    """This rank's part of a whole weight or gradient."""
    dim, whole = getattr(parameter, "partition_dim", None), _padded(key, whole, rows)
    return whole if dim is None else whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def _padded(key: str, whole: Tensor, rows: int) -> Tensor:
    is_vocabulary = "word_embeddings" in key or whole.size(0) == SIZES["vocab_size"]
    return F.pad(whole, (0, 0, 0, rows - whole.size(0))) if is_vocabulary else whole


def _gathered(part: Tensor, layout: ParallelLayout) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous(), group=layout.tensor_group)
    return parts


NEW_TOKENS = 24
LATER = 3
"""Steps after which the other prompts join the first."""
PROMPTS = [[5], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [3, 9, 3]]


def test_greedy_tokens_are_those_of_transformers(run_ranks, references, tmp_path: Path) -> None:
    """From a checkpoint, with and without a cache, on one rank, and on four that share two key and value heads."""
    expected = {}
    for name in ("llama", "mistral", "qwen3", "mixtral"):
        model, reference = hugging_face(name).eval(), references[name]
        model.generation_config.eos_token_id = None
        expected[name] = [_generated(model, prompt) for prompt in PROMPTS]
        (tmp_path / name).mkdir()
        whole = FullModel(replace(reference.config, padded_vocab_size=reference.config.vocab_size), reference.weights)
        write_checkpoint(tmp_path / name, whole, vocab_file=None, merge_file=None)
    assert max(len(set(tokens)) for tokens in expected["llama"]) > 10, "no text that any model would write"
    assert run_ranks(1, greedy_tokens, tmp_path, [*expected], False) == [expected]
    for size in (1, 4):
        assert run_ranks(size, greedy_tokens, tmp_path, [*expected], True) == [expected] * size


def _generated(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokens[0, len(prompt) :].tolist()


def greedy_tokens(folder: Path, names: list[str], use_cache: bool) -> dict[str, list[list[int]]]:
    """What each checkpoint continues PROMPTS with, on the ranks that this is called on."""
    size, found = dist.get_world_size(), {}
    layout = ParallelLayout.create(ParallelConfig(model_parallel_size=size, world_size=size))
    for name in names:
        place = find(folder / name)
        source = Source(place, read_checkpoint_config(place), None)
        model = LanguageModel(load_model(source, layout), source.config, layout.tensor_group)
        settings = {"context": 64, "use_cache": use_cache}
        batch = DecodingBatch(model, PROMPTS[: 1 if use_cache else None], **settings)
        for step in range(NEW_TOKENS + LATER):
            if use_cache and step == LATER:
                batch.join(DecodingBatch(model, PROMPTS[1:], **settings))
            batch.append(batch.logits.argmax(-1).tolist())
        found[name] = [
            tokens[len(prompt) :][:NEW_TOKENS] for tokens, prompt in zip(batch.sequences, PROMPTS, strict=True)
        ]
    return found


@pytest.mark.parametrize("apart", [False, True])
def test_positions_restart_after_each_document(run_ranks, references, apart: bool) -> None:
    """As transformers computes with these positions, where tokens attend to earlier documents and where they do not."""
    tokens = TOKENS.masked_fill(TOKENS == 4, 5)
    tokens[0, [6, 15]] = tokens[1, 9] = 4
    ends = (tokens == 4).int()
    document = ends.cumsum(-1) - ends
    positions = torch.stack([(row.unsqueeze(1) == row).tril().sum(-1) - 1 for row in document])
    model = hugging_face("llama").eval()
    mask = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    if apart:
        mask &= (document.unsqueeze(-1) == document.unsqueeze(-2)).unsqueeze(1)
    scores = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = model(tokens, attention_mask=scores, position_ids=positions).logits.detach()
    assert (expected - model(tokens).logits).abs().max() > 0.1
    settings = {"eod_token": 4, "reset_position_ids": True, "reset_attention_mask": apart}
    reference = references["llama"]._replace(config=replace(references["llama"].config, **settings))
    for found in run_ranks(2, logits_on_rank, reference, tokens):
        assert_close(found, expected, rtol=1e-5, atol=1e-5)


def logits_on_rank(reference: Reference, tokens: Tensor) -> Tensor:
    """Logits [b, s, v] of ``tokens``, with tensor and sequence parallelism over all ranks."""
    size = dist.get_world_size()
    parallel = ParallelConfig(model_parallel_size=size, world_size=size, sequence_parallel=True)
    layout, rows = ParallelLayout.create(parallel), padded_vocabulary(reference.config.vocab_size, size, 1)
    model = sequential_model(replace(reference.config, padded_vocab_size=rows), ActivationConfig(), layout)
    for key, parameter in model.named_parameters():
        parameter.data.copy_(_shard(key, reference.weights[key], parameter, rows))
    return torch.cat(_gathered(model(tokens), layout), -1)[..., : reference.config.vocab_size]


@pytest.mark.parametrize("name", MODELS)
def test_config_and_weights_return_unchanged(references, name: str) -> None:
    """config.json and every weight are the same after a conversion to theirs and back."""
    config, weights = references[name].config, references[name].weights
    written = write_config(config, "float32")
    assert written["model_type"] == name.split()[0]
    assert read_config(written, Path("config.json")) == config
    for key, sources in source_shapes(config).items():
        theirs = divided(key, weights[key], config)
        assert len(theirs) == len(sources) and joined(key, theirs, config).equal(weights[key]), key


def test_llama31_frequencies_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=LLAMA3)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    ours = ModelConfig(hidden_size=512, num_attention_heads=4, rotary_base=500000.0, use_rope_scaling=True)
    assert_close(frequencies(ours, torch.device("cpu")), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e6, "factor": 40.0, "original_max_position_embeddings": 4096},
        {"beta_fast": 4, "beta_slow": 2.0, "truncate": False},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
        {"mscale": 0.7},
        {"attention_factor": 1.3},
        {"factor": 1.0, "attention_factor": 1.0},
        {"type": "yarn", "rope_type": "yarn", "beta_fast": None},
    ],
)
def test_yarn_is_that_of_transformers(changes: dict) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = LlamaConfig(**(SIZES | {"hidden_size": 512, "rope_parameters": YARN | changes}))
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = read_config(theirs.to_dict(), Path("config.json"))
    assert_close(frequencies(ours, torch.device("cpu")), expected, rtol=1e-5, atol=0)
    cosines, _ = rotation_tables(ours, torch.zeros(1, 1), torch.float32)
    assert_close(cosines.flatten(), torch.full((32,), factor))
    again = read_config(write_config(ours, "float32"), Path("config.json"))
    assert_close(frequencies(again, torch.device("cpu")), expected, rtol=1e-5, atol=0)
    cosines, _ = rotation_tables(again, torch.zeros(1, 1), torch.float32)
    assert_close(cosines.flatten(), torch.full((32,), factor))
