"""Checks before the start: missing files and folders that cannot be written, all reported at once."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.command_lines import CPU

from megatron.checkpoint.commit import publish, write_description
from megatron.checkpoint.compatibility import has_same_ranks, loads_directly
from megatron.checkpoint.run_file import describe
from megatron.checkpoint.tracker import replaces_others
from megatron.cli import parse_run
from megatron.common.errors import CheckpointError, UserError
from megatron.config import RunConfig
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.tokenizer import build_tokenizer
from megatron.tools.audit.case import check_tokenizer
from megatron.tools.evaluation.tasks import Request, make_task
from megatron.tools.preprocess.job import Job
from megatron.tools.preprocess.preprocess import preprocess
from megatron.training.preflight import check, data_warnings

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["<unk>", "<|endoftext|>", "a", "b", "c"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with a data set ``text`` and its ``vocab.json``."""
    (tmp_path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(WORDS)}))
    with IndexedDatasetBuilder(str(tmp_path / "text"), np.uint16) as builder:
        for _ in range(30):
            builder.add_document(np.full(40, 2))
    return tmp_path


def run_of(corpus: Path, words: str = "") -> RunConfig:
    small = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --batch-size 1 --train-iters 3 --lr 0.1 "
        f"--data-path {corpus}/text --split 8,1,1 --tokenizer-type WhitespaceTokenizer --vocab-file {corpus}/vocab.json"
    )
    return parse_run(f"{small} {words}".split(), {**CPU, "WORLD_SIZE": "2"})


def refusal(run: RunConfig) -> UserError:
    with pytest.raises(UserError) as caught:
        check(run)
    return caught.value


def test_the_vocabulary_gives_its_sizes(corpus: Path) -> None:
    run, _ = check(run_of(corpus, "--model-parallel-size 2 --make-vocab-size-divisible-by 4"))
    assert (run.model.vocab_size, run.model.padded_vocab_size, run.model.eod_token) == (5, 8, 1)
    assert check(run_of(corpus))[0].model.padded_vocab_size == 128


def test_nothing_is_written(corpus: Path) -> None:
    before = sorted(corpus.iterdir())
    check(run_of(corpus, f"--save {corpus}/new/deep --metrics-file {corpus}/logs/metrics.jsonl"))
    assert sorted(corpus.iterdir()) == before


def save(run: RunConfig, folder: Path, iteration: int, *, without: str = "?") -> Path:
    """A checkpoint without tensors; its tag. ``without`` settings whose names contain that, as an older one."""
    tag = folder / f"global_step{iteration}"
    tag.mkdir(parents=True)
    saved = describe(run, iteration)
    settings = {name: value for name, value in saved["settings"].items() if without not in name}
    write_description(tag, saved | {"settings": settings})
    publish(folder, tag.name, iteration)
    return tag


def test_auto_resume_starts_and_resumes(corpus: Path) -> None:
    """``--auto-resume`` takes what is in --save, then what is in --load, then a fresh start; never what is broken."""
    own, other = corpus / "own", corpus / "other"
    run = run_of(corpus, f"--auto-resume --save {own} --load {other}")
    assert check(run)[1] is None
    (own / "global_step1.partial").mkdir(parents=True)
    assert check(run)[1] is None, "a save that was killed is no checkpoint"
    sized = check(run)[0]
    save(sized, other, 7)
    assert (check(run)[1].folder, check(run)[1].iteration) == (other, 7)
    tags = [save(sized, own, iteration) for iteration in (1, 2)]
    assert (check(run)[1].folder, check(run)[1].iteration) == (own, 2)
    (tags[1] / "run.json").unlink()
    assert (check(run)[1].iteration, check(run)[1].newer_problems) == (1, (f"{tags[1]}/run.json is missing",))
    (tags[0] / "run.json").unlink()
    error = refusal(run)
    assert isinstance(error, CheckpointError)
    assert error.messages == [f"{tags[1]}/run.json is missing; no complete checkpoint is left in {own}"]


def test_only_loaded_weights_are_evaluated(corpus: Path) -> None:
    """``--skip-train`` loads what a run would resume from, never starts fresh, and saves nothing."""
    own, other, none = corpus / "own", corpus / "other", corpus / "none"
    sized, _ = check(run_of(corpus, f"--save {own}"))
    for number, folder in enumerate((own, other), 1):
        save(sized, folder, number)
    saves = f"--save {none} --save-interval 1 --snapshot-interval 1 --async-save"
    loaded = {
        f"--load {other}": 2,
        f"{saves} --load {other}": 2,
        f"--save {own} --load {other} --auto-resume": 1,
        f"{saves} --load {other} --auto-resume": 2,
    }
    for words, iteration in loaded.items():
        run, saved = check(run_of(corpus, f"{words} --skip-train"))
        assert saved is not None and saved.iteration == iteration, words
        config = run.checkpoint
        assert (config.save, config.auto_resume, config.snapshot_interval, config.async_save) == (
            None,
            False,
            None,
            False,
        )
    refused = {
        "": 2,
        f"--save {own}": 2,
        f"--save {none} --auto-resume": 2,
        f"--save {none} --load {none}": 4,
        f"--save {none} --load {none} --auto-resume": 4,
    }
    for words, code in refused.items():
        error = refusal(run_of(corpus, f"{words} --skip-train"))
        assert (error.exit_code, len(error.messages)) == (code, 1), words


def test_a_run_that_replaces_checkpoints_of_another_is_known(corpus: Path) -> None:
    own, other = corpus / "own", corpus / "other"
    run, _ = check(run_of(corpus, f"--auto-resume --save {own}"))
    assert not replaces_others(run, None)
    for folder in (own, other):
        save(run, folder, 2)
    cases = {
        f"--save {own}": True,
        f"--save {own} --load {other}": True,
        f"--save {own} --load {own} --finetune": True,
        f"--save {own} --load {own}": False,
        f"--save {own} --auto-resume": False,
        f"--load {own}": False,
    }
    for words, expected in cases.items():
        assert replaces_others(*check(run_of(corpus, words))) == expected, words


def test_a_checkpoint_of_other_ranks_and_stages(corpus: Path) -> None:
    """It is converted, once torch is there; what the run computes stays as it was."""
    folder = corpus / "saved"
    words = f"--pipe-parallel-size 2 --gas 4 --load {folder}"
    run, _ = check(run_of(corpus, f"{words} --save {folder} --pipeline-partition 2,0"))
    save(run, folder, 1)
    same_ranks, other_stages = (check(run_of(corpus, f"{words} {more}")) for more in ("--pipeline-partition 2,0", ""))
    for (found, saved), is_own in ((same_ranks, True), (other_stages, False)):
        assert saved is not None and saved.iteration == 1
        assert loads_directly(saved, found) == has_same_ranks(saved, found) == is_own
    assert check(run_of(corpus, f"--gas 2 --zero-stage 2 --load {folder}"))[1] is not None
    assert "--seed is 7, but 1234 in" in str(refusal(run_of(corpus, f"{words} --seed 7")))
    for accepted in ("--seed 7 --override", "--seed 7 --finetune"):
        assert check(run_of(corpus, f"{words} {accepted}"))[1] is not None
    assert "--lr is 0.2, but 0.1 in" in str(refusal(run_of(corpus, f"{words} --lr 0.2")))
    for flag in ("--override-lr-scheduler", "--use-checkpoint-lr-scheduler"):  # of the schedule, and of nothing else
        assert check(run_of(corpus, f"{words} --lr 0.2 {flag}"))[1] is not None
        assert "--seed is 7" in str(refusal(run_of(corpus, f"{words} --lr 0.2 {flag} --seed 7")))


def test_a_finished_run_is_continued_with_the_flag_that_the_message_names(corpus: Path) -> None:
    folder = corpus / "saved"
    own = f"--save {folder} --auto-resume"
    run, _ = check(run_of(corpus, f"{own} --train-iters 300"))
    save(run, folder, 300)
    message = str(refusal(run_of(corpus, f"{own} --train-iters 320")))
    flags = re.findall(r"(--[\w-]+) (?:to|\d+ keeps)", message)
    assert flags == ["--override", "--save"], message
    longer, saved = check(run_of(corpus, f"{own} --train-iters 320 --override"))
    assert saved is not None and longer.train.train_iters == 320


def test_weights_of_the_converter_are_for_a_new_run(corpus: Path) -> None:
    """One line, and not one for each setting that such a checkpoint does not have."""
    folder = corpus / "converted"
    tag = save(check(run_of(corpus, f"--no-save-optim --no-save-rng --save {folder}"))[0], folder, 0)
    error = refusal(run_of(corpus, f"--load {folder} --seed 5 --lr 0.2"))
    assert error.messages == [f"{tag} holds weights only, as tools/convert_checkpoint.py writes them: add --finetune"]
    assert check(run_of(corpus, f"--load {folder} --seed 5 --finetune"))[1] is not None


def test_a_setting_that_is_missing_is_taken_from_the_configuration(corpus: Path) -> None:
    folder = corpus / "saved"
    save(check(run_of(corpus, f"--save {folder}"))[0], folder, 1, without="seed")
    assert "--seed is 5, but 1234 in" in str(refusal(run_of(corpus, f"--load {folder} --seed 5")))
    assert check(run_of(corpus, f"--load {folder}"))[1] is not None


def test_yarn_extends_a_model_with_rotation(corpus: Path) -> None:
    """No weight depends on the rotation, but what the run computes does. Older checkpoints know nothing of YaRN."""
    folder = corpus / "saved"
    run, _ = check(run_of(corpus, f"--position-embedding-type rope --save {folder}"))
    save(run, folder, 1, without="yarn")
    words = f"--load {folder} --position-embedding-type yarn --yarn-rotary-scaling-factor 4"
    words += " --yarn-original-max-position-embeddings 8"
    message = str(refusal(run_of(corpus, words)))
    assert "--position-embedding-type is yarn, but rope in" in message and "same shape" not in message
    assert "--yarn-rotary-scaling-factor is 4.0, but None in" in message
    for accepted in ("--override", "--finetune"):
        assert check(run_of(corpus, f"{words} {accepted}"))[1] is not None
    assert "load a model of the same shape" in str(refusal(run_of(corpus, f"--load {folder}")))


def test_a_data_set_knows_its_tokenizer(corpus: Path, tmp_path: Path) -> None:
    """Training, evaluation and audit refuse another one of the same size; the order in its file does not matter."""
    assert any(".tokenizer.json" in line for line in data_warnings(run_of(corpus))), "a data set of another program"
    (corpus / "in").write_text("a b c\n" * 40)
    job = Job(
        inputs=(corpus / "in",),
        output_prefix=f"{corpus}/out",
        input_format="text",
        tokenizer_type="WhitespaceTokenizer",
        vocab_file=f"{corpus}/vocab.json",
    )
    preprocess(job, lambda _: None, print)
    prefix, other = f"{corpus}/out_text_document", {word: number for number, word in enumerate(WORDS[::-1])}
    words = f"--data-path {prefix} --seq-length 2"

    def run(more: str = "") -> RunConfig:
        return run_of(corpus, f"{words} {more}")

    check(run())
    assert not data_warnings(run())
    mask = Path(f"{prefix}_loss_mask.idx")
    mask.touch()
    assert "only with --sft" in data_warnings(run())[0]
    mask.unlink()
    same = dict(reversed(json.loads((corpus / "vocab.json").read_text()).items()))
    (corpus / "vocab.json").write_text(json.dumps(same, indent=1))
    check(run())
    (corpus / "vocab.json").write_text(json.dumps(other))
    assert refusal(run()).exit_code == 3 and "--override" in str(refusal(run()))
    check(run("--override"))
    tokenizer = build_tokenizer("WhitespaceTokenizer", f"{corpus}/vocab.json", None)
    for use in (
        lambda: make_task("PPL", Request(Path(prefix), 8, 8), tokenizer),
        lambda: check_tokenizer(run().data, tokenizer),
    ):
        with pytest.raises(UserError, match="was made with another tokenizer"):
            use()
    make_task("PPL", Request(Path(prefix), 8, 8, override=True), tokenizer)
    for record in (["no record"], {"tokenizer_type": "WhitespaceTokenizer", "hash": 5, "special_tokens": {}}):
        Path(f"{prefix}.tokenizer.json").write_text(json.dumps(record))
        assert "does not name a tokenizer" in str(refusal(run()))
