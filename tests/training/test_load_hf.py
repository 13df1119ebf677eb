"""--load-hf: training on from a Hugging Face folder on any layout begins with the loss of transformers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.programs import read_metrics
from support.training import pretrain
from torch.nn import functional as F

from megatron.cli import parse_run, read_run
from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import DataConfig
from megatron.data.datasets import build_datasets
from megatron.model.spec import ARCHITECTURES
from megatron.training.model_provider import ModelProvider, provided_architecture
from megatron.training.preflight import check

MODELS = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 90, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 90, "n_positions": 64,
             "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
}  # fmt: skip
SECOND: dict[str, float] = {}
"""Loss of the second iteration by model, of the first layout."""
RUN = (
    "--train-iters 2 --batch-size 2 --global-batch-size 4 --seq-length 16 --mock-data --vocab-size 90 --lr 1e-3"
    " --eval-iters 0 --log-interval 1 --num-workers 0 --warmup 0"
).split()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random models in several files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folders = {}
    for kind, sizes in MODELS.items():
        torch.manual_seed(5)
        config = AutoConfig.for_model(kind, **sizes, initializer_range=0.3, bos_token_id=89, eos_token_id=89)
        folders[kind] = tmp_path_factory.mktemp(kind)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[kind], max_shard_size="20KB")
    return folders


@torch.no_grad()
def loss_of_transformers(folder: Path) -> float:
    """Its loss on the first global batch."""
    from transformers import AutoModelForCausalLM

    data = DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=90, seq_length=16)
    rows = torch.from_numpy(build_datasets(data, {"train": 8}, vocab_size=90, seed=1234).train.take(range(4)))
    logits = AutoModelForCausalLM.from_pretrained(folder).eval()(rows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


@pytest.mark.parametrize(
    ("kind", "ranks", "layout"),
    [
        ("llama", 4, "--model-parallel-size 2 --pipe-parallel-size 2"),
        ("gpt2", 2, "--zero-stage 3"),
        ("llama", 2, "--pipe-parallel-size 2 --pipeline-schedule dualpipev --bf16 --zero-stage 1 --batch-size 1"),
        ("gpt2", 1, "--zero-stage 0"),
    ],
)
def test_first_loss_is_that_of_transformers(run_ranks, folders, tmp_path, kind: str, ranks: int, layout: str):
    words = [*RUN, *layout.split(), "--load-hf", str(folders[kind]), "--metrics-file", str(tmp_path / "metrics")]
    outputs = run_ranks(ranks, pretrain, words)
    assert all(code == 0 for code, _ in outputs)
    first, second = (line["lm_loss"] for line in read_metrics(tmp_path / "metrics") if "lm_loss" in line)
    assert first == pytest.approx(loss_of_transformers(folders[kind]), rel=1e-2 if "--bf16" in layout else 1e-5)
    # A step later, weights and their fp32 copies in the optimizer are the same on every layout.
    assert second == pytest.approx(SECOND.setdefault(kind, second), rel=1e-2 if "--bf16" in layout else 1e-4)
    assert abs(second - first) > 1e-3


def test_a_bert_begins_with_the_weights_of_its_folder(run_ranks, train_bert_in_ranks, programs, tmp_path: Path):
    from transformers import AutoModelForPreTraining, MegatronBertConfig

    config = MegatronBertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, initializer_range=0.3, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    torch.manual_seed(5)
    AutoModelForPreTraining.from_config(config).bfloat16().save_pretrained(tmp_path / "hf")
    shutil.copyfile(programs.folder / "vocab.txt", tmp_path / "hf" / "vocab.txt")
    tool = "tools/convert_checkpoint.py"
    programs.warm(1, tool, "from-hf", tmp_path / "hf", "--output", tmp_path / "ours").ok()
    run = "--train-iters 2 --batch-size 4 --global-batch-size 8 --eval-iters 0 --warmup 0".split()
    of_model = "--ffn-hidden-size 48 --layernorm-epsilon 1e-12 --hidden-dropout 0 --attention-dropout 0".split()
    losses = []
    for ranks, words in (
        (2, ["--model-parallel-size", "2", "--load-hf", str(tmp_path / "hf")]),
        (1, [*of_model, "--load", str(tmp_path / "ours"), "--finetune"]),
    ):
        train_bert_in_ranks(ranks, *run, *words, "--metrics-file", tmp_path / "metrics")
        losses.append([line["lm_loss"] for line in read_metrics(tmp_path / "metrics")])
        (tmp_path / "metrics").unlink()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_checkpoint_in_save_is_preferred(run_ranks, folders, tmp_path: Path):
    words = [*RUN, *f"--load-hf {folders['llama']} --save {tmp_path} --auto-resume --lr-decay-iters 2".split()]
    ((_, fresh),) = run_ranks(1, pretrain, [*words, "--train-iters", "1"])
    assert f"weights of {folders['llama']}, with a new optimizer" in fresh
    ((_, resumed),) = run_ranks(1, pretrain, words)
    assert "resuming after iteration 1" in resumed and "weights of" not in resumed


def test_rows_without_a_token_are_named(run_ranks, folders):
    words = [*RUN, *f"--load-hf {folders['gpt2']} --train-iters 1 --vocab-size 87".split()]
    ((_, log),) = run_ranks(1, pretrain, words)
    assert "> the last 3 rows of its vocabulary are left out" in log


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layers 3", "--num-layers 3 contradicts --load-hf {llama}, whose model has --num-layers 4: remove it"),
        ("--num-query-groups 4", "--num-query-groups 4 contradicts --load-hf {llama}"),
        ("--qk-layernorm", "--qk-layernorm contradicts --load-hf {llama}, whose model has --qk-layernorm False"),
        ("--load elsewhere", "--load-hf and --load exclude each other"),
        ("--model-preset gpt2", "exclude each other"),
    ],
)
def test_contradictions(folders, words: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_run([*RUN, "--load-hf", str(folders["llama"]), *words.split()], {})
    assert message.format(**folders) in str(caught.value)


def test_a_provided_model_has_other_weights(folders, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["own.py"])
    monkeypatch.setitem(ARCHITECTURES, "own.py", None)  # is removed in the end
    provided = provided_architecture(ModelProvider(*[lambda *_: None] * 3, None, {}))
    for words in (["--load-hf", str(folders["llama"])], ["--lora-rank", "4"]):
        with pytest.raises(ConfigError, match=f"{words[0]}: the model of own.py has no list of layers"):
            parse_run([*RUN, *words], {}, provided)


def test_a_folder_of_another_program(folders):
    with pytest.raises(ConfigError, match="is a Llama model, and this is pretrain_bert.py"):
        parse_run([*RUN, "--load-hf", str(folders["llama"])], {}, ARCHITECTURES["BERT"])


def test_flags_are_those_of_the_folder(folders):
    llama, gpt2 = (
        parse_run([*RUN, "--load-hf", str(folders[kind]), "--hidden-dropout", "0.2"], {}).model for kind in MODELS
    )
    assert (llama.num_layers, llama.query_groups, llama.swiglu, llama.normalization) == (4, 2, True, "RMSNorm")
    assert (gpt2.num_layers, gpt2.query_groups, gpt2.swiglu, gpt2.openai_gelu) == (4, 4, False, True)
    assert llama.hidden_dropout == gpt2.hidden_dropout == 0.2 and llama.max_position_embeddings == 64


def test_the_number_of_rows_is_no_flag_of_the_user(folders, tmp_path: Path):
    """Nor is it warned about with a tokenizer that counts its tokens."""
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "<|endoftext|>": 1}))
    (tmp_path / "merges.txt").touch()
    words = [word for word in RUN if word not in ("--vocab-size", "90")]
    words += ["--load-hf", str(folders["llama"]), "--tokenizer-model", str(tmp_path)]
    assert not any("--vocab-size" in line for line in read_run(words, {}).warnings)
    assert any("--vocab-size" in line for line in read_run([*words, "--vocab-size", "90"], {}).warnings)


def test_files_are_checked_before_training(folders, tmp_path: Path):
    folder = shutil.copytree(folders["llama"], tmp_path / "hf")
    run = parse_run([*RUN, "--load-hf", str(folder)], {})
    assert check(run)[1] is None
    larger = replace(run, data=replace(run.data, vocab_size=91))
    with pytest.raises(CheckpointError, match="its table has 90 rows, and the tokenizer 91 tokens"):
        check(larger)
    (shard,) = folder.glob("model-00002-*")
    weights = load_file(shard)
    name = next(name for name, weight in weights.items() if len({*weight.shape}) == 2)
    save_file(weights | {name: weights[name].t().contiguous()}, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{shard.name}: {name} is "):
        check(run)
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{shard.name} is not a complete safetensors file"):
        check(run)
    shard.unlink()
    with pytest.raises(CheckpointError, match="names the file 'model-00002-of-"):
        check(run)


def message_of_training(words: list[str]) -> str:
    try:
        pretrain(words)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it trained")


def test_weights_that_are_refused_leave_nothing(run_ranks, folders, tmp_path: Path):
    folder = shutil.copytree(folders["llama"], tmp_path / "hf")
    (shard,) = folder.glob("model-00002-*")
    content = load_file(shard)
    next(iter(content.values()))[0] = torch.nan
    save_file(content, shard, metadata={"format": "pt"})
    words = [*RUN, "--load-hf", str(folder), "--save", str(tmp_path / "ck")]
    (message,) = run_ranks(1, message_of_training, words)
    assert str(shard) in message and "nan" in message
    assert not (tmp_path / "ck").exists() or not any((tmp_path / "ck").iterdir())
