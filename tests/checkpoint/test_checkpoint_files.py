"""The files of a checkpoint, and the flags of saving and loading."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.command_lines import parse
from support.programs import read_metrics

from megatron.checkpoint.run_file import SavedRun, checked_description, describe
from megatron.checkpoint.saved_layout import SavedLayout
from megatron.checkpoint.stored import StoredFile
from megatron.checkpoint.tensor_files import LazyTensors
from megatron.model.partition import layer_groups

SETTINGS = "--train-iters 4 --batch-size 2 --gas 2 --eval-iters 0 --exit-interval 2".split()
PIPELINE = "--model-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1".split()


@pytest.fixture(scope="module")
def plain(programs, tmp_path_factory) -> Path:
    """A checkpoint of iteration 2, from one process, with ``metrics``."""
    folder = tmp_path_factory.mktemp("plain")
    programs.pretrain(1, *SETTINGS, "--save", folder, "--metrics-file", folder / "metrics").ok()
    return folder


def test_a_pipeline_checkpoint_has_deepspeeds_files(programs, tmp_path):
    programs.pretrain(4, *SETTINGS, *PIPELINE, "--save", tmp_path).ok()
    layers = [0, 1, 2, 3, 4, 5, 7]  # 6 has no parameters, 8 is the embedding again
    expected = {f"layer_{layer:02d}-model_{rank:02d}-model_states.pt" for layer in layers for rank in (0, 1)}
    expected |= {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(4)}
    expected |= {f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt" for rank in range(4)}
    expected |= {f"rng_state_{rank:05d}.pt" for rank in range(4)} | {"run.json", "manifest.json"}
    assert {path.name for path in (tmp_path / "global_step2").iterdir()} == expected
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"

    def weights(layer: int) -> dict[str, list[int]]:
        file = tmp_path / "global_step2" / f"layer_{layer:02d}-model_00-model_states.pt"
        return {name: list(tensor.shape) for name, tensor in torch.load(file, weights_only=True).items()}

    assert weights(0) == {"word_embeddings.weight": [128, 32]}
    assert weights(1) == {"position_embeddings.weight": [32, 32]}
    layer = weights(2)
    assert len(layer) == 12 and layer["attention.query_key_value.weight"] == [48, 32]
    assert layer["mlp.dense_4h_to_h.weight"] == [32, 64] and layer["mlp.dense_4h_to_h.bias"] == [32]
    assert weights(7) == {"weight": [32], "bias": [32]}
    state = torch.load(tmp_path / "global_step2" / "mp_rank_00_model_states.pt", weights_only=False)
    assert (state["iteration"], state["consumed_samples"], state["checkpoint_version"]) == (2, 8, 3.0)
    assert state["args"]["model"]["hidden_size"] == 32
    scheduler = {"start_lr", "warmup_iter", "num_iters", "decay_style", "end_iter", "min_lr"}
    assert scheduler <= set(state["lr_scheduler"])
    description = json.loads((tmp_path / "global_step2" / "run.json").read_text())
    assert description["config"]["ds_config"]["train_batch_size"] == 4


def test_flags_of_loading(programs, plain, tmp_path):
    """The whole state; without the optimizer's; without the random states; and only the weights."""

    def resume(*flags: str) -> list[dict]:
        metrics = tmp_path / "-".join(("metrics", *flags))
        programs.pretrain(1, *SETTINGS, "--load", plain, *flags, "--metrics-file", metrics).ok()
        lines = read_metrics(metrics)
        assert [line["iteration"] for line in lines] == ([1, 2] if "--finetune" in flags else [3, 4])
        return lines

    exact, no_optimizer, no_rng = resume(), resume("--no-load-optim"), resume("--no-load-rng")
    assert no_optimizer[0]["lm_loss"] == exact[0]["lm_loss"], "the same weights, rng and samples"
    assert no_optimizer[1]["lm_loss"] != exact[1]["lm_loss"], "Adam begins anew"
    assert no_rng[0]["lm_loss"] != exact[0]["lm_loss"], "another dropout"
    assert no_rng[0]["learning_rate"] == exact[0]["learning_rate"]
    fresh, tuned = read_metrics(plain / "metrics"), resume("--finetune")
    assert tuned[0]["learning_rate"] == fresh[0]["learning_rate"] and tuned[0]["lm_loss"] != fresh[0]["lm_loss"]


def test_saving_less(programs, tmp_path):
    flags = (*SETTINGS, "--zero-stage", "0")
    programs.pretrain(1, *flags, "--save", tmp_path / "ck", "--no-save-optim", "--no-save-rng").ok()
    tag = tmp_path / "ck" / "global_step2"
    assert sorted(path.name for path in tag.iterdir()) == [
        "manifest.json",
        "mp_rank_00_model_states.pt",
        "run.json",
    ]
    assert torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)["optimizer"] is None
    refused = programs.pretrain(1, *flags, "--load", tmp_path / "ck")
    assert refused.returncode == 4
    assert "saved with --no-save-optim: add --no-load-optim" in refused.output
    assert "saved with --no-save-rng: add --no-load-rng" in refused.output
    programs.pretrain(1, *flags, "--load", tmp_path / "ck", "--no-load-optim", "--no-load-rng").ok()


def test_either_schedule_is_used_from_the_first_iteration_on(programs, tmp_path):
    flags = (*SETTINGS, "--zero-stage", "1")
    programs.pretrain(1, *flags, "--save", tmp_path / "ck").ok()
    changed = (*flags, "--load", tmp_path / "ck", "--lr", "5e-3", "--train-iters", "9")
    rates = {}
    for choice in ("--override-lr-scheduler", "--use-checkpoint-lr-scheduler"):
        programs.pretrain(1, *changed, choice, "--metrics-file", tmp_path / choice).ok()
        rates[choice] = [line["learning_rate"] for line in read_metrics(tmp_path / choice)]
    overridden, kept = (schedule(5e-3, 9, warmup=1), schedule(1e-3, 4, warmup=0))
    assert list(rates.values()) == [pytest.approx(overridden), pytest.approx(kept)]


def schedule(peak: float, end: int, *, warmup: int) -> list[float]:
    """The rates of iterations 3 and 4 of a cosine that decays to --min-lr."""
    shares = [(1 + math.cos(math.pi * (finished - warmup) / (end - warmup))) / 2 for finished in (2, 3)]
    return [1e-4 + (peak - 1e-4) * share for share in shares]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--lora-rank 4 --lora-target query_key_value dense",
        "--num-experts 4",
        "--zero-stage 1 --deepspeed_config ds.json",
    ],
)
def test_the_configuration_is_the_one_that_was_saved(words: str, tmp_path: Path, monkeypatch) -> None:
    """Equal, and as good a key of a cache: JSON knows no tuples."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"zero_optimization": {"parameter_alignment": true, "sub_group_size": 1000000}}')
    run = parse(words)
    description = checked_description(json.loads(json.dumps(describe(run, 6))), "run.json")
    saved = SavedRun(tmp_path, "global_step6", description)
    config = saved.full_model_config()
    assert config == replace(run.model, padded_vocab_size=config.vocab_size, dtype=config.dtype)
    assert layer_groups(config) == layer_groups(config)
    assert saved.layout == SavedLayout.from_run(run)


def test_fields_of_earlier_versions_are_left_out(tmp_path: Path) -> None:
    description = json.loads(json.dumps(describe(parse(""), 6)))
    description["config"]["model"] |= {"flex_attention": False, "images_per_sample": 1}
    config = SavedRun(tmp_path, "global_step6", description).full_model_config()
    assert config.hidden_size == parse("").model.hidden_size


def test_a_name_is_looked_for_without_reading() -> None:
    tensors = LazyTensors({"a": torch.empty(1, device="meta")}, read=pytest.fail)
    assert "a" in tensors and "b" not in tensors and len(tensors) == 1


def test_parts_of_a_file_are_found(tmp_path):
    numbers = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    content = {"rows": numbers[1:], "trained": torch.nn.Parameter(numbers + 1), "shape": numbers.shape}
    torch.save(content, tmp_path / "file.pt")
    file = StoredFile(tmp_path / "file.pt")
    assert file.content["shape"].numel() == 12
    assert torch.equal(file.entry("rows").flat(3, 6).read_all(), numbers.flatten()[7:10])
    assert torch.equal(file.entry("trained").read_all(), numbers + 1)
