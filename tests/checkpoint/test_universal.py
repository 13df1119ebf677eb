"""The universal format: the same from every layout, and the same as DeepSpeed's own."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import deepspeed
import pytest
import torch
from support.programs import Programs
from support.universal_folders import read_state

from megatron.checkpoint.commit import remove_unfinished
from megatron.checkpoint.tracker import newest
from megatron.common.errors import CheckpointError, ConfigError, ResourceError
from megatron.tools.convert import universal
from megatron.tools.convert.inspection import find
from megatron.tools.convert.load_and_save import read_model
from megatron.tools.convert.universal import cached_universal, convert

MOMENTS = ("fp32", "exp_avg", "exp_avg_sq")


@pytest.fixture
def universal_of(saved_on: Callable[[str], Path]) -> Callable[[str], Path]:
    """The universal form of the checkpoint of a layout."""
    return lambda layout: cached_universal(newest(saved_on(layout)))[0]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "zero").iterdir() if path.is_dir())


def without_keys_bias(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The bias of attention's keys has no effect on anything, so its gradient is nothing but rounding."""
    return tensor.view(4, 3, 8)[:, ::2] if name.endswith("query_key_value.bias") else tensor


@pytest.mark.parametrize(
    "layout",
    ["tp2 pp2 zero1", "ulysses2 zero2 --zero-round-robin-gradients", "dp2 zero3", "pp2 dualpipev --batch-size 8"],
)
def test_moments_are_those_of_one_process(universal_of, layout: str):
    """There torch's Adam has each moment separately, and nothing is merged."""
    one, other = universal_of("dp1"), universal_of(layout)
    assert names_in(other) == names_in(one) and len(names_in(one)) == 52
    for name in names_in(one):
        expected, found = read_state(one, name), read_state(other, name)
        assert found.keys() == expected.keys() == {*MOMENTS, "step"}
        assert int(found["step"]) == int(expected["step"]) == 3
        for key in MOMENTS:
            first, second = (without_keys_bias(name, state[key]) for state in (expected, found))
            # As a whole: Adam blows rounding up where a gradient is next to nothing.
            assert (second - first).norm() < 1e-2 * first.norm(), (name, key)


def test_moments_of_one_process_are_its_optimizers(universal_of, saved_on):
    state = torch.load(saved_on("dp1") / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)
    decayed, spared = state["param_shapes"]
    names = [*decayed, *spared]
    assert len(names) == 52
    for number, name in enumerate(names):
        found = read_state(universal_of("dp1"), name)
        for key in ("exp_avg", "exp_avg_sq"):
            whole = state["optimizer"]["state"][number][key]
            assert torch.equal(found[key], whole[:92] if "word" in name else whole)


def test_universal_checkpoint_equals_deepspeeds(programs: Programs, universal_of, saved_on, tmp_path: Path):
    source = saved_on("tp2 pp2 zero1") / "global_step3"
    converter = Path(deepspeed.__file__).parent / "checkpoint" / "ds_to_universal.py"
    words = (converter, "--num_merge_workers", "1", "--num_extract_workers", "1")
    programs.warm(1, *words, "--input_folder", source, "--output_folder", tmp_path / "theirs").ok()
    ours, theirs = universal_of("tp2 pp2 zero1"), tmp_path / "theirs"
    assert names_in(ours) == names_in(theirs)
    for name in names_in(ours):
        for key in MOMENTS:
            one, other = (torch.load(folder / "zero" / name / f"{key}.pt") for folder in (ours, theirs))
            assert torch.equal(one.pop("param"), other["param"].view(read_state(ours, name)[key].shape))
            assert one.items() <= {**other, "cat_dim": one.get("cat_dim")}.items()
        assert torch.equal(*(torch.load(folder / "zero" / name / "step.pt") for folder in (ours, theirs)))


def test_deepspeed_loads_the_universal_checkpoint(run_ranks, universal_of):
    run_ranks(1, deepspeed_reads, str(universal_of("tp2 pp2 zero1")))


def deepspeed_reads(folder: str) -> None:
    """With an engine that has only the model from this project."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from support.universal_folders import read_state

    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": True},
    }
    module = _whole_model(padded_vocab_size=128)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    engine.load_checkpoint(str(Path(folder).parent), tag=Path(folder).name)
    assert engine.global_steps == 3
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in module.named_parameters():
        state = read_state(Path(folder), name)
        rows = len(state["fp32"])
        assert torch.equal(parameter[:rows], state["fp32"]), name
        assert torch.equal(safe_get_full_fp32_param(parameter)[:rows], state["fp32"]), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(safe_get_full_optimizer_state(parameter, key)[:rows], state[key]), name


@pytest.mark.parametrize("program", ["", "bert"])
def test_patterns_for_deepspeed_match_each_parameter(program: str):
    """DeepSpeed's own conversion looks up how tensor parallelism divides a parameter by these patterns."""
    from support.command_lines import parse

    from megatron.checkpoint.save import parameter_patterns
    from megatron.model.architectures import architecture_of

    model = replace(parse(program).model, vocab_size=92, padded_vocab_size=128)
    patterns = parameter_patterns(model)
    specs = architecture_of(model).named_parameters(model)
    assert len(specs) > 12 * model.num_layers
    for name, spec in specs.items():
        found = [key for key, values in patterns.items() for pattern in values if re.match(pattern, name)]
        matching = set(found)
        assert len(found) == len(matching), f"{name} matches the pattern of another parameter"
        assert ("vocabulary_parameter_patterns" in matching) == spec.is_vocabulary
        assert ("tp_replicated_parameter_patterns" in matching) == (spec.shard_dim is None)
        assert ("parameter_with_row_parallelism_patterns" in matching) == (spec.shard_dim == 1)
        assert ("pipeline_replicated_parameter_patterns" in matching) == name.startswith("tied_modules.")


def _whole_model(padded_vocab_size: int) -> torch.nn.Module:
    from support.whole_models import whole_model

    from megatron.config import ModelConfig

    config = ModelConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=128, max_position_embeddings=32,
        vocab_size=92, padded_vocab_size=padded_vocab_size,
    )  # fmt: skip
    return whole_model(config)


def test_the_tool_converts_once(programs: Programs, saved_on):
    folder = saved_on("pp2 dualpipev --batch-size 8")
    place = folder / "global_step3"
    cached_universal(newest(folder))
    tool = ("tools/convert_checkpoint.py", "to-universal")
    output = programs.warm(1, *tool, place).ok().output
    assert output == f"{place}_universal: exists already, of {place}\n"
    assert (folder / "latest_universal").read_text() == "global_step3_universal"
    (place / "run.json").touch()
    assert "global_step3_universal: converted from" in programs.warm(1, *tool, folder).ok().output


def _lose_a_weight(file: Path) -> None:
    shutil.rmtree(file.parent)


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    place = content.index(b"PK\x03\x04", content.index(b"data/0")) - 200  # in the record of the tensor
    content[place] ^= 1
    file.write_bytes(content)


def _flip_a_bit_without_manifest(file: Path) -> None:
    (file.parents[1] / "manifest.json").unlink()
    _flip_a_bit(file)


def _exchange(file: Path) -> None:
    other = next(path for path in file.parents[1].glob("*query_key_value.weight/fp32.pt") if path != file)
    other.rename(spare := file.with_suffix(".other"))
    file.rename(other)
    spare.rename(file)


def _reshape(file: Path) -> None:
    torch.save({"param": torch.ones(1)}, file)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_lose_a_weight, "{}"),
        (_flip_a_bit, "{}/fp32.pt"),
        (_exchange, "{}/fp32.pt is damaged"),
        (_reshape, "{}/fp32.pt"),
    ],
)
def test_a_damaged_universal_checkpoint_is_refused_and_converted_again(
    saved_on, tmp_path: Path, spoil: Callable, message: str
):
    folder = shutil.copytree(saved_on("dp1"), tmp_path / "copy")
    universal, _ = cached_universal(newest(folder))
    whole = read_model(find(universal)).weights
    name = next(name for name in whole if name.endswith("query_key_value.weight"))
    spoil(universal / "zero" / name / "fp32.pt")
    with pytest.raises(CheckpointError, match=message.replace("{}", name)):
        read_model(find(universal))
    assert cached_universal(newest(folder)) == (universal, True)
    assert read_model(find(universal)).weights[name].equal(whole[name])
    assert cached_universal(newest(folder)) == (universal, False)


def test_a_folder_of_something_else_is_not_replaced(saved_on, tmp_path: Path):
    folder = shutil.copytree(saved_on("dp1"), tmp_path / "copy")
    shutil.rmtree(target := folder / "global_step3_universal", ignore_errors=True)
    target.mkdir()
    (target / "mine").touch()
    with pytest.raises(ConfigError, match=f"{target} exists, and is no universal checkpoint"):
        cached_universal(newest(folder))
    assert (target / "mine").exists()


def test_a_folder_that_cannot_be_written(saved_on, tmp_path: Path):
    saved = newest(saved_on("dp1"))

    with pytest.raises(ResourceError, match="cannot be written .* has to be converted: "):
        convert(saved, tmp_path / "missing" / "global_step3_universal")
    assert not any(tmp_path.iterdir())


def test_what_a_killed_conversion_leaves_is_removed(saved_on, tmp_path: Path, monkeypatch):
    saved, names = newest(saved_on("dp1")), []

    def stopped(_, folder: Path) -> None:
        names.append(folder.name)
        raise OSError

    monkeypatch.setattr(universal, "_write", stopped)
    with pytest.raises(ResourceError):
        convert(saved, tmp_path / "global_step3_universal")
    (tmp_path / names[0]).mkdir()
    remove_unfinished(tmp_path)
    assert not any(tmp_path.iterdir())
