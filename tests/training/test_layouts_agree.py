"""The central test: every layout gives the same losses, gradient norms and weights."""

import pytest
from support.layouts import LayoutRuns, compare_metrics, compare_runs
from support.programs import read_metrics
from support.training import RankTraining

ITERATIONS = 4
SETTINGS = (
    f"--train-iters {ITERATIONS} --batch-size 2 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
    " --clip-grad 0.4 --eval-iters 1 --eval-interval 2 --eod-mask-loss"
).split()

LLAMA = (
    "--num-query-groups 2 --kv-channels 10 --swiglu --normalization RMSNorm --position-embedding-type rope"
    " --disable-bias-linear --qk-layernorm --untie-embeddings-and-output-weights --reset-position-ids"
)

TILED = "--tiled-mlp --tiled-mlp-num-shards 5"
LAYOUTS = {
    "tp2-pp2-dp2": (8, "--model-parallel-size 2 --pipe-parallel-size 2"),
    "plain-tp2-dp2": (4, "--model-parallel-size 2"),
    "pp2-zero1-recompute": (
        2,
        "--pipe-parallel-size 2 --zero-stage 1 --checkpoint-activations --checkpoint-num-layers 2",
    ),
    "plain-dp2-zero3-offload": (2, "--zero-stage 3 --offload-optimizer cpu --offload-param cpu"),
    "plain-dp2-zero2-overlap-round-robin": (2, "--zero-stage 2 --zero-overlap-comm --zero-round-robin-gradients"),
    "dualpipev-one-stage-dp2-zero1": (2, "--pipe-parallel-size 1 --pipeline-schedule dualpipev --zero-stage 1"),
    "pp2-dp2-zero1-small-buckets": (4, "--pipe-parallel-size 2 --zero-stage 1 --ddp-bucket-size 5000"),
    "plain-dp2-zero2-coalesced-small-buckets": (
        2,
        "--zero-stage 2 --zero-coalesce-grad-reduction --zero-reduce-bucket-size 5000",
    ),
    "plain-dp2-zero3-coalesced-recompute": (
        2,
        "--zero-stage 3 --zero-coalesce-grad-reduction --checkpoint-activations",
    ),
    "pp2-zero1-offload": (2, "--pipe-parallel-size 2 --zero-stage 1 --offload-optimizer cpu"),
    "documents-tp2-pp2-other-order-selective": (
        4,
        "--model-parallel-size 2 --pipe-parallel-size 2 --shape-order SBH --recompute-granularity selective"
        " --reset-attention-mask --reset-position-ids",
    ),
    "plain-tp2-sequence-zero3": (2, "--model-parallel-size 2 --sequence-parallel --zero-stage 3"),
    "documents-tp2-pp2-sequence-recompute": (
        4,
        "--model-parallel-size 2 --pipe-parallel-size 2 --sequence-parallel --checkpoint-activations"
        " --reset-attention-mask --reset-position-ids",
    ),
    "plain-tp2-dp2-sequence-zero2-small-buckets": (
        4,
        "--model-parallel-size 2 --sequence-parallel --zero-stage 2 --ddp-bucket-size 5000",
    ),
    "plain-tp2-overlap": (2, "--model-parallel-size 2 --tp-comm-overlap"),
    "llama-plain-tp2-dp2-sequence-overlap": (
        4,
        f"{LLAMA} --model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
    ),
    "tp2-pp2-sequence-overlap-zbh1-zero1": (
        4,
        "--model-parallel-size 2 --pipe-parallel-size 2 --pipeline-schedule zbh1 --sequence-parallel --zero-stage 1"
        " --tp-comm-overlap --shape-order SBH",
    ),
    "pp4-ends-alone": (4, "--pipe-parallel-size 4 --pipeline-partition 0,2,2,0"),
    "tp2-pp2-dualpipev-zero1-recompute": (
        4,
        "--model-parallel-size 2 --pipe-parallel-size 2 --pipeline-schedule dualpipev --pipeline-partition 2,1,1,0"
        " --zero-stage 1 --checkpoint-activations",
    ),
    "documents-pp2-dualpipev": (
        2,
        "--pipe-parallel-size 2 --pipeline-schedule dualpipev --reset-attention-mask --reset-position-ids",
    ),
    "plain-ulysses2-zero2-recompute": (2, "--ds-sequence-parallel-size 2 --zero-stage 2 --checkpoint-activations"),
    "documents-plain-tp2-ulysses2-sequence-zero1": (
        4,
        "--ds-sequence-parallel-size 2 --model-parallel-size 2 --sequence-parallel --zero-stage 1"
        " --shape-order SBH --reset-attention-mask --reset-position-ids",
    ),
    "plain-ulysses2-dp2-zero3": (4, "--ds-sequence-parallel-size 2 --zero-stage 3"),
    "plain-cp2-zero3-recompute": (2, "--context-parallel-size 2 --zero-stage 3 --checkpoint-activations"),
    "cp2-pp2-zero1-recompute": (
        4,
        "--context-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1 --checkpoint-activations",
    ),
    "documents-plain-tp2-sequence-overlap-zero2-recompute-compiled": (
        2,
        "--model-parallel-size 2 --sequence-parallel --tp-comm-overlap --zero-stage 2 --checkpoint-activations"
        " --compile --reset-attention-mask --reset-position-ids",
    ),
    "plain-tp2-sequence-zero1-in-place": (
        2,
        "--model-parallel-size 2 --sequence-parallel --zero-stage 1 --gradient-accumulation-fusion",
    ),
    "pp2-dualpipev-in-place": (
        2,
        "--pipe-parallel-size 2 --pipeline-schedule dualpipev --gradient-accumulation-fusion",
    ),
    "tp2-pp2-sequence-zero1-recompute-tiled": (
        4,
        "--model-parallel-size 2 --pipe-parallel-size 2 --sequence-parallel --zero-stage 1 --checkpoint-activations"
        f" {TILED} --shape-order SBH",
    ),
    "llama-plain-tp2-zero3-tiled": (2, f"{LLAMA} --model-parallel-size 2 --zero-stage 3 {TILED}"),
    "llama-tp2-sequence-recompute": (
        2,
        f"{LLAMA} --model-parallel-size 2 --sequence-parallel --checkpoint-activations",
    ),
    "llama-pp1-cp2-ulysses2-all-gather": (
        4,
        f"{LLAMA} --pipe-parallel-size 1 --context-parallel-size 2 --ds-sequence-parallel-size 2"
        " --cp-comm-type all_gather",
    ),
    "llama-tp2-ulysses2-zero2": (
        4,
        f"{LLAMA} --model-parallel-size 2 --ds-sequence-parallel-size 2 --zero-stage 2",
    ),
}


DOCUMENTS = "--reset-attention-mask --reset-position-ids"
REFERENCES = {"documents": DOCUMENTS, "llama": LLAMA}
"""The first word of a layout's name, and the flags of the run on one process that it is compared with."""


@pytest.fixture(scope="module")
def runs(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(train_in_ranks, SETTINGS, tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def runs_in_blocks(train_in_blocks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(train_in_blocks, SETTINGS, tmp_path_factory.mktemp)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_agrees_with_one_process(runs: LayoutRuns, runs_in_blocks: LayoutRuns, layout: str) -> None:
    """Where documents are kept apart, several processes compute attention in a block for each, and one with a mask."""
    kind, (processes, flags) = layout.split("-")[0], LAYOUTS[layout]
    reference = runs.on_one_process(REFERENCES.get(kind, ""))
    folder = (runs_in_blocks if kind == "documents" else runs)(processes, flags)
    found = compare_runs(reference, folder, ITERATIONS)
    assert len(found) == ITERATIONS + 3  # two validations and the test


def test_llama_resumes_on_another_layout(runs: LayoutRuns) -> None:
    """From tensor parallel 2 to two pipeline stages after half of the iterations."""
    saved = runs(2, f"{LLAMA} --model-parallel-size 2 --exit-interval 2")
    resumed = runs(2, f"{LLAMA} --pipe-parallel-size 2 --load {saved / 'checkpoint'}")
    found = read_metrics(resumed / "metrics")
    expected = [line for line in read_metrics(runs.on_one_process(LLAMA) / "metrics") if line["iteration"] > 2]
    assert len(found) == 4
    compare_metrics(expected, found)
