"""The central test for LLaVA: every layout gives the same losses, gradient norms and weights, whatever images its ranks
and stages have."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from support.emulated_cuda import EmulatedCuda
from support.layouts import LayoutRuns, check_resumed, compare_metrics, compare_runs, differing_weights, layout
from support.programs import read_metrics
from support.ranks import in_new_process
from support.training import RankTraining, pretrain

from megatron.data.image_dataset import image_writer
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder

ITERATIONS, IMAGE, EOD, SIZE = 2, 60, 63, 28
SETTINGS = (
    f"--num-layers 2 --swiglu --normalization RMSNorm --position-embedding-type rope --train-iters {ITERATIONS}"
    " --vision-num-layers 3 --vision-hidden-size 32 --vision-ffn-hidden-size 64 --vision-num-attention-heads 4"
    f" --vision-image-size {SIZE} --image-token-id {IMAGE} --batch-size 2 --global-batch-size 8"
    " --attention-dropout 0 --hidden-dropout 0 --clip-grad 0.4 --eval-iters 1 --eval-interval 2"
).split()
"""Two layers of the encoder are computed, then two of the language model."""
LAYOUTS = [
    "tp2 sp recompute",
    "pp2 zero1 --pipeline-partition 1,3",  # cut in the encoder
    "pp2 zbv recompute",
    "cp2",
    "dp2 zero3 --batch-size 1",
]
PARTS = [
    ("--freeze-vision --projector-lr-mult 10", "pp2 --pipeline-partition 3,1"),
    ("--freeze-vision --lora-rank 2 --lora-alpha 4 --vision-lr-mult 0.1", "tp2 zero1 recompute"),
    ("--freeze-vision --freeze-language-model", "dp2 zero2"),
    ("--freeze-vision --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24", "dp2 ep2 zero1"),
]
"""Flags of what is trained, and a layout."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Conversations of which many have no image, and some have several."""
    return write_data(tmp_path_factory.mktemp("data"), has_images=True)


def write_data(folder: Path, *, has_images: bool) -> list[str]:
    """The flags that read 60 conversations in ``folder``."""
    chance, pixels = random.Random(1), np.random.default_rng(1)
    documents, images = [], []
    for number in range(60):
        count = has_images * (3 if number == 7 else chance.choice((0, 0, 0, 1, 2)))
        answer = [chance.randrange(50) for _ in range(chance.randint(3, 9))]
        documents.append(([*[55, *[IMAGE] * 4] * count, 51, *answer, EOD], 5 * count + 1))
        images.append([pixels.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8) for _ in range(count)])
    for name, dtype in (("data", "u2"), ("data_loss_mask", "u1")):
        with IndexedDatasetBuilder(folder / name, dtype) as builder:
            for tokens, prompt in documents:
                mask = [int(place >= prompt) for place in range(len(tokens))]
                builder.add_document(tokens if name == "data" else mask)
    with image_writer(str(folder / "data"), SIZE) as add:
        for of_document in images:
            add(of_document)
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(EOD + 1)]
    return ["--data-path", str(folder / "data"), "--split", "8,1,1", *tokenizer]


def pretrain_vlm(words: list[str]) -> tuple[int, str]:
    """The same as ``pretrain_vlm.py``."""
    return pretrain(words, "LLaVA")


@pytest.fixture(scope="module")
def runs(run_ranks_once, data: list[str], tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(RankTraining(run_ranks_once, data, pretrain_vlm), SETTINGS, tmp_path_factory.mktemp)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_agrees_with_one_process(runs: LayoutRuns, name: str) -> None:
    compare_runs(runs.on_one_process(), runs(*layout(name)), ITERATIONS)


@pytest.mark.parametrize(("part", "name"), PARTS)
def test_a_part_is_trained_alike(runs: LayoutRuns, part: str, name: str) -> None:
    expected, found = runs.on_one_process(part), runs(*layout(f"{name} {part}"))
    compare_metrics(read_metrics(expected / "metrics"), read_metrics(found / "metrics"))
    assert not differing_weights(expected / "checkpoint", found / "checkpoint")


def test_the_host_waits_for_no_image(emulated_cuda: EmulatedCuda, data: list[str], tmp_path: Path) -> None:
    """Neither for the constants of pixels, nor for where the conversations of a sequence begin."""
    program = ("tests/support/emulated_cuda/waits.py", tmp_path / "found", "2", "1", "pretrain_vlm.py")
    flags = (
        "--sft --bf16 --zero-stage 1 --seq-length 64 --train-iters 3 --log-interval 3 --eval-interval 9 --num-workers 0"
    )
    sizes = "--hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 --lr 1e-3"
    emulated_cuda.run(1, *program, *SETTINGS, *f"{flags} {sizes}".split(), *data).ok()
    _, _, unlogged, _ = json.loads((tmp_path / "found").read_text())
    assert not unlogged


def test_the_position_in_the_data_is_kept_on_another_layout(runs: LayoutRuns) -> None:
    check_resumed(runs, "dp2 zero1", "pp2 zero1", after=1)


def test_a_part_may_be_frozen_on_another_layout(runs: LayoutRuns) -> None:
    """The optimizer's state that the checkpoint has of it is left out."""
    saved = runs(*layout("dp2 zero1 --exit-interval 1")) / "checkpoint"
    found = runs(*layout(f"pp2 zero1 --pipeline-partition 3,1 --freeze-vision --load {saved}"))
    assert [line["iteration"] for line in read_metrics(found / "metrics") if "lm_loss" in line] == [2]


PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_vlm.py"


def extract_ranks(folder: Path, words: list[str], ranks: int) -> list:
    """What each of ``ranks`` communicates."""
    from megatron.tools.communication.extract import Job, extract

    return sorted(extract(Job(PROGRAM, words, ranks, folder), range(ranks), 2), key=lambda trace: trace.rank)


def test_ranks_without_any_image_communicate_as_those_with_images(data: list[str], tmp_path: Path) -> None:
    """Two stages, of which the first ends in the encoder, of two tensor-parallel ranks."""
    sizes = "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3"
    ranks, flags_of_layout = layout("tp2 pp2 zero1 bf16 --pipeline-partition 1,3")
    slots = ["--images-per-micro-batch", "8", "--num-workers", "0"]
    words = [*SETTINGS, *sizes.split(), *flags_of_layout.split(), *slots]
    some, none = (
        in_new_process(extract_ranks, tmp_path / name, [*words, *flags], ranks)
        for name, flags in (("some", data), ("none", write_data(tmp_path, has_images=False)))
    )
    assert [trace.threads for trace in none] == [trace.threads for trace in some]
    assert any(len(events) > 100 for events in some[0].threads.values())
