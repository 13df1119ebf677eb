"""Checkpoints of other Megatrons, made here from known weights as each of them writes its files."""

import enum
import math
import random
import shutil
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fuzzing import Attack
from support.programs import Programs
from support.whole_models import logits_and_weights, made_up_weights
from torch import Tensor
from torch.nn import functional as F

from megatron.common.errors import CheckpointError, ConfigError, UserError
from megatron.config import ModelConfig
from megatron.tools.convert.from_megatron import GivenModel, full_model
from megatron.tools.convert.full_model import FullModel
from megatron.tools.convert.load_and_save import write_checkpoint
from megatron.tools.convert.megatron_files import read_shards

LAYERS, HIDDEN, HEADS, TOKENS, ROWS = 4, 16, 4, 92, 96
CONFIG = ModelConfig(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    ffn_hidden_size=24,
    max_position_embeddings=8,
    vocab_size=TOKENS,
    padded_vocab_size=TOKENS,
    eod_token=TOKENS - 1,
)
WEIGHTS = made_up_weights(CONFIG)
ARGS = Namespace(num_attention_heads=HEADS, num_layers=LAYERS, hidden_dropout=0.25, params_dtype=torch.float16)
SAID = GivenModel(heads=HEADS, vocab_size=TOKENS)

ROW_ORDERS: dict[float, Callable[[Tensor], Tensor]] = {
    0.0: lambda rows: torch.stack([rows[:, part] for part in range(3)]),  # [n, 3, d, ..] -> [3, n, d, ..]
    1.0: lambda rows: torch.stack([rows[:, part] for part in range(3)], dim=2),  # -> [n, d, 3, ..]
    2.0: lambda rows: rows,
    3.0: lambda rows: rows,
}


def shard(name: str, rank: int, size: int, version: float) -> Tensor:
    """What a rank holds of a weight of ours, with the rows of query_key_value as ``version`` has them."""
    tensor = WEIGHTS[name]
    if "word_embeddings" in name:
        return F.pad(tensor, (0, 0, 0, ROWS - TOKENS)).chunk(size)[rank]
    if "query_key_value" in name:
        rows = tensor.view(HEADS, 3, HIDDEN // HEADS, *tensor.shape[1:]).chunk(size)[rank]
        return ROW_ORDERS[version](rows).reshape(-1, *tensor.shape[1:])
    if "dense_h_to_4h" in name:
        return tensor.chunk(size)[rank]
    if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
        return tensor.chunk(size, 1)[rank]
    return tensor


def layer(number: int, rank: int, size: int, version: float, attention: str = "attention") -> dict[str, Tensor]:
    prefix = f"{number + 2}."
    return {
        name.removeprefix(prefix).replace("attention.", f"{attention}.", name.startswith(f"{prefix}attention.")): shard(
            name, rank, size, version
        )
        for name in WEIGHTS
        if name.startswith(prefix)
    }


def ends(rank: int, size: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Word embeddings, position embeddings, last norm."""
    words = shard("tied_modules.embed.word_embeddings.weight", rank, size, 3.0)
    norm = {kind: WEIGHTS[f"{LAYERS + 3}.{kind}"] for kind in ("weight", "bias")}
    return {"weight": words}, {"weight": WEIGHTS["1.position_embeddings.weight"]}, norm


def save(value: dict, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, file)


def write_megatron_lm(folder: Path, version: float, *, size: int, stages: int, encoder: str, attention: str) -> None:
    """iter_0000007/mp_rank_TT[_PPP]/model_optim_rng.pt, each stage with its layers numbered from 0."""
    for rank in range(size):
        words, positions, norm = ends(rank, size)
        for stage in range(stages):
            own = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
            layers = {
                f"layers.{number - own[0]}.{name}": tensor
                for number in own
                for name, tensor in layer(number, rank, size, version, attention).items()
            }
            model: dict = {"language_model": {encoder: layers}}
            if stage == 0:
                model["language_model"]["embedding"] = {"word_embeddings": words, "position_embeddings": positions}
            if stage == stages - 1:
                layers |= {f"final_layernorm.{kind}": tensor for kind, tensor in norm.items()}
                if stages > 1:
                    model["word_embeddings_for_head"] = words
            file = {"model": model, "iteration": 7, "args": ARGS, "np_rng_state": np.random.get_state()}
            file |= {"random_rng_state": random.getstate()} | ({"checkpoint_version": version} if version else {})
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            save(file, folder / "iter_0000007" / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def write_ancestor(folder: Path, *, size: int) -> None:
    """v1.1.5 on DeepSpeed with a pipeline: embeddings 00, layers from 02, norm at L+3, no arguments, no version."""
    for rank in range(size):
        words, positions, norm = ends(rank, size)
        embeddings = {"word_embeddings.weight": words["weight"], "position_embeddings.weight": positions["weight"]}
        layers = {number + 2: layer(number, rank, size, 3.0) for number in range(LAYERS)}
        for number, state in {0: embeddings, **layers, LAYERS + 3: norm}.items():
            save(state, folder / "global_step7" / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        save({"module": None, "iteration": 7}, folder / "global_step7" / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "latest").write_text("global_step7")


def write_megatron_deepspeed(folder: Path, *, size: int) -> None:
    """Megatron-DeepSpeed with a pipeline: embeddings 01, self_attention, norm at L+2, the table once more after it."""
    for rank in range(size):
        words, positions, norm = ends(rank, size)
        embeddings = {"word_embeddings.weight": words["weight"], "position_embeddings.weight": positions["weight"]}
        layers = {number + 2: layer(number, rank, size, 3.0, "self_attention") for number in range(LAYERS)}
        head = {"word_embeddings.weight": words["weight"]}
        for number, state in {1: embeddings, **layers, LAYERS + 2: norm, LAYERS + 3: head}.items():
            save(state, folder / "global_step7" / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        file = {"module": None, "args": ARGS, "checkpoint_version": 3.0}
        save(file, folder / "global_step7" / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "latest").write_text("global_step7")


def write_without_pipeline(folder: Path, *, size: int) -> None:
    """v1.1.5 on DeepSpeed without a pipeline: everything under module, nested."""
    for rank in range(size):
        words, positions, norm = ends(rank, size)
        layers = {f"layers.{n}.{name}": t for n in range(LAYERS) for name, t in layer(n, rank, size, 3.0).items()}
        layers |= {f"final_layernorm.{kind}": tensor for kind, tensor in norm.items()}
        embedding = {"word_embeddings": words, "position_embeddings": positions}
        module = {"language_model": {"embedding": embedding, "transformer": layers}}
        save({"module": module, "iteration": 7}, folder / f"mp_rank_{rank:02d}_model_states.pt")


OLD = {"encoder": "transformer", "attention": "attention"}
NEW = {"encoder": "encoder", "attention": "self_attention"}
WRITERS: dict[str, Callable[[Path], None]] = {
    "version 0, 2 ranks": lambda folder: write_megatron_lm(folder, 0.0, size=2, stages=1, **OLD),
    "version 1, 2 ranks": lambda folder: write_megatron_lm(folder, 1.0, size=2, stages=1, **OLD),
    "version 2, 1 rank": lambda folder: write_megatron_lm(folder, 2.0, size=1, stages=1, **OLD),
    "version 3, 2 ranks, 2 stages": lambda folder: write_megatron_lm(folder, 3.0, size=2, stages=2, **NEW),
    "the ancestor": lambda folder: write_ancestor(folder, size=2),
    "the ancestor without a pipeline": lambda folder: write_without_pipeline(folder, size=2),
    "Megatron-DeepSpeed": lambda folder: write_megatron_deepspeed(folder, size=2),
}


@pytest.fixture
def logits(run_ranks, tmp_path: Path) -> Tensor:
    """What our model computes with the known weights."""
    (tmp_path / "known").mkdir()
    write_checkpoint(tmp_path / "known", FullModel(CONFIG, WEIGHTS), vocab_file=None, merge_file=None)
    return run_ranks(1, logits_and_weights, tmp_path / "known")[0][0]


@pytest.mark.parametrize("writer", WRITERS)
def test_every_format_gives_the_same_model(run_ranks, logits: Tensor, tmp_path: Path, writer: str):
    WRITERS[writer](tmp_path / "theirs")
    model = full_model(read_shards(tmp_path / "theirs"), SAID)
    (tmp_path / "ours").mkdir()
    write_checkpoint(tmp_path / "ours", model, vocab_file=None, merge_file=None)
    ((found, weights),) = run_ranks(1, logits_and_weights, tmp_path / "ours")
    assert found.equal(logits) and logits.std() > 0.1
    assert weights.keys() == WEIGHTS.keys() and all(weights[name].equal(WEIGHTS[name]) for name in WEIGHTS)


LLAMA = replace(
    CONFIG, num_query_groups=2, swiglu=True, normalization="RMSNorm", disable_bias_linear=True,
    untie_embeddings_and_output_weights=True, position_embedding_type="rope", rotary_base=500.0,
)  # fmt: skip


def test_a_llama_in_classic_files_of_two_ranks(tmp_path: Path):
    """Each rank has its groups of query_key_value, and its rows of gate, then those of up."""
    weights = made_up_weights(LLAMA)
    names = {"0.word_embeddings.weight": "embedding.word_embeddings.weight", "8.weight": "output_layer.weight"}
    names |= {f"{LAYERS + 3}.weight": "encoder.final_norm.weight"}
    for rank in range(2):
        model: dict[str, Tensor] = {"rotary_pos_emb.inv_freq": torch.ones(2)}
        for name, tensor in weights.items():
            number, _, inner = name.partition(".")
            theirs = names.get(name) or f"encoder.layers.{int(number) - 2}.{inner}".replace(
                ".attention", ".self_attention"
            )
            if "dense_h_to_4h" in name:
                tensor = torch.cat([part.chunk(2)[rank] for part in tensor])
            elif "query_key_value" in name or tensor.size(0) == TOKENS:
                tensor = F.pad(tensor, (0, 0, 0, -len(tensor) % 4)).chunk(2)[rank]
            elif tensor.dim() == 2:
                tensor = tensor.chunk(2, 1)[rank]
            model[theirs] = tensor
        said = {"vocab_size": TOKENS, "seq_length": 8, "use_rotary_position_embeddings": True, "rotary_base": 500}
        file = {"model": {"language_model": model}, "args": Namespace(**vars(ARGS), **said), "checkpoint_version": 3.0}
        save(file, tmp_path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    found = full_model(read_shards(tmp_path), GivenModel())
    assert found.config == replace(LLAMA, hidden_dropout=0.25, eod_token=TOKENS - 1)
    assert all(found.weights[name].equal(weights[name]) for name in weights)


def test_the_tool(programs: Programs, run_ranks, logits: Tensor, tmp_path: Path):
    write_megatron_lm(tmp_path / "theirs", 0.0, size=2, stages=1, **OLD)
    command = ("tools/convert_checkpoint.py", "from-megatron", tmp_path / "theirs", "--output", tmp_path / "ours")
    refused = programs.warm(1, *command)
    assert refused.returncode == 2 and "has 96 rows of tokens, including padding: give --vocab-file" in refused.output
    assert not (tmp_path / "ours").exists()
    finished = programs.warm(1, *command, "--vocab-size", str(TOKENS)).ok()
    assert "query_key_value read as of checkpoint version 0" in finished.output
    assert run_ranks(1, logits_and_weights, tmp_path / "ours")[0][0].equal(logits)


def test_saved_arguments_and_given_values(tmp_path: Path):
    write_megatron_lm(tmp_path, 2.0, size=1, stages=1, **OLD)
    shards = read_shards(tmp_path / "iter_0000007")
    config = full_model(shards, GivenModel(vocab_size=90)).config
    assert (config.hidden_dropout, config.attention_dropout, config.eod_token) == (0.25, 0.1, 89)
    assert (config.openai_gelu, config.vocab_size, config.ffn_hidden_size) == (False, 90, 24)
    shards.args.bias_gelu_fusion = True
    assert full_model(shards, SAID).config.openai_gelu
    other = full_model(shards, GivenModel(vocab_size=TOKENS, version=0.0)).weights
    assert not other["2.attention.query_key_value.weight"].equal(WEIGHTS["2.attention.query_key_value.weight"])


def without(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "global_step7" / file).unlink()


def copied(file: str, name: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / "global_step7" / file, folder / "global_step7" / name)


def changed(number: int, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "global_step7" / f"layer_{number:02d}-model_00-model_states.pt"
        state = torch.load(file, weights_only=True)
        change(state)
        torch.save(state, file)

    return apply


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a layer is missing": (
        without("layer_03-model_01-model_states.pt"),
        "layer_LL-model_01-model_states.pt: number 3 is missing before 4",
    ),
    "a layer in two files": (
        copied("layer_03-model_00-model_states.pt", "layer_3-model_0-model_states.pt"),
        "are of the same rank: remove one of them",
    ),
    "the last layer of one rank": (
        without("layer_05-model_01-model_states.pt"),
        "of the tensor-parallel ranks 0 and 1 only one holds layers.3.attention.dense.bias",
    ),
    "an encoder and a decoder": (
        changed(
            2, lambda state: state.update({f"decoder.{name}": tensor.clone() for name, tensor in list(state.items())})
        ),
        "is another tensor that is input_layernorm.weight",
    ),
    "no columns": (
        changed(2, lambda state: state.update({"self_attention.dense.weight": torch.ones(16, 0)})),
        "global_step7 lacks a part",
    ),
    "an empty file": (
        lambda folder: (folder / "global_step7" / "layer_02-model_00-model_states.pt").write_bytes(b""),
        "layer_02-model_00-model_states.pt cannot be read",
    ),
    "no file of that kind": (
        lambda folder: (folder / "latest").write_text("../elsewhere"),
        "no checkpoint of Megatron",
    ),
    "a tracker in other digits": (
        lambda folder: (folder / "latest").write_text("٧"),
        "no checkpoint of Megatron",
    ),
    "a tracker of one long word": (
        lambda folder: (folder / "latest").write_text("9" * 4000),
        "no checkpoint of Megatron",
    ),
    "weights that contain themselves": (
        changed(2, lambda state: state.update({"more": state})),
        "layer_02-model_00-model_states.pt cannot be read (it is nested too deep)",
    ),
    "FP8": (
        changed(2, lambda state: state.update({"mlp.dense_4h_to_h.bias": torch.ones(16).to(torch.float8_e4m3fn)})),
        "bias is of type float8_e4m3fn",
    ),
    "numbers that are none": (
        changed(2, lambda state: state["mlp.dense_4h_to_h.bias"].fill_(torch.nan)),
        "layers.0.mlp.dense_4h_to_h.bias is from nan to nan",
    ),
    "another shape": (
        changed(2, lambda state: state.update({"mlp.dense_4h_to_h.bias": torch.rand(3)})),
        "2.mlp.dense_4h_to_h.bias is [3], and the model's [16]",
    ),
    "a norm of another checkpoint": (
        changed(2, lambda state: state["input_layernorm.weight"].add_(1)),
        "layers.0.input_layernorm.weight of tensor-parallel rank 1 is up to 1 from what it is in rank 0",
    ),
    "a head of its own": (
        changed(LAYERS + 3, lambda state: state["word_embeddings.weight"].add_(1)),
        "the output projection is not the embedding table",
    ),
}


def test_a_rank_has_one_file(tmp_path: Path) -> None:
    """As where the same iteration was saved with a pipeline, and then without."""
    write_megatron_lm(tmp_path, 3.0, size=1, stages=2, encoder="encoder", attention="self_attention")
    write_megatron_lm(tmp_path, 3.0, size=1, stages=1, encoder="encoder", attention="self_attention")
    with pytest.raises(CheckpointError, match="mp_rank_00.* are of the same rank: remove one of them"):
        read_shards(tmp_path)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_is_missing(tmp_path: Path, rank: int) -> None:
    write_without_pipeline(tmp_path, size=4)
    (tmp_path / f"mp_rank_{rank:02d}_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=f"number {rank} is missing before {rank + 1}"):
        read_shards(tmp_path)


def of_ranks(*ranks: int) -> list[dict]:
    return [{"args": Namespace(**vars(ARGS), rank=rank)} for rank in ranks]


def of_sizes(**sizes: int) -> list[dict]:
    return [{"args": Namespace(**vars(ARGS), **sizes)}] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (of_ranks(0, 1, 4, 5), None),
        (of_ranks(0, 0, 0, 0), None),
        (of_sizes(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), None),
        (
            of_ranks(1, 0, 4, 5),
            "mp_rank_01_000/.* is of rank 0, and .*mp_rank_00_000/.* of rank 1: files were exchanged",
        ),
        (
            of_ranks(0, 1, 0, 5),
            "mp_rank_00_001/.* is of rank 0, and .*mp_rank_01_000/.* of rank 1: files were exchanged",
        ),
        ([{}, {}, {"iteration": 8}, {}], "mp_rank_00_001/.* is of iteration 8, and .*mp_rank_01_000/.* of 7: copy all"),
        (of_sizes(tensor_model_parallel_size=4), "saved with --tensor-model-parallel-size 4, and holds files of 2"),
        (of_sizes(pipeline_model_parallel_size=3), "saved with --pipeline-model-parallel-size 3, and holds files of 2"),
    ],
)
def test_files_are_of_one_run(tmp_path: Path, changes: list[dict], message: str | None):
    write_megatron_lm(tmp_path, 3.0, size=2, stages=2, **NEW)
    files = [tmp_path / f"iter_0000007/mp_rank_{r:02d}_{s:03d}/model_optim_rng.pt" for s in range(2) for r in range(2)]
    for file, change in zip(files, changes, strict=True):
        torch.save(torch.load(file, weights_only=False) | change, file)
    if message is None:
        assert len(full_model(read_shards(tmp_path), SAID).weights) == len(WEIGHTS)
        return
    with pytest.raises(CheckpointError, match=message):
        read_shards(tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_of_a_checkpoint_are_reported(tmp_path: Path, fault: str):
    write_megatron_deepspeed(tmp_path, size=2)
    spoil, message = FAULTS[fault]
    spoil(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        full_model(read_shards(tmp_path), SAID)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("version", "args", "message"),
    [
        (math.nan, {}, "checkpoint version nan"),
        (3.0, {"ffn_hidden_size": 12}, "--ffn-hidden-size 12"),
        (3.0, {"hidden_size": 64}, "holds weights of --hidden-size 16, not of --hidden-size 64"),
        (3.0, {"kv_channels": 8}, "holds weights of --kv-channels 4, not of --kv-channels 8"),
        (3.0, {"hidden_dropout": math.nan}, "hidden_dropout is nan"),
        (3.0, {"normalization": "RMSNorm"}, "holds weights of LayerNorm, not of --normalization RMSNorm"),
        (3.0, {"padded_vocab_size": 128}, "of --padded-vocab-size 96, not of --padded-vocab-size 128"),
        (3.0, {"num_attention_heads": 10**30}, "iter_0000007 says 10{30} heads, which do not divide hidden size 16"),
        (3.0, {"vocab_size": 97}, "holds 96 rows of tokens, not of --vocab-size 97"),
        (3.0, {"max_position_embeddings": 16}, "of --max-position-embeddings 8, not of --max-position-embeddings 16"),
    ],
)
def test_what_is_saved_fits_the_weights(tmp_path: Path, version: float, args: dict, message: str):
    write_megatron_lm(tmp_path, 3.0, size=1, stages=1, **NEW)
    shards = replace(read_shards(tmp_path), version=version)
    vars(shards.args).update(args)
    with pytest.raises(CheckpointError, match=message):
        full_model(shards, replace(SAID, heads=None))


@pytest.mark.parametrize(("tokens", "fits"), [(96, True), (93, True), (92, False), (10, False)])
def test_a_saved_vocabulary_is_padded_to_the_rows(tmp_path: Path, tokens: int, fits: bool):
    """To a multiple of 2 x TP 2."""
    write_megatron_lm(tmp_path, 3.0, size=2, stages=1, **NEW)
    shards = read_shards(tmp_path)
    vars(shards.args).update(vocab_size=tokens, make_vocab_size_divisible_by=2)
    with nullcontext() if fits else pytest.raises(CheckpointError, match="give --vocab-size"):
        assert full_model(shards, GivenModel(heads=HEADS)).config.vocab_size == tokens
    assert full_model(shards, SAID).config.vocab_size == TOKENS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (GivenModel(vocab_size=TOKENS), "does not contain the number of heads: give --num-attention-heads"),
        (GivenModel(heads=3, vocab_size=TOKENS), "3 heads, which do not divide hidden size 16 over 2 ranks"),
        (GivenModel(heads=HEADS, vocab_size=97), "the vocabulary has 97 tokens"),
    ],
)
def test_missing_values_are_requested(tmp_path: Path, given: GivenModel, message: str):
    write_ancestor(tmp_path, size=2)
    with pytest.raises(ConfigError) as caught:
        full_model(read_shards(tmp_path), given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (replace(SAID, heads=2), "--num-attention-heads 2: .*iter_0000007 has 4; leave the flag out"),
        (replace(SAID, rotary_base=500.0), "--rotary-base 500: .*iter_0000007 has 10000; leave the flag out"),
        (replace(SAID, layernorm_epsilon=1e-6), "--layernorm-epsilon 1e-06: .*iter_0000007 has 1e-05"),
        (replace(SAID, position_embedding_type="rope"), "--position-embedding-type rope: .* has a table of positions"),
        (replace(SAID, max_position_embeddings=16), "--max-position-embeddings 16: .*iter_0000007 has 8; leave the"),
    ],
)
def test_flags_do_not_contradict_the_files(tmp_path: Path, given: GivenModel, message: str):
    write_megatron_lm(tmp_path, 3.0, size=1, stages=1, **NEW)
    shards = read_shards(tmp_path)
    vars(shards.args).update(rotary_base=10000, norm_epsilon=1e-5, normalization="layernorm")
    assert full_model(shards, SAID).config.normalization == "LayerNorm"
    with pytest.raises(ConfigError, match=message):
        full_model(shards, given)


def test_a_pickle_runs_no_code(tmp_path: Path):
    file = "mp_rank_00_model_states.pt"
    write_megatron_deepspeed(tmp_path, size=1)
    torch.save({"optimizer": Attack(tmp_path / "marker")}, tmp_path / "global_step7" / file)
    with pytest.raises(UserError, match=f"{file} cannot be read .it asks for posix.mkdir") as caught:
        full_model(read_shards(tmp_path), SAID)
    assert "which could run code" in str(caught.value) and not (tmp_path / "marker").exists()


@pytest.mark.parametrize("held", ["weights", "harm"])
def test_files_of_torch_before_zip(tmp_path: Path, held: str):
    write_megatron_deepspeed(tmp_path, size=1)
    file = tmp_path / "global_step7" / "mp_rank_00_model_states.pt"
    value = {"args": ARGS, "more": Attack(tmp_path / "marker") if held == "harm" else None}
    torch.save(value, file, _use_new_zipfile_serialization=False)
    if held == "weights":
        assert full_model(read_shards(tmp_path), GivenModel(vocab_size=TOKENS)).config.num_attention_heads == HEADS
        return
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states.pt asks for posix.mkdir"):
        read_shards(tmp_path)
    assert not (tmp_path / "marker").exists()


def test_objects_of_other_programs_are_stubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Enumerations and loss scalers of a package that is called as ours is, and has not to be there."""
    module = types.ModuleType("megatron.enums")
    module.ModelType = enum.Enum("ModelType", "encoder decoder", module="megatron.enums", qualname="ModelType")
    module.LossScaler = type("LossScaler", (), {"__module__": "megatron.enums"})
    monkeypatch.setitem(sys.modules, "megatron.enums", module)
    write_megatron_deepspeed(tmp_path, size=1)
    scaler = module.LossScaler()
    scaler.cur_scale = 2.0
    file = {"args": Namespace(**vars(ARGS), kind=module.ModelType.decoder), "scaler": scaler, "checkpoint_version": 3.0}
    torch.save(file, tmp_path / "global_step7" / "mp_rank_00_model_states.pt")
    monkeypatch.delitem(sys.modules, "megatron.enums")
    model = full_model(read_shards(tmp_path), GivenModel(vocab_size=TOKENS))
    assert model.config.num_attention_heads == HEADS and model.weights["7.bias"].equal(WEIGHTS["7.bias"])


WRONG: list[tuple[Callable[[dict], object], str]] = [
    (lambda file: file.update(checkpoint_version="3"), "checkpoint_version is '3', and should be a number"),
    (lambda file: file.update(checkpoint_version=torch.ones(2)), r"checkpoint_version is float32 \[2\], and should be"),
    (lambda file: file.update(checkpoint_version=10**400), "checkpoint version inf: give --checkpoint-version"),
    (
        lambda file: file["model"]["language_model"].update({f"layers.{'9' * 5000}.bias": torch.ones(2)}),
        "holds weights of --num-layers 5, not of --num-layers 4",
    ),
    (lambda file: file.update(checkpoint_version=True), "checkpoint_version is True, and should be a number"),
    (
        lambda file: file["model"]["language_model"]["embedding"]["position_embeddings"].update(
            weight=torch.ones(0, HIDDEN)
        ),
        "position_embeddings.weight has no rows",
    ),
    (
        lambda file: file["model"]["language_model"]["embedding"]["word_embeddings"].update(
            weight=torch.ones(ROWS, HIDDEN, device="meta")
        ),
        "weight is without data",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_would_be_read_as_something_else_is_refused(tmp_path: Path, change: Callable, message: str) -> None:
    write_megatron_lm(tmp_path, 3.0, size=1, stages=1, **OLD)
    file = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=message) as caught:
        full_model(read_shards(tmp_path), SAID)
    assert str(tmp_path) in caught.value.messages[0]
