"""The central test: every layout gives the same losses, gradient norms and weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.programs import read_metrics
from support.training import RankTraining

TOLERANCE = 1e-4
ITERATIONS = 6
SETTINGS = (
    f"--train-iters {ITERATIONS} --batch-size 2 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
    " --clip-grad 0.4 --eval-iters 1 --eval-interval 3 --eod-mask-loss"
).split()

LLAMA = (
    "--num-query-groups 2 --kv-channels 10 --swiglu --normalization RMSNorm --position-embedding-type rope"
    " --disable-bias-linear --qk-layernorm --untie-embeddings-and-output-weights --reset-position-ids"
)

TILED = "--tiled-mlp --tiled-mlp-num-shards 5"
LAYOUTS = {
    "tp2": (2, "--model-parallel-size 2"),
    "pp2": (2, "--pipe-parallel-size 2"),
    "dp2": (2, ""),
    "tp2-pp2": (4, "--model-parallel-size 2 --pipe-parallel-size 2"),
    "tp2-pp2-dp2": (8, "--model-parallel-size 2 --pipe-parallel-size 2"),
    "plain-tp2-dp2": (4, "--model-parallel-size 2"),
    "pp2-zero1-recompute": (
        2,
        "--pipe-parallel-size 2 --zero-stage 1 --checkpoint-activations --checkpoint-num-layers 2",
    ),
    "plain-dp2-zero3-recompute": (2, "--zero-stage 3 --checkpoint-activations"),
    "plain-dp2-zero1-offload": (2, "--zero-stage 1 --offload-optimizer cpu"),
    "plain-dp2-zero3-offload": (2, "--zero-stage 3 --offload-optimizer cpu --offload-param cpu"),
    "plain-dp2-zero2-overlap-round-robin": (2, "--zero-stage 2 --zero-overlap-comm --zero-round-robin-gradients"),
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
    "tp2-pp2-sequence": (4, "--model-parallel-size 2 --pipe-parallel-size 2 --sequence-parallel --shape-order SBH"),
    "plain-tp2-dp2-sequence-zero1": (4, "--model-parallel-size 2 --sequence-parallel --zero-stage 1"),
    "plain-tp2-sequence-zero3": (2, "--model-parallel-size 2 --sequence-parallel --zero-stage 3"),
    "documents-tp2-pp2-sequence-recompute": (
        4,
        "--model-parallel-size 2 --pipe-parallel-size 2 --sequence-parallel --checkpoint-activations"
        " --reset-attention-mask --reset-position-ids",
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
    "documents-plain-tp2-sequence-zero2-recompute-compiled": (
        2,
        "--model-parallel-size 2 --sequence-parallel --zero-stage 2 --checkpoint-activations --compile"
        " --reset-attention-mask --reset-position-ids",
    ),
    "plain-tp2-sequence-zero1-in-place": (
        2,
        "--model-parallel-size 2 --sequence-parallel --zero-stage 1 --gradient-accumulation-fusion",
    ),
    "pp2-dualpipev-in-place": (
        2,
        "--pipe-parallel-size 2 --pipeline-schedule dualpipev --gradient-accumulation-fusion",
    ),
    "documents-tp2-pp2": (
        4,
        "--model-parallel-size 2 --pipe-parallel-size 2 --reset-attention-mask --reset-position-ids",
    ),
    "tp2-pp2-sequence-zero1-recompute-tiled": (
        4,
        "--model-parallel-size 2 --pipe-parallel-size 2 --sequence-parallel --zero-stage 1 --checkpoint-activations"
        f" {TILED} --shape-order SBH",
    ),
    "plain-dp2-zero2-tiled": (2, f"--zero-stage 2 {TILED}"),
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


@pytest.fixture(scope="module")
def train(
    train_in_ranks: RankTraining, train_in_blocks: RankTraining, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], Path]:
    """``train(processes, flags)``: a new folder with the metrics and the checkpoint of a run.

    Where documents are kept apart, several processes compute attention in a block for each, and one with a mask.
    """

    def run(processes: int, flags: str) -> Path:
        in_blocks = processes > 1 and "--reset-attention-mask" in flags
        training = train_in_blocks if in_blocks else train_in_ranks
        return training.into_folder(tmp_path_factory.mktemp("layout"), processes, *SETTINGS, *flags.split())

    return run


@pytest.fixture(scope="module")
def one_process(train) -> Path:
    return train(1, "")


@pytest.fixture(scope="module")
def one_process_with_documents(train) -> Path:
    return train(1, "--reset-attention-mask --reset-position-ids")


@pytest.fixture(scope="module")
def one_process_llama(train) -> Path:
    return train(1, LLAMA)


REFERENCES = {"documents": "one_process_with_documents", "llama": "one_process_llama"}
"""The first word of a layout's name, and the run that it is compared with."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_agrees_with_one_process(train, run_ranks, layout, request):
    reference = request.getfixturevalue(REFERENCES.get(layout.split("-")[0], "one_process"))
    processes, flags = LAYOUTS[layout]
    folder = train(processes, flags)
    expected, found = read_metrics(reference / "metrics"), read_metrics(folder / "metrics")
    assert len(found) == len(expected) == ITERATIONS + 3  # two validations and the test
    compare_metrics(expected, found, layout)
    assert any(line.get("grad_norm", 0) > 0.4 for line in expected), "clipping had nothing to do"
    (differences,) = run_ranks(1, compare_weights, str(reference / "checkpoint"), str(folder / "checkpoint"))
    assert not differences


def test_llama_resumes_on_another_layout(train, one_process_llama):
    """From tensor parallel 2 to two pipeline stages after half of the iterations."""
    saved = train(2, f"{LLAMA} --model-parallel-size 2 --exit-interval 3")
    resumed = train(2, f"{LLAMA} --pipe-parallel-size 2 --load {saved / 'checkpoint'}")
    found = read_metrics(resumed / "metrics")
    expected = [line for line in read_metrics(one_process_llama / "metrics") if line["iteration"] > 3]
    assert len(found) == len(expected) == 5
    compare_metrics(expected, found, "resumed")


def compare_metrics(expected: list[dict], found: list[dict], layout: str) -> None:
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & {"lm_loss", "grad_norm", "learning_rate", "validation_loss", "test_loss"}:
            assert other[name] == pytest.approx(one[name], rel=TOLERANCE), (layout, one["iteration"], name)


def compare_weights(one: str, other: str) -> list[str]:
    """Names of the weights that differ between two checkpoints, each brought together from its ranks."""
    import torch
    import torch.distributed as dist
    from support.whole_models import load_weights

    from megatron.checkpoint.tracker import newest
    from megatron.config import ActivationConfig, ParallelConfig
    from megatron.model.gpt2 import GPT2Model
    from megatron.mpu import ParallelLayout

    layout = ParallelLayout.create(ParallelConfig(world_size=dist.get_world_size()))
    models = []
    for folder in (one, other):
        saved = newest(folder)
        models.append(GPT2Model(saved.whole_model_config(), ActivationConfig(), layout))
        load_weights(models[-1], saved)
    first, second = (dict(model.named_parameters()) for model in models)
    assert first.keys() == second.keys() and len(first) > 30
    # Adam divides by the root of the squared gradient, and so blows rounding up where a gradient is next to nothing.
    return [name for name in first if not torch.allclose(first[name], second[name], rtol=TOLERANCE, atol=TOLERANCE)]
