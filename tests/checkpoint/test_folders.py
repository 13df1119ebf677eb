"""Checkpoints of many ranks have folders for the files of ranks, which every reader finds."""

from pathlib import Path
from unittest.mock import patch

import pytest
from checkpoint.conftest import SAVED, SETTINGS
from support.layouts import layout
from support.programs import read_metrics
from support.training import RankTraining, pretrain

from megatron.checkpoint import stored, tracker
from megatron.checkpoint.manifest import check_sizes, read_manifest
from megatron.common import checkpoint_folders
from megatron.common.checkpoint_folders import FLAT, existing_rank_file, rank_file_path
from megatron.tools.convert.inspection import find, verify
from megatron.tools.convert.load_and_save import read_versions, read_weights

FOLDERS = {
    "rng_state_12345.pt": "rng_12",
    "zero_pp_rank_999_mp_rank_07_optim_states.pt": "model_rank_07_0",
    "bf16_zero_pp_rank_1000_mp_rank_163_optim_states.pt": "model_rank_163_1",
    "zero_pp_rank_2001_mp_rank_00_model_states.pt": "model_rank_00_2",
    "expert_rank_63_mp_rank_07_states.pt": "model_rank_07_0",
    **dict.fromkeys(("mp_rank_07_model_states.pt", "layer_03-model_07-model_states.pt", "run.json"), "."),
}


def test_the_folder_of_each_file(tmp_path: Path) -> None:
    for name, folder in FOLDERS.items():
        flat = tmp_path / name.removesuffix(".pt") / name
        assert rank_file_path(flat, FLAT) == flat == existing_rank_file(flat)
        file = rank_file_path(flat, FLAT + 1)
        assert file == flat.parent / folder / name
        file.parent.mkdir(parents=True)
        assert existing_rank_file(flat) == file


def pretrain_as_if_many(words: list[str]) -> tuple[int, str]:
    with patch.object(checkpoint_folders, "FLAT", 1), patch.object(checkpoint_folders, "_BLOCK", 1):
        return pretrain(words)


@pytest.mark.parametrize(("name", "folders"), [("dp2 zero3", 4), ("tp2 pp2 zero1", 8)])
def test_a_run_saves_and_resumes(
    run_ranks, programs, train_in_ranks: RankTraining, uninterrupted: Path, tmp_path: Path, name: str, folders: int
) -> None:
    """On the same layout, where DeepSpeed loads, and on another; its tools read it, and find what was changed."""
    processes, flags = layout(name)
    many = RankTraining(run_ranks, programs.data_arguments, pretrain_as_if_many)
    many(processes, *SETTINGS, *flags.split(), "--save", tmp_path, "--save-interval", "1", "--keep-last", "1",
         "--exit-interval", str(SAVED))  # fmt: skip
    (path,) = tmp_path.glob("global_step*")
    assert len([one for one in path.iterdir() if one.is_dir()]) == folders
    expected = [line["lm_loss"] for line in read_metrics(uninterrupted / "metrics")[SAVED:]]
    with patch.object(checkpoint_folders, "_BLOCK", 1):
        verify(path)
        with patch.object(stored, "check_content") as hashed:
            assert read_versions(find(path))["checkpoint"] == 3.0
        assert not hashed.called, "verify has read all files"
        assert all(tensor.numel() for tensor in read_weights(find(path)).values())
    for number, (other, train) in enumerate(((name, many), ("dp1", many))):
        processes, flags = layout(other)
        metrics = tmp_path / f"metrics{number}"
        train(processes, *SETTINGS, *flags.split(), "--load", tmp_path, "--metrics-file", metrics)
        assert [line["lm_loss"] for line in read_metrics(metrics)] == pytest.approx(expected, rel=1e-5)
    file = next(path.glob("model_rank_*/*optim_states.pt"))
    file.rename(path / "model_rank_00_0" / "other.pt")
    with pytest.raises(Exception, match=file.name):
        check_sizes(path, read_manifest(path))
    assert tracker.holds_checkpoint(tmp_path)
