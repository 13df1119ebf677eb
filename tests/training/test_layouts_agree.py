"""The central test: every layout gives the same losses, gradient norms and weights."""

import pytest
from support.layouts import LayoutRuns, check_resumed, compare_runs, layout
from support.training import RankTraining

ITERATIONS = 3
SETTINGS = (
    f"--train-iters {ITERATIONS} --batch-size 2 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
    " --clip-grad 0.4 --eval-iters 1 --eval-interval 3 --eod-mask-loss"
).split()

LLAMA = (
    "--num-query-groups 2 --kv-channels 10 --swiglu --normalization RMSNorm --position-embedding-type rope"
    " --disable-bias-linear --qk-layernorm --untie-embeddings-and-output-weights --reset-position-ids"
)

WORDS = {"llama": LLAMA, "tiled": "--tiled-mlp --tiled-mlp-num-shards 3"}
LAYOUTS = [
    "tp2 pp2 dp2",
    "pp2 zero1 offload recompute --checkpoint-num-layers 2",
    "dp2 zero3 offload --offload-param cpu",
    "dp2 zero2 --zero-overlap-comm --zero-round-robin-gradients",
    "pp1 dualpipev dp2 zero1",
    "pp2 dp2 zero1 --ddp-bucket-size 5000",
    "dp2 zero2 --zero-coalesce-grad-reduction --zero-reduce-bucket-size 5000",
    "documents tp2 pp2 sbh selective --pipeline-partition 0,4",
    "documents pp4 sbh selective --pipeline-partition 0,1,2,1",
    "tp2 dp2 sp zero2 --ddp-bucket-size 5000",
    "llama tp2 sp zero1 overlap in-place --batch-size 4",
    "documents pp2 dualpipev zero1 recompute in-place --pipeline-partition 2,1,1,0",
    "documents tp2 ulysses2 sp zero1 sbh",
    "cp2 zero3 recompute --zero-coalesce-grad-reduction --batch-size 4",
    "cp2 pp2 zero1 recompute --pipeline-partition 4,0",
    "tp2 sp zero1 recompute tiled sbh --batch-size 4",
    "llama tp2 sp zero3 tiled --batch-size 4",
    "llama pp1 cp2 ulysses2 --cp-comm-type all_gather",
    "llama ulysses2 zero3 recompute --batch-size 4",
]


@pytest.fixture(scope="module")
def runs(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(train_in_ranks, SETTINGS, tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def runs_in_blocks(train_in_blocks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(train_in_blocks, SETTINGS, tmp_path_factory.mktemp)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_agrees_with_one_process(runs: LayoutRuns, runs_in_blocks: LayoutRuns, name: str) -> None:
    """Where documents are kept apart, several processes compute attention in a block for each, and one with a mask."""
    kind = name.split()[0] if name.startswith(("documents", "llama")) else ""
    reference = runs.on_one_process(layout(kind, **WORDS)[1])
    folder = (runs_in_blocks if kind == "documents" else runs)(*layout(name, **WORDS))
    found = compare_runs(reference, folder, ITERATIONS)
    assert len(found) == ITERATIONS + 2  # a validation and the test


def test_llama_resumes_on_another_layout(runs: LayoutRuns) -> None:
    check_resumed(runs, "tp2", "pp2", after=2, flags=LLAMA)
