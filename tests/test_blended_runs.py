"""Runs that read a blend: the same on every layout, exact on resume, one set of index maps for each host."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.programs import Programs, read_metrics
from support.training import RankTraining

SETTINGS = "--train-iters 6 --batch-size 1 --global-batch-size 4 --eval-iters 1 --eval-interval 3".split()
EXACT = ("consumed_samples", "lm_loss", "grad_norm", "validation_loss", "test_loss")


@pytest.fixture(scope="module")
def blend(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that blend the tiny corpus with a part of itself."""
    folder = tmp_path_factory.mktemp("blend")
    vocabulary = programs.data_arguments[3]
    lines = (programs.folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    (folder / "half.jsonl").write_text("".join(reversed(lines[:100])))
    programs.python(
        "tools/preprocess_data.py", "--input", folder / "half.jsonl", "--tokenizer-type", "WhitespaceTokenizer",
        "--vocab-file", vocabulary, "--append-eod", "--output-prefix", folder / "half",
    ).ok()  # fmt: skip
    return ["--data-path", "0.7", programs.data_arguments[1], "0.3", str(folder / "half_text_document")]


def test_a_blend_resumes_exactly_on_another_layout(
    train_in_ranks: RankTraining, programs: Programs, blend: list[str], tmp_path: Path
) -> None:
    train_in_ranks(1, *SETTINGS, *blend, "--metrics-file", tmp_path / "whole")
    parts = (*blend, "--save", tmp_path / "ck", "--load", tmp_path / "ck", "--metrics-file", tmp_path / "parts")
    train_in_ranks(2, *SETTINGS, *parts, "--exit-interval", "2")
    said = train_in_ranks(1, *SETTINGS, *parts)
    assert "goes on behind iteration 2" in said and "70.00%" in said
    found, expected = read_metrics(tmp_path / "parts"), read_metrics(tmp_path / "whole")
    assert [line["iteration"] for line in found] == [line["iteration"] for line in expected]
    for name in EXACT:
        theirs = [line[name] for line in expected if name in line]
        assert [line[name] for line in found if name in line] == pytest.approx(theirs, rel=1e-5), name

    other = ["--data-path", "0.6", blend[2], "0.4", blend[4]]
    refused = programs.pretrain(1, *SETTINGS, *other, "--load", tmp_path / "ck")
    assert refused.returncode == 4
    assert "the proportions of the blend is 3/5 2/5, but 7/10 3/10 in" in refused.output
    swapped = programs.pretrain(1, *SETTINGS, "--data-path", *blend[3:5], *blend[1:3], "--load", tmp_path / "ck")
    assert swapped.returncode == 4 and "the content of --data-path is" in swapped.output


def builds_of(shared: bool, local_ranks: list[int], cache: str, words: list[str]) -> int:
    """How many index maps this rank builds for its feed."""
    import os

    import torch.distributed as dist

    from megatron.arguments import parse_run
    from megatron.data import map_cache
    from megatron.feed import Feed

    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    flags = [] if shared else ["--no-shared-disk"]
    run = parse_run([*words, *flags, "--data-cache-path", cache.format(rank)], os.environ)
    os.environ["LOCAL_RANK"] = str(rank)
    built = []
    build = map_cache.build_index_maps
    map_cache.build_index_maps = lambda stream: built.append(stream) or build(stream)
    try:
        Feed(run, SimpleNamespace(rank=rank, is_first_stage=True, is_last_stage=True))
    finally:
        map_cache.build_index_maps = build
    return len(built)


@pytest.mark.parametrize(
    "shared, local_ranks, cache, expected",
    [
        (True, [0, 1], "one", [3, 0]),
        (False, [0, 1], "one", [3, 0]),
        (False, [0, 0], "host{}", [3, 3]),
    ],
)
def test_one_rank_builds_the_maps(run_ranks, programs, tmp_path, shared, local_ranks, cache, expected) -> None:
    from support.programs import TINY_MODEL

    words = [*TINY_MODEL, *programs.data_arguments, *SETTINGS]
    found = run_ranks(2, builds_of, shared, local_ranks, str(tmp_path / cache), [str(word) for word in words])
    assert found == expected
