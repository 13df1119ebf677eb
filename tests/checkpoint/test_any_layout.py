"""A run resumed from a checkpoint of any layout has the losses of an uninterrupted run."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint.conftest import FP8, SAVED, SETTINGS
from support.layouts import layout
from support.programs import TINY_MODEL, Programs, read_metrics
from support.training import RankTraining, started_engine

from megatron.checkpoint.stored import Shard, Stored, StoredFile
from megatron.model.spec import ParameterSpec

TP2_FP8 = f"tp2 sp {FP8}"
PAIRS = [
    ("dp1", "tp2 pp2 zero1"),  # a padded vocabulary of 256 rows in place of 128
    ("tp2 pp2 zero1", "ulysses2 zero2 --zero-round-robin-gradients"),
    ("dp2 zero3", "dp1 zero3 offload --offload-param cpu"),
    ("ulysses2 zero2 --zero-round-robin-gradients", "pp1 cp2 zero1"),
    ("pp2 dualpipev --batch-size 8", "dp2 zero1 offload"),
]


@pytest.fixture
def resume(train_in_ranks: RankTraining, saved_on: Callable[[str], Path], tmp_path: Path):
    """Resume on a layout with some flags from a checkpoint of another; its output and metrics."""

    def run(source: str, name: str, *flags: str) -> tuple[str, list[dict]]:
        processes, words = layout(name)
        metrics = tmp_path / f"metrics{len(list(tmp_path.iterdir()))}"
        printed = train_in_ranks(
            processes, *SETTINGS, *words.split(), *flags, "--load", saved_on(source), "--metrics-file", metrics
        )
        return printed, read_metrics(metrics)

    return run


@pytest.fixture(scope="module")
def expected(uninterrupted: Path) -> list[dict]:
    """The iterations after the checkpoint, uninterrupted."""
    return read_metrics(uninterrupted / "metrics")[SAVED:]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_next_losses_are_those_of_the_uninterrupted_run(resume, expected, source: str, target: str):
    printed, found = resume(source, target)
    assert "resuming after iteration 3" in printed
    assert printed.count("random streams restart from --seed and the iteration") == 1
    for name in ("iteration", "consumed_samples", "learning_rate"):
        assert [line[name] for line in found] == [line[name] for line in expected]
    for name in ("lm_loss", "grad_norm"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-5), name


def test_samples_of_a_second_epoch_follow(programs: Programs, expected):
    """The comparison above covers an end of the data, where the samples are shuffled again."""
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.splits import split_documents

    indexed = IndexedDataset(programs.data_arguments[1])
    training = split_documents(indexed.num_documents, "8,1,1")[0]
    samples = (int(indexed.document_starts[training.stop]) - 1) // 32
    assert expected[0]["consumed_samples"] < samples < expected[-1]["consumed_samples"]


@pytest.mark.parametrize(("source", "target"), [("tp2 pp2 zero1", "dp2 zero3"), ("dp2 zero3", "tp2 pp2 zero1")])
def test_a_rank_reads_what_it_needs(run_ranks_once, programs: Programs, saved_on, source: str, target: str):
    """From 4 ranks to 2, and from 2 to 4: weights of its stage and shard, and moments of its partition."""
    processes, flags = layout(target)
    words = [*TINY_MODEL, *programs.data_arguments, *SETTINGS, *flags.split(), "--load", str(saved_on(source))]
    for read, needed in run_ranks_once(processes, bytes_of_loading, words):
        assert 0.5 * needed < read < 1.05 * needed  # rows that pad the vocabulary are not read


def bytes_of_loading(words: list[str]) -> tuple[int, int]:
    """Bytes of tensors that this rank reads of a checkpoint; those of its weights, moments, and copies to compare."""
    from megatron.checkpoint.load import load_checkpoint, select_checkpoint
    from megatron.checkpoint.parameter_state import SavedStates
    from megatron.cli import parse_run
    from megatron.engines.state import master_weights
    from megatron.training.preflight import check

    read, counted = Stored.read_all, []

    def counting(tensor: Stored, *used_as: torch.dtype) -> torch.Tensor:
        counted.append(tensor.numel() * tensor.dtype.itemsize)
        return read(tensor, *used_as)

    Stored.read_all = counting
    run = check(parse_run(words, os.environ))[0]
    with started_engine(words) as (layout, engine):
        load_checkpoint(engine, run, layout, saved := select_checkpoint(run))
        share = SavedStates(saved, verified=True).copies(slice(dist.get_rank(), None, dist.get_world_size()))
        compared = sum(copy.numel() for _, copies in share for copy in copies)
        moments = sum(2 * master.length for master in master_weights(engine).values())
        weights = sum(
            parameter.ds_tensor.ds_numel if hasattr(parameter, "ds_tensor") else parameter.numel()
            for parameter in engine.module.parameters()
        )
    return sum(counted), 4 * (weights + moments + compared)


def test_another_precision(resume, saved_on, expected):
    printed, found = resume("dp1", "dp1", "--bf16", "--zero-stage", "1")
    place = saved_on("dp1") / "global_step3"
    assert printed.count(f"{place}: saved on TP 1, PP 1, DP 1, ZeRO 0, fp32; each rank reads its parts") == 1
    assert "random streams" not in printed, "the ranks are the same"
    assert [line["iteration"] for line in found] == [line["iteration"] for line in expected]
    assert [line["lm_loss"] for line in found] == pytest.approx([line["lm_loss"] for line in expected], rel=1e-3)
    assert found[0]["lm_loss"] != expected[0]["lm_loss"]


def test_another_padding_of_the_vocabulary(resume, expected):
    _, found = resume("dp1", "dp1", "--make-vocab-size-divisible-by", "50")
    assert [line["iteration"] for line in found] == [line["iteration"] for line in expected]
    assert [line["lm_loss"] for line in found] == pytest.approx([line["lm_loss"] for line in expected], rel=1e-5)


def test_fp8_on_another_layout(resume):
    """Within bf16's precision: weights are saved in bf16, and quantized as they are on the new layout."""
    found = [resume(TP2_FP8, target, *FP8.split())[1] for target in (TP2_FP8, "dp1")]
    for name, bound in (("iteration", 0), ("lm_loss", 1e-3), ("grad_norm", 2e-2)):
        one, other = ([line[name] for line in lines] for lines in found)
        assert len(one) == 4 and one == pytest.approx(other, rel=bound), name


def test_weights_alone_on_another_layout(resume):
    """As on the layout that saved them, where DeepSpeed loads them itself."""
    losses = {}
    for source in ("dp1", "dp2 zero3"):
        _, found = resume(source, "dp1", "--finetune")
        assert [line["iteration"] for line in found] == list(range(1, 8))
        losses[source] = [line["lm_loss"] for line in found]
    assert losses["dp2 zero3"] == pytest.approx(losses["dp1"], rel=1e-5)


@pytest.mark.parametrize(("shape", "shard_dim"), [((4,), 0), ((2,), None), ((4, 3), 0), ((3, 4), 1), ((2, 4, 3), 1)])
def test_any_part_of_a_shard_is_read(tmp_path: Path, shape: tuple[int, ...], shard_dim: int | None):
    """Saved at TP 2, read at TP 1; empty parts, too: ZeRO 3 divides a parameter of two elements among four ranks."""
    full = torch.randn(shape)
    parts = [full, full] if shard_dim is None else [part.clone() for part in full.chunk(2, shard_dim)]
    torch.save(dict(enumerate(parts)), tmp_path / "parts")
    shard = Shard(StoredFile(tmp_path / "parts").entry, 2, ParameterSpec("p", shape, shard_dim), parts[0].shape, shape)
    for begin in range(full.numel() + 1):
        for end in range(begin, full.numel() + 1):
            assert torch.equal(shard.read(begin, end), full.flatten()[begin:end]), (begin, end)
