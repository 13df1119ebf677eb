"""The central test for a mixture of experts: every layout gives the same losses, gradient norms and weights."""

import pytest
import torch
from support.layouts import COMPARED, LayoutRuns, compare_metrics, compare_runs, differing_weights, layout
from support.programs import read_metrics
from support.training import RankTraining

from megatron.checkpoint.manifest import write_manifest
from megatron.checkpoint.tracker import newest
from megatron.common.errors import CheckpointError
from megatron.tools.convert.load_and_save import lazy_weights

ITERATIONS = 3
SETTINGS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
    " --moe-shared-expert-intermediate-size 16 --swiglu --disable-bias-linear"
    f" --train-iters {ITERATIONS} --batch-size 2 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
    " --clip-grad 0.4 --eval-iters 1 --eval-interval 3 --log-interval 1 --log-params-norm"
).split()
LAYOUTS = [
    "dp2 ep2 zero2 recompute",
    "dp4 ep2 zero1",
    "tp2 sp zero3",
    "cp2 zero1",
    "pp2 zbv",
    "dp2 pp2 ep2 zbh1",
]
OF_EXPERTS = {"params_norm", "load_balancing_loss", "z_loss", "router_entropy"}
OF_EXPERTS |= {"largest_expert_load", "smallest_expert_load"}


@pytest.fixture(scope="module")
def runs(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(train_in_ranks, SETTINGS, tmp_path_factory.mktemp)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_agrees_with_one_process(runs: LayoutRuns, name: str) -> None:
    found = compare_runs(runs.on_one_process(), runs(*layout(name)), ITERATIONS, COMPARED | OF_EXPERTS)
    assert found[0].keys() >= OF_EXPERTS


def test_a_balanced_global_batch_agrees_with_one_process(runs: LayoutRuns) -> None:
    """In one micro-batch: the ranks exchange which experts their samples chose."""
    balance = "--moe-router-load-balancing-type global_aux_loss --batch-size"
    found = runs(*layout(f"dp2 tp2 ep2 zero1 {balance} 4"))
    compare_runs(runs.on_one_process(f"{balance} 8"), found, ITERATIONS, COMPARED | OF_EXPERTS)


def test_training_resumes_with_other_numbers_of_expert_ranks(runs: LayoutRuns) -> None:
    """From one rank to four, and then to two, each time for one iteration. Experts of no layer are refused."""
    whole, folder = runs.on_one_process(), runs(1, "--exit-interval 1")
    divided = runs(*layout(f"dp4 ep4 zero1 --exit-interval 2 --load {folder / 'checkpoint'}")) / "checkpoint"
    folder = runs(*layout(f"dp2 ep2 --load {divided}"))
    expected = [line for line in read_metrics(whole / "metrics") if line["iteration"] > 2]
    compare_metrics(expected, read_metrics(folder / "metrics"), COMPARED | OF_EXPERTS)
    assert not differing_weights(whole / "checkpoint", folder / "checkpoint")
    file = divided / "global_step2" / "expert_rank_03_mp_rank_00_states.pt"
    torch.save(torch.load(file, weights_only=True) | {"9.mlp.experts.dense_h_to_4h.weight": {}}, file)
    (file.parent / "manifest.json").unlink()
    write_manifest(file.parent, {})
    with pytest.raises(CheckpointError, match=rf"{file} holds 9\.mlp\.experts"):
        lazy_weights(newest(divided))
